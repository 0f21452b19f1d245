// The controller between a client and hosts that the test plays itself, record by record.
//
//   OWN-1    Senders.*: a client that makes no sense goes alone; Clients.Removed
//   GANG-1   Gangs.*: all or none, and all hosts the same; different counts on different hosts are fine
//   ORD-1    Overflow.KeepsTheOrder: what does not fit a ring waits for its turn
//   ASY-1    Credits.*: a client that waits for room is woken when a quarter is free
//   (life)   Broken.*: after a failure nobody hangs
#include <thread>

#include "controller/played.h"
#include "support.h"

namespace pathways::test::test_controller {
namespace {

using Records = Cluster;
using Senders = Cluster;
struct Gangs : Cluster {
  std::string fault() {
    try {
      pass();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
};
using Clients = Cluster;
using Credits = Cluster;
using Overflow = Cluster;
using Broken = Cluster;
using Groups = Cluster;

TEST_F(Records, TravelOutAndBack) {
  uint64_t results[2] = {};
  const uint64_t arguments[] = {77, 78};
  ASSERT_EQ(good->submit({5, 2, {2, 1}}, arguments, results), Status::kOk);
  pass();
  for (auto& host : hosts) {
    const auto bytes = host->next();
    ASSERT_EQ(bytes.size(), sizeof(RunRecord) + 4 * sizeof(uint64_t));
    RunRecord record;
    std::memcpy(&record, bytes.data(), sizeof record);
    EXPECT_TRUE(record.plan == 5 && record.group == 2 && record.order == 1 && record.arguments == 2);
    uint64_t handles[4];
    std::memcpy(handles, bytes.data() + sizeof record, sizeof handles);
    EXPECT_TRUE(handles[0] == 77 && handles[1] == 78 && handles[2] == results[0] && handles[3] == results[1]);
    EXPECT_EQ(good->in_flight(), 1u);
    host->done(record);
    pass();
  }
  EXPECT_EQ(good->in_flight(), 0u);
  EXPECT_TRUE(controller->is_idle());
}

TEST_F(Records, WantedWordsTravelToo) {  // READ-1
  uint64_t results[70] = {};
  uint64_t wanted[2] = {1, 1u << 5};
  ProgramRef program{5, 2, std::vector<uint32_t>(70, 1), std::vector<uint64_t>(70, 64)};
  program.result_bytes[0] = ReadBackArea::kLargeBytes + 1;  // has no slot
  ASSERT_EQ(good->submit(program, {}, results, wanted), Status::kOk);
  EXPECT_TRUE(wanted[0] == 0 && wanted[1] == 1u << 5);
  uint64_t more[70] = {}, none[2] = {1, 0};
  ASSERT_EQ(good->submit(program, {}, more, none), Status::kOk);
  pass();
  for (auto& host : hosts) {
    for (const uint64_t words : {2u, 0u}) {
      const auto bytes = host->next();
      ASSERT_EQ(bytes.size(), sizeof(RunRecord) + (70 + words) * sizeof(uint64_t));
      RunRecord record;
      std::memcpy(&record, bytes.data(), sizeof record);
      EXPECT_EQ(record.header.detail, words == 0 ? 0 : kRunWanted);
      uint64_t last = 0;
      std::memcpy(&last, bytes.data() + bytes.size() - sizeof last, sizeof last);
      EXPECT_EQ(last, words == 0 ? more[69] : 1u << 5);
      host->done(record);
    }
  }
  pass();
  EXPECT_TRUE(controller->is_idle());
}

TEST_F(Records, WindowHoldsBack) {
  for (int i = 0; i < 3; ++i) submit(1);
  pass();
  const RunRecord first = hosts[0]->next_run();
  EXPECT_EQ(hosts[0]->next_run().order, 2u);
  EXPECT_TRUE(hosts[0]->next().empty());
  EXPECT_EQ(controller->stats().waiting, 1u);
  hosts[0]->done(first);
  pass();
  EXPECT_EQ(hosts[0]->next_run().order, 3u);
}

TEST_F(Senders, NonsensePutsTheSenderOut) {
  struct Raw {
    const char* why;
    std::vector<std::byte> bytes;
  };
  const auto raw = [](const auto& record, size_t size) {
    std::vector<std::byte> bytes(size);
    std::memcpy(bytes.data(), &record, std::min(size, sizeof record));
    return bytes;
  };
  RunRecord run{{RecordKind::kRun, 0, 0}, 1, 0, 5, 2, 1, 1};
  RunRecord nowhere = run;
  nowhere.group = 99;
  nowhere.arguments = 2;
  nowhere.results = 0;
  RunRecord many = run;
  many.arguments = 0xffffffff;
  many.results = 0xffffffff;
  RunRecord wanting = run;
  wanting.header.detail = kRunWanted;
  RunRecord strange = run;
  strange.header.detail = 256;
  const CommandRecord command{{RecordKind::kCommand, 1, 0}, 1, 0, 2, 64, 0, kNoSpaceSet, 0};
  CommandRecord holding = command;
  holding.bytes = 0;
  holding.hold = 1;
  const std::vector<Raw> cases = {
      {"shorter", raw(run, 4)},
      {"has 16 bytes, expected 40", raw(run, 16)},
      {"expected 56", raw(run, sizeof run)},
      {"expected 68719476760", raw(many, 56)},
      {"expected 64", raw(wanting, 56)},
      {"unknown flags 256", raw(strange, 56)},
      {"group 99", raw(nowhere, 56)},
      {"expected 160", raw(command, sizeof command)},
      {"has 8 bytes, expected 96", raw(command, 8)},
      {"has a hold", raw(holding, sizeof holding)},
      {"of kind 3", raw(CancelRecord{{RecordKind::kCancel, 0, 0}, 1}, 16)},  // it has a ring of its own
      {"of kind 5", raw(RunDoneRecord{{RecordKind::kRunDone, 0, 0}, 1, 1, 1, 1, 0}, sizeof(RunDoneRecord))},
      {"of kind 999", raw(RecordHeader{static_cast<RecordKind>(999), 0, 0}, 8)},
      {"does not fit the hosts' rings", std::vector<std::byte>(3000)},
  };
  uint32_t id = 1;
  for (const Raw& bad : cases) {
    SCOPED_TRACE(bad.why);
    RawClient memory;
    {
      auto producer = memory.block->ring_to_controller()->claim_producer();
      const auto room = producer.try_reserve(static_cast<uint32_t>(bad.bytes.size()));
      std::memcpy(room.data(), bad.bytes.data(), bad.bytes.size());
      producer.publish();
    }
    Client client({id, 8}, memory.block, block);
    controller->add_client(id, memory.block);
    submit();
    pass();
    client.poll_inbox();
    EXPECT_EQ(client.cluster_status(), ClusterStatus::kFailed);
    EXPECT_NE(client.cluster_failure().find(bad.why), std::string::npos) << client.cluster_failure();
    EXPECT_NE(client.cluster_failure().find("client " + std::to_string(id)), std::string::npos);
    EXPECT_EQ(controller->stats().clients, 1u);
    // The others see nothing, and the hosts hear that it is gone.
    EXPECT_TRUE(is_up());
    EXPECT_EQ(good->cluster_status(), ClusterStatus::kUp);
    for (auto& host : hosts) {
      RunRecord mine{};
      int runs = 0, gone = 0;
      for (auto bytes = host->next(); !bytes.empty(); bytes = host->next()) {
        RecordHeader header;
        std::memcpy(&header, bytes.data(), sizeof header);
        if (header.kind == RecordKind::kRun) {
          std::memcpy(&mine, bytes.data(), sizeof mine);
          ++runs;
        } else if (header.kind == RecordKind::kClientGone) {
          EXPECT_EQ(header.client, id);
          ++gone;
        }
      }
      EXPECT_TRUE(runs == 1 && gone == 1);
      host->done(mine);
    }
    pass();
    ++id;
  }
  EXPECT_TRUE(controller->is_idle());
}

TEST_F(Senders, CorruptRingPutsTheSenderOut) {
  RawClient memory;
  {
    auto producer = memory.block->ring_to_controller()->claim_producer();
    (void)producer.try_reserve(64);
    producer.publish();
  }
  // The record's header is overwritten.
  auto* ring = reinterpret_cast<std::byte*>(memory.block->ring_to_controller());
  std::memset(ring + sizeof(ByteRing), 0xee, 8);
  Client client({1, 8}, memory.block, block);
  controller->add_client(1, memory.block);
  pass();
  client.poll_inbox();
  EXPECT_NE(client.cluster_failure().find("corrupt"), std::string::npos) << client.cluster_failure();
  EXPECT_TRUE(is_up());
}

TEST_F(Gangs, AllOrNone) {
  submit();
  pass();
  hosts[0]->done(hosts[0]->next_run(), 2, 2);
  hosts[1]->done(hosts[1]->next_run(), 5, 5);  // another slice of the program: another number
  pass();
  EXPECT_TRUE(is_up());
  submit();
  submit();
  pass();
  hosts[0]->done(hosts[0]->next_run(), 0, 2);
  hosts[1]->done(hosts[1]->next_run(), 0, 5);
  hosts[0]->done(hosts[0]->next_run(), 2, 2);
  hosts[1]->done(hosts[1]->next_run(), 0, 0);  // has none
  pass();
  EXPECT_TRUE(is_up());
  EXPECT_EQ(controller->stats().gangs[0], 4u);
}

TEST_F(Gangs, OneHostDidNot) {
  submit();
  pass();
  hosts[0]->done(hosts[0]->next_run(), 2, 2);
  hosts[1]->done(hosts[1]->next_run(), 0, 2);
  EXPECT_EQ(fault(), "GANG-1 broken in run 1: host 1 launched no gangs, another of its hosts did");
}

TEST_F(Gangs, SomeOfThem) {
  submit(1);
  pass();
  hosts[0]->done(hosts[0]->next_run(), 1, 2);
  EXPECT_EQ(fault(), "GANG-1 broken in run 1: host 0 launched 1 of the 2 gangs");
}

TEST_F(Gangs, MoreThanThereAre) {
  submit(1);
  pass();
  hosts[0]->done(hosts[0]->next_run(), 1, 0);
  EXPECT_EQ(fault(), "GANG-1 broken in run 1: host 0 launched 1 of the 0 gangs");
}

TEST_F(Gangs, OneHostTookAnotherBranch) {
  const auto took = [&](uint32_t host, uint64_t known, uint64_t chosen) {
    const RunRecord run = hosts[host]->next_run();
    hosts[host]->say(RunDoneRecord{{RecordKind::kRunDone, 0, 0}, run.tag, 0, 0, host, 0, 0, known, chosen});
    return fault();
  };
  submit();
  pass();
  EXPECT_EQ(took(0, 0b0111, 0b0101), "");
  EXPECT_EQ(took(1, 0b1101, 0b1101), "");  // it knows others, and agrees on those that both know
  submit();
  pass();
  EXPECT_EQ(took(0, 0b0111, 0b0101), "");
  EXPECT_EQ(took(1, 0b1110, 0b0010),
            "GANG-1 broken in run 2: host 1 launched a branch (predicate bit 1), another of its hosts did not");
}

TEST_F(Clients, Removed) {
  RawClient memory;
  {
    Client leaves({1, 8}, memory.block, block);
    controller->add_client(1, memory.block);
    std::vector<uint64_t> results(6);
    for (uint64_t& result : results) ASSERT_EQ(leaves.submit({5, 2, {2}}, {}, &result), Status::kOk);
    pass();
    submit();
    pass();
    controller->remove_client(1);
  }
  memory = RawClient();  // the controller no longer touches it
  // Two runs were granted, four dropped (none of them granted on the way). The farewell comes right behind them, on all
  // hosts (GANG-1), and does not wait for the others' work.
  EXPECT_EQ(controller->stats().dropped, 4u);
  EXPECT_EQ(controller->stats().granted, 2u);
  const RunRecord first = hosts[0]->next_run(), second = hosts[0]->next_run();
  EXPECT_EQ(hosts[0]->next_kind(), RecordKind::kClientGone);
  EXPECT_TRUE(hosts[0]->next().empty());
  hosts[0]->done(first);
  hosts[0]->done(second);
  pass();
  EXPECT_TRUE(hosts[0]->next().empty());  // GANG-1: the other host has no room yet
  hosts[1]->done(hosts[1]->next_run());
  hosts[1]->done(hosts[1]->next_run());
  EXPECT_EQ(hosts[1]->next_kind(), RecordKind::kClientGone);
  pass();
  for (auto& host : hosts) {
    const RunRecord mine = host->next_run();
    EXPECT_EQ(mine.header.client, 0u);
    host->done(mine);
  }
  pass();
  EXPECT_TRUE(controller->is_idle());
  EXPECT_THROW(controller->add_client(1, memory.block), Error);
  controller->remove_client(1);
}

TEST_F(Clients, RemovedBeforeItWasAdded) {
  controller->remove_client(5);  // hosts may have been told to attach it
  pass();
  for (auto& host : hosts) {
    EXPECT_EQ(host->next_kind(), RecordKind::kClientGone);
    EXPECT_TRUE(host->next().empty());
  }
  EXPECT_TRUE(controller->is_idle());
}

TEST_F(Clients, RemovedWithoutGrantingTheRest) {
  controller->add_group(3, {1});
  submit(3);
  submit(3);
  pass();  // host 1 is full
  RawClient memory;
  Client leaves({1, 8}, memory.block, block);
  controller->add_client(1, memory.block);
  uint64_t results[2] = {};
  ASSERT_EQ(leaves.submit({5, 2, {2}}, {}, &results[0]), Status::kOk);  // waits for host 1
  ASSERT_EQ(leaves.submit({5, 1, {1}}, {}, &results[1]), Status::kOk);  // waits behind it, though host 0 has room
  pass();
  controller->remove_client(1);
  EXPECT_EQ(controller->stats().dropped, 2u);
  EXPECT_EQ(hosts[0]->next_kind(), RecordKind::kClientGone);
}

TEST_F(Clients, CancelBeforeAndAfterTheGrant) {
  std::vector<uint64_t> results;
  for (int i = 0; i < 4; ++i) results.push_back(submit());
  pass();
  ASSERT_EQ(good->cancel(4, {&results[3], 1}, "changed my mind"), Status::kOk);
  ASSERT_EQ(good->cancel(1, {&results[0], 1}, "too late"), Status::kOk);
  pass();
  EXPECT_EQ(good->poll(Handle{results[3]}), FutureState::kFailed);
  EXPECT_EQ(good->error_of(Handle{results[3]}), "changed my mind");
  EXPECT_EQ(controller->stats().dropped, 0u);  // it keeps its place in the order
  for (int round = 0; round < 3; ++round) {
    for (auto& host : hosts) host->done(host->next_run());
    pass();
  }
  EXPECT_EQ(controller->stats().dropped, 1u);
  EXPECT_TRUE(hosts[0]->next().empty());
  EXPECT_EQ(good->in_flight(), 0u);
}

TEST_F(Credits, WaitersAreWoken) {
  const Watchdog watchdog("a client that waits for room");
  for (int i = 0; i < 8; ++i) submit();
  uint64_t result = 0;
  EXPECT_EQ(good->submit({5, 2, {2}}, {}, &result), Status::kFull);
  controller->start();
  std::thread waiter([&] {
    while (good->in_flight() > 6) good->wait_room(std::chrono::nanoseconds::max(), SpinPolicy::sleep_at_once());
  });
  std::thread other([&] {
    while (good->in_flight() > 6) good->wait_room(std::chrono::nanoseconds::max(), SpinPolicy::sleep_at_once());
  });
  for (int run = 0; run < 2; ++run) {
    for (auto& host : hosts) {
      std::vector<std::byte> bytes;
      while ((bytes = host->next()).empty()) std::this_thread::yield();
      RunRecord record;
      std::memcpy(&record, bytes.data(), sizeof record);
      host->done(record);
    }
  }
  waiter.join();
  other.join();
  EXPECT_EQ(good_memory.block->wanted.load(std::memory_order_relaxed), 0u);
}

TEST_F(Credits, FailuresWakeWaiters) {
  const Watchdog watchdog("a client that waits for a future that fails");
  const uint64_t result = submit();
  controller->start();
  std::vector<std::byte> bytes;
  while ((bytes = hosts[0]->next()).empty()) std::this_thread::yield();
  std::thread waiter([&] {
    while (good->wait(Handle{result}, std::chrono::nanoseconds::max(), SpinPolicy::sleep_at_once()) ==
           FutureState::kPending) {
      good->poll_inbox();
    }
  });
  std::this_thread::sleep_for(5ms);
  const char text[8] = "no luck";
  struct {
    FailedRecord record;
    char text[8];
  } failed{{{RecordKind::kFailed, 0, 0}, result, 7, 0}, {}};
  std::memcpy(failed.text, text, 8);
  hosts[0]->say(failed);
  waiter.join();
  EXPECT_EQ(good->poll(Handle{result}), FutureState::kFailed);
  EXPECT_EQ(good->error_of(Handle{result}), "no luck");
}

TEST_F(Credits, FailureToldBeforeTheWait) {
  const Watchdog watchdog("a client that was told before it waits");
  const uint64_t result = submit();
  pass();
  good->poll_inbox();
  hosts[0]->say(FailedRecord{{RecordKind::kFailed, 0, 0}, result, 0, 0});
  pass();  // the bell has rung before the ticket is drawn
  EXPECT_EQ(good->wait(Handle{result}, std::chrono::nanoseconds::max(), SpinPolicy::sleep_at_once()),
            FutureState::kPending);
  good->poll_inbox();
  EXPECT_EQ(good->wait(Handle{result}, std::chrono::nanoseconds::max(), SpinPolicy::sleep_at_once()),
            FutureState::kFailed);
}

TEST_F(Overflow, KeepsTheOrder) {
  // Releases have no credits: far more than a ring of 4 KiB holds.
  const Watchdog watchdog("a host that reads slowly");
  controller->start();
  constexpr uint64_t kCommands = 2000;
  uint64_t seen = 0;
  const auto read = [&] {
    for (auto bytes = hosts[0]->next(); !bytes.empty(); bytes = hosts[0]->next()) {
      CommandRecord record;
      std::memcpy(&record, bytes.data(), sizeof record);
      EXPECT_EQ(record.handle, ++seen);
    }
  };
  for (uint64_t i = 1; i <= kCommands; ++i) {
    while (good->command(CommandKind::kBackend, 1, Handle{i}, Handle{}, {}) != Status::kOk) {
      good->wait_room(1ms, SpinPolicy::sleep_at_once());
    }
    if (i % 700 == 0) read();
  }
  while (seen < kCommands) read();  // nobody rings the controller for the room that this makes
  controller->stop();
  pass();
  EXPECT_TRUE(controller->is_idle());
}

TEST_F(Broken, NobodyHangs) {
  const Watchdog watchdog("a controller that stopped");
  controller->start();
  const uint64_t result = submit();
  std::thread waiter([&] {
    while (good->cluster_status() == ClusterStatus::kUp) {
      (void)good->wait(Handle{result}, std::chrono::nanoseconds::max(), SpinPolicy::sleep_at_once());
    }
  });
  hosts[1]->say(RecordHeader{RecordKind::kReceiveReady, 0, 0});
  waiter.join();
  EXPECT_NE(good->cluster_failure().find("host 1 sent"), std::string::npos) << good->cluster_failure();
  EXPECT_LE(controller->stats().runs, 1u);
  controller->remove_client(0);
  EXPECT_EQ(controller->stats().clients, 0u);
  controller->stop();
  controller->stop();
  EXPECT_EQ(controller->stats().clients, 0u);
}

TEST_F(Broken, ClosedWakesEverybody) {
  const Watchdog watchdog("a closed cluster");
  controller->start();
  for (int i = 0; i < 8; ++i) submit();
  std::thread room([&] {
    while (good->cluster_status() == ClusterStatus::kUp) {
      good->wait_room(std::chrono::nanoseconds::max(), SpinPolicy::sleep_at_once());
    }
  });
  std::this_thread::sleep_for(5ms);
  controller->close();
  room.join();
  EXPECT_EQ(good->cluster_status(), ClusterStatus::kClosed);
  controller->fail("later");
  EXPECT_EQ(good->cluster_status(), ClusterStatus::kClosed);
}

TEST_F(Groups, RefusedAtOnce) {
  EXPECT_THROW(controller->add_group(7, {}), Error);
  EXPECT_THROW(controller->add_group(7, {2}), Error);
  EXPECT_THROW(controller->add_group(7, {1, 1}), Error);
  EXPECT_THROW(controller->add_group(1u << 24, {1}), Error);
  controller->add_group(1, {0, 1});  // known already: the first stands
  pass();
  submit(1);
  pass();
  EXPECT_TRUE(hosts[1]->next().empty());
}

}  // namespace
}  // namespace pathways::test::test_controller
