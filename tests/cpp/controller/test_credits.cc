// What one client may have under way, whatever its library does.
//
//   FLOW-1  Flow.*: past its bounds it is not read further until hosts are done with earlier work of it; others notice
//           nothing; it can cancel and leave meanwhile, and its releases come through where memory waits for them
//   ASY-1   Flow.ALongStreamGoesThrough: who waits for room gets it
#include "messages/credits.h"

#include <atomic>
#include <thread>

#include "controller/played.h"
#include "simulate/simulation.h"
#include "support.h"

namespace pathways::test::test_credits {
namespace {

constexpr uint64_t kRing = 1u << 14;  // of a client

struct Flow : Cluster {
  /// What waits for memory waits for as long as a slow machine takes: nothing here is about refusals.
  Flow() : Cluster(2, 2, {100}, PolicyKind::kFifo, false, std::chrono::hours(1)) {}

  /// Sends commands of so many bytes of payload until nothing more is taken. How many were sent.
  uint64_t flood(Client& client, GroupId group, size_t payload) {
    const std::vector<std::byte> bytes(payload);
    uint64_t sent = 0;
    for (int full = 0; full < 3;) {
      if (client.command(CommandKind::kBackend, group, {}, {}, bytes) == Status::kOk) {
        ++sent;
        full = 0;
      } else {
        ++full;
        pass();
      }
      if (sent > 100'000) break;
    }
    return sent;
  }
  /// Takes what is in the host's ring, and says that it is done with it. How many of its records were this client's
  /// commands.
  uint64_t hear(uint32_t h, uint32_t client = 0) {
    Load done[2];
    while (true) {
      const auto bytes = hosts[h]->next();
      if (bytes.empty()) {
        hosts[h]->inbox.release();
        break;
      }
      const auto header = read_record<RecordHeader>(bytes);
      if (header.kind == RecordKind::kRun) hosts[h]->done(read_record<RunRecord>(bytes));
      if (header.kind == RecordKind::kCommand) done[header.client].add(1, bytes.size());
    }
    for (uint32_t c = 0; c < 2; ++c) {
      if (done[c].count == 0) continue;
      hosts[h]->say(CommandsDoneRecord{{RecordKind::kCommandsDone, 0, c}, done[c].count, done[c].bytes});
    }
    pass();
    return done[client].count;
  }
};

TEST_F(Flow, AHostThatDoesNotReadCostsBoundedMemory) {
  controller->add_group(3, {1});
  const uint64_t sent = flood(*good, 1, 2000 - sizeof(CommandRecord));
  EXPECT_GE(sent * 2000, kMostCommandBytes);
  EXPECT_LE(sent * 2000, kMostCommandBytes + 2000 + kRing);
  EXPECT_EQ(controller->stats().unread, 1u);
  // Another client notices nothing: not on another host, and not on this one, behind what the first may have.
  RawClient memory;
  Client other({1, 8}, memory.block, block);
  controller->add_client(1, memory.block);
  ASSERT_EQ(other.command(CommandKind::kBackend, 3, {}, {}, {}), Status::kOk);
  ASSERT_EQ(other.command(CommandKind::kBackend, 1, {}, {}, {}), Status::kOk);
  pass();
  EXPECT_EQ(hear(1, 1), 1u);
  uint64_t heard = 0;
  while (const uint64_t now = hear(0)) heard += now;  // all of it comes in the end
  EXPECT_EQ(heard, sent);
  controller->remove_client(1);
  hear(0), hear(1);
  EXPECT_EQ(controller->stats().unread, 0u);
  EXPECT_TRUE(controller->is_idle());
}

TEST_F(Flow, ManySmallOnesToo) {
  const uint64_t sent = flood(*good, 2, 0);  // to both hosts
  EXPECT_GE(sent, kMostCommands);
  EXPECT_LE(sent, kMostCommands + kRing / sizeof(CommandRecord));
  while (hear(0) != 0) {
  }
  EXPECT_EQ(controller->stats().unread, 1u);  // the other is not done with them
  while (hear(0) + hear(1) != 0) {
  }
  EXPECT_EQ(controller->stats().unread, 0u);
}

TEST_F(Flow, WhatWaitsInTheOrderIsBoundedToo) {
  for (int i = 0; i < 3; ++i) submit(1);  // one more than the window
  pass();
  const uint64_t sent = flood(*good, 1, 0);
  EXPECT_GE(sent, kMostWaiting - 1);
  EXPECT_LE(sent, kMostWaiting + kRing / sizeof(CommandRecord));
  uint64_t heard = 0;
  while (const uint64_t now = hear(0) + hear(0)) heard += now;
  EXPECT_EQ(heard, sent);
}

TEST_F(Flow, ALostHostsCommandsAreOver) {
  flood(*good, 1, 1000);
  EXPECT_EQ(controller->stats().unread, 1u);
  (void)controller->lose_hosts({0}, "gone");
  auto fresh = std::make_unique<PlayedHost>(0, 2, block);
  controller->restore_host(0, fresh->block);
  hosts[0] = std::move(fresh);
  uint64_t heard = 0;
  pass();
  while (const uint64_t now = hear(0)) heard += now;
  EXPECT_GT(heard, 0u);  // what was in the client's ring
  EXPECT_EQ(controller->stats().unread, 0u);
}

TEST_F(Flow, CancelsPassWhatIsNotRead) {
  for (int i = 0; i < 2; ++i) submit(1);
  const uint64_t taken = submit(1);  // waits in the order
  const uint64_t taken_tag = good->last_tag();
  pass();
  flood(*good, 2, 2000 - sizeof(CommandRecord));
  EXPECT_EQ(controller->stats().unread, 1u);
  ASSERT_EQ(good->cancel(taken_tag, {&taken, 1}, "enough"), Status::kOk);
  pass();
  EXPECT_EQ(good->poll(Handle{taken}), FutureState::kFailed);
  for (int i = 0; i < 1000; ++i) {  // many more than its ring holds
    ASSERT_EQ(good->cancel(taken_tag, {&taken, 1}, "enough"), Status::kOk);
    pass();
  }
  while (hear(0) + hear(1) != 0) {
  }
  EXPECT_EQ(controller->stats().dropped, 1u);
  EXPECT_EQ(good->in_flight(), 0u);
}

TEST_F(Flow, ACancelMayComeBeforeItsRun) {
  flood(*good, 1, 2000 - sizeof(CommandRecord));
  uint64_t result = 0;
  // Three more are read, which makes room in the client's ring for a run that is not.
  hosts[0]->say(CommandsDoneRecord{{RecordKind::kCommandsDone, 0, 0}, 3, 6000});
  pass();
  ASSERT_EQ(controller->stats().unread, 1u);
  ASSERT_EQ(good->submit({5, 1, {1}}, {}, &result), Status::kOk);
  pass();
  const uint64_t runs = controller->stats().runs;
  ASSERT_EQ(good->cancel(good->last_tag(), {&result, 1}, "enough"), Status::kOk);
  pass();
  EXPECT_EQ(controller->stats().runs, runs);
  while (hear(0) != 0) {
  }
  EXPECT_EQ(controller->stats().runs, runs + 1);
  EXPECT_EQ(controller->stats().granted, 0u);
  EXPECT_EQ(controller->stats().dropped, 1u);
  EXPECT_EQ(good->in_flight(), 0u);
}

TEST_F(Flow, ItLeavesAsItIs) {
  flood(*good, 2, 1000);
  controller->remove_client(0);
  EXPECT_EQ(controller->stats().clients, 0u);
  EXPECT_EQ(controller->stats().unread, 0u);
  while (hear(0) + hear(1) != 0) {  // what hosts say of it is of nobody
  }
  EXPECT_TRUE(is_up());
  EXPECT_TRUE(controller->is_idle());
}

TEST_F(Flow, AReleaseComesThroughBehindManyThatWaitForMemory) {
  const SpaceSetId set = controller->add_space_set({0});
  const auto put = [&](uint64_t bytes) {
    Handle handle;
    EXPECT_EQ(good->allocate(1, &handle), Status::kOk);
    while (good->command(CommandKind::kPut, 1, handle, {}, {}, set, bytes) != Status::kOk) pass();
    return handle;
  };
  const Handle first = put(100);
  std::vector<Handle> waiting;
  for (uint64_t i = 0; i < 200; ++i) waiting.push_back(put(i == 0 ? 100 : 0));
  // Commands that wait behind the held ones are no reason to stop before the release.
  const std::vector<std::byte> payload(1000);
  for (uint64_t i = 0; i < 2 * kMostWaiting; ++i) {
    while (good->command(CommandKind::kBackend, 1, Handle{7}, {}, payload) != Status::kOk) pass();
  }
  pass();
  EXPECT_EQ(controller->stats().unread, 0u);
  good->release(first, 1, uint64_t{1} << 30);
  pass();
  EXPECT_LT(controller->stats().held, 2 * kMostWaiting + 200);
  EXPECT_GT(controller->stats().held, kMostCommands / 2);  // the host has as many as it may
  while (hear(0) != 0) {
  }
  EXPECT_EQ(controller->stats().held, 0u);
  EXPECT_EQ(controller->stats().refused, 0u);
}

TEST_F(Flow, WhoDoesNotListenIsNotReadFurther) {
  const std::string text(1500, 'x');
  std::vector<std::byte> bytes(sizeof(FailedRecord) + padded(text.size()));
  std::memcpy(bytes.data() + sizeof(FailedRecord), text.data(), text.size());
  const uint64_t own = submit(1);
  pass();
  for (uint64_t i = 0; i < 1000; ++i) {
    const FailedRecord record{{RecordKind::kFailed, 0, 0}, own, static_cast<uint32_t>(text.size()), 0};
    std::memcpy(bytes.data(), &record, sizeof record);
    hosts[0]->outbox.send(static_cast<uint32_t>(bytes.size()),
                          [&](std::byte* out) { std::memcpy(out, bytes.data(), bytes.size()); });
  }
  while (hosts[0]->outbox.flush()) pass();
  pass();
  EXPECT_EQ(controller->stats().unread, 1u);
  submit(1);
  pass();
  EXPECT_EQ(controller->stats().runs, 1u);
  for (int i = 0; i < 2000 && controller->stats().unread != 0; ++i) {
    good->poll_inbox();
    pass();
  }
  EXPECT_EQ(controller->stats().unread, 0u);
  EXPECT_EQ(controller->stats().runs, 2u);
}

TEST_F(Flow, DescriptionsAreBounded) {
  const std::vector<std::byte> payload(1900);
  uint64_t number = 0;
  while (good->cluster_status() == ClusterStatus::kUp && number < 100'000) {
    if (good->command(CommandKind::kBackend, 1, Handle{number % 1000 + 1}, {}, payload) == Status::kOk) {
      ++number;  // again and again the same ones: that costs nothing
    } else {
      hear(0);
      good->poll_inbox();
    }
    if (number == 50'000) break;
  }
  EXPECT_EQ(good->cluster_status(), ClusterStatus::kUp);
  while (good->cluster_status() == ClusterStatus::kUp && number < 200'000) {
    if (good->command(CommandKind::kBackend, 1, Handle{++number}, {}, payload) == Status::kOk) continue;
    hear(0);
    good->poll_inbox();
  }
  EXPECT_NE(good->cluster_failure().find("more than 64 MiB of placements"), std::string::npos)
      << good->cluster_failure();
  EXPECT_TRUE(is_up());
}

TEST(FlowOfHosts, ALongStreamGoesThrough) {
  const Watchdog watchdog("a client that floods a cluster with commands");
  SimulationOptions options;
  options.hosts = 2;
  options.clock = ModelClock::Kind::kReal;
  options.ring_bytes = 4096;
  Simulation sim(options);
  Client& client = sim.add_client();
  const GroupId group = sim.add_group({0, 1});
  sim.start();
  const auto send = [&](CommandKind kind, Handle handle, Handle token, std::span<const std::byte> payload) {
    while (client.command(kind, group, handle, token, payload) != Status::kOk) {
      client.wait_room(std::chrono::milliseconds(1), SpinPolicy::sleep_at_once());
      client.poll_inbox();
    }
  };
  // More than the bounds several times over, and every value right.
  uint64_t wrong = 0;
  for (uint64_t i = 1; i <= 5 * kMostCommands; ++i) {
    Handle buffer, token;
    while (client.allocate(2, &buffer) != Status::kOk) {
      client.flush();
      client.wait_room(std::chrono::milliseconds(1), SpinPolicy::sleep_at_once());
    }
    const ModelledBackend::Put put{i, 1};
    send(CommandKind::kPut, buffer, {}, std::as_bytes(std::span{&put, 1}));
    if (i % 64 == 0) {
      uint64_t out[2] = {};
      const ModelledBackend::Fetch fetch{out};
      ASSERT_EQ(client.allocate(2, &token), Status::kOk);
      send(CommandKind::kFetch, buffer, token, std::as_bytes(std::span{&fetch, 1}));
      while (client.poll(token) == FutureState::kPending) {
        (void)client.wait(token, std::chrono::milliseconds(50), SpinPolicy::sleep_at_once());
        client.poll_inbox();
      }
      wrong += out[0] != i || out[1] != i ? 1U : 0U;
      client.forget(token);
    }
    client.release(buffer, group, 8);
  }
  client.flush();
  EXPECT_EQ(wrong, 0u);
  sim.stop();
}

}  // namespace
}  // namespace pathways::test::test_credits
