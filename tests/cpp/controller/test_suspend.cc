// A suspended client between the controller and a host that the test plays itself.
//
//   SUSP-1  Suspend.*: nothing of it is taken, its runs end, commands are sent in its name, then all is taken in its
//   order OWN-1   Suspend.AClientThatLeavesSuspendedIsGone
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "client/client.h"
#include "controller/controller.h"

namespace pathways::test::test_suspend {
namespace {

struct Suspend : ::testing::Test {
  Suspend() {
    controller = std::make_unique<Controller>(Controller::Options{2, {}}, block, std::vector<HostView>{host});
    for (uint32_t id = 0; id < 2; ++id) {
      segments[id] = ClientBlock::make({64, 1 << 14, 0}, false);
      clients[id] = std::make_unique<Client>(Client::Options{id, 16}, ClientBlock::attach(segments[id]), block);
      controller->add_client(id, ClientBlock::attach(segments[id]));
    }
  }
  void pass() {
    while (controller->step() != 0) {
    }
  }
  void submit(uint32_t client) {
    uint64_t result = 0;
    ASSERT_EQ(clients[client]->submit({5, 0, {1}, {}}, {}, &result), Status::kOk);
  }
  /// "run 0", "command 7 of 0", "gone 1", or nothing.
  std::string next() {
    const auto bytes = inbox.try_front();
    if (bytes.empty()) return {};
    RecordHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    if (header.kind == RecordKind::kRun) std::memcpy(&run, bytes.data(), sizeof run);
    inbox.pop();
    if (header.kind == RecordKind::kRun) return "run " + std::to_string(header.client);
    if (header.kind == RecordKind::kClientGone) return "gone " + std::to_string(header.client);
    return "command " + std::to_string(header.detail) + " of " + std::to_string(header.client);
  }
  void done() {
    outbox.send(sizeof(RunDoneRecord), [&](std::byte* out) {
      const RunDoneRecord record{{RecordKind::kRunDone, 0, run.header.client}, run.tag, 0, 0, 0, 0};
      std::memcpy(out, &record, sizeof record);
    });
    outbox.flush();
    pass();
  }

  Segment controller_segment = ControllerBlock::make(false), host_segment = HostBlock::make(0, 1, {4096, 0, 0}, false);
  Segment segments[2] = {ControllerBlock::make(false), ControllerBlock::make(false)};
  ControllerBlock* block = ControllerBlock::attach(controller_segment);
  HostBlock* host = HostBlock::attach(host_segment);
  ByteRing::Consumer inbox = host->ring_from_controller()->claim_consumer();
  Outbox outbox{host->ring_to_controller(), &block->doorbell, &block->ready_bitmap, 0};
  RunRecord run{};
  std::unique_ptr<Client> clients[2];
  std::unique_ptr<Controller> controller;
};

TEST_F(Suspend, ItsWorkWaitsAndTheOthersGoOn) {
  submit(0);
  pass();
  controller->suspend(0);
  EXPECT_FALSE(controller->is_quiet(0));
  submit(0);
  submit(1);
  pass();
  EXPECT_EQ(next(), "run 0");
  done();
  EXPECT_TRUE(controller->is_quiet(0));
  EXPECT_EQ(next(), "run 1");
  done();
  EXPECT_EQ(next(), "");
  EXPECT_EQ(clients[0]->in_flight(), 1u);
  controller->command_for(0, CommandKind::kOffload, std::vector<std::byte>(3));
  EXPECT_EQ(next(), "command 7 of 0");
  controller->command_for(0, CommandKind::kRestore, {});
  controller->resume(0);
  pass();
  EXPECT_EQ(next(), "command 8 of 0");
  EXPECT_EQ(next(), "run 0");
  done();
  EXPECT_EQ(clients[0]->in_flight(), 0u);
}

TEST_F(Suspend, WhatWaitsInTheOrderIsNotQuiet) {
  for (int i = 0; i < 3; ++i) submit(0);  // one more than the window
  pass();
  controller->suspend(0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(controller->is_quiet(0));
    EXPECT_EQ(next(), "run 0");
    done();
  }
  EXPECT_TRUE(controller->is_quiet(0));
}

TEST_F(Suspend, AClientThatLeavesSuspendedIsGone) {
  controller->suspend(0);
  submit(0);
  pass();
  controller->remove_client(0);
  pass();
  EXPECT_EQ(next(), "gone 0");
  EXPECT_EQ(next(), "");
  controller->resume(0);
  controller->suspend(0);
  EXPECT_TRUE(controller->is_quiet(0));
  controller->command_for(0, CommandKind::kOffload, {});
  EXPECT_EQ(controller->restore(0), "");
  pass();
  EXPECT_EQ(next(), "");
  EXPECT_TRUE(controller->is_idle());
}

TEST_F(Suspend, ClientsDoNotParkThemselves) {
  ASSERT_EQ(clients[0]->command(CommandKind::kOffload, 0, Handle{}, Handle{}, {}), Status::kOk);
  pass();
  clients[0]->poll_inbox();
  EXPECT_NE(clients[0]->cluster_failure().find("kind 7"), std::string::npos) << clients[0]->cluster_failure();
  EXPECT_EQ(next(), "gone 0");
}

}  // namespace
}  // namespace pathways::test::test_suspend
