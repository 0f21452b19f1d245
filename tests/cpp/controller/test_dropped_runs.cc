// What becomes of the results of runs that no host was granted: cancelled, late, or refused.
//
//   FUT-3   Dropped.*: their failure comes in their own place in the order, so it meets neither an older nor a younger
//           use of a handle's index, and never comes behind the release that it stands for
//           HeldDropped.ADonated*: a donated handle is free for a new use when its run is in the ring; nothing
//           releases it a second time
//   DEAD-1  Dropped.*, by a deadline and by a cancel
//   MEM-2   HeldDropped.*: also of runs that wait for memory, and of what waits behind them
#include "controller/played.h"
#include "simulate/simulation.h"
#include "support.h"

namespace pathways::test::test_dropped_runs {
namespace {

constexpr int64_t kSoon = 20'000'000;

enum class By { kCancel, kDeadline };

/// One host with a window of one run, and a program of two results.
struct Dropped : ::testing::Test {
  static SimulationOptions options() {
    SimulationOptions options;
    options.window = 1;
    options.time = test_clock;
    return options;
  }
  Dropped() : sim(options()), client(sim.add_client()) {
    ModelledProgram two;
    const uint32_t slice = two.add_slice({{0}, 1});
    two.add_result(two.add_call(slice, {}));
    two.add_result(two.add_call(slice, {}));
    program = &sim.add_program(std::move(two));
    group = program->ref.group;
    EXPECT_TRUE(sim.run_until_idle());
    PlanMemory memory;  // as every compiled program has
    memory.results.resize(2);
    for (auto& result : memory.results) result.group = group;
    sim.controller().set_plan_memory(program->ref.plan, memory);
  }
  /// A run that waits in the order, behind two others. Returns its results.
  std::array<uint64_t, 2> submit_waiting(By by) {
    std::array<uint64_t, 2> first{}, second{}, results{};
    EXPECT_EQ(client.submit(program->ref, {}, first.data()), Status::kOk);
    EXPECT_EQ(client.submit(program->ref, {}, second.data()), Status::kOk);
    at_ns = test_clock() + kSoon;
    EXPECT_EQ(client.submit(program->ref, {}, results.data(), {}, by == By::kDeadline ? at_ns : 0, &words),
              Status::kOk);
    tag = client.last_tag();
    sim.controller().step();
    return results;
  }
  void drop(By by, uint64_t still_named) {
    if (by == By::kCancel) {
      ASSERT_EQ(client.cancel(tag, {&still_named, 1}, "cancelled"), Status::kOk);
    } else {
      let_pass(std::chrono::nanoseconds(kSoon));
    }
    sim.controller().step();
  }
  void release(uint64_t handle) {
    client.release(Handle{handle}, group, uint64_t{1} << 30);  // big: it is sent at once
  }
  Handle put(uint64_t value) {
    Handle fresh;
    EXPECT_EQ(client.allocate(1, &fresh), Status::kOk);
    const ModelledBackend::Put put{value, 1};
    EXPECT_EQ(client.command(CommandKind::kPut, group, fresh, {}, std::as_bytes(std::span{&put, 1})), Status::kOk);
    return fresh;
  }
  uint64_t read(Handle handle) {
    uint64_t out[1] = {0};
    const ModelledBackend::Fetch fetch{out};
    Handle token;
    EXPECT_EQ(client.allocate(1, &token), Status::kOk);
    EXPECT_EQ(client.command(CommandKind::kFetch, group, handle, token, std::as_bytes(std::span{&fetch, 1})),
              Status::kOk);
    EXPECT_TRUE(sim.run_until_idle());
    EXPECT_EQ(client.poll(token), FutureState::kReady) << client.error_of(token);
    client.forget(token);
    return out[0];
  }
  void younger_is_spared(By by) {
    const auto [released, named] = submit_waiting(by);
    release(released);
    const Handle younger = put(77);
    ASSERT_EQ(younger.index(), Handle{released}.index());
    drop(by, named);
    ASSERT_TRUE(sim.run_until_idle());
    EXPECT_EQ(client.poll(Handle{named}), FutureState::kFailed);
    EXPECT_EQ(client.poll(younger), FutureState::kReady);
    EXPECT_EQ(read(younger), 77u);
  }
  void nothing_is_left(By by) {
    ASSERT_TRUE(sim.run_until_idle());
    const auto [one, two] = submit_waiting(by);
    release(one);
    drop(by, two);
    release(two);
    ASSERT_TRUE(sim.run_until_idle());
    EXPECT_EQ(sim.live_objects(), 4u);  // of the two runs before it
  }

  Simulation sim;
  Client& client;
  const Simulation::Program* program = nullptr;
  GroupId group = 0;
  uint64_t tag = 0;
  int64_t at_ns = 0;
  ErrorText words = make_error_text("too late");
};

TEST_F(Dropped, ACancelSparesAYoungerBuffer) { younger_is_spared(By::kCancel); }
TEST_F(Dropped, ADeadlineSparesAYoungerBuffer) { younger_is_spared(By::kDeadline); }
TEST_F(Dropped, ACancelLeavesNothing) { nothing_is_left(By::kCancel); }
TEST_F(Dropped, ADeadlineLeavesNothing) { nothing_is_left(By::kDeadline); }

TEST_F(Dropped, WhatDependsOnItFailsByItsWords) {
  const auto [one, two] = submit_waiting(By::kCancel);
  ModelledProgram chain = make_chain({{0}, 1}, 1);
  const auto& next = sim.add_program(std::move(chain));
  uint64_t result = 0;
  ASSERT_EQ(client.submit(next.ref, {&one, 1}, &result), Status::kOk);
  release(one);
  drop(By::kCancel, two);
  drop(By::kCancel, two);  // again: it was told once
  ASSERT_TRUE(sim.run_until_idle());
  EXPECT_EQ(client.poll(Handle{result}), FutureState::kFailed);
  EXPECT_NE(client.error_of(Handle{result}).find("cancelled before it started"), std::string::npos)
      << client.error_of(Handle{result});
  EXPECT_EQ(sim.controller().stats().dropped, 1u);
}

/// One place of 100 bytes, on a host that the test plays.
struct HeldDropped : Cluster {
  HeldDropped() : Cluster(2, 2, {100}) {
    set = controller->add_space_set({0});
    set_peak(0);
  }
  /// What a run takes.
  void set_peak(uint64_t bytes) {
    PlanMemory memory;
    memory.needs = {{0, bytes, 0}};
    memory.results.push_back({1, kNoSpaceSet, 0, -1, -1});
    controller->set_plan_memory(5, std::move(memory));
  }
  uint64_t put(uint64_t bytes) {
    Handle handle;
    EXPECT_EQ(good->allocate(1, &handle), Status::kOk);
    EXPECT_EQ(good->command(CommandKind::kPut, 1, handle, {}, {}, set, bytes), Status::kOk);
    pass();
    return handle.raw;
  }
  uint64_t run(std::span<const uint64_t> arguments = {}, int64_t at_ns = 0) {
    uint64_t result = 0;
    EXPECT_EQ(good->submit({5, 1, {1}}, arguments, &result, {}, at_ns, &words), Status::kOk);
    pass();
    return result;
  }
  void release(uint64_t handle) {
    good->release(Handle{handle}, 1, uint64_t{1} << 30);
    pass();
  }
  /// What host 0 hears next: "run", "put", "release" or "fail", and of which handle (a run: its argument, or result).
  std::string next() {
    const auto bytes = hosts[0]->next();
    if (bytes.empty()) return {};
    uint64_t handle = 0;
    if (read_record<RecordHeader>(bytes).kind == RecordKind::kRun) {
      last = read_record<RunRecord>(bytes);
      std::memcpy(&handle, bytes.data() + sizeof last, sizeof handle);
      return said("run", handle);
    }
    const auto command = read_record<CommandRecord>(bytes);
    handle = command.handle;
    if (handle == 0) std::memcpy(&handle, bytes.data() + sizeof command, sizeof handle);
    const auto kind = static_cast<CommandKind>(command.header.detail);
    return said(kind == CommandKind::kPut ? "put" : kind == CommandKind::kRelease ? "release" : "fail", handle);
  }
  static std::string said(const char* what, uint64_t handle) {
    return std::string(what) + " " + std::to_string(Handle{handle}.generation()) + ":" +
           std::to_string(Handle{handle}.index());
  }

  SpaceSetId set = 0;
  RunRecord last{};
  ErrorText words = make_error_text("too late");
};

TEST_F(HeldDropped, TheFailureWaitsForThoseThatNameAnOlderBuffer) {
  const uint64_t older = put(60), spare = put(40);
  for (const uint64_t handle : {older, spare}) EXPECT_EQ(next(), said("put", handle));
  const uint64_t waits = put(40);  // for memory
  run({&older, 1});                // behind it, and reads what is released behind that again
  release(older);
  const uint64_t dropped = run();  // its result has the older one's index
  ASSERT_EQ(Handle{dropped}.index(), Handle{older}.index());
  ASSERT_EQ(good->cancel(good->last_tag(), {&dropped, 1}, "enough"), Status::kOk);
  pass();
  good->poll_inbox();
  EXPECT_EQ(good->poll(Handle{dropped}), FutureState::kFailed);
  EXPECT_EQ(good->in_flight(), 1u);  // the other
  EXPECT_EQ(next(), "");
  release(dropped);
  const uint64_t younger = put(1);
  ASSERT_EQ(Handle{younger}.index(), Handle{older}.index());
  EXPECT_EQ(next(), "");
  release(spare);
  EXPECT_EQ(next(), said("release", spare));
  EXPECT_EQ(next(), said("put", waits));
  EXPECT_EQ(next(), said("run", older));
  EXPECT_EQ(next(), said("release", older));
  EXPECT_EQ(next(), said("fail", dropped));
  EXPECT_EQ(next(), said("release", dropped));
  hosts[0]->done(last);
  pass();
  EXPECT_EQ(next(), said("put", younger));
  EXPECT_EQ(controller->stats().held, 0u);
  EXPECT_EQ(controller->stats().dropped, 1u);
}

TEST_F(HeldDropped, ADonatedIndexIsUsedAgainAtOnce) {
  for (const bool is_cancelled : {false, true}) {
    PlanMemory memory;
    memory.results.push_back({1, kNoSpaceSet, 0, -1, -1});
    memory.donated = {0};
    controller->set_plan_memory(5, std::move(memory));
    const uint64_t older = put(60), spare = put(40);
    for (const uint64_t handle : {older, spare}) EXPECT_EQ(next(), said("put", handle));
    const uint64_t waits = put(40);  // for memory
    const uint64_t result = run({&older, 1});
    good->donated(Handle{older});
    EXPECT_EQ(good->poll(Handle{older}), FutureState::kFree);
    const uint64_t younger = put(60);
    ASSERT_EQ(Handle{younger}.index(), Handle{older}.index());
    if (is_cancelled) {
      ASSERT_EQ(good->cancel(good->last_tag(), {&result, 1}, "enough"), Status::kOk);
      pass();
    }
    EXPECT_EQ(next(), "");
    release(spare);
    EXPECT_EQ(next(), said("release", spare));
    EXPECT_EQ(next(), said("put", waits));
    if (is_cancelled) {  // nobody takes the older one over
      EXPECT_EQ(next(), said("fail", result));
      EXPECT_EQ(next(), said("release", older));
    } else {
      EXPECT_EQ(next(), said("run", older));
      hosts[0]->done(last);
      pass();
    }
    EXPECT_EQ(next(), said("put", younger));
    EXPECT_EQ(next(), "");  // no release of the donated one, whose index has another meaning now
    EXPECT_EQ(controller->stats().held, 0u);
    for (const uint64_t handle : {waits, result, younger}) release(handle);
    while (!next().empty()) continue;
  }
}

TEST_F(HeldDropped, ADeadlineOfOneBehindAnother) {
  const uint64_t first = put(100);
  EXPECT_EQ(next(), said("put", first));
  const int64_t at_ns = test_clock() + kSoon;
  const uint64_t second = put(50), late = run({}, at_ns), after = run();
  let_pass(std::chrono::nanoseconds(kSoon));
  pass();
  good->poll_inbox();
  EXPECT_EQ(good->poll(Handle{late}), FutureState::kFailed);
  EXPECT_EQ(good->error_of(Handle{late}), *words);
  EXPECT_EQ(good->in_flight(), 1u);
  EXPECT_EQ(next(), "");
  release(first);
  EXPECT_EQ(next(), said("release", first));
  EXPECT_EQ(next(), said("put", second));
  EXPECT_EQ(next(), said("fail", late));
  EXPECT_EQ(next(), said("run", after));
  EXPECT_EQ(controller->stats().late, 1u);
}

TEST_F(HeldDropped, NothingStaysBehindWhenAllIsDropped) {
  set_peak(10);
  const uint64_t first = put(100);
  EXPECT_EQ(next(), said("put", first));
  const uint64_t one = run(), two = run();
  EXPECT_EQ(controller->stats().held, 2u);
  ASSERT_EQ(good->cancel(1, {&one, 1}, "enough"), Status::kOk);
  ASSERT_EQ(good->cancel(2, {&two, 1}, "enough"), Status::kOk);
  pass();
  EXPECT_EQ(next(), said("fail", one));
  EXPECT_EQ(next(), said("fail", two));
  EXPECT_EQ(controller->stats().held, 0u);
  EXPECT_EQ(good->in_flight(), 0u);
}

}  // namespace
}  // namespace pathways::test::test_dropped_runs
