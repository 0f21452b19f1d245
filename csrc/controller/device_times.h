/// How much device time each client's runs took, under every policy: what `pathways clients` shows. DeviceShares
/// charges for itself, by pool, and only while clients compete.
///
/// A host reports for each run how long its devices were busy with it. Runs that a host notices together have a sum
/// that is right, but not its parts (executor/device_clock.h). So the sum is divided in proportion to the plans' usual
/// times, which are learnt from runs that were noticed alone; a plan without a usual time counts like the others' mean.
///
/// A client's device time is summed over hosts: a run on two hosts that takes 1 ms counts 2 ms.
///
/// Cost: O(1) per run and host, and no clock is read. Threading: the controller's stepping thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "controller/clients.h"
#include "sequencer/sequencer.h"

namespace pathways {

class DeviceTimes {
 public:
  explicit DeviceTimes(Clients& clients) : clients_(clients) {}

  /// A run has entered the order.
  void entered(EntryId id, uint32_t plan) {
    if (id >= plans_.size()) plans_.resize(id + 1);
    plans_[id] = plan;
  }
  /// A host has completed the run. `look`: runs that the host noticed together have the same number.
  void run_done(EntryId id, uint32_t client, int64_t busy_ns, uint32_t look) {
    if (look != look_) settle();
    look_ = look;
    busy_ns = std::clamp<int64_t>(busy_ns, 0, kMost_ns);
    sum_ns_ += busy_ns;
    done_.push_back({client, id < plans_.size() ? plans_[id] : UINT32_MAX, busy_ns != 0});
  }
  /// All that one host has reported in this pass was passed to `run_done`.
  void settle();

 private:
  static constexpr int64_t kMost_ns = 3'600'000'000'000;  ///< no host is believed more
  static constexpr int64_t kLearnPart = 8;                ///< the moving average moves by this part of the difference
  struct Done {
    uint32_t client;
    uint32_t plan;
    bool has_time;
  };
  int64_t usual_ns(uint32_t plan) const { return plan < usual_ns_.size() ? usual_ns_[plan] : 0; }

  Clients& clients_;
  std::vector<uint32_t> plans_;    ///< by entry
  std::vector<int64_t> usual_ns_;  ///< by plan; 0: not known yet
  std::vector<Done> done_;         ///< noticed together
  int64_t sum_ns_ = 0;             ///< of `done_`
  uint32_t look_ = 0;              ///< of `done_`
};

}  // namespace pathways
