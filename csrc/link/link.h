/// Link: one end of the connection between two machines. It moves records between the rings of this machine and the
/// bytes of the connection, so that controllers, hosts and clients use rings and futures as if all were on one machine.
///
///   sender thread     n = link.collect(buffer); if n == 0: link.wait(...); else send the n bytes
///   receiver thread   link.deliver(the bytes that have come, wherever they are cut)
///
/// Home, the controller's machine, has a twin of each far host's block: the controller writes and reads its rings as
/// ever, and the link is the host's end of them. The agent's machine has the hosts' own blocks, and the link is the
/// controller's end. The formats are in frames.h.
///
///   LINK-1 (order)   what one ring carries arrives in its order, once and whole. A future's completion arrives before
///                    the end of its run, because both are records of one ring.
///   LINK-2 (known)   see link_hub.h.
///   LINK-3 (data)    the bytes that a command leases arrive before the command, and those of a fetch before the last
///                    completion of its token: frames of one connection keep their order, and `collect` writes them so.
///   LINK-4 (bounded) a frame that is too long, malformed, or not for this end breaks the link, and so does an end
///   whose
///                    records are not read any more (kMostKept). Nothing of a wrong frame is applied (TRUST-1).
///
/// A block that a command leases to hosts of this link is mirrored at the agent for all of them at once (kLease); its
/// bytes cross once. The lease comes back when the last of them has returned it (memory/arena_twin.h), behind the bytes
/// of a fetch. Each such lease has a number, which the frames about it name: so home writes only to what it lent for a
/// fetch, takes back only what it lent, and both for nobody but the hosts that it lent it to (LINK-2, ARENA-5).
/// All hosts of a fetch must be on one machine, because a whole block comes back.
///
/// Threading: `collect` and `wait` by one thread, `deliver` by one thread, everything else by any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "link/frames.h"
#include "link/link_hub.h"
#include "memory/arena_twin.h"
#include "memory/segment.h"
#include "messages/outbox.h"
#include "messages/shared_segments.h"
#include "sync/bell_set.h"

namespace pathways {

class Link : public std::enable_shared_from_this<Link> {
 public:
  enum class End : uint8_t { kHome, kAgent };
  static constexpr uint64_t kMostKept = uint64_t{64} << 20;  ///< bytes that wait for room in a ring, or to be collected

  /// `clock`: this machine's (monotonic_ns).
  static std::shared_ptr<Link> open(LinkHub& hub, End end, int64_t (*clock)() = monotonic_ns);
  Link(LinkHub& hub, End end, int64_t (*clock)());
  ~Link();

  /// Home: `block` is the twin of a host of the other machine, `controller` the controller's block. Agent: `block` is
  /// the host's own, `controller` the twin. The link drops `keep`, which keeps both mapped, when it uses them no more:
  /// some time after `remove_host`, which waits for nobody.
  void add_host(uint32_t host, int32_t incarnation, const HostView& block, ControllerBlock* controller,
                std::shared_ptr<const void> keep = nullptr);
  void remove_host(uint32_t host);
  /// Agent: memory that stands for that of a client of home. Each call makes a new one, for hosts that start anew.
  Segment twin_client(uint32_t client, size_t arena_bytes);

  size_t collect(std::span<std::byte> out);
  void wait(std::chrono::nanoseconds timeout);
  /// Throws Error(kInvalid) when the other end has broken the protocol (LINK-4).
  void deliver(std::span<const std::byte> in);
  /// Makes `wait` return.
  void wake() { bell_.ring(); }
  /// Nothing is collected or delivered from then on. Call it when neither thread is in a call.
  void close();

  struct Stats {
    uint64_t bytes_out = 0, bytes_in = 0, records_out = 0, records_in = 0, dropped = 0;
    int64_t round_trip_ns = 0;  ///< of the last ping; 0: none yet
    int64_t heard_ns = 0;       ///< how long ago something was delivered
  };
  Stats stats();

 private:
  struct Fetch {
    uint64_t offset, bytes, lease;
    size_t left;  ///< hosts that have not answered
  };
  struct Lent {       ///< home: a block that is lent to hosts of this link
    uint64_t handle;  ///< of the command: a put's buffer, or a fetch's token
    uint64_t lease, bytes;
    bool is_fetch;
    std::vector<uint32_t> hosts;  ///< that have not returned it
  };
  struct Twin {
    Segment segment;
    ArenaTwin arena;
    std::unordered_map<uint64_t, Fetch> fetches;  ///< by token
    std::set<uint32_t> gone;                      ///< hosts that were told of the client's end
  };
  struct FarHost {
    std::shared_ptr<const void> keep;  ///< the memory of all that follows, and so the last to go
    int32_t incarnation;
    ByteRing::Consumer from, from_far;
    Outbox to, to_far;
    DoorbellWord* bell;
  };
  struct Bell {
    DoorbellWord* word;
    std::shared_ptr<const void> keep;
  };
  struct Data {  ///< bytes of a block that are being sent
    uint32_t client;
    uint64_t offset, bytes, lease, at;
  };
  using Key = std::pair<uint32_t, uint64_t>;

  // collect
  bool pump(uint32_t number, FarHost& host, FrameWriter& to);
  bool pump_far(uint32_t number, FarHost& host, FrameWriter& to);
  bool lease(uint32_t host, std::span<const std::byte> record, FrameWriter& to);
  bool answer_fetch(std::span<const std::byte> record, FrameWriter& to);
  bool send_data(FrameWriter& to);
  void send_queued(FrameWriter& to);
  void send_leases_back();
  void enqueue(FrameKind kind, uint32_t a, int32_t b, std::span<const std::byte> payload);
  // deliver
  void take(const FrameHeader& header, std::span<const std::byte> payload);
  void take_from_controller(const FrameHeader& header, std::span<const std::byte> record);
  void take_to_controller(const FrameHeader& header, std::span<const std::byte> record);
  void take_peer(const FrameHeader& header, std::span<const std::byte> payload);
  void take_lease(const FrameHeader& header, std::span<const std::byte> payload);
  void take_data(const FrameHeader& header, std::span<const std::byte> payload);
  void take_lease_back(const FrameHeader& header, std::span<const std::byte> payload);
  FarHost* host_of(uint32_t host, int32_t incarnation);
  void keep(Outbox& box, std::span<const std::byte> bytes);
  void flush();
  void apply_bells();

  LinkHub& hub_;
  const End end_;
  int64_t (*const clock_)();
  DoorbellWord bell_{};
  BellSet bells_;           ///< of the collecting thread
  std::vector<Bell> rung_;  ///< those in the set
  std::mutex mutex_;
  // All that follows is guarded by mutex_.
  std::vector<Bell> bells_to_add_, bells_to_remove_;  ///< by the collecting thread
  bool is_closed_ = false, has_overflow_ = false, has_new_lease_ = false;
  std::map<uint32_t, FarHost> hosts_;
  uint32_t next_host_ = 0;  ///< where the next pass begins
  std::unordered_map<uint32_t, Twin> twins_;
  std::map<Key, Lent> lent_;  ///< home: by client and offset
  uint64_t last_lease_ = 0;   ///< home: the number of the last lease
  std::optional<Data> data_;
  std::vector<std::byte> partial_, record_, record_in_;  ///< record_: collect's; record_in_: deliver's
  /// What this delivery passes on to other links, when the lock is released.
  struct Relay {
    std::shared_ptr<Link> to;
    FrameHeader header;
    std::vector<std::byte> payload;
  };
  std::vector<Relay> relays_;
  int64_t next_ping_ns_ = 0, heard_at_ns_ = 0, look_ns_ = 0;
  Stats stats_;
  std::mutex queue_mutex_;                    ///< guards what follows; the last lock to take
  std::deque<std::vector<std::byte>> queue_;  ///< whole frames, of this link or relayed by others
  uint64_t queued_bytes_ = 0;
  bool is_overrun_ = false;  ///< a frame was dropped, so this link is broken (LINK-4)
};

}  // namespace pathways
