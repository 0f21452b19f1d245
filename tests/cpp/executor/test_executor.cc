// One host's executor on a modelled device with a clock that the test advances.
//
//   ASY-1, ASY-2  Chain.*: everything is launched before anything is ready; Arguments.Pending, Plans.CompiledLater
//   ORD-1         Chain.DevicesAreFifos, Throttle.*
//   GANG-1        Errors.GangRunsOnPlaceholders, Plans.CompileErrorLaunchesNothing, Clients.PlansGoBehindTheLastRun
//   GANG-2        Throttle.WhatLiesBeforeTheTakerIsToldInItsTime
//   MEM-4         every test ends with `expect_empty`: each reference was dropped exactly once
//   ERR-1         Errors.*
//   OWN-1         Clients.*
//   LOOK-1        Looks.*, Donations.*, Throttle.DonatedStepsKeepToTheBound, Throttle.WhatLiesBeforeTheTakerIsToldIn*
//   READ-1        Reads.Wanted*
//   FUT-3         Objects.IndexReusedBeforeDefined, Objects.StaleHandles
#include "executor/bench_host.h"

namespace pathways::test {
namespace {

using Chain = Bench;
using Arguments = Bench;
using Plans = Bench;
using Errors = Bench;
using Objects = Bench;
using Clients = Bench;
using Reads = Bench;
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
using Unsound = Bench;

const uint64_t A = handle(1), B = handle(2), C = handle(3), D = handle(4);

TEST_F(Chain, LaunchedAtOnceDoneWhenReady) {
  host.add_plan(0, plan_of({0}, {call({0}, {1}), call({1}, {2}), call({2}, {3})}, {3}, 4));
  host.put(A, 7);
  host.run(1, 0, {A}, {B});
  EXPECT_EQ(host.backend.launches(), 3u);  // nothing is ready yet
  host.poll();
  EXPECT_EQ(host.link.completions(B), 0u);
  EXPECT_TRUE(host.link.runs.empty());
  pass(299);
  EXPECT_EQ(host.link.completions(B), 0u);
  pass(1);
  EXPECT_EQ(host.link.completions(B), 1u);
  EXPECT_EQ(host.link.runs.size(), 1u);
  drop({A, B});
}

TEST_F(Chain, DevicesAreFifos) {
  // Two runs; the first waits for a plan that is not compiled, on device 0 alone: device 1 goes on.
  host.add_plan(0, plan_of({}, {call({}, {0}, 1)}, {0}, 1), false);
  host.add_plan(1, plan_of({}, {call({}, {0}, 1), call({}, {1}, 2)}, {0, 1}, 2));
  host.add_plan(2, plan_of({}, {call({}, {0}, 3)}, {0}, 1));
  host.run(1, 0, {}, {A});
  host.run(2, 1, {}, {B, C});
  host.run(3, 2, {}, {D});
  EXPECT_EQ(host.backend.launches(), 1u);
  pass();
  EXPECT_EQ(host.link.completions(C), 1u);
  EXPECT_EQ(host.link.completions(B) + host.link.completions(D), 0u);
  host.executor.set_compiled(0);
  EXPECT_EQ(host.backend.launches(), 4u);
  pass();
  drop({A, B, C, D});
}

TEST_F(Chain, ManyRunsLeaveNothing) {
  host.add_plan(
      0, plan_of({0}, {call({0, 0}, {1, 2}, 3), call({1}, {3}), call({2}, {4}, 2), call({3, 4}, {5}, 3)}, {5}, 6));
  host.put(handle(0), 7, 3);
  for (uint32_t i = 1; i <= 200; ++i) {
    host.run(i, 0, {handle(i - 1)}, {handle(i)});
    host.release(handle(i - 1));
    if (i % 7 == 0) pass(150);
  }
  pass();
  EXPECT_EQ(host.link.runs.size(), 200u);
  drop({handle(200)});
}

TEST_F(Arguments, Pending) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1), false);
  host.add_plan(1, plan_of({0}, {call({0}, {1}, 2)}, {1, 0}, 2));
  host.run(1, 0, {}, {A});
  host.run(2, 1, {A}, {B, C});  // its argument is announced and no more
  EXPECT_EQ(host.backend.launches(), 0u);
  host.executor.set_compiled(0);
  EXPECT_EQ(host.backend.launches(), 2u);
  pass();
  EXPECT_EQ(host.link.completions(A) + host.link.completions(B) + host.link.completions(C), 3u);
  drop({A, B, C});
}

TEST_F(Arguments, PassedThroughTwice) {
  host.add_plan(0, plan_of({0}, {}, {0, 0}, 1));
  host.add_plan(1, plan_of({0}, {call({0}, {1})}, {1, 1}, 2));
  host.put(A, 7);
  host.run(1, 0, {A}, {B, C});
  host.run(2, 1, {B}, {D, handle(5)});
  host.release(B);  // the other result is completed all the same
  pass();
  EXPECT_EQ(host.link.completions(C) + host.link.completions(D) + host.link.completions(handle(5)), 3u);
  drop({A, C, D, handle(5)});
}

TEST_F(Arguments, OneReleasedWhilePassedThrough) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1), false);
  host.add_plan(1, plan_of({0}, {}, {0, 0}, 1));
  host.run(1, 0, {}, {A});
  host.run(2, 1, {A}, {B, C});
  host.release(B);
  host.executor.set_compiled(0);
  pass();
  EXPECT_EQ(host.link.completions(C), 1u);
  EXPECT_EQ(host.link.runs.size(), 2u);
  drop({A, C});
}

TEST_F(Arguments, SameBufferTwice) {
  host.add_plan(0, plan_of({0, 1}, {call({0, 1, 0}, {2})}, {2}, 3));
  host.put(A, 7);
  host.run(1, 0, {A, A}, {B});
  pass();
  EXPECT_EQ(host.link.completions(B), 1u);
  drop({A, B});
}

TEST_F(Arguments, Deleted) {
  host.add_plan(0, plan_of({0}, {call({0}, {1})}, {1}, 2));
  host.run(1, 0, {A}, {B});
  EXPECT_NE(host.link.failure(B).find("deleted"), std::string::npos);
  EXPECT_EQ(host.backend.launches(), 0u);
  EXPECT_EQ(host.link.runs.size(), 1u);
  drop({B});
}

TEST_F(Plans, CompiledLater) {
  host.add_plan(0, plan_of({}, {call({}, {0}), call({0}, {1}, 2)}, {1}, 2), false);
  host.add_plan(1, plan_of({0}, {}, {0}, 1), false);  // nothing to launch: it does not wait
  host.put(A, 7);
  host.run(1, 0, {}, {B});
  host.run(2, 1, {A}, {C});
  pass();
  EXPECT_EQ(host.link.completions(C), 1u);
  EXPECT_EQ(host.link.completions(B), 0u);
  host.executor.set_compiled(0);
  host.executor.set_compiled(0);
  host.executor.set_compiled(1);
  host.executor.set_compiled(77);
  pass();
  EXPECT_EQ(host.link.completions(B), 1u);
  drop({A, B, C});
}

TEST_F(Plans, CompileErrorLaunchesNothing) {
  host.add_plan(0, plan_of({}, {call({}, {0}, 1, true), call({0}, {1}, 3, true)}, {1}, 2), false);
  host.run(1, 0, {}, {A});
  host.executor.set_compiled(0, "out of registers");
  host.run(2, 0, {}, {B});
  pass();
  EXPECT_EQ(host.link.failure(A), "out of registers");
  EXPECT_EQ(host.link.failure(B), "out of registers");
  EXPECT_EQ(host.link.runs[1], (std::pair{0u, 2u}));
  EXPECT_EQ(host.backend.launches(), 0u);
  drop({A, B});
}

TEST_F(Plans, RemovedWhileRunning) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1));
  host.run(1, 0, {}, {A});
  host.executor.remove_plan(0);
  pass();
  EXPECT_EQ(host.link.completions(A), 1u);
  host.run(2, 0, {}, {B});
  EXPECT_NE(host.link.failure(B).find("not known"), std::string::npos);
  drop({A, B});
}

TEST_F(Errors, OnlyDependents) {
  host.add_plan(0, plan_of({}, {call({}, {0}), call({0}, {1}), call({}, {2}, 2)}, {1, 2}, 3));
  host.add_plan(1, plan_of({0}, {call({0}, {1})}, {1, 0}, 2));
  host.backend.set_faults({1});  // the first launch is refused
  host.run(1, 0, {}, {A, B});
  host.run(2, 1, {A}, {C, D});
  pass();
  EXPECT_NE(host.link.failure(A).find("refused"), std::string::npos);
  EXPECT_EQ(host.link.failure(A), host.link.failure(C));  // with the first error's text
  EXPECT_EQ(host.link.failure(A), host.link.failure(D));
  EXPECT_EQ(host.link.completions(B), 1u);
  EXPECT_EQ(host.backend.launches(), 2u);
  drop({A, B, C, D});
}

TEST_F(Errors, GangRunsOnPlaceholders) {
  host.add_plan(0, plan_of({}, {call({}, {0}, 1, true), call({0}, {1}, 3, true), call({1}, {2})}, {2}, 3));
  host.backend.set_faults({1});
  host.run(1, 0, {}, {A});
  pass();
  EXPECT_EQ(host.backend.gangs(), 2u);  // the third call, no gang, is not launched
  EXPECT_EQ(host.backend.launches(), 2u);
  EXPECT_EQ(host.link.runs[1], (std::pair{2u, 2u}));
  EXPECT_NE(host.link.failure(A), "");
  drop({A});
}

TEST_F(Errors, FailsWhenItShouldBeReady) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1));
  host.add_plan(1, plan_of({0}, {call({0}, {1})}, {1}, 2));
  ModelledFaults faults;
  faults.fail_value = 1;
  host.backend.set_faults(faults);
  uint64_t out = 0;
  host.run(1, 0, {}, {A});
  host.fetch(A, D, &out);
  host.run(2, 1, {A}, {B});
  pass();
  EXPECT_NE(host.link.failure(A).find("failed on host 0"), std::string::npos);
  for (const uint64_t h : {B, D}) EXPECT_EQ(host.link.failure(h), host.link.failure(A)) << "not its maker's words";
  EXPECT_EQ(out, 0u);
  EXPECT_EQ(host.link.completions(A), 0u);
  host.run(3, 1, {A}, {C});  // known to have failed: not even launched
  EXPECT_NE(host.link.failure(C), "");
  EXPECT_EQ(host.backend.launches(), 2u);
  drop({A, B, C});
}

TEST_F(Errors, PutFails) {
  ModelledFaults faults;
  faults.fail_put = 1;
  host.backend.set_faults(faults);
  host.put(A, 7);
  EXPECT_NE(host.link.failure(A), "");
  uint64_t out = 0;
  host.fetch(A, D, &out);
  EXPECT_EQ(host.link.failure(D), host.link.failure(A));
  drop({A});
}

TEST_F(Errors, TheFirstOneCounts) {
  ModelledFaults faults;
  faults.fail_put = 1;
  host.backend.set_faults(faults);
  host.add_plan(0, plan_of({0, 1}, {call({0, 1}, {2})}, {2}, 3));
  host.put(A, 7);
  host.run(1, 0, {A, B}, {C});  // A failed, B was deleted
  EXPECT_EQ(host.link.failure(C), host.link.failure(A));
  drop({A, C});
}

TEST_F(Errors, ManyTextsAreForgottenNotMisread) {
  host.add_plan(0, plan_of({0}, {}, {0}, 1));
  host.run(1, 0, {A}, {B});
  for (uint32_t i = 0; i < 5000; ++i) {
    host.run(2 + i, 0, {A}, {C});
    host.release(C);
  }
  uint64_t out = 0;
  host.fetch(B, D, &out);
  EXPECT_NE(host.link.failure(D).find("no longer kept"), std::string::npos);
  drop({B});
}

TEST_F(Objects, ReleasedBeforeDefined) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1), false);
  host.add_plan(1, plan_of({0}, {call({0}, {1}, 2)}, {1}, 2));
  uint64_t out = 0;
  host.run(1, 0, {}, {A});
  host.run(2, 1, {A}, {B});
  host.fetch(A, D, &out);
  host.release(A);
  host.release(B);
  host.executor.set_compiled(0);
  pass();
  EXPECT_EQ(host.link.completions(D), 1u);  // who asked before the release is served
  EXPECT_NE(out, 0u);
  EXPECT_EQ(host.link.runs.size(), 2u);
  drop({});
}

TEST_F(Objects, IndexReusedBeforeDefined) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1), false);
  host.add_plan(1, plan_of({}, {call({}, {0}, 2)}, {0}, 1));
  host.run(1, 0, {}, {handle(1, 1)});
  host.release(handle(1, 1));
  host.run(2, 1, {}, {handle(1, 2)});
  host.executor.set_compiled(0);
  pass();
  uint64_t out = 0;
  host.fetch(handle(1, 2), D, &out);
  host.fetch(handle(1, 1), C, &out);
  pass();
  EXPECT_EQ(host.link.completions(D), 1u);
  EXPECT_NE(host.link.failure(C).find("deleted"), std::string::npos);
  drop({handle(1, 2)});
}

TEST_F(Objects, StaleHandles) {
  host.put(handle(1, 5), 7);
  host.release(handle(1, 4));
  host.release(handle(1, 6));
  host.release(handle(99, 5));
  pass();
  EXPECT_EQ(host.executor.stats().objects, 1u);
  host.put(handle(1, 6), 8);  // a client that forgot to release the old one: it is taken from it
  pass();
  EXPECT_EQ(host.executor.stats().objects, 1u);
  drop({handle(1, 6)});
}

TEST_F(Objects, SameHandleForTwoResults) {
  host.add_plan(0, plan_of({}, {call({}, {0}), call({}, {1})}, {0, 1}, 2));
  host.run(1, 0, {}, {A, A});
  pass();
  drop({A});
}

TEST_F(Reads, WantedResultsComeBeforeTheirCompletion) {
  host.add_plan(0, plan_of({0}, {call({0}, {1, 2})}, {1, 2, 1, 0}, 3));
  host.put(A, 7);
  const uint64_t E = handle(5);
  host.run(1, 0, {A}, {B, C, D, E}, 0, {0b1101});
  host.poll();
  EXPECT_TRUE(host.link.read.count(B) == 0 && host.link.completions(B) == 0);  // not ready
  pass();
  EXPECT_EQ(host.link.read.size(), 3u);
  EXPECT_NE(host.link.read[B], 0u);
  EXPECT_EQ(host.link.read[B], host.link.read[D]);  // one value, two results
  EXPECT_EQ(host.link.read[E], 7u);                 // passed through
  EXPECT_EQ(host.link.writers, 0);
  for (const uint64_t h : {B, C, D, E}) EXPECT_EQ(host.link.completions(h), 1u);
  drop({A, B, C, D, E});
}

TEST_F(Reads, WantedByNobodyAnyMore) {
  host.add_plan(0, plan_of({}, {call({}, {0, 1})}, {0, 1}, 2));
  host.run(1, 0, {}, {A, B}, 0, {3});
  host.run(2, 0, {}, {C, D}, 0, {3});
  host.release(A);              // while it is pending
  host.link.refused.insert(B);  // released, and the host has not heard of it
  host.executor.on_client_gone(0);
  pass();
  EXPECT_TRUE(host.link.read.empty());
  host.expect_empty();
}

TEST_F(Clients, PlansGoBehindTheLastRun) {
  const PlanBuilder gang = plan_of({}, {call({}, {0}, 1, true)}, {0}, 1);
  host.executor.add_client(1);
  host.add_plan(0, gang, false, 0);
  host.add_plan(1, gang, true, 0);
  host.add_plan(2, gang, true, 1);
  host.add_plan(3, gang);
  host.run(1, 0, {}, {A});
  host.executor.on_client_gone(0);
  EXPECT_EQ(host.backend.forgotten(), std::vector<uint32_t>{1});
  EXPECT_EQ(host.backend.gone(), std::vector<uint32_t>{0});
  host.executor.set_compiled(0);
  pass();
  EXPECT_EQ(host.link.runs[1], (std::pair{1u, 1u}));  // the other hosts of the gang launched theirs
  EXPECT_EQ(host.backend.forgotten(), (std::vector<uint32_t>{1, 0}));
  host.executor.on_client_gone(0);  // said again, it is nothing
  host.run(2, 2, {}, {B}, 1);
  host.run(3, 3, {}, {C}, 1);
  pass();
  EXPECT_EQ(host.link.completions(B, 1), 1u);
  EXPECT_EQ(host.link.completions(C, 1), 1u);
  host.executor.on_client_gone(1);
  EXPECT_EQ(host.backend.forgotten(), (std::vector<uint32_t>{1, 0, 2}));
  host.expect_empty();
}

TEST_F(Clients, WhatIsRegisteredTooLateIsForgotten) {
  const PlanBuilder builder = plan_of({}, {call({}, {0})}, {0}, 1);
  host.executor.on_client_gone(7);  // it never got as far as being attached here
  EXPECT_TRUE(host.executor.is_gone(7));
  EXPECT_FALSE(host.executor.is_gone(0));
  host.add_plan(0, builder, false, 7);
  EXPECT_EQ(host.backend.forgotten(), std::vector<uint32_t>{0});
  host.executor.set_compiled(0);  // what the compiler made of it meanwhile goes too
  EXPECT_EQ(host.backend.forgotten(), (std::vector<uint32_t>{0, 0}));
  host.add_plan(1, builder, false, 0);
  host.executor.on_client_gone(0);
  host.executor.set_compiled(1);
  EXPECT_EQ(host.backend.forgotten(), (std::vector<uint32_t>{0, 0, 1, 1}));
}

TEST_F(Clients, GoesWhileARunIsHeldBack) {
  // The fault that holds a run back may hold the last one of a client that goes, with its plan.
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1), true, 0);
  host.executor.set_faults({1});
  host.run(1, 0, {}, {A});
  host.executor.on_client_gone(0);
  pass();
  EXPECT_EQ(host.link.runs.size(), 1u);
  EXPECT_EQ(host.backend.forgotten(), std::vector<uint32_t>{0});
  host.expect_empty();
}

TEST_F(Reads, WantedOfAFailure) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1));
  ModelledFaults faults;
  faults.fail_value = 1;
  host.backend.set_faults(faults);
  host.run(1, 0, {}, {A}, 0, {1});
  pass();
  EXPECT_TRUE(host.link.read.empty());
  EXPECT_NE(host.link.failure(A), "");
  faults = {};
  faults.fail_read_back = true;  // fails what could not be read back, alone
  host.backend.set_faults(faults);
  host.run(2, 0, {}, {B}, 0, {1});
  host.run(3, 0, {}, {C});
  pass();
  EXPECT_EQ(host.link.failure(B), "a modelled read-back was refused");
  EXPECT_EQ(host.link.completions(B), 0u);
  EXPECT_EQ(host.link.completions(C), 1u);
  EXPECT_EQ(host.link.writers, 0);
  drop({A, B, C});
}

TEST_F(Reads, WantedOfSwappedRuns) {
  // The fault that holds a run back keeps the words behind its handles.
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1));
  host.executor.set_faults({1});
  host.run(1, 0, {}, {A}, 0, {1});
  host.run(2, 0, {}, {B}, 0, {1});
  pass();
  EXPECT_TRUE(host.link.read.count(A) == 1 && host.link.read.count(B) == 1);
  host.executor.set_faults({});
  for (const uint64_t h : {A, B}) host.release(h);
  pass();
}

TEST_F(Reads, OldValuesDoNotWaitForYoungOnes) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1));
  host.run(1, 0, {}, {A});
  for (uint32_t i = 0; i < 20; ++i) host.run(2 + i, 0, {}, {handle(10 + i)});
  clock.advance(100);  // the first is ready, twenty are not
  uint64_t out = 0;
  host.fetch(A, D, &out);
  host.poll();
  EXPECT_EQ(host.link.completions(D), 1u);
  EXPECT_NE(out, 0u);
  EXPECT_EQ(host.link.completions(handle(10)), 0u);
  pass();
  std::vector<uint64_t> all{A};
  for (uint32_t i = 0; i < 20; ++i) all.push_back(handle(10 + i));
  drop(all);
}

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

using Donations = Bench;

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

TEST_F(Clients, GoneWithWorkInFlight) {
  host.executor.add_client(1);
  host.add_plan(0, plan_of({0}, {call({0}, {1}, 1, true), call({1}, {2})}, {1, 2}, 3), false);
  host.put(A, 7, 1, 1);
  host.put(A, 8, 1, 0);
  uint64_t out = 0;
  host.run(1, 0, {A}, {B, C}, 1);
  host.run(2, 0, {A}, {B, C}, 0);
  host.fetch(B, D, &out, 1);
  pass();
  host.link.done.clear();
  host.executor.on_client_gone(1);
  host.executor.on_client_gone(1);
  host.executor.set_compiled(0);
  host.run(3, 0, {A}, {B, C}, 1);  // was granted before the client went
  pass();
  EXPECT_EQ(host.backend.gangs(), 3u);  // GANG-1: other hosts launch it, too
  EXPECT_EQ(host.link.completions(D, 1), 0u);
  EXPECT_EQ(out, 0u);
  EXPECT_EQ(host.link.completions(B, 0) + host.link.completions(C, 0), 2u);
  EXPECT_EQ(host.link.runs.size(), 3u);
  host.command(CommandKind::kBackend, 0, 0, {}, 1);
  EXPECT_EQ(host.backend.commands(), 0u);
  drop({A, B, C});
}

TEST_F(Clients, ClearWithWorkInFlight) {
  host.add_plan(0, plan_of({0}, {call({0}, {1}), call({1}, {2}, 2)}, {2}, 3));
  host.put(A, 7);
  uint64_t out = 0;
  host.run(1, 0, {A}, {B});
  host.fetch(B, D, &out);
  host.executor.clear();
  EXPECT_EQ(host.backend.live_values(), 0u);
  EXPECT_TRUE(host.executor.is_idle());
}

TEST_F(Unsound, RunsFailAlone) {
  host.executor.add_client(1, 16);
  host.add_plan(0, plan_of({0}, {call({0}, {1}, 1, true)}, {1}, 2));
  host.run(1, 9, {}, {A});
  host.run(2, 0, {}, {B});
  host.run(3, 0, {A}, {handle(16)}, 1);
  host.put(handle(16), 7, 1, 1);
  EXPECT_NE(host.link.failure(A).find("not known"), std::string::npos);
  EXPECT_NE(host.link.failure(B).find("takes 1 arguments"), std::string::npos);
  EXPECT_NE(host.link.failure(handle(16), 1).find("out of range"), std::string::npos);
  for (uint64_t tag = 1; tag <= 3; ++tag) EXPECT_EQ(host.link.runs[tag], (std::pair{0u, 1u}));
  EXPECT_THROW(host.executor.add_plan(0, Plan::parse(PlanBuilder(0, 2, 0).finish())), Error);
  EXPECT_THROW(host.executor.add_plan(1, Plan::parse(PlanBuilder(1, 2, 0).finish())), Error);
  EXPECT_THROW(host.executor.add_plan(1, Plan::parse(PlanBuilder(0, 3, 0).finish())), Error);
  drop({});
}

}  // namespace
}  // namespace pathways::test
