// PoolMap against its definition: two devices are in one pool exactly when the same footprints have them.
#include "policy/pool_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "support.h"

namespace pathways::test::test_pool_map {
namespace {

TEST(PoolMap, DisjointSlicesHavePoolsOfTheirOwn) {
  PoolMap map;
  EXPECT_TRUE(map.add_footprint(std::vector<uint32_t>{0, 1}).empty());
  EXPECT_TRUE(map.add_footprint(std::vector<uint32_t>{2, 3}).empty());
  EXPECT_TRUE(map.add_footprint(std::vector<uint32_t>{1, 0}).empty());
  EXPECT_EQ(map.pool_of(0), map.pool_of(1));
  EXPECT_NE(map.pool_of(0), map.pool_of(2));
  EXPECT_EQ(map.pool_count(), 2u);
}

TEST(PoolMap, AnOverlapIsSplitOff) {
  PoolMap map;
  map.add_footprint(std::vector<uint32_t>{0, 1, 2, 3});
  const auto splits = map.add_footprint(std::vector<uint32_t>{2, 3, 4});
  ASSERT_EQ(splits.size(), 1u);
  EXPECT_EQ(splits[0].from, map.pool_of(0));
  EXPECT_EQ(splits[0].to, map.pool_of(2));
  EXPECT_EQ(map.pool_of(2), map.pool_of(3));
  EXPECT_NE(map.pool_of(4), map.pool_of(3));
  map.validate();
}

TEST(PoolMap, AnyFootprints) {
  std::mt19937_64 random(test::seed());
  for (int round = 0; round < 300; ++round) {
    PoolMap map;
    const auto devices = static_cast<uint32_t>(random() % 12 + 1);
    std::vector<std::set<int>> in(devices);  // footprints by device
    for (int number = 0; number < 6; ++number) {
      std::vector<uint32_t> footprint;
      for (uint32_t device = 0; device < devices; ++device) {
        if (random() % 2 == 0) continue;
        footprint.push_back(device);
        in[device].insert(number);
      }
      std::shuffle(footprint.begin(), footprint.end(), random);
      std::vector<PoolId> before(devices);
      std::vector<bool> was_known(devices);
      for (uint32_t device = 0; device < devices; ++device) {
        was_known[device] = in[device].size() > static_cast<size_t>(in[device].contains(number) ? 1 : 0);
        if (was_known[device]) before[device] = map.pool_of(device);
      }
      const auto splits = map.add_footprint(footprint);
      map.validate();
      for (uint32_t a = 0; a < devices; ++a) {
        for (uint32_t b = 0; b < devices; ++b) {
          if (in[a].empty() || in[b].empty()) continue;
          EXPECT_EQ(map.pool_of(a) == map.pool_of(b), in[a] == in[b]);
        }
        if (!was_known[a] || map.pool_of(a) == before[a]) continue;
        EXPECT_TRUE(std::any_of(splits.begin(), splits.end(), [&](const PoolMap::Split& split) {
          return split.from == before[a] && split.to == map.pool_of(a);
        }));
      }
    }
  }
}

}  // namespace
}  // namespace pathways::test::test_pool_map
