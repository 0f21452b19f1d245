// A modelled cluster in virtual time that drives a SharePolicy: pools that run what enters, and clients that submit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "policy/share_policy.h"

namespace pathways::policy_model {

inline constexpr int64_t kUs = 1'000, kMs = 1'000'000, kSecond = 1'000'000'000;

/// A client of the model. It always has `ahead` runs submitted and not over.
struct Tenant {
  double weight = 1;
  int32_t priority = 0;
  std::vector<PoolTime> takes;       ///< what a run takes
  std::vector<PoolTime> guess = {};  ///< what it is expected to take; empty: what it takes
  uint32_t ahead = 1000;
  int64_t begins = 0, ends = INT64_MAX;
  int64_t late_ns = 0;  ///< its next run that ends is noticed so late, and is charged that, too
  int64_t pause = 0;    ///< from the end of a run to the next submission; for a client with one run at a time

  // What happened
  std::vector<int64_t> used;    ///< by pool
  std::vector<int64_t> waits;   ///< from each submission to the entry
  std::vector<int64_t> delays;  ///< from each submission to the beginning
  std::deque<int64_t> pending;  ///< times of the submissions that are not picked
  uint32_t under_way = 0;
  std::deque<int64_t> to_submit;  ///< times of submissions to come
};

/// Pools that run what enters, each in the order of entry. A run begins when it is first on all of its pools.
class Model {
 public:
  Model(uint32_t pools, std::vector<Tenant> tenants, SharePolicy::Options options = {})
      : policy(options), tenants(std::move(tenants)), fifos_(pools), idle_(pools) {
    for (uint32_t i = 0; i < this->tenants.size(); ++i) {
      Tenant& t = this->tenants[i];
      if (t.guess.empty()) t.guess = t.takes;
      t.used.assign(pools, 0);
      t.to_submit.assign(t.ahead, t.begins);
      policy.set_client(i, t.weight, t.priority);
    }
  }

  void run_until(int64_t end) {
    while (now < end) {
      step_at(now);
      now = std::min(end, next_time());
    }
  }

  /// Part of a pool's time from `mark` on that each tenant got.
  std::vector<double> shares(PoolId pool) const {
    std::vector<double> parts;
    int64_t sum = 0;
    for (const Tenant& t : tenants) sum += t.used[pool];
    for (const Tenant& t : tenants) parts.push_back(static_cast<double>(t.used[pool]) / static_cast<double>(sum));
    return parts;
  }
  void forget_use() {
    for (Tenant& t : tenants) t.used.assign(fifos_.size(), 0);
    std::fill(idle_.begin(), idle_.end(), 0);
  }
  /// Time in which the pool had nothing to do although a tenant waited for it.
  int64_t idle_ns(PoolId pool) const { return idle_[pool]; }
  int64_t longest_outstanding = 0;  ///< on any pool, as estimated

  SharePolicy policy;
  std::vector<Tenant> tenants;
  int64_t now = 0;

 private:
  struct Run {
    uint32_t tenant;
    int64_t submitted = 0;
    bool has_begun = false;
    std::vector<int64_t> ends;  ///< by index into the tenant's `takes`
    std::vector<bool> over;
  };

  void step_at(int64_t at) {
    for (uint32_t id = 0; id < tenants.size(); ++id) {
      Tenant& t = tenants[id];
      while (!t.to_submit.empty() && t.to_submit.front() <= at) {
        if (at < t.ends) t.pending.push_back(t.to_submit.front());
        t.to_submit.pop_front();
      }
    }
    bool is_changed = true;
    while (is_changed) {
      is_changed = finish(at);
      offer(at);
      while (const auto picked = policy.pick(at)) {
        enter(*picked, at);
        offer(at);
        is_changed = true;
      }
      is_changed = begin(at) || is_changed;
    }
    policy.validate();
    for (PoolId p = 0; p < fifos_.size(); ++p) {
      longest_outstanding = std::max(longest_outstanding, policy.outstanding_ns(p));
    }
  }

  void offer(int64_t at) {
    for (uint32_t id = 0; id < tenants.size(); ++id) {
      if (!tenants[id].pending.empty() && !policy.has_offer(id)) policy.offer(id, tenants[id].guess, at);
    }
  }

  void enter(uint32_t id, int64_t at) {
    Tenant& t = tenants[id];
    policy.entered(id, t.guess, at);
    const int64_t submitted = t.pending.front();
    t.waits.push_back(at - submitted);
    t.pending.pop_front();
    ++t.under_way;
    auto run = std::make_shared<Run>(Run{id, submitted, false, {}, std::vector<bool>(t.takes.size(), false)});
    for (const PoolTime& each : t.takes) fifos_[each.pool].push_back(run);
  }

  bool begin(int64_t at) {
    bool has_begun = false;
    for (PoolId p = 0; p < fifos_.size(); ++p) {
      if (fifos_[p].empty() || fifos_[p].front()->has_begun) continue;
      Run& run = *fifos_[p].front();
      Tenant& t = tenants[run.tenant];
      const bool is_first = std::all_of(t.takes.begin(), t.takes.end(),
                                        [&](const PoolTime& each) { return fifos_[each.pool].front().get() == &run; });
      if (!is_first) continue;
      run.has_begun = has_begun = true;
      t.delays.push_back(at - run.submitted);
      for (const PoolTime& each : t.takes) run.ends.push_back(at + each.ns);
    }
    return has_begun;
  }

  bool finish(int64_t at) {
    bool has_ended = false;
    for (PoolId p = 0; p < fifos_.size(); ++p) {
      if (fifos_[p].empty() || !fifos_[p].front()->has_begun) continue;
      const std::shared_ptr<Run> run = fifos_[p].front();
      Tenant& t = tenants[run->tenant];
      for (size_t i = 0; i < t.takes.size(); ++i) {
        if (t.takes[i].pool != p || run->ends[i] > at) continue;
        const int64_t took = t.takes[i].ns + std::exchange(t.late_ns, 0);
        t.used[p] += took;
        policy.over(run->tenant, t.guess[i], took, at);
        run->over[i] = has_ended = true;
        fifos_[p].pop_front();
        if (std::all_of(run->over.begin(), run->over.end(), [](bool is) { return is; })) {
          --t.under_way;
          t.to_submit.push_back(at + t.pause);
        }
        break;
      }
    }
    return has_ended;
  }

  int64_t next_time() {
    int64_t next = std::max(now + 1, policy.next_ns());
    for (PoolId p = 0; p < fifos_.size(); ++p) {
      if (fifos_[p].empty()) continue;
      const Run& run = *fifos_[p].front();
      if (!run.has_begun) continue;
      const Tenant& t = tenants[run.tenant];
      for (size_t i = 0; i < t.takes.size(); ++i) {
        if (t.takes[i].pool == p) next = std::min(next, run.ends[i]);
      }
    }
    for (const Tenant& t : tenants) {
      if (!t.to_submit.empty()) next = std::min(next, std::max(now + 1, t.to_submit.front()));
    }
    for (PoolId p = 0; p < fifos_.size(); ++p) {
      const bool is_wanted = std::any_of(tenants.begin(), tenants.end(), [&](const Tenant& t) {
        return !t.pending.empty() &&
               std::any_of(t.takes.begin(), t.takes.end(), [&](const PoolTime& each) { return each.pool == p; });
      });
      if (fifos_[p].empty() && is_wanted) idle_[p] += next - now;
    }
    return next;
  }

  std::vector<std::deque<std::shared_ptr<Run>>> fifos_;
  std::vector<int64_t> idle_;
};

inline Tenant on_pool(PoolId pool, double weight, int64_t ns) {
  Tenant t;
  t.weight = weight;
  t.takes = {{pool, ns}};
  return t;
}

inline double worst_error(const std::vector<double>& shares, const std::vector<double>& weights) {
  double sum = 0, worst = 0;
  for (const double weight : weights) sum += weight;
  for (size_t i = 0; i < shares.size(); ++i) worst = std::max(worst, std::abs(shares[i] - weights[i] / sum));
  return worst;
}

}  // namespace pathways::policy_model
