// A client's limits in a controller whose clients and hosts the test plays: what they keep out, what they do not, and
// what happens when they change.
//
//   MEM-5   Limits.AQuota*, Limits.AnInnocentClientNoticesNothing, Refusals.AtAQuotaGiveNobodyElseTime
//   MEM-3   Refusals.GiveOthersTimeSomeTimesAtMost
//   FLOW-1  Limits.RunsUnderWay, Limits.BytesUnderWay
//   SHARE-1 Limits.DeviceTime*
#include "ledger/client_limits.h"

#include <chrono>
#include <cmath>
#include <limits>

#include "controller/played.h"
#include "support.h"

namespace pathways::test::test_client_limits {
namespace {

/// One device of 1000 bytes, and two clients: `good`, which is number 0, and `second`, which is number 1.
struct Limits : Cluster {
  explicit Limits(std::chrono::nanoseconds grace = std::chrono::milliseconds(250))
      : Cluster(64, 2, {1000}, PolicyKind::kFifo, false, grace) {
    set = controller->add_space_set({0});
    controller->add_client(1, second_memory.block);
    second = std::make_unique<Client>(Client::Options{1, 8}, second_memory.block, block);
  }
  ~Limits() override { controller.reset(); }  // before the second client's memory

  uint64_t put(Client& client, uint64_t bytes) {
    Handle handle;
    EXPECT_EQ(client.allocate(1, &handle), Status::kOk);
    EXPECT_EQ(client.command(CommandKind::kPut, 1, handle, {}, {}, set, bytes), Status::kOk);
    pass();
    return handle.raw;
  }
  void release(Client& client, uint64_t handle) {
    client.release(Handle{handle}, 1, uint64_t{1} << 30);  // big: it is sent at once
    pass();
  }
  /// The error of a handle; empty: none so far.
  static std::string error_of(Client& client, uint64_t handle) {
    client.poll_inbox();
    return client.error_of(Handle{handle});
  }
  /// Longer than a grace.
  void pass_a_grace() {
    for (int i = 0; i < 60; ++i) {
      let_pass(5ms);
      pass();
    }
  }
  uint64_t live() { return controller->stats().live_bytes.front(); }
  uint64_t held() { return controller->stats().held; }
  /// Runs that the first host was granted since the last call.
  std::vector<RunRecord> granted() {
    std::vector<RunRecord> runs;
    for (auto bytes = hosts[0]->next(); !bytes.empty(); bytes = hosts[0]->next()) {
      if (read_record<RecordHeader>(bytes).kind == RecordKind::kRun) runs.push_back(read_record<RunRecord>(bytes));
    }
    hosts[0]->inbox.release();
    return runs;
  }
  ClientUse use_of(uint32_t number) {
    for (const ClientUse& each : controller->client_uses()) {
      if (each.client == number) return each;
    }
    ADD_FAILURE() << "no client " << number;
    return {};
  }

  SpaceSetId set = 0;
  RawClient second_memory;
  std::unique_ptr<Client> second;
};

TEST_F(Limits, AQuotaThatNothingFitsFailsAtOnce) {
  controller->limit(0, {.memory = 100});
  const uint64_t big = put(*good, 101);
  const std::string error = error_of(*good, big);
  EXPECT_NE(error.find("101 bytes"), std::string::npos) << error;
  EXPECT_NE(error.find("this client's quota is 100 bytes"), std::string::npos) << error;
  EXPECT_NE(error.find("It can never fit"), std::string::npos) << error;
  EXPECT_EQ(live(), 0u);
  const uint64_t small = put(*good, 100);
  EXPECT_EQ(error_of(*good, small), "");
  EXPECT_EQ(use_of(0).memory, 100u);
}

TEST_F(Limits, AQuotaThatOwnBuffersFillFailsAfterTheGrace) {
  controller->limit(0, {.memory = 100});
  put(*good, 80);
  const uint64_t late = put(*good, 30);
  let_pass(249ms);
  pass();
  EXPECT_EQ(held(), 1u);
  pass_a_grace();
  EXPECT_EQ(held(), 0u);
  const std::string error = error_of(*good, late);
  EXPECT_NE(error.find("live arrays hold 80 bytes"), std::string::npos) << error;
  EXPECT_EQ(live(), 80u);
}

TEST_F(Limits, AQuotaMayBeWaitedFor) {
  controller->limit(0, {.memory = 100, .at_quota = AtQuota::kWait});
  const uint64_t first = put(*good, 80), waits = put(*good, 30);
  pass_a_grace();
  EXPECT_EQ(held(), 1u);
  EXPECT_EQ(error_of(*good, waits), "");
  release(*good, first);
  EXPECT_EQ(held(), 0u);
  EXPECT_EQ(live(), 30u);
  EXPECT_EQ(error_of(*good, waits), "");
}

TEST_F(Limits, WhatIsThereIsReadWhileAQuotaIsWaitedFor) {
  controller->limit(0, {.memory = 100, .at_quota = AtQuota::kWait});
  const uint64_t first = put(*good, 80), waits = put(*good, 30);
  const auto fetched = [&] {  // handles that the host is to read
    std::vector<uint64_t> found;
    for (auto bytes = hosts[0]->next(); !bytes.empty(); bytes = hosts[0]->next()) {
      const auto record = read_record<CommandRecord>(bytes);
      if (static_cast<CommandKind>(record.header.detail) == CommandKind::kFetch) found.push_back(record.handle);
    }
    hosts[0]->inbox.release();
    return found;
  };
  const auto fetch = [&](uint64_t handle) {
    Handle token;
    EXPECT_EQ(good->allocate(1, &token), Status::kOk);
    EXPECT_EQ(good->command(CommandKind::kFetch, 1, Handle{handle}, token, {}), Status::kOk);
    pass();
  };
  EXPECT_TRUE(fetched().empty());
  fetch(waits);  // it is not there yet
  fetch(first);
  EXPECT_EQ(fetched(), std::vector{first});
  release(*good, first);
  EXPECT_EQ(held(), 0u);
  EXPECT_EQ(fetched(), std::vector{waits});
}

TEST_F(Limits, AQuotaWaitsForOwnRuns) {
  controller->limit(0, {.memory = 100});
  controller->set_plan_memory(5, {0, "five", {}, {{0, 70, 0}}, {}, {}});
  ASSERT_EQ(good->submit({5, 1, {}}, {}, nullptr), Status::kOk);
  pass();
  const uint64_t waits = put(*good, 60);
  pass_a_grace();
  EXPECT_EQ(held(), 1u);  // however long: the run ends
  for (const RunRecord& run : granted()) hosts[0]->done(run);
  pass();
  EXPECT_EQ(held(), 0u);
  EXPECT_EQ(live(), 60u);
  EXPECT_EQ(error_of(*good, waits), "");
}

TEST_F(Limits, AQuotaBelowWhatIsHeldWaits) {
  const uint64_t first = put(*good, 500), spare = put(*good, 20);
  controller->limit(0, {.memory = 100, .at_quota = AtQuota::kWait});
  EXPECT_EQ(live(), 520u);
  const uint64_t waits = put(*good, 50);
  pass_a_grace();
  EXPECT_EQ(held(), 1u);
  release(*good, spare);
  EXPECT_EQ(held(), 1u);
  release(*good, first);
  EXPECT_EQ(live(), 50u);
  EXPECT_EQ(error_of(*good, waits), "");
}

TEST_F(Limits, AQuotaThatGrowsLetsWaitersIn) {
  controller->limit(0, {.memory = 100, .at_quota = AtQuota::kWait});
  put(*good, 80);
  const uint64_t waits = put(*good, 80);
  EXPECT_EQ(held(), 1u);
  controller->limit(0, {.memory = 160});
  pass();
  EXPECT_EQ(held(), 0u);
  EXPECT_EQ(live(), 160u);
  EXPECT_EQ(error_of(*good, waits), "");
}

TEST_F(Limits, AnInnocentClientNoticesNothing) {
  // One that waits for its quota keeps nobody out, although the device has little room besides.
  controller->limit(0, {.memory = 900, .at_quota = AtQuota::kWait});
  put(*good, 850);
  const uint64_t waits = put(*good, 100);
  EXPECT_EQ(held(), 1u);
  for (int i = 0; i < 50; ++i) {
    const uint64_t mine = put(*second, 150);
    ASSERT_EQ(live(), 1000u);
    ASSERT_EQ(error_of(*second, mine), "");
    release(*second, mine);
    ASSERT_EQ(live(), 850u);
  }
  EXPECT_EQ(held(), 1u);
  controller->remove_client(0);  // OWN-1: what it waited for goes with it
  EXPECT_EQ(live(), 0u);
  EXPECT_EQ(held(), 0u);
  (void)waits;
  good.reset();
}

/// With a short grace: client 0's puts fail one after the other, while a put of client 1 waits behind them in the line.
struct Refusals : Limits {
  Refusals() : Limits(std::chrono::milliseconds(60)) { put(*second, 900); }

  /// How many of 40 puts of `bytes` of client 0 have failed when client 1's put, which only its own array keeps out,
  /// fails. The puts of client 0 are sent before, together.
  size_t failed_before(uint64_t bytes) {
    std::vector<uint64_t> puts(40);
    for (uint64_t& each : puts) {
      Handle handle;
      EXPECT_EQ(good->allocate(1, &handle), Status::kOk);
      EXPECT_EQ(good->command(CommandKind::kPut, 1, handle, {}, {}, set, bytes), Status::kOk);
      each = handle.raw;
    }
    pass();
    const uint64_t waits = put(*second, 200);
    EXPECT_EQ(held(), 41u);
    size_t failed = 0;
    while (error_of(*second, waits).empty() && failed < puts.size()) {
      pass();
      hosts[0]->inbox.release();
      while (!hosts[0]->next().empty()) {
      }
      let_pass(1ms);
      while (failed < puts.size() && !error_of(*good, puts[failed]).empty()) ++failed;
    }
    EXPECT_NE(error_of(*second, waits).find("900 bytes put there by this client"), std::string::npos);
    return failed;
  }
};

TEST_F(Refusals, AtAQuotaGiveNobodyElseTime) {
  controller->limit(0, {.memory = 100});
  put(*good, 90);
  EXPECT_LE(failed_before(20), 5u);
}

TEST_F(Refusals, GiveOthersTimeSomeTimesAtMost) {
  const size_t failed = failed_before(300);  // each of them fails only because of client 1's array
  EXPECT_GE(failed, 2u);                     // client 0 might have released some because of it
  EXPECT_LE(failed, 20u);
}

TEST_F(Limits, RunsUnderWay) {
  controller->limit(0, {.runs = 3});
  for (int i = 0; i < 8; ++i) ASSERT_EQ(good->submit({5, 1, {}}, {}, nullptr), Status::kOk);
  for (int i = 0; i < 8; ++i) ASSERT_EQ(second->submit({6, 1, {}}, {}, nullptr), Status::kOk);
  uint64_t ended = 0;
  for (pass(); ended < 8;) {
    EXPECT_LE(use_of(0).in_flight, 3u);
    for (const RunRecord& run : granted()) {
      ended += run.header.client == 0 ? 1U : 0U;
      hosts[0]->done(run);
    }
    pass();
  }
  EXPECT_EQ(use_of(0).in_flight, 0u);
  controller->limit(0, {.runs = 1});
  for (int i = 0; i < 4; ++i) ASSERT_EQ(good->submit({5, 1, {}}, {}, nullptr), Status::kOk);
  pass();
  EXPECT_EQ(granted().size(), 1u);
  EXPECT_TRUE(use_of(0).has_unread);
  controller->limit(0, {});  // wider again: the rest is read without another ring of its bell
  pass();
  EXPECT_EQ(granted().size(), 3u);
}

TEST_F(Limits, BytesUnderWay) {
  const std::vector<std::byte> payload(2000 - sizeof(CommandRecord));
  const auto flood = [&] {
    uint64_t sent = 0;
    for (int i = 0; i < 5000; ++i) {
      if (good->command(CommandKind::kBackend, 1, {}, {}, payload) != Status::kOk) break;
      ++sent;
      pass();
    }
    return sent * 2000;
  };
  controller->limit(0, {.bytes = ClientLimits::kLeastBytes});
  EXPECT_LE(flood(), ClientLimits::kLeastBytes + (1u << 14) + 4000);
  controller->limit(0, {});
  pass();
  const uint64_t more = flood();
  EXPECT_GE(more, kMostCommandBytes - ClientLimits::kLeastBytes - (1u << 15));
  EXPECT_LE(more, kMostCommandBytes);
}

TEST_F(Limits, WhatMakesNoSenseIsRefused) {
  for (const double weight : {0.0, -1.0, 1e9, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(controller->limit(0, {.weight = weight}), Error);
  }
  EXPECT_THROW(controller->limit(0, {.runs = 0}), Error);
  EXPECT_THROW(controller->limit(0, {.runs = kMostRuns + 1}), Error);
  EXPECT_THROW(controller->limit(0, {.bytes = 1000}), Error);
  controller->limit(77, {.memory = 5});  // it is gone: nothing happens
  EXPECT_EQ(controller->client_uses().size(), 2u);
}

TEST_F(Limits, DeviceTimeIsCounted) {
  ASSERT_EQ(good->submit({5, 1, {}}, {}, nullptr), Status::kOk);
  ASSERT_EQ(second->submit({6, 1, {}}, {}, nullptr), Status::kOk);
  pass();
  uint32_t batch = 0;
  for (const RunRecord& run : granted()) hosts[0]->done(run, 0, 0, ++batch, run.header.client == 0 ? 1000 : 3000);
  pass();
  EXPECT_EQ(use_of(0).device_ns, 1000u);
  EXPECT_EQ(use_of(1).device_ns, 3000u);
}

TEST_F(Limits, DeviceTimeThatWasNoticedTogetherIsDivided) {
  for (int i = 0; i < 2; ++i) {  // alone, so that the usual times are known
    ASSERT_EQ((i == 0 ? *good : *second).submit({i == 0 ? 5u : 6u, 1, {}}, {}, nullptr), Status::kOk);
    pass();
    for (const RunRecord& run : granted())
      hosts[0]->done(run, 0, 0, static_cast<uint32_t>(i + 1), i == 0 ? 1000 : 3000);
    pass();
  }
  ASSERT_EQ(good->submit({5, 1, {}}, {}, nullptr), Status::kOk);
  ASSERT_EQ(second->submit({6, 1, {}}, {}, nullptr), Status::kOk);
  pass();
  for (const RunRecord& run : granted()) hosts[0]->done(run, 0, 0, 9, run.header.client == 0 ? 8000 : 0);
  pass();
  EXPECT_EQ(use_of(0).device_ns, 1000u + 2000u);
  EXPECT_EQ(use_of(1).device_ns, 3000u + 6000u);
}

}  // namespace
}  // namespace pathways::test::test_client_limits
