/// Link: one end of the connection between two machines. It moves records between the rings of this machine and the
/// bytes of the connection, so that controllers, hosts and clients use rings and futures as if all were on one machine.
///
///   sender thread     collects from the link what the other end shall have: that of a pool of links, see link_pool.h
///   receiver thread   link.deliver(the bytes that have come, wherever they are cut)
///
/// What is on the other machine has a twin on this one, a block of shared memory: the processes here write and read the
/// rings of the twin as ever, and the link is the other end of them. This class has what all links share: whole frames,
/// in their order, in both directions (frames.h). A MachineLink joins the head, the controller's machine, with a
/// machine that has hosts; ClientLinkAtHead and ClientLinkAtClient are the ends of one that joins the head with a
/// client's machine.
///
///   LINK-1 (order)   what one ring carries arrives in its order, once and whole. A future's completion arrives before
///                    the end of its run, because both are records of one ring.
///   LINK-2 (known)   see link_hub.h.
///   LINK-3 (data)    the bytes that a command leases arrive before the command, and those of a fetch before the last
///                    completion of its token: frames of one connection keep their order, and `collect` writes them so.
///                    They cross by value: a lease of a put ends when its bytes are in the link, one of a fetch when
///                    nothing more comes, and the memory in which they arrive is the receiving machine's own.
///   LINK-4 (bounded) a frame that is too long, malformed, or not for this end breaks the link, and so does an end
///                    whose records are not read any more (kMostKept). Nothing of a wrong frame is applied (TRUST-1).
///                    What is relayed is checked before, and a link that brings more than another machine takes breaks
///                    itself (kMostRelayed).
///
/// Threading: `collect` by one thread, `deliver` by one thread, everything else by any thread. What a
/// derived class overrides is called under the link's lock, but for `finish_collect` and `finish_deliver`.
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
#include <utility>
#include <vector>

#include "futures/read_back.h"
#include "link/frames.h"
#include "messages/outbox.h"

namespace pathways {

class Carrier;
class LinkPool;

class Link : public std::enable_shared_from_this<Link> {
 public:
  static constexpr uint64_t kMostKept = uint64_t{64} << 20;  ///< bytes that wait for room in a ring, or to be collected
  static constexpr uint64_t kMostRelayed = kMostKept / 4;    ///< of these, bytes that one other link has brought

  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  size_t collect(std::span<std::byte> out);
  /// Throws Error(kInvalid) when the other end has broken the protocol (LINK-4).
  void deliver(std::span<const std::byte> in);
  /// Makes the pool ask this link.
  void wake();
  /// The sender of a pool collects from this link. Call it before any other method.
  void join(std::shared_ptr<LinkPool> pool);
  uint32_t slot() const { return slot_; }  ///< in the pool
  /// When `collect` should be called again although nobody wakes the link: at once if a record waits for room in a ring
  /// of this machine; max: it need not be.
  std::chrono::nanoseconds again_in();
  /// Nothing is collected or delivered from then on.
  void close();
  /// Puts a frame before what the rings have. For other links of this machine, too. `by`: the link that has brought it.
  /// False: that link has brought too much, and nothing happens (LINK-4).
  bool enqueue(FrameKind kind, uint32_t a, int32_t b, std::span<const std::byte> payload, const Link* by = nullptr);
  uint64_t queued_bytes();  ///< of such frames, that wait to be collected

  struct Stats {
    uint64_t bytes_out = 0, bytes_in = 0, records_out = 0, records_in = 0, dropped = 0;
    int64_t round_trip_ns = 0;   ///< of the last ping; 0: none yet
    int64_t heard_ns = 0;        ///< how long ago something was delivered
    int64_t clock_ahead_ns = 0;  ///< how far the other end's clock is ahead, within half a round trip; 0: not known yet
    uint64_t kept = 0, most_kept = 0;  ///< bytes that wait here to be sent or read, and how many may (LINK-4)
  };
  Stats stats();

 protected:
  friend class Carrier;
  /// `clock`: this machine's (monotonic_ns). Both ends send pings: an answer alone would come too late from an end
  /// whose own pings wait behind a block on a slow network.
  explicit Link(Clock clock);

  struct Block {  ///< a block of memory that is being sent
    uint32_t client;
    uint64_t number;
    std::vector<BlockPiece> pieces;  ///< what is left to send, the last piece first
  };
  /// What a delivery passes on to another link, when the lock is released.
  struct Relay {
    std::shared_ptr<Link> to;
    FrameHeader header;
    std::vector<std::byte> payload;
  };

  /// The link is in a pool: tells it at which doorbells this machine's processes ring for the link.
  virtual void joined() {}
  /// Collects what the rings have. Not called while a block is being sent.
  virtual void send_records(FrameWriter& to) = 0;
  /// Sends what must go before a frame of the queue (LINK-3). False: there was no room for all of it.
  virtual bool precede(std::span<const std::byte> frame, FrameWriter& to);
  /// Copies bytes of a block, from `at` on. False: it is not there any more.
  virtual bool read_block(const Block& block, uint64_t at, std::span<std::byte> out) = 0;
  /// All bytes of a block have been sent.
  virtual void sent(const Block& block) = 0;
  /// For how long what waits in the queue should wait for more, so that it goes in one piece.
  virtual std::chrono::nanoseconds gathers(int64_t /*now_ns*/) { return {}; }
  /// Whether `look` should be called soon.
  virtual bool must_look_soon() const { return false; }
  /// Called from time to time before records are collected: finds out which memory of blocks from elsewhere is free.
  virtual void look(int64_t /*now_ns*/) {}
  /// Takes a frame. Throws Error(kInvalid) when it is wrong.
  virtual void take(const FrameHeader& header, std::span<const std::byte> payload) = 0;
  /// Puts what waits into the rings. True: something still waits.
  virtual bool flush() = 0;
  /// Adds what waits for room in the rings, by `add_box` of each.
  virtual void add_kept(Stats& now) const = 0;
  /// Drops all that the end has; its memory goes.
  virtual void forget() = 0;
  /// Called last by `collect` and by `deliver`, by their threads, without the link's lock: for what must not be done
  /// under it.
  virtual void finish_collect() {}
  virtual void finish_deliver() {}

  bool send_data(FrameWriter& to);
  void keep(Outbox& box, std::span<const std::byte> record);
  static void add_box(Stats& now, const Outbox& box);
  void enqueue_word(FrameKind kind, uint64_t word);
  [[noreturn]] static void refuse(const std::string& why);
  /// The first bytes of a payload. Throws Error(kInvalid) when it has fewer; `what` it should be.
  template <typename T>
  static T first_of(std::span<const std::byte> payload, const char* what) {
    if (payload.size() < sizeof(T)) refuse(std::string(what) + " of " + std::to_string(payload.size()) + " bytes");
    return read_record<T>(payload);
  }

  const Clock clock_;
  std::shared_ptr<LinkPool> pool_;  ///< set before the link is used; nullptr: nobody is to be woken
  uint32_t slot_ = 0;               ///< that of its carrier, if it has one
  bool is_carried_ = false;
  std::mutex mutex_;
  // All that follows is guarded by mutex_, until the next comment.
  bool is_closed_ = false, has_overflow_ = false;
  bool must_look_ = false;  ///< the collecting thread must look more often from now on
  std::optional<Block> data_;
  std::vector<std::byte> record_, record_in_;  ///< record_: collect's; record_in_: deliver's
  std::vector<Relay> relays_;
  Stats stats_;

 private:
  size_t collect_locked(std::span<std::byte> out);
  bool send_queued(FrameWriter& to);
  void take_pong(const PongFrame& pong);
  void take_common(const FrameHeader& header, std::span<const std::byte> payload);
  void take_all(std::span<const std::byte> in);

  std::vector<std::byte> partial_;
  int64_t best_trip_ns_ = INT64_MAX, best_trip_at_ns_ = 0;  ///< of the ping that `clock_ahead_ns` is of
  int64_t next_ping_ns_ = 0, heard_at_ns_ = 0, look_ns_ = 0;
  // Guarded by queue_mutex_, the last lock to take.
  std::mutex queue_mutex_;
  struct Queued {
    std::vector<std::byte> frame;
    const Link* by;  ///< who has relayed it; nullptr: it is this link's own
  };
  std::deque<Queued> queue_;
  uint64_t queued_bytes_ = 0;
  std::unordered_map<const Link*, uint64_t> relayed_bytes_;  ///< of queue_, by who has relayed them; none is 0
  bool is_overrun_ = false;                                  ///< a frame was dropped, so this link is broken (LINK-4)
};

/// Takes all records of a ring that `send` takes; false from `send`: there is no room for the record now. Returns
/// whether there was room for all.
template <typename Send>
bool pump(ByteRing::Consumer& ring, std::vector<std::byte>& scratch, Send&& send) {
  bool is_done = true;
  while (is_done) {
    const std::span<const std::byte> bytes = ring.try_take(scratch);
    if (bytes.empty()) break;
    is_done = send(std::span<std::byte>(scratch.data(), bytes.size()));
    if (is_done) ring.pop();
  }
  ring.release();
  return is_done;
}

}  // namespace pathways
