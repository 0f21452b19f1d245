#include "dispatch/device_shares.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "dispatch/device_times.h"
#include "sync/atomic.h"

namespace pathways {
namespace {

constexpr int64_t kLeast_ns = 1'000;          // a run is never free
constexpr int64_t kAging_ns = 1'000'000'000;  // a waiting run rises by one priority in this time
// A run of a higher priority waits for what has entered. So the policy lets less of it enter than where all are equal;
// a device that stands still for a moment lengthens its horizon (SHARE-3).
constexpr int64_t kLeastHorizon_ns = 1'000'000, kLeastHorizonOfPriority_ns = 500'000;
constexpr int64_t kLearnPart = 8;  // the moving average moves by this part of the difference

}  // namespace

SharePolicy::Options DeviceShares::options_of(PolicyKind kind) {
  const bool has_priorities = kind == PolicyKind::kPriority;
  return {.least_horizon_ns = has_priorities ? kLeastHorizonOfPriority_ns : kLeastHorizon_ns,
          .aging_ns = has_priorities ? kAging_ns : 0};
}

DeviceShares::DeviceShares(PolicyKind kind, Clock clock)
    : clock_(clock), is_on_(kind != PolicyKind::kFifo), policy_(options_of(kind)) {}

void DeviceShares::add_client(uint32_t client, double weight, int32_t priority) {
  policy_.set_client(client, weight, priority);
}

void DeviceShares::forget_client(uint32_t client) {
  policy_.remove_client(client);
  if (picked_ == client) picked_.reset();
  std::erase_if(plans_, [&](const auto& each) { return each.second.client == client; });
  plans_of_.erase(client);
}

// ---------------------------------------------------------------------------------------------------------- plans

void DeviceShares::add_plan(uint32_t number, uint32_t client, std::vector<HostDevice> devices) {
  if (!is_on_ || devices.empty()) return;
  std::vector<uint32_t> footprint;
  footprint.reserve(devices.size());
  for (const HostDevice& each : devices) footprint.push_back(each.device);
  std::sort(footprint.begin(), footprint.end());
  footprint.erase(std::unique(footprint.begin(), footprint.end()), footprint.end());
  split(pools_.add_footprint(footprint));
  forget_plan(number);
  ++plans_of_[client];
  Plan& plan = plans_[number];
  plan.client = client;
  plan.footprint = footprint_of(devices);
  plan.usual_ns.assign(plan.footprint->pools.size(), 0);
  plan.devices = std::move(devices);
}

void DeviceShares::forget_plan(uint32_t number) {
  const auto plan = plans_.find(number);
  if (plan == plans_.end()) return;
  const auto owner = plans_of_.find(plan->second.client);
  if (--owner->second == 0) plans_of_.erase(owner);
  plans_.erase(plan);
}

std::shared_ptr<const DeviceShares::Footprint> DeviceShares::footprint_of(std::span<const HostDevice> devices) const {
  auto made = std::make_shared<Footprint>();
  std::vector<std::pair<uint32_t, PoolId>> pairs;  // (host, pool)
  for (const HostDevice& each : devices) pairs.emplace_back(each.host, pools_.pool_of(each.device));
  std::sort(pairs.begin(), pairs.end());
  pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
  for (const auto& [host, pool] : pairs) made->pools.push_back(pool);
  std::sort(made->pools.begin(), made->pools.end());
  made->pools.erase(std::unique(made->pools.begin(), made->pools.end()), made->pools.end());
  made->hosts.assign(made->pools.size(), 0);
  for (const auto& [host, pool] : pairs) {
    const auto at = std::lower_bound(made->pools.begin(), made->pools.end(), pool) - made->pools.begin();
    ++made->hosts[static_cast<size_t>(at)];
    made->by_host.emplace_back(host, static_cast<uint32_t>(at));
  }
  return made;
}

/// A plan that uses a pool uses both of its parts from now on. Its usual time on a new pool is that on the old one.
void DeviceShares::split(std::span<const PoolMap::Split> splits) {
  if (splits.empty()) return;
  for (const PoolMap::Split& each : splits) policy_.split(each.from, each.to);
  for (auto& [number, plan] : plans_) {
    const std::vector<PoolId> old = plan.footprint->pools;
    plan.footprint = footprint_of(plan.devices);
    std::vector<int64_t> usual;
    for (PoolId pool : plan.footprint->pools) {
      const auto made = std::find_if(splits.begin(), splits.end(), [&](const auto& each) { return each.to == pool; });
      if (made != splits.end()) pool = made->from;
      const auto at = std::find(old.begin(), old.end(), pool);
      PW_DCHECK(at != old.end());
      usual.push_back(at == old.end() ? 0 : plan.usual_ns[static_cast<size_t>(at - old.begin())]);
    }
    plan.usual_ns = std::move(usual);
  }
}

/// Writes what a run of the plan is expected to take to `estimate_`.
void DeviceShares::estimate(const Plan& plan) {
  estimate_.clear();
  for (size_t i = 0; i < plan.usual_ns.size(); ++i) {
    estimate_.push_back({plan.footprint->pools[i], plan.usual_ns[i] == 0 ? DeviceTimes::kGuess_ns : plan.usual_ns[i]});
  }
}

// ---------------------------------------------------------------------------------------------------------- enter

bool DeviceShares::may_enter(uint32_t client, uint32_t number) {
  if (picked_ == client) {
    picked_.reset();
    return true;
  }
  if (!acts()) return true;
  const auto found = plans_.find(number);
  if (found == plans_.end()) return true;
  const Plan& plan = found->second;
  const int64_t now = clock_();
  const bool is_known = std::none_of(plan.usual_ns.begin(), plan.usual_ns.end(), [](int64_t ns) { return ns == 0; });
  if (!is_known && plan.under_way != 0 && now - plan.entered_ns < SharePolicy::kStandstill_ns) return false;
  estimate(plan);
  policy_.offer(client, estimate_, now);
  return false;
}

std::optional<uint32_t> DeviceShares::pick() {
  picked_.reset();
  if (policy_.offers() != 0) picked_ = policy_.pick(clock_());
  return picked_;
}

int64_t DeviceShares::next_ns() const {
  return policy_.offers() == 0 ? std::numeric_limits<int64_t>::max() : policy_.next_ns();
}

void DeviceShares::entered(uint32_t client, uint32_t number, EntryId id) {
  if (!acts()) return;
  const auto found = plans_.find(number);
  if (found == plans_.end()) return;
  Plan& plan = found->second;
  if (id >= running_.size()) running_.resize(id + 1);
  Running& run = running_[id];
  PW_DCHECK(run.footprint == nullptr);
  run.client = client;
  run.plan = number;
  run.footprint = plan.footprint;
  run.uses.clear();
  ++runs_;
  ++plan.under_way;
  plan.entered_ns = clock_();
  estimate(plan);
  for (size_t i = 0; i < estimate_.size(); ++i) run.uses.push_back({estimate_[i], plan.footprint->hosts[i], 0});
  policy_.entered(client, estimate_, plan.entered_ns);
}

// ----------------------------------------------------------------------------------------------------------- over

void DeviceShares::took(EntryId id, uint32_t host, int64_t took_ns, int64_t now) {
  if (id >= running_.size() || running_[id].footprint == nullptr) return;
  Running& run = running_[id];
  const auto& by_host = run.footprint->by_host;
  for (auto at = std::lower_bound(by_host.begin(), by_host.end(), std::pair{host, 0u});
       at != by_host.end() && at->first == host; ++at) {
    PoolUse& use = run.uses[at->second];
    if (use.missing == 0) continue;
    use.sum_ns += took_ns;
    if (--use.missing != 0) continue;
    const int64_t mean = use.sum_ns / run.footprint->hosts[at->second];
    learn(run.plan, use.estimate.pool, mean);
    policy_.over(run.client, use.estimate, std::max(kLeast_ns, mean), now);
  }
}

void DeviceShares::learn(uint32_t number, PoolId pool, int64_t took_ns) {
  if (took_ns == 0) return;  // it was not launched
  const auto found = plans_.find(number);
  if (found == plans_.end()) return;
  Plan& plan = found->second;
  const auto& pools = plan.footprint->pools;  // a split may have moved the pool, but then its time stays
  const auto at = std::find(pools.begin(), pools.end(), pool);
  if (at == pools.end()) return;
  int64_t& usual = plan.usual_ns[static_cast<size_t>(at - pools.begin())];
  usual = std::max(kLeast_ns, usual == 0 ? took_ns : usual + (took_ns - usual) / kLearnPart);
}

void DeviceShares::over(EntryId id) {
  if (id >= running_.size() || running_[id].footprint == nullptr) return;
  Running& run = running_[id];
  for (const PoolUse& use : run.uses) {
    if (use.missing != 0) policy_.over(run.client, use.estimate, 0, clock_());
  }
  run.footprint.reset();
  --runs_;
  ++charged_;
  const auto plan = plans_.find(run.plan);
  if (plan != plans_.end()) --plan->second.under_way;
}

void DeviceShares::validate() const {
  policy_.validate();
  pools_.validate();
  std::unordered_map<uint32_t, uint32_t> under_way;
  uint64_t runs = 0;
  for (const Running& run : running_) {
    if (run.footprint == nullptr) continue;
    ++runs;
    PW_CHECK(run.uses.size() == run.footprint->pools.size());
    ++under_way[run.plan];
  }
  PW_CHECK(runs == runs_);
  std::unordered_map<uint32_t, uint32_t> plans_of;
  for (const auto& [number, plan] : plans_) {
    ++plans_of[plan.client];
    const auto found = under_way.find(number);
    PW_CHECK(plan.under_way == (found == under_way.end() ? 0 : found->second));
    PW_CHECK(plan.usual_ns.size() == plan.footprint->pools.size());
  }
  PW_CHECK(plans_of == plans_of_);
}

}  // namespace pathways
