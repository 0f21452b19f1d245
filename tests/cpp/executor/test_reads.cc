// What a client reads of one host's executor: small results that it wants, and fetches.
//
//   READ-1  Reads.Wanted*
//   MEM-4   a test that ends with `expect_empty` or `drop` has dropped each reference exactly once
//   Reads.OldValuesDoNotWaitForYoungOnes: a fetch is answered as soon as its own value is ready.
#include "executor/bench_host.h"

namespace pathways::test::test_reads {
namespace {

using Reads = Bench;

const uint64_t A = handle(1), B = handle(2), C = handle(3), D = handle(4);

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
  drop({A, B, C});
}

TEST_F(Reads, WantedOfSwappedRuns) {
  // The fault that holds a run back keeps the words behind its handles.
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1));
  host.swap_runs();
  host.run(1, 0, {}, {A}, 0, {1});
  host.run(2, 0, {}, {B}, 0, {1});
  pass();
  EXPECT_TRUE(host.link.read.count(A) == 1 && host.link.read.count(B) == 1);
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

}  // namespace
}  // namespace pathways::test::test_reads
