// TRUST-1: what a client can write is data to the controller and the hosts. Whatever it writes into its own block, and
// at whatever moment, it alone goes, with the reason; the others see nothing.
//
//   Blocks.*   a header's offsets and sizes are checked against what is mapped, once, and kept
//   Rings.*    a capacity or a length that is changed later moves nobody out of the ring
//   Records.*  what is checked is what is used
//   Names.*    whose a record is follows from the ring it came by, not from what it says
//   Board.*    what clients share is read-only
#include <atomic>
#include <csignal>
#include <thread>

#include "controller/played.h"
#include "support.h"

namespace pathways::test::test_trust {
namespace {

struct Trust : Cluster {
  Trust() {
    controller->add_client(1, bad_memory.block);
    pass();
  }
  ~Trust() override {
    bad.reset();
    controller.reset();  // before the memory that it works on
  }
  /// The bad client is gone for `why`; the good one computes.
  void expect_evicted(const char* why) {
    for (int i = 0; i < 4; ++i) pass();
    EXPECT_TRUE(is_up()) << block->failure();
    EXPECT_EQ(controller->stats().clients, 1u) << why;
    if (bad != nullptr) {
      bad->poll_inbox();
      EXPECT_NE(bad->cluster_failure().find(why), std::string::npos) << bad->cluster_failure();
    }
    const uint64_t result = submit();
    for (int round = 0; round < 10; ++round) {
      pass();
      for (auto& host : hosts) {
        for (auto bytes = host->next(); !bytes.empty(); bytes = host->next()) {
          RunRecord run{};
          std::memcpy(&run, bytes.data(), std::min(bytes.size(), sizeof run));
          if (run.header.kind != RecordKind::kRun) continue;
          host->done(run);
          if (run.header.client == 0) (void)good_memory.block->futures()->complete(Handle{result});
        }
      }
    }
    EXPECT_EQ(good->poll(Handle{result}), FutureState::kReady);
    EXPECT_EQ(good->cluster_status(), ClusterStatus::kUp);
  }

  RawClient bad_memory;
  std::unique_ptr<Client> bad = std::make_unique<Client>(Client::Options{1, 8}, bad_memory.block, block);
};
using Names = Trust;
using Rings = Trust;
using Records = Trust;
using Board = Trust;

TEST(Blocks, AHeaderMustFitWhatIsMapped) {
  const auto offsets = [](Segment& segment) { return reinterpret_cast<uint64_t*>(segment.data()) + 1; };
  for (int field = 0; field < 6; ++field) {  // to_controller, cancels, from_controller, table, read_back, arena
    for (const uint64_t wrong :
         {uint64_t{8}, uint64_t{1} << 40, UINT64_MAX, UINT64_MAX - 63, uint64_t{64 * 1000 + 8}}) {
      Segment segment = ClientBlock::make({256, 4096, 1u << 14}, true);
      EXPECT_NO_THROW(ClientView{segment});
      offsets(segment)[field] = wrong;
      EXPECT_THROW(ClientView{segment}, Error) << field << " " << wrong;
    }
  }
  for (int field = 0; field < 5; ++field) {  // from_controller, to_controller, from_peers, peer_stride, arena
    for (const uint64_t wrong : {uint64_t{8}, uint64_t{1} << 40, UINT64_MAX, UINT64_MAX - 63}) {
      Segment segment = HostBlock::make(0, 4, {4096, 4096, 1u << 14}, true);
      EXPECT_NO_THROW(HostView{segment});
      offsets(segment)[2 + field] = wrong;
      EXPECT_THROW(HostView{segment}, Error) << field << " " << wrong;
    }
  }
}

TEST(Blocks, RingsAreOfTheHostsOfOneMachine) {
  HostBlock::Sizes sizes{4096, 4096, 0};
  sizes.first_peer = 1000;
  Segment segment = HostBlock::make(1001, 3, sizes, false);
  HostBlock* block = HostBlock::attach(segment);
  const HostView view(segment);
  for (const uint32_t peer : {1000u, 1001u, 1002u}) {
    ASSERT_TRUE(view.has_ring_from(peer));
    EXPECT_EQ(view.from(peer).ring(), block->ring_from(peer));
  }
  for (const uint32_t peer : {0u, 999u, 1003u, UINT32_MAX}) {
    EXPECT_FALSE(view.has_ring_from(peer));
    EXPECT_THROW((void)view.from(peer), Error);
  }
  EXPECT_LT(segment.size(), 8u * 4096) << "no rings from hosts of other machines";
}

TEST(Blocks, PartsMustFitWhatIsMapped) {
  // Each part lies at the segment's end, and is longer than what is there.
  for (const size_t part : {0u, 1u, 2u, 3u, 4u}) {
    Segment segment = ClientBlock::make({256, 4096, 1u << 14}, true);
    Segment whole = ClientBlock::make({1u << 16, 1u << 16, 1u << 14}, true);
    auto* header = reinterpret_cast<uint64_t*>(segment.data()) + 1;
    const auto* theirs = reinterpret_cast<uint64_t*>(whole.data()) + 1;
    const uint64_t end = segment.size() - 4096;
    std::memcpy(segment.data() + end, whole.data() + theirs[part], 4096);
    header[part] = end;
    EXPECT_THROW(ClientView{segment}, Error) << part;
  }
}

TEST(Blocks, WhatIsKeptDoesNotMove) {
  Segment segment = ClientBlock::make({64, 4096, 1u << 14}, true);
  const ClientView view(segment);
  Handle handle;
  ASSERT_EQ(ClientBlock::attach(segment)->futures()->allocate(1, &handle), Status::kOk);
  auto* header = reinterpret_cast<uint64_t*>(segment.data()) + 1;
  for (int i = 0; i < 6; ++i) header[i] = UINT64_MAX - 1;
  EXPECT_EQ(view.futures().complete(handle), Completion::kReady);
  EXPECT_EQ(view.futures().capacity(), 64u);
}

TEST_F(Board, ClientsCannotWriteTheStatus) {
  Segment segment = StatusBlock::make(true);
  StatusBlock::attach(segment)->set_status(ClusterStatus::kFailed, "why");
  Child child([&] {
    Segment theirs = second_view(segment);
    if (StatusBlock::attach(theirs)->failure() != "why") return 1;
    std::signal(SIGSEGV, SIG_DFL);  // a sanitizer has a handler of its own
    reinterpret_cast<volatile uint64_t*>(theirs.data())[1] = 0;
    return 2;
  });
  EXPECT_EQ(child.wait(), -SIGSEGV);
}

TEST_F(Board, ABitOfAHostThatIsNotThere) {
  block->ready_bitmap.mark(60000);
  pass();
  EXPECT_TRUE(is_up());
  submit();
  pass();
  EXPECT_FALSE(hosts[0]->next().empty());
}

TEST_F(Rings, TheCapacityIsKept) {
  uint64_t result = 0;
  ASSERT_EQ(bad->submit({5, 1, {1}}, {}, &result), Status::kOk);
  for (ByteRing* ring : {bad_memory.block->ring_to_controller(), bad_memory.block->ring_from_controller()}) {
    reinterpret_cast<uint32_t*>(ring)[3] = 1u << 30;
  }
  bad_memory.block->table += 8;
  bad_memory.block->from_controller += 4096;
  pass();
  hosts[0]->done(hosts[0]->next_run());
  pass();
  EXPECT_TRUE(is_up());
  EXPECT_EQ(controller->stats().clients, 2u);  // it harmed nobody, and not even itself
  bad_memory.block->table -= 8;
  bad_memory.block->from_controller -= 4096;
}

TEST_F(Rings, ACorruptTailPutsTheSenderOut) {
  for (const uint64_t tail : {uint64_t{4}, uint64_t{1} << 40, UINT64_MAX}) {
    SCOPED_TRACE(tail);
    RawClient memory;
    const auto id = static_cast<uint32_t>(2 + controller->stats().passes);
    controller->add_client(id, memory.block);
    pass();
    reinterpret_cast<uint64_t*>(memory.block->ring_to_controller())[8] = tail;
    for (int i = 0; i < 4; ++i) pass();
    EXPECT_TRUE(is_up()) << block->failure();
    EXPECT_EQ(controller->stats().clients, 2u);
  }
}

TEST_F(Rings, ACorruptHeadPutsTheReaderOut) {
  // The controller is to tell the client of a failure, and more than the ring holds as far as it knows.
  reinterpret_cast<uint64_t*>(bad_memory.block->ring_from_controller())[16] = 1u << 20;
  std::vector<uint64_t> results(8);
  for (uint64_t& result : results) ASSERT_EQ(bad->submit({5, 1, {1}}, {}, &result), Status::kOk);
  pass();
  const std::string text(1500, 'x');
  for (uint64_t result : results) {
    for (int i = 0; i < 4; ++i) {
      hosts[0]->outbox.send(static_cast<uint32_t>(sizeof(FailedRecord)) + padded(uint32_t{1500}), [&](std::byte* out) {
        const FailedRecord record{{RecordKind::kFailed, 0, 1}, result, 1500, 0};
        std::memcpy(out, &record, sizeof record);
        std::memcpy(out + sizeof record, text.data(), text.size());
      });
      while (hosts[0]->outbox.flush()) pass();
    }
  }
  bad.reset();
  expect_evicted("head");
}

#if !defined(PATHWAYS_SANITIZED_thread)  // the race is what it makes
TEST_F(Records, WhatIsCheckedIsWhatIsUsed) {
  const Watchdog watchdog("a record that changes while it is read");
  // The client's run says one result, which fits, and at other moments 2^28 of them.
  std::atomic<volatile RunRecord*> at{nullptr};
  std::atomic<bool> over{false};
  std::thread flipper([&] {
    while (!over.load(std::memory_order_relaxed)) {
      volatile RunRecord* run = at.load(std::memory_order_acquire);
      if (run == nullptr) continue;
      run->results = 0x10000000;
      run->results = 1;
    }
  });
  bad.reset();
  bool is_in = true;
  auto ring = bad_memory.block->ring_to_controller()->claim_producer();
  for (int round = 0; round < 4000 * kStressScale && is_in; ++round) {
    auto room = ring.try_reserve(sizeof(RunRecord) + 8);
    if (!room.empty()) {
      const RunRecord run{{RecordKind::kRun, 0, 1}, 1, 0, 5, 1, 0, 1};
      std::memcpy(room.data(), &run, sizeof run);
      at.store(reinterpret_cast<RunRecord*>(room.data()), std::memory_order_release);
      ring.publish();
    }
    EXPECT_NO_THROW(pass());
    at.store(nullptr, std::memory_order_release);
    for (auto bytes = hosts[0]->next(); !bytes.empty(); bytes = hosts[0]->next()) {
      RunRecord run{};
      std::memcpy(&run, bytes.data(), std::min(bytes.size(), sizeof run));
      if (run.header.kind != RecordKind::kRun) continue;
      ASSERT_EQ(bytes.size(), sizeof run + words_behind(run) * sizeof(uint64_t));  // as it was checked
      hosts[0]->done(run);
    }
    while (!hosts[1]->next().empty()) {
    }
    is_in = controller->stats().clients == 2;
  }
  over = true;
  flipper.join();
  EXPECT_TRUE(is_up()) << block->failure();
}
#endif

TEST_F(Names, ARunOfAnothersPlan) {
  controller->register_plan(7, 0, 2);
  uint64_t result = 0;
  ASSERT_EQ(bad->submit({7, 2, {2}}, {}, &result), Status::kOk);
  expect_evicted("another client's");
}

TEST_F(Names, OneHandleForTwoResults) {  // the ledger could not tell their blocks apart
  bad.reset();
  {
    auto ring = bad_memory.block->ring_to_controller()->claim_producer();
    const RunRecord run{{RecordKind::kRun, 0, 1}, 1, 0, 5, 1, 0, 2};
    const uint64_t results[] = {Handle::make(3, 1).raw, Handle::make(3, 2).raw};
    auto room = ring.try_reserve(sizeof run + sizeof results);
    ASSERT_FALSE(room.empty());
    std::memcpy(room.data(), &run, sizeof run);
    std::memcpy(room.data() + sizeof run, results, sizeof results);
    ring.publish();
  }
  expect_evicted("one handle for two results");
}

TEST_F(Names, ARunToOtherHostsThanItsPlans) {
  controller->register_plan(7, 1, 2);
  uint64_t result = 0;
  ASSERT_EQ(bad->submit({7, 1, {1}}, {}, &result), Status::kOk);
  expect_evicted("names group 1, but the plan's hosts are group 2");
}

TEST_F(Names, ARunOfItsOwnPlan) {
  controller->register_plan(7, 1, 1);
  uint64_t result = 0;
  ASSERT_EQ(bad->submit({7, 1, {1}}, {}, &result), Status::kOk);
  pass();
  EXPECT_EQ(hosts[0]->next_run().plan, 7u);
  EXPECT_EQ(controller->stats().clients, 2u);
}

TEST_F(Names, AnothersPlanIsNotForgotten) {
  controller->register_plan(7, 0, 2);
  ASSERT_EQ(bad->command(CommandKind::kBackend, 0, Handle{}, Handle{7}, {}), Status::kOk);
  expect_evicted("another client's");
  EXPECT_TRUE(controller->take_forgotten().empty());
  ASSERT_EQ(good->command(CommandKind::kBackend, 2, Handle{}, Handle{7}, {}), Status::kOk);
  pass();
  EXPECT_EQ(controller->take_forgotten(), std::vector<uint32_t>{7});
}

TEST_F(Names, APlanThatSomeOfItsHostsWouldKeep) {  // the controller would forget it
  controller->register_plan(7, 1, 2);
  ASSERT_EQ(bad->command(CommandKind::kBackend, 1, Handle{}, Handle{7}, {}), Status::kOk);
  expect_evicted("names group 1, but the plan's hosts are group 2");
}

TEST_F(Names, ARecordInAnothersName) {  // the number in a record's header is nobody's
  bad.reset();
  bad = std::make_unique<Client>(Client::Options{0, 8}, bad_memory.block, block);
  uint64_t result = 0;
  ASSERT_EQ(bad->submit({5, 1, {1}}, {}, &result), Status::kOk);
  pass();
  EXPECT_EQ(hosts[0]->next_run().header.client, 1u);
}

TEST_F(Names, WhatOnlyTheControllerSays) {
  uint32_t id = 2;
  for (const auto kind :
       {CommandKind{0}, CommandKind::kOffload, CommandKind::kRestore, CommandKind::kFail, CommandKind{77}}) {
    RawClient memory;
    Client client({id, 8}, memory.block, block);
    controller->add_client(id++, memory.block);
    ASSERT_EQ(client.command(kind, 1, Handle{1}, Handle{}, {}), Status::kOk);
    for (int i = 0; i < 3; ++i) pass();
    client.poll_inbox();
    EXPECT_NE(client.cluster_failure().find("which clients do not send"), std::string::npos)
        << client.cluster_failure();
    EXPECT_EQ(controller->stats().clients, 2u);
  }
}

TEST(Plans, OneThatNobodyRegistered) {
  Segment controller_segment = ControllerBlock::make(false);
  ControllerBlock* block = ControllerBlock::attach(controller_segment);
  PlayedHost host(0, 1, block);
  Controller::Options options;
  options.knows_plans = true;
  RawClient memory;
  Client client({0, 8}, memory.block, block);
  Controller controller(options, block, {host.block});
  controller.add_client(0, memory.block);
  uint64_t results[2] = {};
  controller.register_plan(5, 0, 0);
  controller.set_plan_memory(5, {0, "five", {}, {}, {{}}, {}});
  ASSERT_EQ(client.submit({5, 0, {1}}, {}, &results[0]), Status::kOk);
  while (controller.step() != 0) {
  }
  EXPECT_EQ(host.next_run().plan, 5u);
  ASSERT_EQ(client.submit({6, 0, {1}}, {}, &results[1]), Status::kOk);
  while (controller.step() != 0) {
  }
  client.poll_inbox();
  EXPECT_NE(client.cluster_failure().find("plan 6, which is not registered"), std::string::npos);
}

// A client rings at a doorbell of its own, and another scribbles on its: nobody waits longer for that.
TEST_F(Board, ABellOfItsOwn) {
  const Watchdog watchdog("bells");
  Segment bells[2] = {BellBlock::make(true), BellBlock::make(true)};
  RawClient memory;
  Client client({2, 8}, memory.block, &block->status, &BellBlock::attach(bells[0])->doorbell);
  controller->add_client(2, memory.block, &BellBlock::attach(bells[0])->doorbell);
  RawClient scribbler;
  controller->add_client(3, scribbler.block, &BellBlock::attach(bells[1])->doorbell);
  controller->start();
  std::atomic<bool> over{false};
  std::thread noise([&] {
    uint32_t value = 12345;
    while (!over.load()) {
      BellBlock::attach(bells[1])->doorbell.word.store(value = value * 1664525 + 1013904223, std::memory_order_relaxed);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  });
  for (int i = 0; i < 20; ++i) {
    uint64_t result = 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the controller sleeps
    ASSERT_EQ(client.submit({5, 1, {1}}, {}, &result), Status::kOk);
    std::vector<std::byte> bytes;
    while ((bytes = hosts[0]->next()).empty()) std::this_thread::yield();
    RunRecord run{};
    std::memcpy(&run, bytes.data(), sizeof run);
    hosts[0]->done(run);
    while (client.in_flight() != 0) std::this_thread::yield();
  }
  over = true;
  noise.join();
  controller->stop();
  controller->remove_client(2);
  controller->remove_client(3);
  EXPECT_TRUE(is_up());
}

}  // namespace
}  // namespace pathways::test::test_trust
