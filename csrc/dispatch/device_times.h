/// What each run took on each of its hosts: the one place where measured device time becomes the time of a run.
///
/// A host measures how long its devices were busy for a run (runs/device_clock.h), and says it when the run is over
/// there. Runs whose ends a host notices together, in one batch, have a sum that is right, but not its parts. So the
/// sum of a batch is divided in proportion to the usual times of the runs' plans on that host.
///
/// The usual time of a plan on a host is a moving average of what its runs took there when no run of another plan was
/// noticed with them. Short runs are seldom noticed one by one, and those that are took longer than most; so runs of
/// one plan that are noticed together count too. Before the first measurement the time is guessed. A batch without any
/// time says nothing: its runs were not launched.
///
/// Who reads it: Grants gives each part to the client's account, which people see (`ClientState::device_ns`, under
/// every policy), and to DeviceShares, which charges the policy while clients compete.
///
///   SHARE-5 (charged)  the parts of a batch add up to what the host measured, whatever the usual times are.
///
/// Cost: per run and host O(1) where a plan's hosts have consecutive numbers, else O(log hosts). No clock is read.
/// Threading: the controller's stepping thread only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "sequencer/sequencer.h"

namespace pathways {

class DeviceTimes {
 public:
  static constexpr int64_t kGuess_ns = 1'000'000;  ///< of a plan that was not measured on a host

  /// A run's part of a batch.
  struct Part {
    EntryId id;
    uint32_t host;
    uint32_t client;
    int64_t took_ns;
  };

  /// A run of the client has entered the order.
  void entered(EntryId id, uint32_t plan, uint32_t client) {
    if (id >= plan_of_.size()) plan_of_.resize(id + 1);
    plan_of_[id] = plan;
    if (plan == newest_plan_) return;
    plans_.try_emplace(plan, Plan{client, {}});
    newest_plan_ = plan;
  }
  /// No run of the plan enters any more. Those that are not over are still divided; nothing is learnt from them.
  void forget_plan(uint32_t plan) {
    plans_.erase(plan);
    newest_plan_ = kNoPlan;
  }
  /// The client is gone: the same for all its plans.
  void forget_client(uint32_t client) {
    std::erase_if(plans_, [&](const auto& each) { return each.second.client == client; });
    newest_plan_ = kNoPlan;
  }

  /// Whether what is not divided yet belongs to another batch than this one; then it must be divided first.
  bool is_other_batch(uint32_t host, uint32_t batch) const {
    return !parts_.empty() && (batch != batch_ || host != parts_.front().host);
  }
  /// A host has completed the run. `batch`: runs that the host noticed together have the same number.
  void run_done(EntryId id, uint32_t host, uint32_t client, int64_t busy_ns, uint32_t batch);
  bool is_divided() const { return parts_.empty(); }
  /// Divides the batch, and calls f(part) for each of its runs, in the order in which they came.
  template <typename F>
  void divide(F&& f) {
    if (parts_.size() == 1) {
      learn_alone();
    } else {
      divide_look();
    }
    for (const Part& part : parts_) f(part);
    parts_.clear();
    batch_plans_.clear();
    sum_ns_ = 0;
  }

 private:
  static constexpr int64_t kMost_ns = 3'600'000'000'000;  ///< no host is believed more
  static constexpr uint32_t kNoPlan = UINT32_MAX;
  static constexpr int64_t kLearnPart = 8;  ///< the moving average moves by this part of the difference
  struct Usual {
    uint32_t host;
    int64_t ns;  ///< 0: not known yet
  };
  struct Plan {
    uint32_t client = 0;
    std::vector<Usual> usual;  ///< by number of the host
  };

  int64_t& usual_ns(uint32_t plan, const Part& part);
  static void learn(int64_t& usual_ns, int64_t took_ns);
  void learn_alone();
  void divide_look();

  std::vector<uint32_t> plan_of_;             ///< by entry
  std::unordered_map<uint32_t, Plan> plans_;  ///< those that a run entered with and that nobody dropped
  uint32_t newest_plan_ = kNoPlan;            ///< of the newest run; it is in `plans_`
  std::vector<Part> parts_;                   ///< of the batch that is not divided yet
  std::vector<uint32_t> batch_plans_;         ///< their plans
  int64_t sum_ns_ = 0;                        ///< of the batch
  uint32_t batch_ = 0;                        ///< its number
  int64_t nobodys_ns_ = 0;                    ///< scratch: the usual time of a plan that was forgotten
};

}  // namespace pathways
