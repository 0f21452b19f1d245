/// LinkPool: all links of one process, for which one thread sends: at the head those to all machines and clients,
/// elsewhere the one to the head.
///
///   sender thread     loop: c = pool.collect(buffer); if none: pool.wait(...); else send c.bytes bytes on link c.slot
///   receiver thread   pool does not take part: link.deliver(the bytes that have come)
///
/// A link is asked for frames only when somebody has said that it has some. The controller marks the bit of a host when
/// it has written to the host's ring, whoever calls Link::wake() marks the link's bit, and other processes ring at a
/// doorbell of the link. So neither a pass nor the idle cost grows with the number of machines, except that each link
/// is asked every kSweep, for its ping, and that a pass reads the word of each doorbell.
///
///   POOL-1 (none missed)  What was published before its mark is collected after it: the pool clears a mark before it
///                         asks the link, and asks it again until it has nothing (READY-1, PARK-1).
///   POOL-2 (fair)         A link that had frames goes behind the others that are marked.
///
/// Threading: `collect` and `wait` by one thread, everything else by any thread. Locks: a link's, then the pool's.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "link/link.h"
#include "messages/ready_bell.h"
#include "sync/bell_set.h"

namespace pathways {

class LinkPool {
 public:
  static constexpr std::chrono::nanoseconds kSweep = std::chrono::milliseconds(500);

  explicit LinkPool(Clock clock = monotonic_ns) : clock_(clock) {}
  LinkPool(const LinkPool&) = delete;
  LinkPool& operator=(const LinkPool&) = delete;

  /// A number for a link, which is the link's until `remove`. It is paused. Throws Error(kFull) when there are too
  /// many.
  uint32_t add(const std::shared_ptr<Link>& link);
  /// The link is not asked any more. It may still be in a call that began before.
  void remove(uint32_t slot);
  /// A mark of this host means this link, until another one has the host or this one gives it up.
  void add_host(uint32_t host, uint32_t slot);
  void remove_host(uint32_t host, uint32_t slot);
  /// Where the controller says that it has written to a host's ring: the bit is the host's number.
  ReadyBell& hosts() { return hosts_; }
  /// Who rings at `word` means this link, until the link gives it up as often. `keep`: its memory.
  void add_bell(uint32_t slot, DoorbellWord* word, std::shared_ptr<const void> keep);
  void remove_bell(uint32_t slot, DoorbellWord* word);
  /// The link has something to send.
  void mark(uint32_t slot) {
    links_.mark(slot);
    hosts_.doorbell.ring();
  }

  struct Collected {
    std::shared_ptr<Link> link{};
    uint32_t slot = 0;
    size_t bytes = 0;     ///< so many were written; 0: see `error`
    std::string error{};  ///< why the link is broken
  };
  /// Writes what the next marked link has. nullopt: none has anything.
  std::optional<Collected> collect(std::span<std::byte> out);
  /// Sleeps until a link may have something, or `wake` was called, since the last `collect`.
  void wait(std::chrono::nanoseconds timeout);
  void wake() { hosts_.doorbell.ring(); }
  /// The link is not asked until `resume`: its connection takes no bytes now.
  void pause(uint32_t slot);
  void resume(uint32_t slot);

 private:
  struct Member {
    std::weak_ptr<Link> link;
    bool is_queued = false, is_paused = true;
  };
  struct Bell {
    uint32_t slot;
    DoorbellWord* word;
    std::shared_ptr<const void> keep;
    uint32_t ticket;
    bool is_over = false;
  };
  struct Retry {
    uint32_t slot;
    int64_t at_ns;
  };
  void change_bells();
  void queue_marked();
  void queue(uint32_t slot);
  std::shared_ptr<Link> next(uint32_t* slot);

  const Clock clock_;
  ReadyBell hosts_;                              ///< and its doorbell, at which the sender sleeps
  ReadyBitmap links_;                            ///< by slot
  std::vector<uint32_t> marked_, marked_hosts_;  ///< of the sender
  BellSet sleep_{&hosts_.doorbell};              ///< of the sender, on its own doorbell and the links'
  std::vector<Bell> bells_;                      ///< of the sender: those in the set
  std::vector<Retry> retries_;                   ///< of the sender: links to be asked though nobody says so
  // Guarded by mutex_, the last lock to take but for that of a link's queue.
  std::mutex mutex_;
  std::unordered_map<uint32_t, Member> members_;
  std::unordered_map<uint32_t, uint32_t> slot_of_host_;
  std::vector<Bell> changed_bells_;  ///< added, or over; by the sender, who alone may change where it sleeps
  std::deque<uint32_t> queue_;       ///< members with is_queued, each once
  std::vector<uint32_t> free_;
  uint32_t next_slot_ = 0;
  int64_t sweep_ns_ = 0;  ///< when all are asked next; the sender alone writes it
};

}  // namespace pathways
