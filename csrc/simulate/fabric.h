/// What modelled devices share: their clock, and the interconnect of their collectives.
///
/// Threading: any thread may use both.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "base/ids.h"
#include "sync/atomic.h"

namespace pathways {

/// Time in nanoseconds: real time, or virtual time that the test advances.
class ModelClock {
 public:
  enum class Kind : uint8_t { kVirtual, kReal };
  explicit ModelClock(Kind kind) : kind_(kind) {}
  int64_t now_ns() const { return kind_ == Kind::kReal ? monotonic_ns() : virtual_ns_.load(std::memory_order_relaxed); }
  void advance(int64_t ns) { virtual_ns_.fetch_add(ns, std::memory_order_relaxed); }

 private:
  const Kind kind_;
  Atomic<int64_t> virtual_ns_{0};
};

/// The interconnect of the collectives: pairs the k-th launches of a communicator's hosts, even if they differ.
class Fabric {
 public:
  static constexpr uint32_t kNoCommunicator = 0xffffffffu;
  uint32_t add_communicator(std::vector<uint32_t> hosts);
  /// `host` launches `what` next on the communicator. Returns the launch that it is paired with, which is `what` unless
  /// gangs are crossed. `waits`: not before all hosts of the communicator have made their part.
  uint64_t launch(uint32_t communicator, uint32_t host, uint64_t what, bool waits = false);
  uint64_t crossed() const { return crossed_.load(std::memory_order_relaxed); }
  /// Gangs that some host of a communicator has launched and another has not (GANG-1).
  uint64_t incomplete();

 private:
  struct Communicator {
    std::vector<uint32_t> hosts;
    std::vector<uint64_t> launched;  ///< per host
    std::deque<uint64_t> log;        ///< per k, from `log_begin` on: the launch of the host that came first
    uint64_t log_begin = 0;
  };
  std::mutex mutex_;  ///< guards communicators_
  std::condition_variable joined_;
  std::vector<Communicator> communicators_;
  Atomic<uint64_t> crossed_{0};
};

}  // namespace pathways
