// Sequential dispatch on one host's executor and on two: a node is prepared at its go, and a call reported when
// enqueued.
//
//   ORD-1   Stepwise.GoesGiveTheOrder: places in the FIFOs are taken as goes come
//   GANG-1  Stepwise.FailedInput: a gang is launched and reported whatever failed its input
//   MEM-4   every test ends with nothing left
#include "executor/bench_pair.h"

namespace pathways::test::test_stepwise {
namespace {

const uint64_t A = handle(1), B = handle(2), C = handle(3), D = handle(4);

PlanBuilder::Node numbered(uint32_t number, PlanBuilder::Node node) {
  node.global_node = number;
  return node;
}

struct Stepwise : Bench {
  void run(uint64_t order, uint32_t plan, const std::vector<uint64_t>& arguments,
           const std::vector<uint64_t>& results) {
    host.run(order, plan, arguments, results, 0, {}, kRunStepwise);
  }
  size_t reported() const { return host.link.enqueued_calls.size(); }
};

TEST_F(Stepwise, NothingBeforeItsGo) {
  host.add_plan(0, plan_of({0}, {numbered(0, call({0}, {1})), numbered(2, call({1}, {2}))}, {2}, 3));
  host.put(A, 7);
  run(1, 0, {A}, {B});
  host.poll();
  EXPECT_EQ(host.backend.launches(), 0u);
  host.executor.on_go(1, 0);
  EXPECT_EQ(host.backend.launches(), 1u);
  ASSERT_EQ(reported(), 1u);  // enqueued, though it is not done
  EXPECT_EQ(host.link.enqueued_calls[0], (std::pair<uint64_t, uint32_t>{1, 0}));
  host.executor.on_go(1, 1);  // of a node that other hosts have
  EXPECT_EQ(host.backend.launches(), 1u);
  host.executor.on_go(1, 2);
  EXPECT_EQ(host.backend.launches(), 2u);
  EXPECT_EQ(host.link.enqueued_calls[1].second, 2u);
  host.executor.on_go(1, 3);  // the run needs none any more
  host.executor.on_go(9, 0);  // nobody's
  clock.advance(1000000);
  host.poll();
  EXPECT_EQ(host.link.completions(B), 1u);
  EXPECT_EQ(host.link.runs.size(), 1u);
  drop({A, B});
}

TEST_F(Stepwise, GoesGiveTheOrder) {
  host.add_plan(0, plan_of({}, {numbered(0, call({}, {0}, 1)), numbered(1, call({0}, {1}, 3))}, {1}, 2));
  host.add_plan(1, plan_of({}, {numbered(0, call({}, {0}, 3))}, {0}, 1), false);
  run(1, 0, {}, {A});
  host.executor.on_go(1, 0);
  host.executor.on_go(1, 1);
  run(2, 1, {}, {B});
  host.executor.on_go(2, 0);
  run(3, 0, {}, {C});
  host.executor.on_go(3, 0);
  EXPECT_EQ(host.backend.launches(), 2u);  // the third run stands behind the second, which is not compiled
  EXPECT_EQ(reported(), 2u);
  host.executor.set_compiled(1);
  EXPECT_EQ(host.backend.launches(), 4u);
  host.executor.on_go(3, 1);
  EXPECT_EQ(reported(), 5u);
  EXPECT_EQ(host.backend.order_violations(), 0u);
  drop({A, B, C});
}

TEST_F(Stepwise, CompiledAfterSomeGoes) {
  host.add_plan(0, plan_of({0}, {numbered(0, call({0}, {1})), numbered(1, call({1}, {2}))}, {2}, 3), false);
  host.put(A, 7);
  run(1, 0, {A}, {B});
  host.executor.on_go(1, 0);
  host.executor.set_compiled(0);
  EXPECT_EQ(host.backend.launches(), 1u);
  host.executor.on_go(1, 1);
  EXPECT_EQ(host.backend.launches(), 2u);
  drop({A, B});
}

TEST_F(Stepwise, FailedPlanIsReportedToo) {
  host.add_plan(0, plan_of({}, {numbered(0, call({}, {0})), numbered(1, call({0}, {1}))}, {1}, 2), false);
  host.executor.set_compiled(0, "no such thing");
  run(1, 0, {}, {A});
  host.executor.on_go(1, 0);
  host.executor.on_go(1, 1);
  EXPECT_EQ(host.backend.launches(), 0u);
  EXPECT_EQ(reported(), 2u);
  EXPECT_EQ(host.link.failure(A), "no such thing");
  drop({A});
}

TEST_F(Stepwise, FailedInput) {
  host.add_plan(0, plan_of({0}, {numbered(0, call({0}, {1}, 1, true))}, {1}, 2));
  run(1, 0, {D}, {B});
  EXPECT_EQ(host.backend.launches(), 0u);
  host.executor.on_go(1, 0);
  EXPECT_EQ(host.backend.launches(), 1u);
  EXPECT_EQ(reported(), 1u);
  EXPECT_FALSE(host.link.failure(B).empty());
  EXPECT_EQ(host.link.runs.at(1), (std::pair<uint32_t, uint32_t>{1, 1}));
  drop({B});
}

TEST_F(Stepwise, RunWithoutNodesEndsByItself) {
  host.add_plan(0, plan_of({0}, {}, {0}, 1));
  host.put(A, 7);
  run(1, 0, {A}, {B});
  host.executor.on_go(1, 5);
  clock.advance(1000000);
  host.poll();
  EXPECT_EQ(host.link.completions(B), 1u);
  drop({A, B});
}

TEST_F(Stepwise, UnsoundRunIsOver) {
  run(1, 7, {}, {A});
  host.executor.on_go(1, 0);
  EXPECT_EQ(host.link.runs.at(1), (std::pair<uint32_t, uint32_t>{0, 1}));
  EXPECT_EQ(reported(), 0u);
}

/// Host 0 calls, the value goes to host 1, which calls. Nodes: call 0, transfer 1, call 2.
struct StepwisePair : BenchPair {
  StepwisePair() {
    zero.add_plan(0, plan_of({0}, {numbered(0, call({0}, {1})), transfer(1, {1}, {}, {}, {1})}, {kNoValue}, 2, 0));
    one.add_plan(0, plan_of({kNoValue}, {transfer(1, {}, {0}, {0}, {}), numbered(2, call({0}, {1}))}, {1}, 2, 1));
    zero.put(A, 7);
    for (BenchHost* host : {&zero, &one}) host->run(1, 0, {A}, {B}, 0, {}, kRunStepwise);
  }
  void finish() {
    settle();
    EXPECT_EQ(one.link.completions(B), 1u);
    for (BenchHost* host : {&zero, &one}) {
      host->release(A);
      host->release(B);
      host->poll();
      host->expect_empty();
    }
  }
};

TEST_F(StepwisePair, ReceivesArePostedAtTheirGo) {
  settle();
  EXPECT_EQ(one.backend.open_receives(), 0u);
  zero.executor.on_go(1, 0);
  settle();
  EXPECT_EQ(zero.link.enqueued_calls.size(), 1u);
  EXPECT_EQ(one.backend.open_receives(), 0u);
  one.executor.on_go(1, 2);  // the source's go is late
  EXPECT_EQ(one.backend.open_receives(), 1u);
  settle();
  EXPECT_EQ(one.backend.launches(), 0u);
  zero.executor.on_go(1, 2);
  settle();
  EXPECT_EQ(one.backend.launches(), 1u);
  EXPECT_EQ(one.link.enqueued_calls.size(), 1u);
  finish();
}

TEST_F(StepwisePair, SourceFirst) {
  zero.executor.on_go(1, 0);
  zero.executor.on_go(1, 2);
  settle();
  EXPECT_EQ(one.backend.launches(), 0u);
  one.executor.on_go(1, 2);
  finish();
}

}  // namespace
}  // namespace pathways::test::test_stepwise
