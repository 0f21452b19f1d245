/// The controller's use of the policy: when a client's run may enter the order, and what each run is charged.
///
/// Inbox and AdmissionQueue ask `may_enter` before a run enters; a run that may not enter waits at its client, in the
/// client's ring, or among the held records. Controller calls `pick` in each pass. AdmissionQueue reports runs that
/// have entered, Grants those that are done on a host or over.
///
/// It acts only while two clients or more have plans, and for plans whose devices are known: one client alone has its
/// runs ordered as they come, and nothing is counted. A client without a plan takes no device time. There often is one:
/// the process that started the cluster. It never changes what has entered the order.
///
/// SHARE-1 (fair): what the policy calls a pool is a set of devices that the same plans use (policy/pool_map.h).
/// SHARE-2 (bounded): at most one run of each client is offered to the policy: the next one.
/// SHARE-5 (charged): a run is charged on each of its pools what it took there: the mean of what it took on the pool's
///   hosts (dispatch/device_times.h). Not the greatest: each time is a little wrong, by more of it the shorter the
///   run, and the greatest of several such times would charge short runs for more than they took. What a run of a plan
///   is expected to take on a pool is a moving average of what its runs were charged there. Of a plan that has none
///   yet, one run is under way at a time, for a while: then one more enters, as at any standstill (SHARE-2). A run that
///   took no time was not launched, and says nothing about its plan.
///
/// Invariants: `running_[entry]` has a footprint only while the entry is a run that has entered and is not over; each
///   of its pools is reported to the policy as entered once, and as over once.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "policy/pool_map.h"
#include "policy/share_policy.h"
#include "sequencer/sequencer.h"
#include "sync/atomic.h"

namespace pathways {

/// A device of a plan, and its host.
struct HostDevice {
  uint32_t host = 0;
  uint32_t device = 0;
};

class DeviceShares {
 public:
  DeviceShares(PolicyKind kind, Clock clock);

  void add_client(uint32_t client, double weight, int32_t priority);
  /// Another weight and priority for a client that is there; they act at once.
  void change_client(uint32_t client, double weight, int32_t priority) { policy_.set_client(client, weight, priority); }
  void forget_client(uint32_t client);
  void add_plan(uint32_t plan, uint32_t client, std::vector<HostDevice> devices);
  void forget_plan(uint32_t plan);
  /// The run that the client has offered will not enter: it was cancelled, or the client is suspended.
  void withdraw(uint32_t client) { policy_.withdraw(client); }
  /// Whether a run of the client waits for its turn.
  bool is_waiting(uint32_t client) const { return policy_.has_offer(client); }

  /// Whether a run of the client may enter the order now. False: it is offered to the policy, and `pick` says when.
  bool may_enter(uint32_t client, uint32_t plan);
  /// The next client whose run may enter now: the next call of `may_enter` for it says so. The caller tries to enter
  /// that run, and then picks again.
  std::optional<uint32_t> pick();
  /// When `pick` may find something although no host reports anything (by the clock); INT64_MAX: never.
  int64_t next_ns() const;

  void entered(uint32_t client, uint32_t plan, EntryId id);
  /// Whether some run that entered is not over: then `took` and `over` want to be told.
  bool has_runs() const { return runs_ != 0; }
  /// The run is over on a host, and took so long there. A run that is not charged is ignored.
  void took(EntryId id, uint32_t host, int64_t took_ns, int64_t now);
  /// The run is over, or was dropped. What was not reported is not charged.
  void over(EntryId id);

  /// Runs that entered under the policy and are over.
  uint64_t charged() const { return charged_; }

  void validate() const;

 private:
  /// The pools of a plan. A new one is made when a pool is split; runs under way keep the old one.
  struct Footprint {
    std::vector<PoolId> pools;
    std::vector<uint32_t> hosts;                         ///< by position in `pools`: how many hosts it has
    std::vector<std::pair<uint32_t, uint32_t>> by_host;  ///< (host, position in `pools`), sorted
  };
  struct Plan {
    uint32_t client = 0;
    std::vector<HostDevice> devices;
    std::shared_ptr<const Footprint> footprint;
    std::vector<int64_t> usual_ns;  ///< by position in the footprint's pools; 0: not known yet
    uint32_t under_way = 0;
    int64_t entered_ns = 0;  ///< when the last of its runs entered
  };
  struct PoolUse {
    PoolTime estimate;
    uint32_t missing = 0;  ///< hosts that have not reported
    int64_t sum_ns = 0;    ///< over the hosts that have
  };
  struct Running {
    uint32_t client = 0;
    uint32_t plan = 0;
    std::shared_ptr<const Footprint> footprint;  ///< null: the entry is no run that is under way
    std::vector<PoolUse> uses;                   ///< by position in the footprint's pools
  };

  static SharePolicy::Options options_of(PolicyKind kind);
  bool acts() const { return is_on_ && plans_of_.size() > 1; }
  std::shared_ptr<const Footprint> footprint_of(std::span<const HostDevice> devices) const;
  void split(std::span<const PoolMap::Split> splits);
  void estimate(const Plan& plan);
  void learn(uint32_t plan, PoolId pool, int64_t took_ns);

  const Clock clock_;
  const bool is_on_;
  SharePolicy policy_;
  PoolMap pools_;
  std::unordered_map<uint32_t, Plan> plans_;
  std::unordered_map<uint32_t, uint32_t> plans_of_;  ///< by client: the number of its plans in `plans_`, never 0
  std::vector<Running> running_;                     ///< by entry
  uint64_t runs_ = 0;                                ///< those of `running_` that are under way
  uint64_t charged_ = 0;                             ///< see charged()
  std::optional<uint32_t> picked_;                   ///< the client whose run may enter
  std::vector<PoolTime> estimate_;                   ///< scratch
};

}  // namespace pathways
