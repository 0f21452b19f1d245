// DeviceTimes: how the device time that a host measured in one batch becomes the time of each of its runs.
//
//   SHARE-5 (charged)  Divided.PartsAddUp, Divided.EachHostHasItsOwnUsualTimes
#include "dispatch/device_times.h"

#include <numeric>
#include <random>
#include <vector>

#include "support.h"

namespace pathways::test::test_device_times {
namespace {

class Divided : public ::testing::Test {
 protected:
  struct Ended {
    uint32_t plan;
    int64_t busy_ns;
    uint32_t client = 0;
  };
  void enter(const std::vector<Ended>& runs) {
    for (EntryId id = 0; id < runs.size(); ++id) times.entered(id, runs[id].plan, runs[id].client);
  }
  /// Runs enter and end in one batch of a host. What each of them took.
  std::vector<int64_t> batch(uint32_t host, const std::vector<Ended>& ended) {
    enter(ended);
    return end(host, ended);
  }
  std::vector<int64_t> end(uint32_t host, const std::vector<Ended>& ended) {
    ++number;
    for (EntryId id = 0; id < ended.size(); ++id) {
      EXPECT_FALSE(times.is_other_batch(host, number));
      times.run_done(id, host, ended[id].client, ended[id].busy_ns, number);
    }
    EXPECT_EQ(times.is_divided(), ended.empty());
    EXPECT_EQ(times.is_other_batch(host, number + 1), !ended.empty());
    EXPECT_EQ(times.is_other_batch(host + 1, number), !ended.empty());
    std::vector<int64_t> took;
    times.divide([&](const DeviceTimes::Part& part) {
      EXPECT_EQ(part.id, took.size());
      EXPECT_EQ(part.host, host);
      EXPECT_EQ(part.client, ended[part.id].client);
      took.push_back(part.took_ns);
    });
    EXPECT_TRUE(times.is_divided());
    return took;
  }

  DeviceTimes times;
  uint32_t number = 0;
};

TEST_F(Divided, OneRunTookWhatWasMeasured) {
  EXPECT_EQ(batch(0, {{7, 1000}}), std::vector<int64_t>{1000});
  EXPECT_EQ(batch(0, {{7, 0}}), std::vector<int64_t>{0});
  EXPECT_EQ(batch(0, {{7, -5}}), std::vector<int64_t>{0});
  EXPECT_EQ(batch(0, {{7, INT64_MAX}}), std::vector<int64_t>{3'600'000'000'000});
}

TEST_F(Divided, InProportionToUsualTimes) {
  batch(0, {{1, 1000}});
  batch(0, {{2, 3000, 1}});
  EXPECT_EQ(batch(0, {{1, 8000}, {2, 0, 1}}), (std::vector<int64_t>{2000, 6000}));
  EXPECT_EQ(batch(0, {{1, 0}, {2, 0, 1}}), (std::vector<int64_t>{0, 0}));
}

TEST_F(Divided, EachHostHasItsOwnUsualTimes) {
  for (const uint32_t host : {5u, 3u, 4u, 90u}) {  // a gap, and not in order
    batch(host, {{1, 1000}});
    batch(host, {{2, 1000 * int64_t{host}}});
  }
  for (const uint32_t host : {3u, 4u, 5u, 90u}) {
    const int64_t sum = 1000 * (1 + int64_t{host});
    EXPECT_EQ(batch(host, {{1, sum}, {2, 0}}), (std::vector<int64_t>{1000, sum - 1000})) << host;
  }
}

TEST_F(Divided, RunsOfOnePlanTellItsTimeTogether) {
  batch(0, {{1, 8000}});  // slow once
  batch(0, {{2, 1000}});
  for (int i = 0; i < 60; ++i) batch(0, {{1, 2000}, {1, 0}});
  const auto took = batch(0, {{1, 4000}, {2, 0}});
  EXPECT_NEAR(static_cast<double>(took[0]), 2000, 50);
}

TEST_F(Divided, WhatIsNoticedWithOthersTeachesNothingButTheFirstTime) {
  batch(0, {{1, 1000}});
  batch(0, {{2, 1000}});
  for (int i = 0; i < 50; ++i) batch(0, {{1, 100'000}, {2, 0}});
  EXPECT_EQ(batch(0, {{1, 2000}, {2, 0}}), (std::vector<int64_t>{1000, 1000}));
  // Plan 3 was never measured. Its guess of 1 ms counts once; then what it took counts.
  const auto first = batch(0, {{3, 101'000}, {1, 0}});
  EXPECT_GT(first[0], 90 * first[1]);
}

TEST_F(Divided, PartsAddUp) {
  std::mt19937_64 random(20);
  for (int i = 0; i < 3000; ++i) {
    std::vector<Ended> ended(1 + random() % 9);
    int64_t sum = 0;
    for (Ended& each : ended) {
      each = {static_cast<uint32_t>(random() % 5), static_cast<int64_t>(random() % 3 == 0 ? 0 : random() % 10'000'000)};
      sum += each.busy_ns;
    }
    const auto took = batch(static_cast<uint32_t>(random() % 3), ended);
    ASSERT_EQ(std::accumulate(took.begin(), took.end(), int64_t{0}), sum);
    for (const int64_t each : took) ASSERT_GE(each, 0);
  }
}

TEST_F(Divided, WhatEndsAfterItsPlanWasForgottenTeachesNothing) {
  const std::vector<Ended> runs = {{1, 1'003'000}, {2, 0, 1}};
  batch(0, {{1, 1000}});
  batch(0, {{2, 3000, 1}});
  enter(runs);
  times.forget_client(0);
  const std::vector<int64_t> guessed{1'000'000, 3000};
  for (int i = 0; i < 2; ++i) EXPECT_EQ(end(0, runs), guessed) << i;  // plan 1 counts as 1 ms each time
  times.forget_plan(2);
  EXPECT_EQ(end(0, {{1, 9000}, {2, 0, 1}}), (std::vector<int64_t>{4500, 4500}));
  // A plan that enters again is new.
  batch(0, {{1, 2000}});
  batch(0, {{2, 2000}});
  EXPECT_EQ(batch(0, {{1, 9000}, {2, 0}}), (std::vector<int64_t>{4500, 4500}));
}

}  // namespace
}  // namespace pathways::test::test_device_times
