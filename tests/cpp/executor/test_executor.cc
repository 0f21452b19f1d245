// One host's executor on a modelled device with a clock that the test advances: what it makes of runs, of their
// arguments and plans, of errors and of handles. When it tells what is ready: test_readiness.cc. What a client reads:
// test_reads.cc. What a client leaves behind: test_clients_gone.cc.
//
//   ASY-1, ASY-2  Chain.*: everything is launched before anything is ready; Arguments.Pending, Plans.CompiledLater
//   ORD-1         Chain.DevicesAreFifos
//   GANG-1        Errors.GangRunsOnPlaceholders, Plans.CompileErrorLaunchesNothing
//   MEM-4         every test ends with `expect_empty`: each reference was dropped exactly once
//   ERR-1         Errors.*
//   FUT-3         Objects.IndexReusedBeforeDefined, Objects.StaleHandles
#include "executor/bench_host.h"

namespace pathways::test::test_executor {
namespace {

using Chain = Bench;
using Arguments = Bench;
using Plans = Bench;
using Errors = Bench;
using Objects = Bench;
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

TEST_F(Unsound, RunsFailAlone) {
  host.executor.add_client(1, 16);
  host.add_plan(0, plan_of({0}, {call({0}, {1}, 1, true)}, {1}, 2));
  host.run(1, 9, {}, {A});
  host.run(2, 0, {}, {B});
  host.run(3, 0, {A}, {handle(16)}, 1);
  host.run(4, 0, {A}, {uint64_t{0}}, 1);  // no future has this handle
  host.put(handle(16), 7, 1, 1);
  EXPECT_NE(host.link.failure(A).find("not known"), std::string::npos);
  EXPECT_NE(host.link.failure(B).find("takes 1 arguments"), std::string::npos);
  EXPECT_NE(host.link.failure(handle(16), 1).find("out of range"), std::string::npos);
  for (uint64_t tag = 1; tag <= 4; ++tag) EXPECT_EQ(host.link.runs[tag], (std::pair{0u, 1u}));
  EXPECT_THROW(host.executor.add_plan(0, Plan::parse(PlanBuilder(0, 2, 0).finish())), Error);
  EXPECT_THROW(host.executor.add_plan(1, Plan::parse(PlanBuilder(1, 2, 0).finish())), Error);
  EXPECT_THROW(host.executor.add_plan(1, Plan::parse(PlanBuilder(0, 3, 0).finish())), Error);
  drop({});
}

}  // namespace
}  // namespace pathways::test::test_executor
