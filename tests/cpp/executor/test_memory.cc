// The gate in front of launches, on a modelled device: what finds no room waits for what is under way.
//
//   MEM-1  Gate.CountsWhatValuesTake, Gate.ValuesBetweenGo*, Gate.DonatedInputsAreTakenOver,
//          Gate.CountsWhatIsMadeForAClientThatIsGone
//   MEM-1  Gate.WhatIsMovedAwayTakesRoomUntilTheCopyIsThere
//   MEM-4  Gate.DonatedArgumentsGoWithTheirLastReaderInTheRun
//   MEM-2  Gate.LaunchWaitsForRoom, Gate.TemporariesNeedRoomToo, Gate.OtherDevicesGoOn
//   MEM-3  Gate.OverfullOnlyWhenNothingIsUnderWay
//   MEM-1  Puts.*: a put waits for what is under way, on its own devices, and is made before later calls
//   OWN-1  Puts.AreNotMadeForAClientThatIsGone
//   Gate.RunsSayWhatTheyWaitFor: the words for people who ask.
#include <chrono>

#include "executor/bench_host.h"
#include "support.h"

namespace pathways::test::test_memory {
namespace {

constexpr uint64_t kBudget = 100;
constexpr auto kLongestPutWait = std::chrono::seconds(1);

struct Gate : ::testing::Test {
  ModelClock clock{ModelClock::Kind::kVirtual};
  ModelledBackend backend{{0, 2, 100, 0}, clock, nullptr};
  RecordingLink link;
  Executor executor{
      {.host = 0, .devices = 2, .device_bytes = kBudget, .clock = test_clock, .longest_put_wait = kLongestPutWait},
      backend,
      link};

  Gate() { executor.add_client(0); }

  void add_plan(uint32_t id, const PlanBuilder& builder, PlanSizes sizes) {
    Plan plan = Plan::parse(builder.finish());
    backend.learn(id, plan, {});
    executor.add_plan(id, std::move(plan));
    executor.set_compiled(id, std::nullopt, std::move(sizes));
  }
  void run(uint64_t order, uint32_t plan, std::vector<uint64_t> arguments, const std::vector<uint64_t>& results) {
    RunRecord record{};
    record.header = {RecordKind::kRun, 0, 0};
    record.tag = record.order = order;
    record.plan = plan;
    record.arguments = static_cast<uint32_t>(arguments.size());
    record.results = static_cast<uint32_t>(results.size());
    arguments.insert(arguments.end(), results.begin(), results.end());
    executor.on_run(record, arguments.data());
  }
  void release(uint64_t handle) {
    const CommandRecord command{{RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kRelease), 0},
                                0,
                                0,
                                0,
                                sizeof handle,
                                0,
                                kNoSpaceSet,
                                0};
    executor.on_command(command, std::as_bytes(std::span{&handle, 1}));
  }
  void put(uint64_t handle, uint64_t devices, uint32_t bytes) {
    const ModelledBackend::Put payload{handle, devices};
    CommandRecord command{};
    command.header = {RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kPut), 0};
    command.handle = handle;
    command.bytes = sizeof payload;
    command.space_set = 0;
    command.space_bytes = bytes;
    executor.on_command(command, std::as_bytes(std::span{&payload, 1}));
  }
  void poll() {
    while (executor.poll() != 0) {
    }
  }
  void pass(int64_t ns = 1000000) {
    clock.advance(ns);
    poll();
  }
  const Ledger::Device& device(size_t number) const { return executor.ledger().devices()[number]; }
  void expect_empty() {
    pass();
    executor.ledger().validate();
    EXPECT_EQ(device(0).bytes, 0u);
    EXPECT_EQ(backend.live_values(), 0u);
    EXPECT_TRUE(executor.is_idle());
  }
};

const uint64_t A = handle(1), B = handle(2), C = handle(3);

/// Makes one value on `devices` out of nothing.
PlanBuilder maker(uint64_t devices = 1) { return plan_of({}, {call({}, {0}, devices)}, {0}, 1); }

TEST_F(Gate, CountsWhatValuesTake) {
  add_plan(0, maker(3), {{40}, {{}}});
  run(1, 0, {}, {A});
  pass();
  EXPECT_EQ(device(0).bytes, 40u);
  EXPECT_EQ(device(1).bytes, 40u);
  release(A);
  expect_empty();
  EXPECT_EQ(device(1).high_water, 40u);
}

TEST_F(Gate, CountsWhatIsMadeForAClientThatIsGone) {
  Plan plan = Plan::parse(maker().finish());
  backend.learn(0, plan, {});
  executor.add_plan(0, std::move(plan), 0);
  run(1, 0, {}, {A});
  executor.on_client_gone(0);
  executor.set_compiled(0, std::nullopt, {{40}, {{}}});
  EXPECT_EQ(backend.launches(), 1u);
  EXPECT_EQ(device(0).bytes, 40u);
  expect_empty();
  EXPECT_EQ(backend.forgotten(), std::vector<uint32_t>{0});
}

TEST_F(Gate, ValuesBetweenGoWithTheLaunchOfTheirLastReader) {
  // What follows on the device takes their memory only when the reader is done with it.
  add_plan(0, plan_of({}, {call({}, {0}), call({0}, {1}), call({1}, {2})}, {2}, 3), {{45, 45, 45}, {{}}});
  run(1, 0, {}, {A});
  EXPECT_EQ(backend.launches(), 3u);
  EXPECT_EQ(device(0).high_water, 90u);
  pass();
  release(A);
  expect_empty();
}

TEST_F(Gate, LaunchWaitsForRoom) {
  add_plan(0, maker(), {{60}, {{}}});
  run(1, 0, {}, {A});
  run(2, 0, {}, {B});
  for (int i = 0; i < 10; ++i) {
    poll();
    EXPECT_EQ(backend.launches(), 1u);
    EXPECT_TRUE(executor.is_throttled());
  }
  pass();
  EXPECT_EQ(link.completions(A), 1u);
  EXPECT_EQ(backend.launches(), 1u) << "A is still held";
  release(A);
  poll();
  EXPECT_EQ(backend.launches(), 2u);
  pass();
  EXPECT_EQ(link.completions(B), 1u);
  EXPECT_EQ(executor.stats().overfull, 0u);
  EXPECT_EQ(device(0).high_water, 60u);
  release(B);
  expect_empty();
}

TEST_F(Gate, TemporariesNeedRoomToo) {
  add_plan(0, maker(), {{30}, {{}}});
  add_plan(1, maker(), {{30}, {{.temporary = 50, .donated = {}}}});
  run(1, 0, {}, {A});
  run(2, 1, {}, {B});  // 30 and 50 beside 30 are too many
  EXPECT_EQ(backend.launches(), 1u);
  release(A);
  pass();
  EXPECT_EQ(backend.launches(), 2u);
  pass();
  EXPECT_EQ(executor.stats().overfull, 0u);
  EXPECT_EQ(device(0).high_water, 80u);
  release(B);
  expect_empty();
}

TEST_F(Gate, DonatedInputsAreTakenOver) {
  add_plan(0, maker(), {{90}, {{}}});
  add_plan(1, plan_of({0}, {call({0}, {1})}, {1}, 2), {{90, 90}, {{.temporary = 10, .donated = {0}}}});
  run(1, 0, {}, {A});
  run(2, 1, {A}, {B});
  EXPECT_EQ(backend.launches(), 2u) << "90 take the place of 90";
  release(A);
  pass();
  EXPECT_EQ(executor.stats().overfull, 0u);
  EXPECT_EQ(device(0).bytes, 90u);
  EXPECT_EQ(device(0).high_water, kBudget);
  release(B);
  expect_empty();
}

TEST_F(Gate, WhatIsMovedAwayTakesRoomUntilTheCopyIsThere) {
  // Value 1 is value 0 in host memory. The call behind the move needs the room of value 0.
  PlanBuilder::Node move = call({0}, {1});
  move.computation = 1;
  const auto plan = plan_of({}, {call({}, {0}), move, call({}, {2})}, {1, 2}, 3);
  add_plan(0, plan, {{60, 0, 60}, {{}, {.temporary = 0, .donated = {}, .moves = true}}});
  run(1, 0, {}, {A, B});
  EXPECT_EQ(backend.launches(), 2u) << "the move is launched at once, and what is behind it waits";
  EXPECT_EQ(device(0).bytes, 60u);
  pass();
  EXPECT_EQ(backend.launches(), 3u);
  EXPECT_EQ(link.completions(A), 1u);
  pass();
  EXPECT_EQ(link.completions(B), 1u);
  EXPECT_EQ(executor.stats().overfull, 0u);
  EXPECT_EQ(device(0).high_water, 60u);
  release(A);
  release(B);
  expect_empty();
}

TEST_F(Gate, OtherDevicesGoOn) {
  add_plan(0, maker(1), {{60}, {{}}});
  add_plan(1, maker(2), {{60}, {{}}});
  run(1, 0, {}, {A});
  run(2, 0, {}, {B});  // waits
  run(3, 1, {}, {C});  // is on the other device
  EXPECT_EQ(backend.launches(), 2u);
  release(A);
  pass();
  EXPECT_EQ(link.completions(C), 1u);
  EXPECT_EQ(backend.launches(), 3u);
  EXPECT_EQ(executor.stats().overfull, 0u);
  pass();
  release(B);
  release(C);
  expect_empty();
}

TEST_F(Gate, DonatedArgumentsGoWithTheirLastReaderInTheRun) {
  // Not with the client's release, which may come much later, or wait for this very run.
  add_plan(0, maker(), {{60}, {{}}});
  PlanBuilder builder = plan_of({0}, {call({0}, {1}), call({1}, {2})}, {2}, 3);
  builder.set_donated({0});
  add_plan(1, builder, {{60, 30, 60}, {{}}});
  run(1, 0, {}, {A});
  run(2, 1, {A}, {B});
  pass();
  EXPECT_EQ(device(0).bytes, 60u);
  EXPECT_EQ(executor.stats().overfull, 0u);
  EXPECT_EQ(executor.stats().objects, 1u);
  release(A);  // it comes all the same
  release(B);
  expect_empty();
  EXPECT_EQ(executor.stats().objects, 0u);
}

TEST_F(Gate, RunsSayWhatTheyWaitFor) {
  add_plan(0, maker(), {{60}, {{}}});
  add_plan(1, plan_of({0}, {call({0}, {1})}, {1}, 2), {{60, 30}, {{}}});
  run(1, 0, {}, {A});
  run(2, 0, {}, {B});
  run(3, 1, {B}, {C});
  const std::vector<std::string> lines = executor.describe_runs(8);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0], "run 1 of client 0, plan 0: 1 steps open");
  EXPECT_TRUE(lines[1].starts_with("run 2 of client 0, plan 0: 1 steps open; call ")) << lines[1];
  EXPECT_TRUE(lines[1].ends_with(" waits for memory")) << lines[1];
  EXPECT_TRUE(lines[2].starts_with("run 3 of client 0, plan 1: 2 steps open; call ")) << lines[2];
  EXPECT_TRUE(lines[2].ends_with(" waits for 2 of what it needs")) << lines[2];
  EXPECT_EQ(executor.describe_runs(1).size(), 1u);
  release(A);
  pass();
  release(B);
  pass();
  release(C);
  expect_empty();
  EXPECT_TRUE(executor.describe_runs(8).empty());
}

TEST_F(Gate, OverfullOnlyWhenNothingIsUnderWay) {
  add_plan(0, maker(), {{60}, {{}}});
  run(1, 0, {}, {A});
  run(2, 0, {}, {B});  // the order would not have admitted it: A stays
  for (int i = 0; i < 1000; ++i) poll();
  EXPECT_EQ(backend.launches(), 1u) << "A is under way";
  EXPECT_EQ(executor.stats().overfull, 0u);
  pass();
  EXPECT_EQ(link.completions(A), 1u);
  for (int i = 0; i < 1000 && backend.launches() < 2; ++i) executor.poll();
  EXPECT_EQ(backend.launches(), 2u) << "better too full than still for ever";
  EXPECT_EQ(executor.stats().overfull, 1u);
  pass();
  EXPECT_EQ(device(0).high_water, 120u);
  release(A);
  release(B);
  expect_empty();
}

TEST_F(Gate, OverfullWithABranchBehind) {
  // The branch waits for the value of the launch that has no room.
  PlanBuilder::Node select = call({0, 0}, {1});
  select.kind = NodeKind::kSelect;
  select.computation = 0;
  select.global_node = 1;
  PlanBuilder branch = plan_of({0}, {select}, {1}, 2);
  branch.add(PlanBuilder::Choice{7, 0, 0, 0, 2, kNoPredicate, 0, {}});
  add_plan(0, maker(), {{60}, {{}}});
  add_plan(1, branch, {{60, 0}, {{}}});
  run(1, 0, {}, {A});
  run(2, 0, {}, {B});
  run(3, 1, {B}, {C});
  pass();
  for (int i = 0; i < 1000 && backend.launches() < 2; ++i) executor.poll();
  EXPECT_EQ(backend.launches(), 2u);
  EXPECT_EQ(executor.stats().overfull, 1u);
  pass();
  for (const uint64_t each : {A, B, C}) release(each);
  expect_empty();
}

struct Puts : Gate {
  Puts() {
    add_plan(0, maker(), {{60}, {{}}});
    add_plan(1, maker(), {{30}, {{}}});
    add_plan(2, plan_of({0}, {call({0}, {1})}, {1}, 2), {{50, 10}, {{}}});
    run(1, 0, {}, {A});  // 60 of 100 bytes
    release(A);          // in use until the call is done
  }
};

TEST_F(Puts, WaitForWhatIsUnderWay) {
  put(B, 3, 50);
  EXPECT_EQ(device(0).bytes, 60u);
  EXPECT_EQ(device(1).bytes, 0u);
  EXPECT_FALSE(executor.is_idle());
  EXPECT_EQ(link.completions(B), 0u);
  pass();
  EXPECT_EQ(device(0).bytes, 50u);
  EXPECT_EQ(device(1).bytes, 50u);
  EXPECT_EQ(link.completions(B), 1u);
  release(B);
  EXPECT_LE(device(0).high_water, kBudget);
  EXPECT_EQ(executor.stats().overfull, 0u);
  expect_empty();
}

TEST_F(Puts, OfOtherDevicesGoOn) {
  put(B, 1, 50);
  put(C, 2, 50);
  EXPECT_EQ(device(0).bytes, 60u);
  EXPECT_EQ(device(1).bytes, 50u);
  release(C);
  pass();
  release(B);
  expect_empty();
}

TEST_F(Puts, AreMadeInTheirOrderAndBeforeLaterCalls) {
  put(B, 1, 50);
  put(C, 1, 10);               // it would fit
  run(2, 1, {}, {handle(4)});  // so would this
  poll();
  EXPECT_EQ(device(0).bytes, 60u);
  pass(100);  // the first call is done
  EXPECT_EQ(device(0).bytes, 50u + 10 + 30);
  EXPECT_EQ(device(0).high_water, 90u);
  for (const uint64_t each : {B, C, handle(4)}) release(each);
  expect_empty();
}

TEST_F(Puts, ReadersWaitForThem) {
  put(B, 1, 50);
  run(2, 2, {B}, {C});
  release(B);
  poll();
  EXPECT_EQ(link.completions(C), 0u);
  pass();
  pass();
  EXPECT_EQ(link.completions(C), 1u);
  EXPECT_TRUE(link.failures.empty());
  release(C);
  expect_empty();
}

TEST_F(Puts, AreNotMadeForAClientThatIsGone) {
  put(B, 1, 50);
  run(2, 2, {B}, {C});
  const uint64_t before = backend.live_values();
  executor.on_client_gone(0);
  EXPECT_EQ(backend.live_values(), before);
  expect_empty();
  EXPECT_EQ(executor.stats().live_runs, 0u);
}

// What is under way may wait for a host that waits for this one.
TEST_F(Puts, DoNotWaitForEver) {
  put(B, 1, 50);
  poll();
  EXPECT_EQ(device(0).bytes, 60u);
  let_pass(kLongestPutWait - 1ns);
  poll();
  EXPECT_EQ(device(0).bytes, 60u);
  let_pass(1ns);
  poll();
  EXPECT_EQ(device(0).bytes, 110u);
  EXPECT_EQ(executor.stats().overfull, 1u);
  release(B);
  expect_empty();
}

TEST_F(Puts, GoOnWhenNothingIsUnderWay) {
  run(2, 1, {}, {C});  // it stays
  pass();
  put(B, 1, 90);
  EXPECT_EQ(device(0).bytes, 30u);
  for (int i = 0; i < 100; ++i) poll();
  EXPECT_EQ(device(0).bytes, 120u);
  EXPECT_EQ(executor.stats().overfull, 1u);
  release(B);
  release(C);
  expect_empty();
}

}  // namespace
}  // namespace pathways::test::test_memory
