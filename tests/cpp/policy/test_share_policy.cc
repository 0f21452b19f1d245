// SharePolicy, driven by a modelled cluster in virtual time.
//
//   SHARE-1 (fair)    ShareIsByWeight.*, ALatecomerGetsNoCredit, SharesOnEachOfManyPools
//   SHARE-2 (bounded) AShortRunDoesNotWaitBehindAFlood, ARunOnManyPoolsIsNotStarved, OutstandingTimeIsBounded
//   SHARE-2           AStandstillEnds
//   SHARE-3 (busy)    DevicesAreNeverIdle, AShortHorizonGrows, TheNextTimeIsWhenAPoolOpens
//   SHARE-2           AShorterHorizonLetsLessBeforeAHigherPriority
//   SHARE-4 (classes) AHigherPriorityGoesFirst, ALowerPriorityWaitsForABoundedTime
//   SHARE-5 (charged) AWrongGuessIsCorrected, WhatIsGivenBackIsNotLost
//   all of them       AnyClientsOnAnyPools, drawn by chance; the seed is printed
#include "policy/share_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "policy/policy_model.h"
#include "support.h"

namespace pathways::test::test_share_policy {
namespace {

using namespace policy_model;

TEST(ShareIsByWeight, OverEachSecond) {
  const std::vector<std::vector<double>> cases = {
      {1, 1, 1, 1}, {1, 2, 4, 8}, {0.5, 0.25, 0.125, 0.0625}, {1, 100, 3, 3}};
  for (const auto& weights : cases) {
    const int64_t steps[] = {100 * kUs, kMs, 10 * kMs, kMs};
    std::vector<Tenant> tenants;
    for (size_t i = 0; i < weights.size(); ++i) tenants.push_back(on_pool(0, weights[i], steps[i]));
    Model model(1, std::move(tenants));
    for (int second = 1; second <= 5; ++second) {
      model.forget_use();
      model.run_until(second * kSecond);
      EXPECT_LE(worst_error(model.shares(0), weights), 0.02) << "second " << second;
      EXPECT_EQ(model.idle_ns(0), 0);
    }
  }
}

TEST(ShareIsByWeight, WhateverTheStep) {
  for (const int64_t step : {20 * kUs, 330 * kUs, 5 * kMs}) {
    Model model(1, {on_pool(0, 1, step), on_pool(0, 3, 50 * kUs)});
    model.run_until(2 * kSecond);
    EXPECT_LE(worst_error(model.shares(0), {1, 3}), 0.02) << step;
  }
}

// A host that gets no core for a tenth of a second notices a run so much later, and charges the run for it. So the
// shares of a short time are off by as much. The policy makes up for it afterwards, and a longer time is fair.
TEST(ShareIsByWeight, ALateNoticeIsMadeUpFor) {
  const std::vector<double> weights = {1, 2, 4, 8};
  const int64_t steps[] = {100 * kUs, kMs, 10 * kMs, kMs};
  std::vector<Tenant> tenants;
  for (size_t i = 0; i < weights.size(); ++i) tenants.push_back(on_pool(0, weights[i], steps[i]));
  Model model(1, std::move(tenants));
  model.run_until(1900 * kMs);
  model.forget_use();
  model.tenants[0].late_ns = 100 * kMs;  // 1.5 seconds of its share
  model.run_until(2 * kSecond);
  EXPECT_GE(worst_error(model.shares(0), weights), 0.1);
  model.run_until(4 * kSecond);
  EXPECT_LE(worst_error(model.shares(0), weights), 0.02);
}

TEST(Share, ALatecomerGetsNoCredit) {
  Tenant late = on_pool(0, 1, kMs);
  late.begins = 3 * kSecond;
  Model model(1, {on_pool(0, 1, kMs), late});
  model.run_until(3 * kSecond);
  model.forget_use();
  model.run_until(3 * kSecond + kSecond / 5);
  EXPECT_LE(worst_error(model.shares(0), {1, 1}), 0.03);
}

TEST(Share, SharesOnEachOfManyPools) {
  // One client on both pools, and a client of its own on each.
  Tenant both;
  both.takes = {{0, kMs}, {1, kMs}};
  Model model(2, {both, on_pool(0, 1, kMs), on_pool(1, 1, 300 * kUs)});
  model.run_until(3 * kSecond);
  for (const PoolId pool : {0u, 1u}) {
    EXPECT_GE(model.shares(pool)[0], 0.45);
    EXPECT_LE(model.shares(pool)[0], 0.55);
    EXPECT_LE(model.idle_ns(pool), 3 * kSecond / 20);  // it waits for its other pool now and then
  }
}

TEST(Share, AShortRunDoesNotWaitBehindAFlood) {
  Tenant light = on_pool(0, 1, kMs);
  light.ahead = 1;
  light.pause = 7 * kMs;
  Model model(1, {on_pool(0, 1, kMs), light});
  model.run_until(5 * kSecond);
  EXPECT_GE(model.tenants[1].waits.size(), 300u);
  for (const int64_t wait : model.tenants[1].waits) EXPECT_LE(wait, 3 * kMs);
}

TEST(Share, ARunOnManyPoolsIsNotStarved) {
  Tenant wide;
  for (PoolId p = 0; p < 8; ++p) wide.takes.push_back({p, kMs});
  wide.ahead = 1;
  std::vector<Tenant> tenants = {wide};
  std::mt19937_64 random(test::seed());
  for (PoolId p = 0; p < 8; ++p) {
    for (int i = 0; i < 3; ++i) {
      tenants.push_back(on_pool(p, 1, static_cast<int64_t>(random() % 3000 + 100) * kUs));
    }
  }
  Model model(8, std::move(tenants));
  model.run_until(4 * kSecond);
  EXPECT_GE(model.tenants[0].waits.size(), 4000u / 4 / 4);  // a quarter of its share at least, whatever the others do
  for (const int64_t wait : model.tenants[0].waits) EXPECT_LE(wait, 100 * kMs);
}

TEST(Share, OutstandingTimeIsBounded) {
  SharePolicy::Options options;
  Model model(2, {on_pool(0, 1, 100 * kUs), on_pool(1, 1, 900 * kUs), on_pool(0, 5, 40 * kUs)}, options);
  model.run_until(kSecond);
  EXPECT_LE(model.longest_outstanding, options.horizon_ns + 2 * 900 * kUs);  // the one that runs, and the last one
}

TEST(Share, DevicesAreNeverIdle) {
  Model model(1, {on_pool(0, 1, 10 * kMs), on_pool(0, 8, 30 * kUs), on_pool(0, 3, 2 * kMs)});
  model.run_until(2 * kSecond);
  EXPECT_EQ(model.idle_ns(0), 0);
}

TEST(Share, AShortHorizonGrows) {
  // The end of a run is known late, as if the controller were slow: the model looks 3 ms later.
  SharePolicy::Options options;
  options.horizon_ns = options.least_horizon_ns = kMs;
  SharePolicy policy(options);
  policy.set_client(1, 1, 0);
  const PoolTime run{0, kMs};
  int64_t now = 0;
  for (int i = 0; i < 20; ++i, now += 3 * kMs) {
    uint32_t entered = 0;
    policy.offer(1, {&run, 1}, now);
    for (; policy.pick(now); ++entered) {
      policy.entered(1, {&run, 1}, now);
      policy.offer(1, {&run, 1}, now);
    }
    for (; entered != 0; --entered) policy.over(1, run, kMs, now + 3 * kMs);
  }
  EXPECT_GE(policy.horizon_ns(0), 3 * kMs);
  EXPECT_LE(policy.horizon_ns(0), options.most_horizon_ns);
}

TEST(Share, AHigherPriorityGoesFirst) {
  Tenant high = on_pool(0, 1, kMs);
  high.priority = 1;
  high.begins = kSecond;
  high.ends = 2 * kSecond;
  high.ahead = 50;
  Model model(1, {on_pool(0, 100, kMs), high});
  model.run_until(kSecond);
  model.forget_use();
  model.run_until(2 * kSecond);
  EXPECT_GE(model.shares(0)[1], 0.99);
  EXPECT_LE(model.tenants[1].waits[0], 3 * kMs);
  model.forget_use();
  model.run_until(3 * kSecond);
  EXPECT_GE(model.shares(0)[0], 0.9);  // what it had submitted ends, then the other has all
}

TEST(Share, AShorterHorizonLetsLessBeforeAHigherPriority) {
  for (const int64_t least : {kMs, kMs / 2}) {
    SharePolicy::Options options;
    options.least_horizon_ns = least;
    Tenant high = on_pool(0, 1, kMs);
    high.priority = 1;
    high.ahead = 1;
    high.pause = 7 * kMs + 37 * kUs;  // so that it comes at each moment of the others' runs
    high.begins = kSecond;            // the horizon has shrunk by then
    Model model(1, {on_pool(0, 1, kMs), high}, options);
    model.run_until(5 * kSecond);
    const auto& delays = model.tenants[1].delays;
    ASSERT_GE(delays.size(), 300u);
    const int64_t worst = *std::max_element(delays.begin(), delays.end());
    EXPECT_LE(worst, kMs + least + 1);  // the run that has just begun to let another one enter, and that one
    EXPECT_GE(worst, kMs / 2 + least);
    EXPECT_EQ(model.idle_ns(0), 0);
  }
}

TEST(Share, ALowerPriorityWaitsForABoundedTime) {
  SharePolicy::Options options;
  options.aging_ns = 100 * kMs;
  Tenant high = on_pool(0, 1, kMs), low = on_pool(0, 1, kMs);
  high.priority = 5;
  low.ahead = 1;
  Model model(1, {high, low}, options);
  model.run_until(10 * kSecond);
  EXPECT_GE(model.tenants[1].waits.size(), 10u);
  for (const int64_t wait : model.tenants[1].waits) EXPECT_LE(wait, 700 * kMs);
}

TEST(Share, AWrongGuessIsCorrected) {
  Tenant wrong = on_pool(0, 1, 2 * kMs);
  wrong.guess = {{0, 100 * kUs}};
  wrong.ahead = 30;
  Model model(1, {wrong, on_pool(0, 1, kMs)});
  model.run_until(4 * kSecond);
  EXPECT_LE(worst_error(model.shares(0), {1, 1}), 0.03);
}

TEST(Share, WhatIsGivenBackIsNotLost) {
  // The guess of client 0 is right in the mean only: every other run takes less and the next one as much more.
  SharePolicy policy({});
  policy.set_client(0, 1, 0);
  policy.set_client(1, 1, 0);
  const PoolTime guess[] = {{0, 200 * kUs}, {0, kMs}};
  const auto offer = [&](uint32_t id, int64_t now) { policy.offer(id, {&guess[id], 1}, now); };
  std::deque<std::pair<uint32_t, int64_t>> under_way;  // (client, what its run takes)
  int64_t now = 0, used[2] = {}, runs = 0;
  while (now < 10 * kSecond) {
    for (uint32_t id : {0u, 1u}) offer(id, now);
    while (const auto picked = policy.pick(now)) {
      const int64_t off = ++runs % 2 == 0 ? 150 * kUs : -150 * kUs;
      policy.entered(*picked, {&guess[*picked], 1}, now);
      under_way.emplace_back(*picked, guess[*picked].ns + (*picked == 0 ? off : 0));
      offer(*picked, now);
    }
    policy.validate();
    ASSERT_FALSE(under_way.empty());
    const auto [id, took] = under_way.front();
    under_way.pop_front();
    now += took;
    used[id] += took;
    policy.over(id, guess[id], took, now);
  }
  EXPECT_NEAR(static_cast<double>(used[0]) / static_cast<double>(used[0] + used[1]), 0.5, 0.005);
}

TEST(Share, AClientMayGoAtAnyTime) {
  SharePolicy policy({});
  const PoolTime run{0, kMs};
  policy.set_client(1, 1, 0);
  policy.set_client(2, 1, 0);
  policy.offer(1, {&run, 1}, 0);
  policy.offer(2, {&run, 1}, 0);
  EXPECT_EQ(policy.pick(0), 1u);
  policy.entered(1, {&run, 1}, 0);
  policy.offer(1, {&run, 1}, 0);
  policy.remove_client(1);
  EXPECT_FALSE(policy.has_offer(1));
  EXPECT_EQ(policy.pick(0), 2u);
  EXPECT_EQ(policy.pick(0), std::nullopt);
  EXPECT_EQ(policy.outstanding_ns(0), kMs);
  policy.over(1, run, kMs, kMs);
  EXPECT_EQ(policy.outstanding_ns(0), 0);
  policy.validate();
}

TEST(Share, ASplitPoolKeepsItsTags) {
  SharePolicy policy({});
  policy.set_client(1, 1, 0);
  policy.set_client(2, 1, 0);
  const PoolTime run{0, 50 * kMs};
  policy.offer(1, {&run, 1}, 0);
  ASSERT_EQ(policy.pick(0), 1u);
  policy.entered(1, {&run, 1}, 0);
  policy.over(1, run, run.ns, kMs);
  policy.split(0, 1);
  const PoolTime part{1, kMs};
  policy.offer(1, {&part, 1}, kMs);
  policy.offer(2, {&part, 1}, kMs);
  EXPECT_EQ(policy.pick(kMs), 2u);  // client 1 is 50 ms ahead on the new pool, too
}

TEST(Share, AStandstillEnds) {
  // Runs that are not over wait for what their client does behind the run that it offers.
  SharePolicy policy({});
  policy.set_client(1, 1, 0);
  const PoolTime run{0, 10 * kMs};
  int64_t now = 0;
  for (uint32_t entered = 0; entered < 20; ++entered) {
    policy.offer(1, {&run, 1}, now);
    if (!policy.pick(now)) {
      now = policy.next_ns();
      ASSERT_LT(now, 10 * kSecond);
      ASSERT_EQ(policy.pick(now), 1u);
    }
    policy.entered(1, {&run, 1}, now);
  }
}

TEST(Share, TheNextTimeIsWhenAPoolOpens) {
  SharePolicy policy({});
  policy.set_client(1, 1, 0);
  const PoolTime run{0, 10 * kMs};
  EXPECT_EQ(policy.next_ns(), INT64_MAX);
  policy.offer(1, {&run, 1}, 0);
  ASSERT_EQ(policy.pick(0), 1u);
  policy.entered(1, {&run, 1}, 0);
  policy.offer(1, {&run, 1}, 0);
  EXPECT_EQ(policy.pick(kMs), std::nullopt);
  const int64_t next = policy.next_ns();
  EXPECT_EQ(next, 10 * kMs - policy.horizon_ns(0) + 1);
  EXPECT_EQ(policy.pick(next - 1), std::nullopt);
  EXPECT_EQ(policy.pick(next), 1u);
}

/// Any clients on any pools: nobody starves, open pools are not idle for long, clients of one pool share it by weight.
TEST(Share, AnyClientsOnAnyPools) {
  std::mt19937_64 random(test::seed());
  for (int round = 0; round < 40; ++round) {
    const auto pools = static_cast<uint32_t>(random() % 5 + 1);
    const auto count = static_cast<uint32_t>(random() % 6 + 2);
    std::vector<Tenant> tenants;
    double sum = 0;
    for (uint32_t i = 0; i < count; ++i) {
      Tenant t;
      t.weight = static_cast<double>(random() % 8 + 1);
      sum += t.weight;
      for (PoolId p = 0; p < pools; ++p) {
        if (random() % 2 != 0) t.takes.push_back({p, static_cast<int64_t>(random() % 4000 + 20) * kUs});
      }
      if (t.takes.empty()) t.takes.push_back({static_cast<PoolId>(random() % pools), kMs});
      if (random() % 3 == 0) t.ahead = static_cast<uint32_t>(random() % 3 + 1);
      if (random() % 3 == 0) t.pause = static_cast<int64_t>(random() % 5000) * kUs;
      tenants.push_back(t);
    }
    Model model(pools, std::move(tenants));
    model.run_until(2 * kSecond);
    for (const Tenant& t : model.tenants) {
      EXPECT_GE(t.waits.size(), 2u) << "round " << round;
      // Twenty times a turn of everybody else, by weight: whoever needs many pools waits for the slowest of them.
      const double most = 80e6 * (sum / t.weight + count + 4);
      if (t.ahead != 1) continue;
      for (const int64_t wait : t.waits) EXPECT_LE(static_cast<double>(wait), most) << "round " << round;
    }
  }
}

}  // namespace
}  // namespace pathways::test::test_share_policy
