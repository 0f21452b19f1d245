// Gangs on one host's executor, beside transfers whose other host the test plays, and beside other gangs.
//
//   GANG-2  Gangs.WaitForWhatTheirOthersNeed, Gangs.DoNotWaitForWhatComesAfter; Gangs.GoInTheOrder: whatever devices
//           they hold; Gangs.OfSeveralDevicesWaitForSources: and not for sending
//   GANG-3  MixedGangs: those that share a device go one by one, on stand-ins as well; others go together
//   MEM-4   a test that ends with `expect_empty` has dropped each reference exactly once
#include "executor/bench_host.h"

namespace pathways::test::test_gangs {
namespace {

const uint64_t A = handle(1), B = handle(2), C = handle(3), D = handle(4);

/// A host whose launch of a gang would wait for the other hosts'.
struct Gangs : ::testing::Test {
  ModelClock clock{ModelClock::Kind::kVirtual};
  BenchHost zero{clock, 0, 2, 100, 0, true};
};

TEST_F(Gangs, WaitForWhatTheirOthersNeed) {
  // Host 0 makes a value, sends it to host 1, and has its part of a gang that needs nothing of that.
  auto first = call({0}, {1}), gang = call({0}, {2}, 1, true);
  gang.global_node = 6;
  zero.add_plan(0, plan_of({0}, {first, transfer(5, {1}, {}, {}, {1}), gang}, {2}, 3, 0));
  zero.put(A, 7);
  zero.run(1, 0, {A}, {B});
  for (int round = 0; round < 10; ++round) {
    clock.advance(1000);
    zero.poll();
  }
  EXPECT_EQ(zero.executor.stats().launches, 1u);  // host 1 may need the value before it can join
  EXPECT_EQ(zero.executor.stats().gangs, 0u);
  uint64_t slot = 0;  // where host 1 wants it
  const std::vector<uint64_t> offsets{reinterpret_cast<uint64_t>(&slot)};
  EXPECT_EQ(zero.executor.on_receive_ready(1, 5, 1, offsets), Status::kOk);
  clock.advance(1000);
  zero.poll();
  EXPECT_EQ(zero.executor.stats().gangs, 1u);
  clock.advance(1000);
  zero.poll();
  EXPECT_EQ(zero.link.completions(B), 1u);
  zero.release(A);
  zero.release(B);
  zero.expect_empty();
}

TEST_F(Gangs, DoNotWaitForWhatComesAfter) {
  auto gang = call({0}, {1}, 1, true), last = call({0}, {2});
  gang.global_node = 4;
  zero.add_plan(0, plan_of({0}, {gang, last, transfer(5, {2}, {}, {}, {1})}, {1}, 3, 0));
  zero.put(A, 7);
  zero.run(1, 0, {A}, {B});
  clock.advance(1000);
  zero.poll();
  EXPECT_EQ(zero.executor.stats().gangs, 1u);
}

TEST_F(Gangs, GoInTheOrder) {
  // Two gangs on a device each. The inputs of the second are there first; another host may have it the other way round.
  auto first = call({1}, {2}, 1, true), second = call({0}, {3}, 2, true);
  zero.add_plan(0, plan_of({0}, {transfer(5, {}, {1}, {1}, {}), first, second}, {2, 3}, 4, 0));
  zero.put(A, 7, 2);
  zero.run(1, 0, {A}, {B, C});
  for (int round = 0; round < 10; ++round) {
    clock.advance(1000);
    zero.poll();
  }
  EXPECT_EQ(zero.executor.stats().gangs, 0u);
  EXPECT_EQ(zero.executor.on_receive_done(1, 5, 1, Outcome::kDone, {}), Status::kOk);
  EXPECT_EQ(zero.executor.stats().gangs, 2u);
  for (int round = 0; round < 10; ++round) {
    clock.advance(1000);
    zero.poll();
  }
  EXPECT_EQ(zero.link.completions(C), 1u);  // nothing was written for B
  for (const uint64_t each : {A, B, C}) zero.release(each);
  zero.expect_empty();
}

/// Two gangs on the devices of `first` and `second` of a host of four: by how many launches the second comes later than
/// the first, counted in steps of its computation (100 ns).
class MixedGangs : public ::testing::Test {
 protected:
  int delay(uint64_t first, uint64_t second, bool has_failed_input) {
    BenchHost wide{clock, 0, 4, 100, 8, true};
    auto older = call({0}, {2}, first, true), younger = call({1}, {3}, second, true);
    wide.add_plan(0, plan_of({0, 1}, {older, younger}, {2, 3}, 4, 0, 4));
    wide.put(A, 7, 15);
    if (!has_failed_input) wide.put(B, 7, 15);
    clock.advance(1000);
    wide.poll();
    wide.run(1, 0, {has_failed_input ? D : B, A}, {C, handle(5)});
    EXPECT_GE(wide.executor.stats().gangs, 1u);
    int steps = 0;
    for (; wide.executor.stats().gangs != 2 && steps < 10; ++steps) {
      clock.advance(100);
      wide.poll();
    }
    clock.advance(1000);
    wide.poll();
    EXPECT_EQ(wide.link.completions(C), has_failed_input ? 0u : 1u);
    EXPECT_EQ(wide.link.completions(handle(5)), 1u);
    EXPECT_EQ(wide.link.runs.size(), 1u);
    for (const uint64_t each : {A, B, C, handle(5)}) wide.release(each);
    wide.poll();
    wide.expect_empty();
    return steps;
  }

  ModelClock clock{ModelClock::Kind::kVirtual};
};

TEST_F(MixedGangs, ThatShareADeviceGoOneByOne) {
  EXPECT_EQ(delay(0b0011, 0b0010, false), 1);
  EXPECT_EQ(delay(0b0100, 0b1100, false), 1);
}

TEST_F(MixedGangs, OfOneKindGoTogether) {
  EXPECT_EQ(delay(0b0011, 0b0110, false), 0);
  EXPECT_EQ(delay(0b0010, 0b0010, false), 0);
}

TEST_F(MixedGangs, ThatShareNoneGoTogether) { EXPECT_EQ(delay(0b0011, 0b0100, false), 0); }

TEST_F(MixedGangs, OnStandInsRunAsWell) {
  EXPECT_EQ(delay(0b0011, 0b0010, true), 1);
  EXPECT_EQ(delay(0b0100, 0b1100, true), 1);
}

TEST_F(Gangs, OfSeveralDevicesWaitForSources) {
  // What host 0 owes is computed from what it receives, on one device; a gang behind it holds two others.
  BenchHost wide{clock, 0, 4, 100, 0, true};
  auto first = call({1}, {2}, 1), gang = call({0}, {3}, 6, true);
  first.global_node = 6;
  gang.global_node = 8;
  auto receive = transfer(5, {}, {1}, {1}, {}), send = transfer(7, {2}, {}, {}, {1});
  wide.add_plan(0, plan_of({0}, {receive, first, send, gang}, {3}, 4, 0, 4));
  wide.put(A, 7, 6);
  wide.run(1, 0, {A}, {B});
  for (int round = 0; round < 10; ++round) {
    clock.advance(1000);
    wide.poll();
  }
  EXPECT_EQ(wide.executor.stats().gangs, 0u);  // XLA might run what is owed behind it
  EXPECT_EQ(wide.executor.on_receive_done(1, 5, 1, Outcome::kDone, {}), Status::kOk);
  wide.poll();
  EXPECT_EQ(wide.executor.stats().gangs, 1u);  // it is enqueued now, if not sent
  EXPECT_EQ(wide.executor.stats().exchanges, 1u);
  uint64_t slot = 0;
  const std::vector<uint64_t> offsets{reinterpret_cast<uint64_t>(&slot)};
  EXPECT_EQ(wide.executor.on_receive_ready(1, 7, 1, offsets), Status::kOk);
  clock.advance(1000);
  wide.poll();
  EXPECT_EQ(wide.link.completions(B), 1u);
  for (const uint64_t each : {A, B}) wide.release(each);
  wide.expect_empty();
}

}  // namespace
}  // namespace pathways::test::test_gangs
