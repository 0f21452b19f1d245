// In which order the calls of a host are launched: LaunchQueues.
//   ORD-1   calls leave a device's FIFO in the order in which they entered   CallsOfADeviceGoInTheOrder
//   ASY-1   what must not start yet is tried again, in the same order        WhatIsThrottledIsTriedAgain
//   GANG-2  where gangs block, all gangs have one order                      GangsGoInOneOrderWhereTheyBlock
//   GANG-3  gangs of the two kinds do not run together on a device           GangsOfTwoKindsDoNotRunTogether
#include "runs/launch_queues.h"

#include <gtest/gtest.h>

#include <vector>

#include "executor/bench_host.h"

namespace pathways::test::test_launch_queues {
namespace {

/// A run of a plan whose calls take nothing and make one value each.
struct Queues {
  explicit Queues(std::vector<PlanBuilder::Node> calls, bool gangs_block = false) : queues(runs, 2, {4, gangs_block}) {
    std::vector<uint32_t> values;
    for (uint32_t i = 0; i < calls.size(); ++i) values.push_back(i);
    const auto count = static_cast<uint32_t>(calls.size());
    entry.plan = Plan::parse(plan_of({}, std::move(calls), values, count).finish());
    entry.live = 1;
    slot = runs.acquire();
    runs[slot].plan = &entry;
    runs[slot].open = 1;
    runs[slot].begin(entry.plan);
  }
  /// The call at this position of the plan, which begins with the argument node.
  const NodeRecord& node(uint32_t call) const { return entry.plan.node(call + 1); }
  void enter(uint32_t call) { queues.enter({slot, call + 1}, node(call)); }
  /// The calls that are ready now, in their order.
  std::vector<uint32_t> ready() {
    std::vector<uint32_t> calls;
    queues.start_ready([&](NodeRef ref) {
      calls.push_back(ref.node - 1);
      return true;
    });
    queues.validate();
    return calls;
  }

  PlanEntry entry;
  RunTable runs;
  LaunchQueues queues;
  uint32_t slot = 0;
};

using Calls = std::vector<uint32_t>;

TEST(LaunchQueues, CallsOfADeviceGoInTheOrder) {
  Queues host({call({}, {0}, 0b11), call({}, {1}, 0b01), call({}, {2}, 0b10), call({}, {3}, 0b11)});
  for (uint32_t i = 0; i < 4; ++i) host.enter(i);
  EXPECT_EQ(host.ready(), Calls({0}));
  host.queues.leave(host.node(0));
  EXPECT_EQ(host.ready(), Calls({1, 2}));
  host.queues.leave(host.node(2));  // the last one needs both devices
  EXPECT_EQ(host.ready(), Calls{});
  host.queues.leave(host.node(1));
  EXPECT_EQ(host.ready(), Calls({3}));
}

TEST(LaunchQueues, WhatIsNotStartedStaysReady) {
  Queues host({call({}, {0}, 0b01), call({}, {1}, 0b10)});
  host.enter(0);
  host.enter(1);
  Calls calls;
  host.queues.start_ready([&](NodeRef ref) {
    calls.push_back(ref.node - 1);
    return false;
  });
  EXPECT_EQ(calls, Calls({0}));
  EXPECT_TRUE(host.queues.has_ready());
  EXPECT_EQ(host.ready(), Calls({1}));
  EXPECT_FALSE(host.queues.has_ready());
}

TEST(LaunchQueues, WhatIsThrottledIsTriedAgain) {
  Queues host({call({}, {0}, 0b01), call({}, {1}, 0b10)});
  host.enter(0);
  host.enter(1);
  host.queues.start_ready([&](NodeRef ref) {
    host.queues.throttle(ref);
    host.queues.start_ready([](NodeRef) {  // it goes on to the next itself
      ADD_FAILURE();
      return true;
    });
    return true;
  });
  EXPECT_EQ(host.queues.throttled().size(), 2u);
  EXPECT_EQ(host.ready(), Calls{});
  host.queues.retry_first_throttled();
  EXPECT_EQ(host.ready(), Calls({0}));
  host.queues.throttle({host.slot, 1});
  host.queues.retry_throttled();
  EXPECT_EQ(host.ready(), Calls({1, 0}));
  EXPECT_TRUE(host.queues.throttled().empty());
}

TEST(LaunchQueues, GangsGoInOneOrderWhereTheyBlock) {
  for (const bool gangs_block : {false, true}) {
    Queues host({call({}, {0}, 0b01, true), call({}, {1}, 0b10, true), call({}, {2}, 0b10)}, gangs_block);
    for (uint32_t i = 0; i < 3; ++i) host.enter(i);
    EXPECT_EQ(host.ready(), gangs_block ? Calls({0}) : Calls({0, 1}));
    host.queues.leave(host.node(0));
    EXPECT_EQ(host.ready(), gangs_block ? Calls({1}) : Calls{});
    host.queues.leave(host.node(1));
    EXPECT_EQ(host.ready(), Calls({2}));
  }
}

TEST(LaunchQueues, GangsOfTwoKindsDoNotRunTogether) {
  Queues host({call({}, {0}, 0b01, true), call({}, {1}, 0b11, true), call({}, {2}, 0b10, true), call({}, {3}, 0b11)},
              true);
  host.queues.begin_launch(host.node(0));
  EXPECT_TRUE(host.queues.conflicts_with_running_gang(host.node(1)));
  EXPECT_FALSE(host.queues.conflicts_with_running_gang(host.node(0)));
  EXPECT_FALSE(host.queues.conflicts_with_running_gang(host.node(3)));  // no gang
  host.queues.end_launch(host.node(0));
  EXPECT_FALSE(host.queues.conflicts_with_running_gang(host.node(1)));
  host.queues.begin_launch(host.node(1));
  EXPECT_TRUE(host.queues.conflicts_with_running_gang(host.node(0)));
  EXPECT_TRUE(host.queues.conflicts_with_running_gang(host.node(2)));
  host.queues.validate();
}

TEST(LaunchQueues, LaunchesInFlightHaveABound) {
  Queues host({call({}, {0}, 0b01), call({}, {1}, 0b11), call({}, {2}, 0b10)});
  for (int i = 0; i < 4; ++i) host.queues.begin_launch(host.node(0));
  EXPECT_TRUE(host.queues.is_full(host.node(0)));
  EXPECT_TRUE(host.queues.is_full(host.node(1)));
  EXPECT_FALSE(host.queues.is_full(host.node(2)));
  host.queues.end_launch(host.node(0));
  EXPECT_FALSE(host.queues.is_full(host.node(1)));
}

}  // namespace
}  // namespace pathways::test::test_launch_queues
