// Buffers that move: renamed to what came from elsewhere, offloaded off the devices, and plans that are forgotten.
//
//   MOVE-1  Rename.*: a name means one buffer, what was there goes, what came is found under it
//   OWN-1   Offload.AClientThatDiesOffloadedLeavesNothing
//   SUSP-1  Offload.RefusedChangesNothing: all values of a host or none
//   (life)  Forget.*: a plan goes after the last run that named it
#include "executor/bench_host.h"

namespace pathways::test::test_moves {
namespace {

struct Moves : Bench {
  void rename(std::vector<uint64_t> pairs) {
    host.command(CommandKind::kRename, 0, 0, std::as_bytes(std::span{pairs}));
  }
  void offload(uint32_t client = 0) { host.command(CommandKind::kOffload, 0, 0, {}, client); }
  void restore(uint32_t client = 0) { host.command(CommandKind::kRestore, 0, 0, {}, client); }
  uint64_t read(uint64_t buffer, uint32_t client = 0) {
    uint64_t out = 0;
    host.fetch(buffer, handle(100), &out, client);
    pass();
    return out;
  }
};

using Rename = Moves;
using Offload = Moves;
using Forget = Moves;

const uint64_t A = handle(1), B = handle(2), C = handle(3), D = handle(4);

TEST_F(Rename, TheFreshOneTakesTheName) {
  host.put(A, 7);
  host.put(B, 8, 2);
  host.put(C, 9);
  pass();
  rename({A, B});
  EXPECT_EQ(read(A), 8u);
  EXPECT_EQ(read(C), 9u);
  EXPECT_EQ(read(B), 0u);
  EXPECT_NE(host.link.failure(handle(100)).find("deleted"), std::string::npos);
  EXPECT_EQ(host.executor.stats().objects, 2u);
  host.add_plan(0, plan_of({0}, {call({0}, {1}, 2)}, {1}, 2));  // a run finds it by the old name
  host.run(1, 0, {A}, {D});
  pass();
  EXPECT_EQ(host.link.completions(D), 1u);
  drop({A, C, D, B});
}

TEST_F(Rename, WhatFailedKeepsItsOwnWords) {
  const auto fail = [&](uint64_t buffer, std::string_view why) {
    host.command(CommandKind::kFail, buffer, 0, std::as_bytes(std::span{why}));
  };
  fail(A, "A's maker failed");
  fail(B, "what moved failed");
  fail(C, "only this one failed");
  rename({A, B, D, C});
  EXPECT_EQ(read(A), 0u);
  EXPECT_NE(host.link.failure(handle(100)).find("A's maker failed"), std::string::npos);
  EXPECT_EQ(read(D), 0u);
  EXPECT_NE(host.link.failure(handle(100)).find("only this one failed"), std::string::npos);
  drop({A, D});
}

TEST_F(Rename, WhatMovedElsewhereLeavesNothing) {
  host.put(A, 7);
  pass();
  rename({A, B, C, D});  // neither came here; C was never here
  drop({});
}

TEST_F(Rename, WhatComesFromElsewhereIsNew) {
  host.put(B, 8);
  pass();
  rename({A, B});
  EXPECT_EQ(read(A), 8u);
  drop({A});
}

TEST_F(Rename, AReaderOfTheOldOneIsServed) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1));
  host.run(1, 0, {}, {A});
  uint64_t out = 0;
  host.fetch(A, D, &out);  // before the value is ready
  host.put(B, 8);
  rename({A, B});
  pass();
  EXPECT_EQ(host.link.completions(D), 1u);
  EXPECT_NE(out, 0u);
  EXPECT_NE(out, 8u);
  EXPECT_EQ(read(A), 8u);
  drop({A});
}

TEST_F(Rename, AFailureMovesToo) {
  host.backend.set_faults({1});
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1));
  host.run(1, 0, {}, {B});
  host.put(A, 7);
  pass();
  rename({A, B});
  EXPECT_EQ(read(A), 0u);
  EXPECT_EQ(host.link.failure(handle(100)), host.link.failure(B));
  drop({A});
}

TEST_F(Rename, OfWhatIsNotThereFailsAlone) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1), false);
  host.run(1, 0, {}, {B});
  host.put(A, 7);
  pass();
  rename({A, B});
  EXPECT_NE(host.link.failure(A).find("before it was there"), std::string::npos);
  host.executor.set_compiled(0);
  pass();
  drop({A});
}

TEST_F(Rename, HandlesOutOfRangeAreLeftAlone) {
  host.executor.add_client(1, 8);
  host.put(handle(3), 7, 1, 1);
  pass();
  const std::vector<uint64_t> pairs{handle(9), handle(3), 1, 2, 3};  // and half a pair
  host.command(CommandKind::kRename, 0, 0, std::as_bytes(std::span{pairs}), 1);
  EXPECT_EQ(read(handle(3), 1), 7u);
  host.release(handle(3), 1);
  drop({});
}

TEST_F(Offload, AwayAndBack) {
  host.executor.add_client(1);
  host.put(A, 7);
  host.put(B, 8);
  host.put(A, 9, 1, 1);
  pass();
  offload();
  EXPECT_EQ(host.backend.offloaded(), 2u);
  offload();  // again is nothing
  EXPECT_EQ(host.backend.offloaded(), 2u);
  EXPECT_EQ(host.backend.live_values(), 3u);
  EXPECT_EQ(read(A, 1), 9u);  // another client's
  restore();
  EXPECT_EQ(host.backend.offloaded(), 0u);
  EXPECT_EQ(read(A), 7u);
  EXPECT_EQ(read(B), 8u);
  host.release(A, 1);
  drop({A, B});
}

TEST_F(Offload, RefusedChangesNothing) {
  host.put(A, 7);
  host.put(B, 8);
  pass();
  ModelledFaults faults;
  faults.refuse_offload = true;
  host.backend.set_faults(faults);
  offload();
  EXPECT_EQ(host.backend.offloaded(), 0u);
  restore();
  EXPECT_EQ(read(A), 7u);
  EXPECT_EQ(read(B), 8u);
  drop({A, B});
}

TEST_F(Offload, AClientThatDiesOffloadedLeavesNothing) {
  host.put(A, 7);
  pass();
  offload();
  host.executor.on_client_gone(0);
  restore();
  pass();
  host.expect_empty();
}

TEST_F(Forget, AfterTheLastRun) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1));
  host.add_plan(1, plan_of({}, {call({}, {0})}, {0}, 1));
  host.run(1, 0, {}, {A});
  host.executor.remove_plan(0);
  host.executor.remove_plan(1);
  EXPECT_EQ(host.backend.forgotten(), std::vector<uint32_t>{1});
  pass();
  EXPECT_EQ(host.link.completions(A), 1u);
  EXPECT_EQ(host.backend.forgotten(), (std::vector<uint32_t>{1, 0}));
  drop({A});
}

}  // namespace
}  // namespace pathways::test::test_moves
