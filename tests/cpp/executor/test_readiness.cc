// What one host's executor tells as ready, and when: along a chain, through donated values, and with a bound on the
// launches in flight of each device.
//
//   LOOK-1  Looks.*, Donations.*, Inline.*, Throttle.DonatedStepsKeepToTheBound,
//           Throttle.WhatLiesBeforeTheTakerIsToldIn*
//   ORD-1   Throttle.*
//   SHARE-5 Inline.*
//   GANG-2  Throttle.WhatLiesBeforeTheTakerIsToldInItsTime
//   MEM-4   every test ends with `expect_empty`: each reference was dropped exactly once
#include <chrono>
#include <thread>

#include "executor/bench_host.h"

namespace pathways::test::test_readiness {
namespace {

struct Looks : Bench {
  /// `runs` runs, each on the result of the one before: handle(1) .. handle(runs).
  void start_chain(uint32_t runs, uint64_t failing_launch = 0) {
    host.add_plan(0, plan_of({0}, {call({0}, {1})}, {1}, 2));
    host.put(handle(0), 7);
    host.poll();
    ModelledFaults faults;
    faults.fail_value = failing_launch;
    host.backend.set_faults(faults);
    for (uint32_t i = 1; i <= runs; ++i) host.run(i, 0, {handle(i - 1)}, {handle(i)});
  }
  void drop_chain(uint32_t runs) {
    for (uint32_t i = 0; i < runs; ++i) host.release(handle(i));
    drop({handle(runs)});
  }
};
using Donations = Bench;

const uint64_t A = handle(1), B = handle(2), C = handle(3), D = handle(4);

TEST_F(Looks, TheLastOfAChainSpeaksForAll) {
  start_chain(40);
  const uint64_t before = host.backend.looks();
  pass();
  for (uint32_t i = 1; i <= 40; ++i) EXPECT_EQ(host.link.completions(handle(i)), 1u);
  EXPECT_LE(host.backend.looks() - before, 3u);
  drop_chain(40);
}

TEST_F(Looks, ExactlyWhatIsReady) {
  start_chain(9);
  for (uint32_t ready = 1; ready <= 9; ++ready) {
    pass(100);
    for (uint32_t i = 1; i <= 9; ++i) EXPECT_EQ(host.link.completions(handle(i)), i <= ready ? 1u : 0u);
  }
  drop_chain(9);
}

TEST_F(Looks, AFailureInAChainIsItsMakersOwn) {
  start_chain(6, 3);
  pass();
  for (uint32_t i = 1; i <= 6; ++i) {
    EXPECT_EQ(host.link.completions(handle(i)), i < 3 ? 1u : 0u);
    EXPECT_EQ(host.link.failure(handle(i)).empty(), i < 3);
  }
  EXPECT_EQ(host.link.failure(handle(6)), host.link.failure(handle(3)));
  drop_chain(6);
}

TEST_F(Looks, WhatIsNotComputedFromItSaysNothingOfIt) {
  // The second run's argument is younger than the first run's result and no part of it.
  host.add_plan(0, plan_of({0}, {call({0}, {1})}, {1}, 2));
  host.put(A, 7);
  host.poll();
  ModelledFaults faults;
  faults.fail_value = 1;
  host.backend.set_faults(faults);
  host.run(1, 0, {A}, {B});
  host.put(C, 8);
  host.run(2, 0, {C}, {D});
  host.run(3, 0, {A}, {handle(9)});
  pass();
  EXPECT_NE(host.link.failure(B), "");
  EXPECT_EQ(host.link.completions(B), 0u);
  EXPECT_EQ(host.link.completions(D), 1u);
  EXPECT_EQ(host.link.completions(handle(9)), 1u);
  drop({A, B, C, D, handle(9)});
}

TEST_F(Looks, AReadAmidAChain) {
  start_chain(3);
  clock.advance(100);
  uint64_t out = 0;
  host.fetch(handle(2), D, &out);
  host.poll();
  EXPECT_EQ(host.link.completions(handle(1)), 1u);
  EXPECT_EQ(host.link.completions(handle(2)) + host.link.completions(D), 0u);
  pass(100);
  EXPECT_EQ(host.link.completions(handle(2)), 1u);
  EXPECT_EQ(host.link.completions(D), 1u);
  EXPECT_NE(out, 0u);
  pass();
  drop_chain(3);
}

/// Plan 0 is a step that takes its only argument over. `values`: 1 is its new state, 2 its loss.
void add_donating_step(BenchHost& host, std::vector<uint32_t> results, std::vector<uint32_t> outputs) {
  PlanSizes sizes;
  sizes.launches.resize(1);
  sizes.launches[0].donated = {0};
  const auto values = static_cast<uint32_t>(outputs.size()) + 1;
  Plan plan = Plan::parse(plan_of({0}, {call({0}, std::move(outputs))}, std::move(results), values).finish());
  host.backend.learn(0, plan, {});
  host.backend.donate(0, 1, {0});
  host.executor.add_plan(0, std::move(plan));
  host.executor.set_compiled(0, std::nullopt, sizes);
  host.put(handle(1), 7);
  host.poll();
}

TEST_F(Donations, ALossIsToldWhenItsOwnStepHasRun) {
  for (const bool is_state_first : {true, false}) {
    ModelClock time{ModelClock::Kind::kVirtual};
    BenchHost h{time};
    add_donating_step(h, {1, 2}, is_state_first ? std::vector<uint32_t>{1, 2} : std::vector<uint32_t>{2, 1});
    for (uint32_t i = 0; i < 10; ++i) {  // the state is handle(2 i + 1), the loss handle(2 i + 2)
      h.run(i + 1, 0, {handle(2 * i + 1)}, {handle(2 * i + 3), handle(2 * i + 2)}, 0, {0b11});
      h.release(handle(2 * i + 1));
    }
    for (uint32_t i = 0; i < 10; ++i) {
      h.poll();
      EXPECT_EQ(h.link.completions(handle(2 * i + 2)), 0u) << "step " << i << " has not run";
      EXPECT_EQ(h.link.runs.size(), i);
      time.advance(100);
      h.poll();
      EXPECT_EQ(h.link.completions(handle(2 * i + 2)), 1u) << "step " << i << " has run";
      EXPECT_NE(h.link.read[handle(2 * i + 2)], 0u);
      EXPECT_EQ(h.link.runs.size(), i + 1);
      h.release(handle(2 * i + 2));
    }
    h.release(handle(21));
    h.poll();
    h.expect_empty();
  }
}

TEST_F(Donations, WhatIsTakenOverWithAllOthersIsOverWithItsTaker) {
  add_donating_step(host, {1}, {1});
  for (uint32_t i = 1; i <= 5; ++i) {
    host.run(i, 0, {handle(i)}, {handle(i + 1)});
    host.release(handle(i));
  }
  host.poll();
  EXPECT_TRUE(host.link.runs.empty()) << "no step has run";
  EXPECT_EQ(host.executor.stats().waiting, 5u);
  pass(499);
  EXPECT_EQ(host.link.completions(handle(6)), 0u);
  pass(1);
  EXPECT_EQ(host.link.completions(handle(6)), 1u);
  EXPECT_EQ(host.link.runs.size(), 5u);
  drop({handle(6)});
}

TEST_F(Donations, AReleasedLossLeavesItsLaunchToTheTaker) {
  add_donating_step(host, {1, 2}, {1, 2});
  host.run(1, 0, {handle(1)}, {handle(11), handle(12)});
  host.release(handle(12));
  host.run(2, 0, {handle(11)}, {handle(13), handle(14)}, 0, {0b10});
  host.poll();
  EXPECT_TRUE(host.link.runs.empty());
  pass(100);
  pass(100);
  EXPECT_EQ(host.link.runs.size(), 2u);
  EXPECT_NE(host.link.read[handle(14)], 0u);
  drop({handle(1), handle(11), handle(13), handle(14)});
}

TEST_F(Donations, AFailedStepFailsWhatCanStillBeRead) {
  add_donating_step(host, {1, 2}, {1, 2});
  ModelledFaults faults;
  faults.fail_value = 2;
  host.backend.set_faults(faults);
  for (uint32_t i = 0; i < 3; ++i) {
    host.run(i + 1, 0, {i == 0 ? handle(1) : handle(8 + 2 * i)}, {handle(10 + 2 * i), handle(11 + 2 * i)});
  }
  pass();
  EXPECT_EQ(host.link.completions(handle(11)), 1u);
  EXPECT_NE(host.link.failure(handle(13)), "");
  EXPECT_NE(host.link.failure(handle(15)), "");
  drop({handle(1), handle(10), handle(11), handle(12), handle(13), handle(14), handle(15)});
}

TEST_F(Donations, WithinOneRunToo) {
  // The first call's output is taken over by the second call of the same run; its other output is a result.
  PlanSizes sizes;
  sizes.launches.resize(2);
  sizes.launches[1].donated = {0};
  auto second = call({0}, {2});
  second.computation = 1;
  Plan plan = Plan::parse(plan_of({}, {call({}, {0, 1}), second}, {1, 2}, 3).finish());
  host.backend.learn(0, plan, {});
  host.backend.donate(0, 2, {0});
  host.executor.add_plan(0, std::move(plan));
  host.executor.set_compiled(0, std::nullopt, sizes);
  host.run(1, 0, {}, {A, B}, 0, {0b11});
  host.poll();
  EXPECT_EQ(host.link.completions(A), 0u);
  pass(100);
  EXPECT_EQ(host.link.completions(A), 1u);
  EXPECT_EQ(host.link.completions(B), 0u);
  pass(100);
  EXPECT_EQ(host.link.completions(B), 1u);
  drop({A, B});
}

TEST(Inline, OfAChainOnlyTheEndIsWatchedAndAllIsCounted) {
  // On a host that computes within its launches, nothing but the result is watched, whether each call takes over what
  // the one before has made or not, and the time of all launches counts.
  ModelClock clock(ModelClock::Kind::kVirtual);
  for (const bool takes_over : {true, false}) {
    BenchHost host(clock, 0, 1, 100, 0, true);
    host.link.on_leave = [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); };
    auto second = call({0}, {1}), third = call({1}, {2});
    PlanSizes sizes;
    sizes.launches.resize(3);
    second.computation = 1;
    third.computation = 2;
    Plan plan = Plan::parse(plan_of({}, {call({}, {0}), second, third}, {2}, 3, 0, 1).finish());
    host.backend.learn(0, plan, {});
    if (takes_over) {
      sizes.launches[1].donated = sizes.launches[2].donated = {0};
      for (const uint32_t node : {2u, 3u}) host.backend.donate(0, node, {0});
    }
    host.executor.add_plan(0, std::move(plan));
    host.executor.set_compiled(0, std::nullopt, sizes);
    host.run(1, 0, {}, {A});
    while (host.backend.launches() < 3) host.poll();
    EXPECT_EQ(host.executor.stats().waiting, 1u);
    EXPECT_EQ(host.link.completions(A), 0u);
    clock.advance(300);
    host.poll();
    EXPECT_EQ(host.link.completions(A), 1u);
    EXPECT_GE(host.link.busy_ns[1], 6'000'000) << "takes over: " << takes_over;
    host.release(A);
    host.poll();
    host.expect_empty();
  }
}

TEST(Throttle, WhatLiesBeforeTheTakerIsToldInItsTime) {
  // The first call's only output is taken over by the last, which may be a gang that waits for what the calls between
  // make: those are told when they have run.
  ModelClock clock(ModelClock::Kind::kVirtual);
  BenchHost host(clock, 0, 2, 100, 8);
  PlanSizes sizes;
  sizes.launches.resize(2);
  sizes.launches[1].donated = {0};
  auto last = call({0}, {3});
  last.computation = 1;
  auto taker = call({1}, {2});
  taker.computation = 1;
  Plan plan = Plan::parse(plan_of({}, {call({}, {0}), call({}, {1}), taker, last}, {2, 3}, 4).finish());
  host.backend.learn(0, plan, {});
  host.backend.donate(0, 3, {0});
  host.backend.donate(0, 4, {0});
  host.executor.add_plan(0, std::move(plan));
  host.executor.set_compiled(0, std::nullopt, sizes);
  host.run(1, 0, {}, {A, B}, 0, {0b11});
  host.poll();
  clock.advance(299);
  host.poll();
  EXPECT_EQ(host.link.completions(A), 0u);
  clock.advance(1);
  host.poll();
  EXPECT_EQ(host.link.completions(A), 1u) << "the last call has not run, but this one has";
  EXPECT_NE(host.link.read[A], 0u);
  EXPECT_EQ(host.link.completions(B), 0u);
  std::vector<Value> watched;
  host.executor.watched(&watched);
  EXPECT_EQ(watched.size(), 1u);
  clock.advance(100);
  host.poll();
  EXPECT_EQ(host.link.completions(B), 1u);
  EXPECT_EQ(host.link.runs.size(), 1u);
  EXPECT_EQ(host.executor.stats().waiting, 0u);
  for (const uint64_t each : {A, B}) host.release(each);
  host.poll();
  host.expect_empty();
}

TEST(Throttle, DonatedStepsKeepToTheBound) {
  ModelClock clock(ModelClock::Kind::kVirtual);
  BenchHost host(clock, 0, 2, 100, 3);
  add_donating_step(host, {1}, {1});
  for (uint32_t i = 1; i <= 9; ++i) {
    host.run(i, 0, {handle(i)}, {handle(i + 1)});
    host.release(handle(i));
  }
  for (uint32_t i = 0; i < 200; ++i) {
    clock.advance(10);
    host.poll();
    const uint64_t run = static_cast<uint64_t>(clock.now_ns()) / 100;
    EXPECT_LE(host.backend.launches(), run + 3) << "more in flight than the bound";
  }
  EXPECT_EQ(host.link.runs.size(), 9u);
  host.release(handle(10));
  host.poll();
  host.expect_empty();
}

TEST(Throttle, KeepsToTheBound) {
  ModelClock clock(ModelClock::Kind::kVirtual);
  BenchHost host(clock, 0, 2, 100, 2);
  host.add_plan(0, plan_of({}, {call({}, {0}, 1), call({0}, {1}, 1), call({1}, {2}, 1)}, {2}, 3));
  host.add_plan(1, plan_of({}, {call({}, {0}, 2)}, {0}, 1));
  host.run(1, 0, {}, {A});
  host.run(2, 0, {}, {B});
  host.run(3, 1, {}, {C});
  EXPECT_EQ(host.backend.launches(), 3u);  // two on the first device, one on the second
  for (uint64_t launched = 3; launched < 7; ++launched) {
    EXPECT_EQ(host.backend.launches(), launched);
    clock.advance(100);
    host.poll();
  }
  clock.advance(1000);
  host.poll();
  EXPECT_EQ(host.link.runs.size(), 3u);
  for (const uint64_t h : {A, B, C}) host.release(h);
  host.poll();
  host.expect_empty();
}

}  // namespace
}  // namespace pathways::test::test_readiness
