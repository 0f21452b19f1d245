// Runs with a deadline, between a client and a host that the test plays itself.
//
//   DEAD-1  Deadlines.*: in time, too late to start with, dropped while it waits, failed after it was granted
//   GANG-1  Deadlines.AGrantedRunGoesOn, Deadlines.AWaitingRunKeepsItsPlace
//   MEM-2   HeldDeadlines.*: also one that waits for memory
//   (life)  RealDeadlines.TheLoopWakesByItself, Deadlines.MemoryFollowsWhatIsUnderWay
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "client/client.h"
#include "controller/controller.h"
#include "support.h"

namespace pathways::test::test_deadlines {
namespace {

constexpr int64_t kSoon = 20'000'000, kFar = 60'000'000'000;

struct Deadlines : ::testing::Test {
  explicit Deadlines(Controller::Options options = {2, {}}, Clock clock = test_clock) {
    options.clock = clock;
    controller = std::make_unique<Controller>(options, block, std::vector<HostView>{host});
    client = std::make_unique<Client>(Client::Options{.id = 0, .window = 1 << 12, .clock = clock}, client_block, block);
    controller->add_client(0, client_block);
  }
  void pass() {
    while (controller->step() != 0) {
    }
    client->poll_inbox();
  }
  void pass_until(int64_t moment) {
    let_pass(std::chrono::nanoseconds(moment - test_clock()));
    pass();
  }
  Handle submit(int64_t at_ns) {
    uint64_t result = 0;
    EXPECT_EQ(client->submit({5, 0, {1}, {0}}, {}, &result, {}, at_ns, &words), Status::kOk);
    return Handle{result};
  }
  /// The next run that the host was granted; tag 0: none.
  RunRecord next_run() {
    RunRecord record{};
    const auto bytes = inbox.try_front();
    if (bytes.empty()) return record;
    std::memcpy(&record, bytes.data(), sizeof record);
    inbox.pop();
    EXPECT_EQ(record.header.kind, RecordKind::kRun);
    ++record.tag;  // entries are numbered from 0
    return record;
  }
  void done(const RunRecord& run) {
    outbox.send(sizeof(RunDoneRecord), [&](std::byte* out) {
      const RunDoneRecord record{{RecordKind::kRunDone, 0, 0}, run.tag - 1, 0, 0, 0, 0};
      std::memcpy(out, &record, sizeof record);
    });
    outbox.flush();
  }

  Segment controller_segment = ControllerBlock::make(false), host_segment = HostBlock::make(0, 1, {4096, 0, 0}, false),
          client_segment = ClientBlock::make({1 << 13, 1 << 16, 0}, false);
  ControllerBlock* block = ControllerBlock::attach(controller_segment);
  HostBlock* host = HostBlock::attach(host_segment);
  ClientBlock* client_block = ClientBlock::attach(client_segment);
  ByteRing::Consumer inbox = host->ring_from_controller()->claim_consumer();
  Outbox outbox{host->ring_to_controller(), &block->doorbell, &block->ready_bitmap, 0};
  ErrorText words = make_error_text("DeadlineExceededError: 'f' took too long");
  std::unique_ptr<Client> client;
  std::unique_ptr<Controller> controller;
};

TEST_F(Deadlines, InTimeIsLikeAnyOther) {
  const Handle result = submit(test_clock() + kSoon);
  pass();
  done(next_run());
  (void)client->futures().complete(result);
  pass_until(test_clock() + kSoon);
  EXPECT_EQ(client->poll(result), FutureState::kReady);
  EXPECT_EQ(controller->stats().late, 0u);
  EXPECT_EQ(controller->next_deadline_ns(), INT64_MAX);
}

TEST_F(Deadlines, AGrantedRunGoesOn) {
  const int64_t at = test_clock() + kSoon;
  const Handle late = submit(at), other = submit(0);
  pass();
  EXPECT_EQ(controller->next_deadline_ns(), at);
  const RunRecord first = next_run(), second = next_run();
  pass_until(at);
  EXPECT_EQ(client->poll(late), FutureState::kFailed);
  EXPECT_EQ(client->error_of(late), *words);
  EXPECT_EQ(client->poll(other), FutureState::kPending);
  EXPECT_EQ(client->in_flight(), 2u);
  done(first);
  (void)client->futures().complete(late);  // the host knows nothing of it
  done(second);
  pass();
  EXPECT_EQ(client->poll(late), FutureState::kFailed);
  EXPECT_EQ(client->in_flight(), 0u);
  EXPECT_EQ(controller->stats().dropped, 0u);
  EXPECT_EQ(controller->stats().late, 1u);
  EXPECT_TRUE(controller->is_idle());
}

TEST_F(Deadlines, WhatWasLateIsNotInTimeForAClientThatDidNotLook) {
  const int64_t at = test_clock() + kSoon;
  const Handle late = submit(at);
  while (controller->step() != 0) {
  }
  const RunRecord run = next_run();
  let_pass(std::chrono::nanoseconds(kSoon));
  while (controller->step() != 0) {
  }
  EXPECT_EQ(client->futures().complete(late), Completion::kStale);
  EXPECT_EQ(client->poll(late), FutureState::kFailed);
  done(run);
  pass();
  EXPECT_EQ(client->error_of(late), *words);
  EXPECT_EQ(client->in_flight(), 0u);
}

TEST_F(Deadlines, AWaitingRunKeepsItsPlace) {
  submit(0), submit(0);  // the window's two
  const int64_t at = test_clock() + kSoon;
  const Handle late = submit(at), after = submit(0);
  pass();
  pass_until(at);
  EXPECT_EQ(client->poll(late), FutureState::kFailed);
  EXPECT_EQ(client->poll(after), FutureState::kPending);
  const RunRecord first = next_run();
  EXPECT_EQ(next_run().order, 2u);
  EXPECT_EQ(next_run().tag, 0u);
  done(first);
  pass();
  EXPECT_EQ(next_run().order, 4u);  // the third of the order was dropped
  EXPECT_EQ(controller->stats().dropped, 1u);
  EXPECT_EQ(client->in_flight(), 2u);
}

/// What sleeps until a deadline does so by the machine's clock.
struct RealDeadlines : Deadlines {
  RealDeadlines() : Deadlines({2, {}}, monotonic_ns) {}
};

TEST_F(RealDeadlines, AtTheClientThoughTheControllerHasNotReadIt) {
  const int64_t at = monotonic_ns() + kSoon;
  const Handle late = submit(at), other = submit(0), far = submit(at + kFar);
  while (client->poll(late) == FutureState::kPending) {  // nobody steps, and nobody rings
    (void)client->wait(late, std::chrono::seconds(100), SpinPolicy::sleep_at_once());
    client->poll_inbox();
  }
  EXPECT_GE(monotonic_ns(), at);
  EXPECT_EQ(client->poll(late), FutureState::kFailed);
  EXPECT_EQ(client->error_of(late), *words);
  for (const Handle handle : {other, far}) EXPECT_EQ(client->poll(handle), FutureState::kPending);
  pass();
  EXPECT_EQ(client->in_flight(), 2u);
  EXPECT_EQ(controller->stats().late, 1u);
}

TEST_F(Deadlines, TooLateToStartWith) {
  const Handle late = submit(test_clock() - 1);
  pass();
  EXPECT_EQ(client->poll(late), FutureState::kFailed);
  EXPECT_EQ(client->error_of(late), *words);
  EXPECT_EQ(next_run().tag, 0u);
  EXPECT_EQ(client->in_flight(), 0u);
}

TEST_F(Deadlines, TheEarliestComesFirst) {
  const int64_t now = test_clock();
  const Handle far = submit(now + kFar), soon = submit(now + kSoon), sooner = submit(now + kSoon / 2);
  pass();
  EXPECT_EQ(controller->next_deadline_ns(), now + kSoon / 2);
  pass_until(now + kSoon);
  EXPECT_EQ(client->poll(sooner), FutureState::kFailed);
  EXPECT_EQ(client->poll(soon), FutureState::kFailed);
  EXPECT_EQ(client->poll(far), FutureState::kPending);
  EXPECT_EQ(controller->next_deadline_ns(), now + kFar);
}

TEST_F(RealDeadlines, TheLoopWakesByItself) {
  controller->start();
  const int64_t began = monotonic_ns();
  const Handle late = submit(began + kSoon);
  while (client->poll(late) == FutureState::kPending) {
    (void)client->wait(late, std::chrono::seconds(10), SpinPolicy::sleep_at_once());
    client->poll_inbox();
  }
  EXPECT_EQ(client->poll(late), FutureState::kFailed);
  EXPECT_GE(monotonic_ns(), began + kSoon);
  controller->stop();
}

/// One place of 100 bytes.
struct HeldDeadlines : Deadlines {
  HeldDeadlines() : Deadlines({256, {100}, {"device 0"}}) {}
};

TEST_F(HeldDeadlines, ARunThatWaitsForMemoryIsDropped) {
  PlanMemory memory;
  memory.name = "f";
  memory.needs = {{0, 0, 100}};  // taken at any time: two never go together
  memory.results = {PlanMemory::Result{}};
  controller->set_plan_memory(5, memory);
  const int64_t at = test_clock() + kSoon;
  submit(0);
  const Handle held = submit(at), after = submit(test_clock() + kFar);
  pass();
  const RunRecord first = next_run();
  EXPECT_EQ(next_run().tag, 0u);
  pass_until(at);
  EXPECT_EQ(client->poll(held), FutureState::kFailed);
  EXPECT_EQ(client->error_of(held), *words);
  EXPECT_EQ(client->poll(after), FutureState::kPending);
  EXPECT_EQ(client->in_flight(), 2u);
  done(first);
  pass();
  const auto command = inbox.try_front();  // dependents on the hosts hear it too
  ASSERT_FALSE(command.empty());
  RecordHeader header;
  std::memcpy(&header, command.data(), sizeof header);
  EXPECT_EQ(header.kind, RecordKind::kCommand);
  EXPECT_EQ(header.detail, static_cast<uint16_t>(CommandKind::kFail));
  inbox.pop();
  done(next_run());
  pass();
  EXPECT_EQ(client->in_flight(), 0u);
  EXPECT_EQ(controller->stats().late, 1u);
}

TEST_F(Deadlines, MemoryFollowsWhatIsUnderWay) {
  pathways::DeadlineHeap heap;
  uint64_t over = 0;
  for (uint64_t i = 1; i <= 100'000; ++i) {
    over = i - std::min<uint64_t>(i, 10);  // ten are under way
    pathways::DeadlineHeap::Item item;
    item.at_ns = kFar + static_cast<int64_t>(i);
    item.order = i;
    heap.add(std::move(item), [&](const auto& item) { return item.order <= over; });
    ASSERT_LE(heap.size(), 128u);
  }
  EXPECT_EQ(heap.next_ns() > kFar, true);
}

}  // namespace
}  // namespace pathways::test::test_deadlines
