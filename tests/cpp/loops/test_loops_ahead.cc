// Loops that run ahead of their verdicts, between a client and hosts that the test plays.
//
//   WALK-4   AheadLoops.OrderMoreRunsAsMoreAreKnown, AheadLoops.EndWithTheFirstRunThatDidNothing,
//            AheadLoops.AVerdictOfALoopThatIsLeftIsOfNoOther, AheadLoops.EndAtTheirMostIterations
//   DEAD-1, OWN-1  AheadLoops.EndInTheMiddleAndLeaveNothing
//   TRUST-1  AheadLoops.AreOneRunAndDecided
#include <array>
#include <map>

#include "loops/played_loops.h"

namespace pathways::test::test_loops_ahead {
namespace {

struct AheadLoops : Loops {
  /// carry -> carry by plan 1, as long as its runs do something. Plan 2 is behind it. `times` around both.
  Composite ahead(uint64_t most = UINT64_MAX, uint64_t times = 1) {
    add(1, 1, {0});
    add(2, 1, {0});
    add(3, 1, {});
    Composite made{"while", 0, 2, 1, 9, 5, {0}, {8}, {}};
    made.steps = {bound(Kind::kLoop, times, {0}, {1}),
                  bound(Kind::kLoop, most, {1}, {2}),
                  run(1, {2}, {3}),
                  bound(Kind::kEnd, 0, {3}, {4}),
                  run(2, {4}, {5}),
                  bound(Kind::kEnd, 0, {5}, {6}),
                  run(3, {6}, {8})};
    made.steps[1].is_decided = made.steps[1].is_ahead = true;
    return made;
  }
  void read_more() {
    pass();
    read();
    for (const RunRecord& each : running[1]) {
      if (each.order <= last_seen) continue;
      last_seen = each.order;
      if (each.plan == 1) {
        const uint64_t alive = did_something[loop];
        says[each.order] = static_cast<int>(runs[loop]++ < alive);
        if (is_failed && says[each.order] == 0) says[each.order] = -1;
      } else if (each.plan == 2) {
        ++loop;
      }
    }
  }
  void end_one(uint32_t h) {
    const RunRecord each = running[h].front();
    if (each.plan == 1 && h == 1) {
      verdicts.assign(1, says.at(each.order));
      decider = 1;
    } else {
      decider = UINT32_MAX;
    }
    complete(h);
  }
  /// Everything to its end, one run after the other.
  void play() {
    for (bool is_busy = true; is_busy;) {
      read_more();
      is_busy = false;
      for (uint32_t h = 0; h < hosts.size(); ++h) {
        if (is_lost[h] || running[h].empty()) continue;
        end_one(h);
        is_busy = true;
      }
    }
  }
  void expect_result(uint64_t result) {
    uint64_t expected = 7;
    for (const uint32_t plan : order) expected = output_of(plan, std::array{expected}, 0);
    EXPECT_EQ(objects.at(result), expected);
    EXPECT_EQ(hidden(), 0u);
    EXPECT_EQ(good->in_flight(), 0u);
    EXPECT_TRUE(controller->is_idle());
  }
  void again() {
    objects.clear();
    order.clear();
    says.clear();
    runs.clear();
    loop = 0;
  }

  std::map<uint64_t, uint64_t> did_something, runs;  ///< by loop: how many of its runs do something, and all
  std::map<uint64_t, int> says;                      ///< by place in the order
  uint64_t loop = 0, last_seen = 0;
  bool is_failed = false;
};

TEST_F(AheadLoops, OrderMoreRunsAsMoreAreKnown) {
  controller->register_composite(kNumber, ahead());
  did_something[0] = 1000;
  (void)call({buffer(7)}, 1);
  read_more();
  EXPECT_EQ(order.size(), CompositeWalk::kAhead);
  end_one(0);
  read_more();
  EXPECT_EQ(order.size(), 2u);  // the owner of the scalar has not said anything
  end_one(1);
  read_more();
  EXPECT_EQ(order.size(), 4u);  // one did something, and three are not known
  for (int i = 0; i < 20; ++i) {
    for (const uint32_t h : {0u, 1u}) end_one(h);
    read_more();
    EXPECT_LE(running[1].size() + controller->stats().waiting, 5u);  // `parallel`
  }
  EXPECT_EQ(running[1].size() + controller->stats().waiting, 5u);
  did_something[0] = 0;
  play();
}

TEST_F(AheadLoops, EndWithTheFirstRunThatDidNothing) {
  for (const bool fails : {false, true}) {
    is_failed = fails;
    for (const uint64_t alive : {0u, 1u, 2u, 5u, 40u}) {
      controller->register_composite(kNumber, ahead());
      did_something[0] = alive;
      again();
      const uint64_t result = call({buffer(7)}, 1)[0];
      play();
      EXPECT_GT(runs[0], alive);
      EXPECT_LE(runs[0], alive + std::min<uint64_t>(alive + CompositeWalk::kAhead, 5));
      expect_result(result);
    }
  }
}

TEST_F(AheadLoops, AVerdictOfALoopThatIsLeftIsOfNoOther) {
  controller->register_composite(kNumber, ahead(UINT64_MAX, 4));
  did_something = {{0, 6}, {1, 3}, {2, 0}, {3, 9}};
  const uint64_t result = call({buffer(7)}, 1)[0];
  play();
  EXPECT_EQ(loop, 4u);
  for (const auto& [number, alive] : did_something) EXPECT_GT(runs[number], alive);
  expect_result(result);
}

TEST_F(AheadLoops, EndAtTheirMostIterations) {
  controller->register_composite(kNumber, ahead(3));
  did_something[0] = 1000;
  const uint64_t result = call({buffer(7)}, 1)[0];
  play();
  EXPECT_EQ(runs[0], 3u);
  expect_result(result);
}

TEST_F(AheadLoops, EndInTheMiddleAndLeaveNothing) {
  for (const bool is_client_gone : {false, true}) {
    controller->register_composite(kNumber, ahead());
    did_something[0] = 1000;
    again();
    const uint64_t result = call({buffer(7)}, 1)[0];
    for (int i = 0; i < 9; ++i) {
      read_more();
      for (const uint32_t h : {0u, 1u}) end_one(h);
    }
    if (is_client_gone) {
      controller->remove_client(0);
    } else {
      EXPECT_EQ(good->cancel(good->last_tag(), std::array{result}, "cancelled"), Status::kOk);
    }
    play();
    EXPECT_EQ(loop, 0u);  // nothing behind the loop
    EXPECT_LE(runs[0], 9u + 5u);
    EXPECT_EQ(hidden(), 0u);
    EXPECT_TRUE(is_client_gone || failed.contains(result));
    EXPECT_TRUE(controller->is_idle());
  }
}

TEST_F(AheadLoops, AreOneRunAndDecided) {
  const auto refused = [&](const Composite& wrong, const char* why) {
    try {
      controller->register_composite(kNumber, wrong);
    } catch (const Error& error) {
      return std::string(error.what()).find(why) != std::string::npos;
    }
    return false;
  };
  Composite undecided = ahead();
  undecided.steps[1].is_decided = false;
  EXPECT_TRUE(refused(undecided, "that nobody decides"));
  Composite two_runs = ahead();
  two_runs.steps[2] = run(1, {2}, {7});
  two_runs.steps.insert(two_runs.steps.begin() + 3, run(1, {7}, {3}));
  EXPECT_TRUE(refused(two_runs, "is not one run"));
  Composite inner = ahead();
  inner.values = 11;
  inner.steps[2] = run(1, {9}, {10});
  inner.steps.insert(inner.steps.begin() + 2, bound(Kind::kLoop, 2, {2}, {9}));
  inner.steps.insert(inner.steps.begin() + 4, bound(Kind::kEnd, 0, {10}, {3}));
  inner.steps[5].inputs = {3};
  EXPECT_TRUE(refused(inner, "is not one run"));
}

}  // namespace
}  // namespace pathways::test::test_loops_ahead
