// A controller between a client and hosts that the test plays itself, record by record, in a time of the test's own.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "client/client.h"
#include "controller/controller.h"
#include "support.h"

namespace pathways::test {

struct PlayedHost {
  PlayedHost(uint32_t number, uint32_t hosts, ControllerBlock* controller_block)
      : segment(HostBlock::make(number, hosts, {4096, 0, 0}, false)),
        block(HostBlock::attach(segment)),
        inbox(block->ring_from_controller()->claim_consumer()),
        outbox(block->ring_to_controller(), &controller_block->doorbell, &controller_block->ready_bitmap, number),
        host(number) {}

  std::vector<std::byte> next() {
    const auto bytes = inbox.try_front();
    std::vector<std::byte> copy(bytes.begin(), bytes.end());
    if (!bytes.empty()) inbox.pop();
    return copy;
  }
  /// The next record, which must be a run.
  RunRecord next_run() {
    RunRecord record{};
    const auto bytes = next();
    EXPECT_GE(bytes.size(), sizeof record);
    if (bytes.size() >= sizeof record) std::memcpy(&record, bytes.data(), sizeof record);
    EXPECT_EQ(record.header.kind, RecordKind::kRun);
    return record;
  }
  RecordKind next_kind() {
    const auto bytes = next();
    RecordHeader header{};
    if (bytes.size() >= sizeof header) std::memcpy(&header, bytes.data(), sizeof header);
    return header.kind;
  }
  template <typename Record>
  void say(const Record& record) {
    outbox.send(sizeof record, [&](std::byte* out) { std::memcpy(out, &record, sizeof record); });
    outbox.flush();
  }
  void done(const RunRecord& run, uint32_t gangs = 0, uint32_t expected = 0, uint32_t batch = 0, int64_t busy_ns = 0) {
    say(RunDoneRecord{{RecordKind::kRunDone, 0, run.header.client}, run.tag, gangs, expected, host, batch, busy_ns});
  }
  /// With what the host knows of the predicates.
  void decided(const RunRecord& run, uint64_t known, uint64_t chosen) {
    say(RunDoneRecord{{RecordKind::kRunDone, 0, run.header.client}, run.tag, 0, 0, host, 0, 0, known, chosen});
  }

  Segment segment;
  HostBlock* block;
  ByteRing::Consumer inbox;
  Outbox outbox;
  uint32_t host;
};

struct RawClient {
  explicit RawClient(uint32_t ring_bytes = 1u << 14)
      : segment(ClientBlock::make({256, ring_bytes, 1u << 14}, false)), block(ClientBlock::attach(segment)) {}
  Segment segment;
  ClientBlock* block;
};

struct Cluster : ::testing::Test {
  explicit Cluster(uint32_t window = 2, uint32_t count = 2, std::vector<uint64_t> budgets = {},
                   PolicyKind policy = PolicyKind::kFifo, bool asks_for_room = false,
                   std::chrono::nanoseconds grace = std::chrono::milliseconds(250), bool knows_plans = false,
                   Clock clock = test_clock, bool ends_hosts_with_faults = false)
      : controller_segment(ControllerBlock::make(false)), block(ControllerBlock::attach(controller_segment)) {
    std::vector<HostView> blocks;
    for (uint32_t h = 0; h < count; ++h) {
      hosts.push_back(std::make_unique<PlayedHost>(h, count, block));
      blocks.push_back(hosts[h]->block);
    }
    Controller::Options options{.window = window, .budgets = std::move(budgets)};
    options.policy = policy;
    options.asks_for_room = asks_for_room;
    options.grace = grace;
    options.knows_plans = knows_plans;
    options.clock = clock;
    options.ends_hosts_with_faults = ends_hosts_with_faults;
    controller = std::make_unique<Controller>(std::move(options), block, blocks);
    controller->add_group(1, {0});
    controller->add_group(2, {0, 1});
    good = std::make_unique<Client>(Client::Options{.id = 0, .window = 8, .clock = clock}, good_memory.block, block);
    controller->add_client(0, good_memory.block);
  }
  void pass() {
    while (controller->step() != 0) {
    }
  }
  uint64_t submit(GroupId group = 2) {
    uint64_t result = 0;
    EXPECT_EQ(good->submit({5, group, {group}}, {}, &result), Status::kOk);
    return result;
  }
  bool is_up() const { return block->cluster_status() == ClusterStatus::kUp; }

  Segment controller_segment;
  ControllerBlock* block;
  std::vector<std::unique_ptr<PlayedHost>> hosts;
  RawClient good_memory;
  std::unique_ptr<Client> good;  // gives its ring back before the memory goes
  std::unique_ptr<Controller> controller;
};

}  // namespace pathways::test
