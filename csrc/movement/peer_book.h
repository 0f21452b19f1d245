/// PeerBook: what a host knows of its peers, once for all parts of the executor that wait for peers.
///
/// It knows which peers are lost, which runs this host has refused, what peers said of runs that have not come here
/// yet, and how many sends to each peer are under way. Each part that waits for peers (transfers, exchanges of rows,
/// decisions) is a PeerWaiter and registers here. One more kind of record between hosts is one more waiter.
///
///   PEER-2 (once)   a peer is lost once, for all that wait for it. Each waiter hears of it for each run that is here,
///                   in the order of the runs. A closed peer is alive, but nothing is taken from it any more: each
///                   later run misses it from its beginning on, until a successor is there.
///   PEER-3 (epoch)  a run means one life of each peer. The runs that have come here when a peer's death is told mean
///                   the dead one, later runs mean its successor (ERR-2). So a host tells the successor nothing of
///                   earlier runs, and what the dead one said of later runs counts for nothing.
///   PEER-4 (early)  what a peer says of a run that has not come is kept. It is done when the run is here, or is
///                   refused, as if it came then. If it is invalid, this run misses the peer. What names a run that
///                   never comes is dropped when the next run comes.
///   TRUST-1         each peer has a bound of its own on what is kept of it.
///   END-1           who waits for a part of a run that this host has refused is told so, however long ago that was.
///
/// Pure: no thread, no clock, no I/O. Threading: the executor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"

namespace pathways {

class Plan;

/// How a peer was lost.
enum class LostPeer : uint8_t {
  kAlive,   ///< it may still write into memory that was announced to it; it is told of failures
  kDead,    ///< it writes nothing, and is told nothing
  kBefore,  ///< alive, and lost before the run came, which has announced no memory to it
};

struct Lost {
  uint32_t host;
  std::string text;  ///< the reason
  LostPeer state;
};

/// A part of the executor that waits for peers. `run`: the slot of a run, which stays until the call returns.
class PeerWaiter {
 public:
  /// Whatever the peer still owes to the run fails with the reason. It may come several times for one run and peer.
  virtual void miss(uint32_t run, const Lost& lost) = 0;
  /// This host refuses a run: tells those who wait for its part and do not ask for it.
  virtual void refuse(uint64_t /*order*/, const Plan& /*plan*/, const std::string& /*why*/) {}

 protected:
  ~PeerWaiter() = default;
};

class PeerBook {
 public:
  static constexpr uint64_t kMostKept = uint64_t{64} << 20;  ///< bytes that are kept of one peer
  static constexpr size_t kRefusedKept = 256;                ///< reasons that are kept

  explicit PeerBook(uint32_t host) : host_(host) {}
  /// Waiters are called in the order in which they came.
  void add(PeerWaiter& waiter) { waiters_.push_back(&waiter); }

  // Runs come in their order.
  void run_comes(uint64_t order);
  bool has_come(uint64_t order) const { return order <= newest_; }
  /// The run that has come is prepared, in slot `run`: does what was kept, and misses the peers that are closed.
  void run_is_here(uint64_t order, uint32_t run);
  /// This host refuses the run that has come. `plan`: nullptr if it is not known.
  void refuse(uint64_t order, const Plan* plan, const std::string& why);
  /// Why a run that has come has no part here for whoever asks.
  std::string why_refused(uint64_t order) const;

  /// Keeps what `host` says of a run that has not come: `record` does it. kInvalid: more than this host keeps of a
  /// peer. `bytes`: of its data.
  Status keep(uint64_t order, uint32_t host, uint64_t bytes, std::function<Status()> record);

  /// Does what `host` says of a run, take(data), if the run has come; else keeps it with a copy of `data`.
  template <typename T, typename F>
  Status hear(uint64_t order, uint32_t host, std::span<const T> data, F take) {
    if (has_come(order)) return take(data);
    return keep(order, host, data.size_bytes(),
                [take, kept = std::vector<T>(data.begin(), data.end())] { return take(std::span<const T>(kept)); });
  }

  /// `runs`: the slots of all runs that are here, in their order.
  void lose(std::span<const uint32_t> hosts, std::string_view text, LostPeer state, std::span<const uint32_t> runs);
  bool is_closed(uint32_t host) const { return closed_.contains(host); }
  const std::map<uint32_t, Lost>& closed() const { return closed_; }
  /// Whether the peer that this run means is dead.
  bool is_dead(uint32_t host, uint64_t order) const {
    const auto found = ended_.find(host);
    return found != ended_.end() && order <= found->second;
  }

  // What this host writes into a peer's memory.
  void send_begins(uint32_t host) { ++sends_[host]; }
  void send_ends(uint32_t host) { --sends_[host]; }
  uint32_t sends_to(uint32_t host) const {
    const auto found = sends_.find(host);
    return found == sends_.end() ? 0 : found->second;
  }

  /// Forgets runs and records. Which peers are lost stays.
  void clear();
  /// For debug builds and tests.
  void validate() const;

 private:
  static constexpr uint64_t kRecordBytes = 256;  ///< what a record takes beside its data, at most
  struct Early {
    uint32_t host;
    uint64_t bytes;
    std::function<Status()> record;
  };

  std::vector<Early> take(uint64_t order);
  void release(const Early& early);
  void miss(uint32_t run, const Lost& lost);

  const uint32_t host_;
  std::vector<PeerWaiter*> waiters_;
  uint64_t newest_ = 0;                                   ///< order of the newest run that has come
  std::map<uint32_t, Lost> closed_;                       ///< by host; all of them kBefore to a run that comes
  std::unordered_map<uint32_t, uint64_t> ended_;          ///< by host that has died: the newest run then (PEER-3)
  std::deque<std::pair<uint64_t, std::string>> refused_;  ///< the last runs that were refused, and why
  std::map<uint64_t, std::vector<Early>> early_;          ///< by order; above newest_
  std::unordered_map<uint32_t, uint64_t> kept_;           ///< by host: bytes in early_
  std::unordered_map<uint32_t, uint32_t> sends_;          ///< by host: under way
};

}  // namespace pathways
