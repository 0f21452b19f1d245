/// How long the devices of a host were busy for what they computed: the one place where device time is measured.
///
/// XLA says when a value is ready, and not when its computation began. Launches on one device run one after the other.
/// So a computation began when it was launched, or when its devices had finished what they were noticed to finish last,
/// whichever is later; and it ended when it was noticed to be ready. What the host notices late makes one computation
/// longer and the next one shorter; their sum is right. Nobody notices the end of a computation of which nothing is
/// told. Of it, the time within its launch counts here; what it computes after that counts with the next one.
///
/// Two readers. `began_ns` gives each run its busy time, which goes to the controller with the run's end; there the sum
/// of what was noticed in one batch is divided among the runs, for the policy and for `pathways clients` (SHARE-5,
/// dispatch/device_times.h). `uses` sums up how long each client kept each device busy, for `pathways top`.
///
/// Used by Launcher and ValueSettler. Threading: the executor's thread only.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "sync/atomic.h"

namespace pathways {

class DeviceClock {
 public:
  static constexpr uint32_t kNobody = 0xffffffffu;  ///< a client that is gone

  explicit DeviceClock(Clock clock) : clock_(clock) {}

  /// What is noticed until `end_batch`, is noticed together.
  void begin_batch() {
    ++batch_;
    now_ns_ = 0;
    is_in_batch_ = true;
  }
  void end_batch() { is_in_batch_ = false; }
  uint32_t batch() const { return batch_; }

  /// A computation of the client that was launched on `devices` (a bit each) at `launched_ns` was noticed at `now_ns`
  /// to be over. Returns when it began.
  int64_t began_ns(uint32_t client, uint64_t devices, int64_t launched_ns, int64_t now_ns) {
    int64_t began = launched_ns;
    BusyTimes& busy = busy_of(client);
    for (uint64_t left = devices; left != 0; left &= left - 1) {
      const auto device = static_cast<size_t>(std::countr_zero(left));
      int64_t& free = free_ns_[device];
      busy[device] += now_ns - std::min(now_ns, std::max(launched_ns, free));
      began = std::max(began, free);
      free = std::max(free, now_ns);
    }
    return began;
  }
  /// The time of this batch; between two batches: now.
  int64_t now_ns() {
    if (now_ns_ == 0 || !is_in_batch_) now_ns_ = clock_();
    return now_ns_;
  }

  /// How long a client kept a device busy, by computations that were noticed to be over.
  struct Use {
    uint32_t client, device;
    int64_t busy_ns;
  };
  /// Of all clients that are not gone. Not on the hot path.
  std::vector<Use> uses() const {
    std::vector<Use> found;
    for (const auto& [client, busy] : busy_) {
      if (client == kNobody) continue;
      for (uint32_t device = 0; device < busy.size(); ++device) {
        if (busy[device] != 0) found.push_back({client, device, busy[device]});
      }
    }
    return found;
  }
  /// The client is gone.
  void forget(uint32_t client) {
    busy_.erase(client);
    last_ = nullptr;
  }

 private:
  using BusyTimes = std::array<int64_t, 64>;

  BusyTimes& busy_of(uint32_t client) {
    if (last_ == nullptr || last_->first != client) last_ = &*busy_.try_emplace(client).first;
    return last_->second;
  }

  const Clock clock_;
  int64_t free_ns_[64] = {};  ///< by device: when it was noticed last that something on it was over
  int64_t now_ns_ = 0;        ///< the time of this batch; 0: not read yet
  uint32_t batch_ = 0;
  bool is_in_batch_ = false;
  std::unordered_map<uint32_t, BusyTimes> busy_;                         ///< by client and device
  std::unordered_map<uint32_t, BusyTimes>::value_type* last_ = nullptr;  ///< the client of the last call
};

}  // namespace pathways
