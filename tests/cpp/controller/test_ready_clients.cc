// Which clients a pass looks at, with a controller that the test steps, or that runs.
//
//   COST-4   Ready.AnIdleClientCostsNoLook, Ready.WhoHasNothingLeftIsLookedAtNoMore: work is counted, not time
//   READY-2  Ready.WhoWasIdleIsFound, Ready.WhatWaitedBehindASuspensionIsRead, Ready.ACancelIsRead,
//            Ready.RingsAtAnyMoment
#include "ledger/ready_clients.h"

#include <array>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "controller/played.h"
#include "support.h"

namespace pathways::test::test_ready_clients {
namespace {

/// A client with a bell of its own.
struct Guest {
  Guest(Controller& controller, ControllerBlock* block, uint32_t number)
      : memory(1u << 12), bell(BellBlock::make(false)) {
    DoorbellWord* word = &BellBlock::attach(bell)->doorbell;
    client = std::make_unique<Client>(Client::Options{number, 8}, memory.block, &block->status, word);
    controller.add_client(number, memory.block, word);
  }
  RawClient memory;
  Segment bell;
  std::unique_ptr<Client> client;
};

struct Ready : Cluster {
  Ready() : Cluster(64, 2, {}, PolicyKind::kFifo, false, std::chrono::hours(1), false, monotonic_ns) {}
  ~Ready() override { controller.reset(); }  // before the clients' memory

  void invite(uint32_t count) {
    for (uint32_t i = 1; i <= count; ++i) guests.push_back(std::make_unique<Guest>(*controller, block, i));
    pass();
  }
  Client& guest(uint32_t number) { return *guests[number - 1]->client; }
  uint64_t looks() { return controller->stats().looks; }
  /// Ends all that the host was granted. Returns the clients whose runs these were.
  std::vector<uint32_t> serve() {
    std::vector<uint32_t> found;
    for (auto bytes = hosts[0]->next(); !bytes.empty(); bytes = hosts[0]->next()) {
      const auto header = read_record<RecordHeader>(bytes);
      if (header.kind == RecordKind::kCommand) {
        hosts[0]->say(CommandsDoneRecord{{RecordKind::kCommandsDone, 0, header.client}, 1, bytes.size()});
      }
      if (header.kind != RecordKind::kRun) continue;
      found.push_back(header.client);
      hosts[0]->done(read_record<RunRecord>(bytes));
    }
    hosts[0]->inbox.release();
    return found;
  }

  std::vector<std::unique_ptr<Guest>> guests;
};

TEST_F(Ready, AnIdleClientCostsNoLook) {
  invite(150);
  const uint64_t before = looks();
  constexpr uint32_t kRuns = 200;
  for (uint32_t i = 0; i < kRuns; ++i) {
    ASSERT_EQ(guest(7).submit({5, 1, {}}, {}, nullptr), Status::kOk);
    controller->step();
    serve();
    controller->step();
  }
  // Two passes each, in which `good`, which shares the controller's bell, is looked at twice at most.
  EXPECT_LE(looks() - before, uint64_t{kRuns} * 2 * 4);
}

TEST_F(Ready, WhoHasNothingLeftIsLookedAtNoMore) {
  controller->remove_client(0);
  good.reset();
  invite(60);
  for (uint32_t number = 1; number <= 60; ++number) {
    ASSERT_EQ(guest(number).submit({5, 1, {}}, {}, nullptr), Status::kOk);
  }
  pass();
  EXPECT_EQ(serve().size(), 60u);
  pass();
  const uint64_t before = looks();
  for (int i = 0; i < 1000; ++i) controller->step();
  EXPECT_EQ(looks(), before);
}

TEST_F(Ready, WhoWasIdleIsFound) {
  invite(150);
  for (uint32_t i = 0; i < 2 * ReadyClients::kNearScans; ++i) controller->step();  // now nobody is near
  for (const uint32_t number : {1u, 77u, 150u}) {
    ASSERT_EQ(guest(number).submit({5, 1, {}}, {}, nullptr), Status::kOk);
    pass();
    EXPECT_EQ(serve(), (std::vector<uint32_t>{number}));
    pass();
    EXPECT_EQ(guest(number).in_flight(), 0u);  // its credit was published
  }
}

TEST_F(Ready, WhatWaitedBehindASuspensionIsRead) {
  invite(2);
  controller->suspend(1);
  ASSERT_EQ(guest(1).submit({5, 1, {}}, {}, nullptr), Status::kOk);
  pass();
  EXPECT_TRUE(serve().empty());
  controller->resume(1);
  pass();
  EXPECT_EQ(serve(), (std::vector<uint32_t>{1}));
}

TEST_F(Ready, ACancelIsRead) {
  invite(1);
  controller->suspend(1);
  uint64_t result = 0;
  ASSERT_EQ(guest(1).submit({5, 1, {1}}, {}, &result), Status::kOk);
  pass();
  ASSERT_EQ(guest(1).cancel(1, std::array{result}, "enough"), Status::kOk);
  pass();
  controller->resume(1);
  pass();
  EXPECT_TRUE(serve().empty());
  EXPECT_EQ(controller->stats().dropped, 1u);
}

TEST_F(Ready, RingsAtAnyMoment) {
  const Watchdog watchdog("clients that ring while the controller runs");
  invite(130);  // some of their bells have relays
  controller->start();
  std::atomic<uint32_t> left{3};
  std::thread host([&] {
    while (left.load() != 0) {
      if (serve().empty()) std::this_thread::yield();
    }
  });
  std::vector<std::thread> threads;
  for (const uint32_t number : {1u, 65u, 130u}) {
    threads.emplace_back([this, number, &left] {
      std::mt19937 random(static_cast<uint32_t>(seed()) + number);
      for (int i = 0; i < 60 * kStressScale; ++i) {
        while (guest(number).submit({5, 1, {}}, {}, nullptr) != Status::kOk) std::this_thread::yield();
        if (random() % 2 == 0) {
          while (guest(number).in_flight() != 0) std::this_thread::yield();
        }
        if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      }
      while (guest(number).in_flight() != 0) std::this_thread::yield();
      --left;
    });
  }
  for (std::thread& each : threads) each.join();
  host.join();
  controller->stop();
  EXPECT_TRUE(is_up());
}

}  // namespace
}  // namespace pathways::test::test_ready_clients
