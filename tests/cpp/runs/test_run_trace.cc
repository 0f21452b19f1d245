// What an executor records of its runs while a trace is on: on modelled devices, whose clock the test advances.
//
//   TRACE-2  Traced.*, TracedPair.*: a record per run, per call, per transfer within the host, per part of a transfer
//            between hosts; also of what failed, and of what is not over when the trace stops
//   (off)    Traced.OffRecordsNothing, Traced.RunsFromBefore
#include "runs/run_trace.h"

#include "executor/bench_pair.h"

namespace pathways::test::test_run_trace {
namespace {

const uint64_t A = handle(1), B = handle(2), C = handle(3), D = handle(4);

std::vector<RunTraceRecord> of_kind(const std::vector<RunTraceRecord>& records, TraceKind kind) {
  std::vector<RunTraceRecord> found;
  std::copy_if(records.begin(), records.end(), std::back_inserter(found),
               [&](const auto& r) { return r.kind == kind; });
  return found;
}

struct Traced : Bench {
  void chain() { host.add_plan(0, plan_of({0}, {call({0}, {1}), call({1}, {2}), call({2}, {3})}, {3}, 4)); }
  std::vector<RunTraceRecord> records() { return host.executor.take_trace().records; }
};

TEST_F(Traced, OffRecordsNothing) {
  chain();
  host.put(A, 7);
  host.run(1, 0, {A}, {B});
  pass();
  EXPECT_TRUE(records().empty());
  drop({A, B});
}

TEST_F(Traced, EachCallOfARun) {
  chain();
  host.executor.start_trace(64);
  host.put(A, 7);
  host.run(11, 0, {A}, {B});
  pass(300);
  EXPECT_EQ(host.link.completions(B), 1u);
  const auto all = records();
  const auto calls = of_kind(all, TraceKind::kCall);
  ASSERT_EQ(calls.size(), 3u);  // also the two whose outputs are no results
  ASSERT_EQ(of_kind(all, TraceKind::kRun).size(), 1u);
  EXPECT_EQ(all.size(), 4u);
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(calls[i].node, i + 1);
    EXPECT_EQ(calls[i].order, 11u);
    EXPECT_EQ(calls[i].devices, 1u);
    EXPECT_EQ(calls[i].has_failed, 0);
    EXPECT_LE(calls[i].dispatched_ns, calls[i].ready_ns);
    EXPECT_LE(calls[i].ready_ns, calls[i].launched_ns);
    EXPECT_LE(calls[i].launched_ns, calls[i].ended_ns);
  }
  EXPECT_GE(all.back().ended_ns, calls[2].ended_ns);
  drop({A, B});
}

TEST_F(Traced, TheSameIsDoneAsUntraced) {
  chain();
  uint64_t out[2] = {};
  for (const bool is_on : {false, true}) {
    if (is_on) host.executor.start_trace(64);
    host.put(A, 7);
    host.run(is_on ? 3 : 1, 0, {A}, {B});
    host.fetch(B, C, &out[is_on]);
    pass(301);
    pass();
    drop({A, B, C});
  }
  EXPECT_NE(out[0], 0u);
  EXPECT_EQ(out[0], out[1]);
}

TEST_F(Traced, RunsFromBefore) {
  chain();
  host.put(A, 7);
  host.run(1, 0, {A}, {B});
  host.executor.start_trace(64);
  pass();
  EXPECT_TRUE(records().empty());
  drop({A, B});
}

TEST_F(Traced, WhatItWaitedFor) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1), false);
  host.add_plan(1, plan_of({0}, {call({0}, {1}, 2)}, {1}, 2));
  host.add_plan(2, plan_of({}, {call({}, {0})}, {0}, 1));
  host.executor.start_trace(64);
  host.run(1, 0, {}, {A});   // waits to be compiled
  host.run(2, 1, {A}, {B});  // for the value of the first
  host.run(3, 2, {}, {C});   // behind the first, on its device
  host.executor.set_compiled(0);
  pass();
  const auto calls = of_kind(records(), TraceKind::kCall);
  ASSERT_EQ(calls.size(), 3u);
  for (const RunTraceRecord& each : calls) {
    const auto expected = each.order == 1   ? WaitedFor::kCompilation
                          : each.order == 2 ? WaitedFor::kInput
                                            : WaitedFor::kEarlierCall;
    EXPECT_EQ(each.waited_for, expected) << each.order;
  }
  drop({A, B, C});
}

TEST_F(Traced, WhatIsNotOver) {
  chain();
  host.executor.start_trace(64);
  host.put(A, 7);
  host.run(1, 0, {A}, {B});
  host.executor.stop_trace();
  const auto all = records();
  EXPECT_EQ(of_kind(all, TraceKind::kCall).size(), 3u);
  EXPECT_EQ(of_kind(all, TraceKind::kRun).size(), 1u);
  for (const RunTraceRecord& each : all) EXPECT_EQ(each.ended_ns, 0);
  pass();
  EXPECT_TRUE(records().empty());  // once
  drop({A, B});
}

TEST_F(Traced, WhatFailed) {
  host.add_plan(0, plan_of({0}, {call({0}, {1}), call({1}, {2})}, {2}, 3));
  host.executor.start_trace(64);
  host.run(1, 0, {A}, {B});  // A is no buffer
  pass();
  const auto calls = of_kind(records(), TraceKind::kCall);
  ASSERT_EQ(calls.size(), 2u);
  for (const RunTraceRecord& each : calls) {
    EXPECT_EQ(each.has_failed, 1);
    EXPECT_EQ(each.launched_ns, 0);
  }
  drop({B});
}

TEST_F(Traced, ATransferWithinTheHost) {
  host.add_plan(0, plan_of({0}, {call({0}, {1}), transfer(5, {1}, {2}, {0}, {0})}, {2}, 3));
  host.executor.start_trace(64);
  host.put(A, 7);
  host.run(1, 0, {A}, {B});
  pass();
  pass();
  const auto all = records();
  const auto moves = of_kind(all, TraceKind::kMove);
  ASSERT_EQ(moves.size(), 1u);
  EXPECT_EQ(moves[0].node, 2u);
  EXPECT_LE(moves[0].launched_ns, moves[0].ended_ns);
  EXPECT_EQ(all.size(), 3u);
  drop({A, B});
}

TEST_F(Traced, TheOldestAreDroppedAndCounted) {
  chain();
  host.executor.start_trace(3);
  host.put(A, 7);
  host.run(1, 0, {A}, {B});
  pass();
  const auto taken = host.executor.take_trace();
  EXPECT_EQ(taken.records.size(), 3u);
  EXPECT_EQ(taken.dropped, 1u);
  EXPECT_EQ(taken.records.back().kind, TraceKind::kRun);
  drop({A, B});
}

struct Throttled : ::testing::Test {
  ModelClock clock{ModelClock::Kind::kVirtual};
  BenchHost host{clock, 0, 2, 100, 1};  // one launch in flight per device
};

TEST_F(Throttled, ByLaunchesInFlight) {
  host.add_plan(0, plan_of({}, {call({}, {0}), call({}, {1})}, {0, 1}, 2));
  host.executor.start_trace(64);
  host.run(1, 0, {}, {A, B});
  for (int i = 0; i < 4; ++i) {
    clock.advance(100);
    host.poll();
  }
  const auto calls = of_kind(host.executor.take_trace().records, TraceKind::kCall);
  ASSERT_EQ(calls.size(), 2u);
  EXPECT_EQ(calls[0].throttled_by, 0);
  EXPECT_EQ(calls[1].throttled_by, kThrottledByBound);
  EXPECT_LT(calls[1].ready_ns, calls[1].launched_ns);
  host.release(A);
  host.release(B);
  clock.advance(1000);
  host.poll();
  host.expect_empty();
}

struct TracedPair : BenchPair {};

TEST_F(TracedPair, BothEndsOfATransfer) {
  zero.add_plan(0, plan_of({0}, {call({0}, {1}), transfer(5, {1}, {}, {}, {1})}, {1, kNoValue}, 2, 0));
  one.add_plan(0, plan_of({kNoValue}, {transfer(5, {}, {0}, {0}, {}), call({0}, {1})}, {kNoValue, 1}, 2, 1));
  for (BenchHost* host : {&zero, &one}) host->executor.start_trace(64);
  zero.put(A, 7);
  for (BenchHost* host : {&zero, &one}) host->run(1, 0, {A}, {B, C});
  settle();
  const auto sent = of_kind(zero.executor.take_trace().records, TraceKind::kSend);
  const auto received = of_kind(one.executor.take_trace().records, TraceKind::kReceive);
  ASSERT_EQ(sent.size(), 1u);
  ASSERT_EQ(received.size(), 1u);
  EXPECT_EQ(sent[0].peer, 1u);
  EXPECT_EQ(received[0].peer, 0u);
  EXPECT_LE(sent[0].ready_ns, sent[0].launched_ns);
  EXPECT_LE(sent[0].launched_ns, sent[0].ended_ns);
  EXPECT_LE(received[0].ready_ns, received[0].ended_ns);
  for (const uint64_t h : {A, B, C}) {
    zero.release(h);
    one.release(h);
  }
  settle();
  zero.expect_empty();
  one.expect_empty();
}

}  // namespace
}  // namespace pathways::test::test_run_trace
