// What a controller records of the order while a trace is on, between a client and hosts that the test plays itself.
//
//   TRACE-3  Ordered.*: one record per run that was ordered: granted, dropped, or not granted when the trace stops; and
//            one for what is kept out of the order
//   TRUST-1  Ordered.TimesOfAClientAreData
//
// Ordered.ARecordThatJustFits*: a trace refuses no run and evicts no client.
#include "dispatch/order_trace.h"

#include "controller/played.h"

namespace pathways::test::test_order_trace {
namespace {

struct Ordered : Cluster {
  Ordered() : Cluster(1) {}  // a host has room for one run
  std::vector<OrderTraceRecord> records() { return controller->take_trace().records; }
};

TEST_F(Ordered, OffRecordsNothing) {
  submit();
  pass();
  EXPECT_EQ(words_behind(hosts[0]->next_run()), 1u);  // its result, and no time
  EXPECT_TRUE(records().empty());
}

TEST_F(Ordered, SubmittedOrderedGranted) {
  controller->start_trace(16);
  const int64_t before = test_clock();
  submit();
  submit();
  let_pass(1ms);
  pass();
  auto first = records();
  ASSERT_EQ(first.size(), 1u);  // the other one waits for room
  EXPECT_EQ(first[0].order, 1u);
  EXPECT_EQ(first[0].client, 0u);
  EXPECT_EQ(first[0].plan, 5u);
  EXPECT_EQ(first[0].outcome, OrderOutcome::kGranted);
  EXPECT_LE(before, first[0].submitted_ns);
  EXPECT_LT(first[0].submitted_ns, first[0].ordered_ns);
  EXPECT_LE(first[0].ordered_ns, first[0].granted_ns);
  const RunRecord run = hosts[0]->next_run();
  EXPECT_EQ(run.header.detail & kRunHasSubmitted, 0);  // the hosts do not need the client's time
  EXPECT_EQ(words_behind(run), 1u);
  hosts[0]->done(run);
  hosts[1]->done(hosts[1]->next_run());
  let_pass(1ms);
  const int64_t done = test_clock();
  pass();
  const auto second = records();
  ASSERT_EQ(second.size(), 1u);
  EXPECT_LT(second[0].ordered_ns, done);
  EXPECT_GE(second[0].granted_ns, done);
  EXPECT_TRUE(is_up());
}

TEST_F(Ordered, DroppedAndNotGranted) {
  controller->start_trace(16);
  submit();
  submit();
  const uint64_t dropped = submit();
  pass();
  const uint64_t results[] = {dropped};
  EXPECT_EQ(good->cancel(3, results, "CancelledError: by a test"), Status::kOk);
  pass();
  hosts[0]->done(hosts[0]->next_run());
  hosts[1]->done(hosts[1]->next_run());
  pass();  // the second one is granted; the third one passes nothing
  hosts[0]->done(hosts[0]->next_run());
  hosts[1]->done(hosts[1]->next_run());
  pass();
  submit();
  submit();
  pass();
  controller->stop_trace();
  std::vector<OrderOutcome> outcomes;
  for (const OrderTraceRecord& each : records()) outcomes.push_back(each.outcome);
  const std::vector<OrderOutcome> expected{OrderOutcome::kGranted, OrderOutcome::kGranted, OrderOutcome::kDropped,
                                           OrderOutcome::kGranted, OrderOutcome::kNotGranted};
  EXPECT_EQ(outcomes, expected);
  const auto run = hosts[0]->next();
  submit();
  pass();
  EXPECT_TRUE(records().empty());
}

TEST_F(Ordered, TimesOfAClientAreData) {
  OrderTrace trace(test_clock);
  trace.start(16);
  std::vector<std::byte> bytes(sizeof(RunRecord) + sizeof(int64_t));
  for (const int64_t said : {INT64_MIN, int64_t{-1}, int64_t{7}, INT64_MAX}) {
    RunRecord run{};
    run.header = {RecordKind::kRun, kRunHasSubmitted, 0};
    std::memcpy(bytes.data(), &run, sizeof run);
    std::memcpy(bytes.data() + sizeof run, &said, sizeof said);
    Entry entry;
    entry.order = 3;
    for (const bool is_granted : {false, true}) {
      trace.waits(0, kWaitsForTurn);
      trace.ordered(0, 2, entry, bytes, is_granted);
      trace.left(2, OrderOutcome::kGranted);  // TRACE-3: nothing, when it was granted at once
      const auto taken = trace.take();
      ASSERT_EQ(taken.records.size(), 1u);
      const OrderTraceRecord& record = taken.records[0];
      EXPECT_EQ(record.waits, kWaitsForTurn);
      EXPECT_GE(record.submitted_ns, 0);
      EXPECT_LE(record.submitted_ns, record.ordered_ns);
      EXPECT_LE(record.submitted_ns, record.next_ns);
      EXPECT_LE(record.next_ns, record.ordered_ns);
      EXPECT_LE(record.ordered_ns, record.granted_ns);
      EXPECT_TRUE(!is_granted || record.ordered_ns == record.granted_ns);
    }
  }
}

TEST_F(Ordered, ARecordThatJustFitsAHost) {
  const size_t most = 250;  // rings of 4 KiB take records of 2,040 bytes
  controller->start_trace(16);
  const std::vector<uint64_t> arguments(most - 1, Handle::make(9, 1).raw);
  uint64_t result = 0;
  ASSERT_EQ(good->submit({5, 2, {2}}, arguments, &result), Status::kOk);
  pass();
  ASSERT_EQ(controller->stats().clients, 1u);  // it was not evicted
  const auto bytes = hosts[0]->next();
  ASSERT_EQ(bytes.size(), sizeof(RunRecord) + most * sizeof(uint64_t));
  const auto taken = records();
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_NE(taken[0].submitted_ns, 0);
}

TEST_F(Ordered, TheDeadlineStaysBehindARunWhoseTimeIsTakenOff) {
  controller->start_trace(16);
  const std::vector<uint64_t> arguments{Handle::make(9, 1).raw};
  const int64_t deadline_ns = test_clock() + 3'600'000'000'000;
  const ErrorText late = make_error_text("late");
  uint64_t result = 0;
  ASSERT_EQ(good->submit({5, 2, {2}}, arguments, &result, {}, deadline_ns, &late), Status::kOk);
  pass();
  const auto bytes = hosts[0]->next();
  ASSERT_EQ(bytes.size(), sizeof(RunRecord) + 3 * sizeof(uint64_t));
  uint64_t words[3] = {};
  std::memcpy(words, bytes.data() + sizeof(RunRecord), sizeof words);
  EXPECT_EQ(words[0], arguments[0]);
  EXPECT_EQ(words[1], result);
  EXPECT_EQ(static_cast<int64_t>(words[2]), deadline_ns);
  EXPECT_EQ(is_up(), true);
}

TEST_F(Ordered, ARecordThatJustFitsItsClient) {
  RawClient memory(4096);
  Client small({1, 8}, memory.block, block);
  controller->add_client(1, memory.block);
  controller->start_trace(16);
  uint64_t result = 0;
  for (const size_t words : {250u, 249u}) {
    const std::vector<uint64_t> arguments(words - 1, Handle::make(9, 1).raw);
    ASSERT_EQ(small.submit({5, 2, {2}}, arguments, &result), Status::kOk);
    pass();
    hosts[0]->done(hosts[0]->next_run());
    hosts[1]->done(hosts[1]->next_run());
    pass();
    const auto taken = records();
    ASSERT_EQ(taken.size(), 1u);
    EXPECT_EQ(taken[0].submitted_ns != 0, words != 250u);  // there was no room for the time
  }
  EXPECT_EQ(small.submit({5, 2, {2}}, std::vector<uint64_t>(250, 7), &result), Status::kInvalid);
  controller->remove_client(1);
}

TEST_F(Ordered, WhatIsKeptOut) {
  OrderTrace trace(test_clock);
  trace.start(16);
  trace.waits(3, kWaitsForMemory);
  trace.waits(3, kWaitsForTurn);
  trace.waits(4, kWaitsForCredits);
  trace.forget(4);  // its client is gone
  trace.stop();
  const auto taken = trace.take();
  ASSERT_EQ(taken.records.size(), 1u);
  EXPECT_EQ(taken.records[0].client, 3u);
  EXPECT_EQ(taken.records[0].order, 0u);
  EXPECT_EQ(taken.records[0].waits, kWaitsForMemory | kWaitsForTurn);
  EXPECT_EQ(taken.records[0].outcome, OrderOutcome::kNotOrdered);
}

}  // namespace
}  // namespace pathways::test::test_order_trace
