// SharePolicy, when a client's weight or priority changes while it runs. One pool, served in virtual time: one run
// after the other, all clients always have one more.
//
//   SHARE-1 (fair)    ANewWeightActsAtOnce, AWeightThatRisesPaysNothingForThePast, ALowerWeightKeepsItsDebt
//   SHARE-4 (classes) WhoFallsIsNotStarved, WhoRisesDoesNotStarveOthers, ANewcomerSharesItsClass,
//                     PrioritiesThatNobodyHasAreForgotten
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

#include "policy/share_policy.h"

namespace pathways::test::test_share_changes {
namespace {

constexpr int64_t kMs = 1'000'000, kSecond = 1'000'000'000;

struct Pool {
  SharePolicy policy{SharePolicy::Options{}};
  int64_t now = 0;
  std::map<uint32_t, int64_t> takes;  ///< by client: what each of its runs takes

  void add(uint32_t client, double weight, int32_t priority = 0, int64_t run_ns = kMs) {
    policy.set_client(client, weight, priority);
    takes[client] = run_ns;
  }
  /// Serves for so long. Returns what each client got, and the longest time in which client `watched` got nothing.
  std::pair<std::map<uint32_t, int64_t>, int64_t> serve(int64_t for_ns, uint32_t watched = UINT32_MAX) {
    std::map<uint32_t, int64_t> used;
    const int64_t end = now + for_ns;
    int64_t last = now, longest = 0;
    while (now < end) {
      for (const auto& [client, ns] : takes) {
        const PoolTime run{0, ns};
        if (!policy.has_offer(client)) policy.offer(client, {&run, 1}, now);
      }
      const auto picked = policy.pick(now);
      EXPECT_TRUE(picked.has_value());
      if (!picked) return {used, longest};
      const PoolTime run{0, takes[*picked]};
      policy.entered(*picked, {&run, 1}, now);
      now += run.ns;
      policy.over(*picked, run, run.ns, now);
      used[*picked] += run.ns;
      if (*picked == watched) last = now;
      longest = std::max(longest, now - last);
      policy.validate();
    }
    return {used, longest};
  }
};

double ratio(const std::map<uint32_t, int64_t>& used, uint32_t a, uint32_t b) {
  return static_cast<double>(used.at(a)) / static_cast<double>(used.at(b));
}

TEST(ShareChanges, ANewWeightActsAtOnce) {
  Pool pool;
  pool.add(1, 1);
  pool.add(2, 1);
  EXPECT_NEAR(ratio(pool.serve(kSecond).first, 1, 2), 1, 0.02);
  pool.policy.set_client(1, 4, 0);
  EXPECT_NEAR(ratio(pool.serve(100 * kMs).first, 1, 2), 4, 0.2);
  pool.policy.set_client(2, 4, 0);
  EXPECT_NEAR(ratio(pool.serve(100 * kMs).first, 1, 2), 1, 0.05);
}

TEST(ShareChanges, AWeightThatRisesPaysNothingForThePast) {
  Pool pool;
  pool.add(1, 0.001, 0, 10 * kMs);  // one run puts its tag ten seconds ahead
  pool.add(2, 1);
  pool.serve(kSecond);
  pool.policy.set_client(1, 1, 0);
  const auto [used, longest] = pool.serve(200 * kMs, 1);
  EXPECT_NEAR(ratio(used, 1, 2), 1, 0.15);
  EXPECT_LE(longest, 21 * kMs);
}

TEST(ShareChanges, ALowerWeightKeepsItsDebt) {
  Pool pool;
  pool.add(1, 8, 0, 8 * kMs);
  pool.add(2, 1);
  pool.serve(kSecond);
  pool.policy.set_client(1, 1, 0);
  EXPECT_NEAR(ratio(pool.serve(kSecond).first, 1, 2), 1, 0.05);
}

TEST(ShareChanges, WhoFallsIsNotStarved) {
  Pool pool;
  pool.add(1, 1, 5);
  pool.add(2, 1, 0);
  EXPECT_EQ(pool.serve(10 * kSecond).first.count(2), 0u);  // no aging here
  pool.policy.set_client(1, 1, 0);
  const auto [used, longest] = pool.serve(100 * kMs, 1);
  EXPECT_NEAR(ratio(used, 1, 2), 1, 0.05);
  EXPECT_LE(longest, 3 * kMs);
}

TEST(ShareChanges, WhoRisesDoesNotStarveOthers) {
  Pool pool;
  pool.add(1, 1, 5);
  pool.add(2, 1, 0);
  pool.serve(10 * kSecond);
  pool.policy.set_client(2, 1, 5);
  const auto [used, longest] = pool.serve(100 * kMs, 1);
  EXPECT_NEAR(ratio(used, 1, 2), 1, 0.05);
  EXPECT_LE(longest, 3 * kMs);
}

TEST(ShareChanges, ANewcomerSharesItsClass) {
  Pool pool;
  pool.add(1, 1, 5);
  pool.add(2, 1, 0);  // it waits all the time, and so did the virtual time of the pool when there was one for all
  pool.serve(10 * kSecond);
  pool.add(3, 1, 5);
  EXPECT_NEAR(ratio(pool.serve(100 * kMs).first, 1, 3), 1, 0.05);
}

TEST(ShareChanges, PrioritiesThatNobodyHasAreForgotten) {
  Pool pool;
  pool.add(1, 1, 0);
  pool.add(2, 1, 0);
  for (int32_t priority = 1; priority < 1000; ++priority) {
    pool.policy.set_client(1, 1, priority);
    pool.serve(2 * kMs);
  }
  EXPECT_LE(pool.policy.class_count(), 3u);
  pool.policy.set_client(1, 1, 0);
  EXPECT_NEAR(ratio(pool.serve(100 * kMs).first, 1, 2), 1, 0.05);
}

}  // namespace
}  // namespace pathways::test::test_share_changes
