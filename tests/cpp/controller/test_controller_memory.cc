// What the controller does with records for which there is no memory now.
//
//   MEM-2  Held.*: they wait, and what their client sends waits behind them; a release goes ahead only of buffers that
//          none of them names; Held.SmallOnesDoNotStarveABigOne
//   MEM-1  Held.AHandleThatIsNamedAgainGivesBackWhatItMeant
//   MEM-3  Held.IsRefusedAfterItsGrace, Held.WhatNeverFitsIsRefusedAtOnce
#include <deque>
#include <thread>

#include "controller/played.h"
#include "support.h"

namespace pathways::test::test_controller_memory {
namespace {

/// One place of 100 bytes.
struct Held : Cluster {
  Held() : Cluster(2, 2, {100}) { set = controller->add_space_set({0}); }

  uint64_t put(uint64_t bytes) {
    Handle handle;
    EXPECT_EQ(good->allocate(1, &handle), Status::kOk);
    EXPECT_EQ(good->command(CommandKind::kPut, 1, handle, {}, {}, set, bytes), Status::kOk);
    pass();
    return handle.raw;
  }
  void release(uint64_t handle) {
    good->release(Handle{handle}, 1, uint64_t{1} << 30);  // big: it is sent at once
    pass();
  }
  void rename(uint64_t name, uint64_t fresh) {
    const uint64_t pair[] = {name, fresh};
    EXPECT_EQ(good->command(CommandKind::kRename, 1, {}, {}, std::as_bytes(std::span{pair})), Status::kOk);
    pass();
  }
  /// The next command that the host hears, as "kind:handle" ("kind:first word" where it has no handle), or "".
  std::string next() {
    const auto bytes = hosts[0]->next();
    if (bytes.empty()) return {};
    const auto header = read_record<RecordHeader>(bytes);
    if (header.kind == RecordKind::kRun) {
      run = read_record<RunRecord>(bytes);
      return "run";
    }
    const auto command = read_record<CommandRecord>(bytes);
    uint64_t named = command.handle;
    if (named == 0 && command.bytes != 0) std::memcpy(&named, bytes.data() + sizeof command, sizeof named);
    return std::to_string(header.detail) + ":" + std::to_string(named) + (command.is_refused != 0 ? " refused" : "");
  }
  static std::string said(CommandKind kind, uint64_t handle) {
    return std::to_string(static_cast<int>(kind)) + ":" + std::to_string(handle);
  }

  SpaceSetId set = 0;
  RunRecord run{};  ///< the last that the host heard of
};

TEST_F(Held, AReleaseOfWhatNobodyNamesMakesRoom) {
  const uint64_t first = put(60), second = put(60);
  EXPECT_EQ(next(), said(CommandKind::kPut, first));
  EXPECT_EQ(next(), "");
  EXPECT_EQ(controller->stats().held, 1u);
  release(first);
  EXPECT_EQ(next(), said(CommandKind::kRelease, first));
  EXPECT_EQ(next(), said(CommandKind::kPut, second));
  EXPECT_EQ(controller->stats().held, 0u);
  EXPECT_EQ(controller->stats().live_bytes, (std::vector<uint64_t>{60}));
}

TEST_F(Held, WhatAHeldRunNamesIsReleasedBehindIt) {
  const uint64_t spare = put(20), first = put(60), second = put(40);
  uint64_t result = 0;
  ASSERT_EQ(good->submit({5, 1, {1}}, std::array{first}, &result), Status::kOk);
  pass();
  release(first);
  EXPECT_EQ(next(), said(CommandKind::kPut, spare));
  EXPECT_EQ(next(), said(CommandKind::kPut, first));
  EXPECT_EQ(next(), "");  // the run comes before the release, and the put before the run
  release(spare);
  EXPECT_EQ(next(), said(CommandKind::kRelease, spare));
  EXPECT_EQ(next(), said(CommandKind::kPut, second));
  EXPECT_EQ(next(), "run");
  EXPECT_EQ(next(), said(CommandKind::kRelease, first));
}

TEST_F(Held, AReleaseWaitsForThoseThatNameTheBufferNotForOthers) {
  // The last put waits for the very memory that the release behind it releases.
  controller->set_plan_memory(5, {0, "five", {}, {{0, 30, 0}}, {{1, set, 10, -1, -1}}, {}});
  const uint64_t first = put(60), spare = put(20);
  uint64_t result = 0;
  ASSERT_EQ(good->submit({5, 1, {1}}, std::array{first}, &result), Status::kOk);
  pass();
  const uint64_t last = put(50);
  release(first);
  for (const uint64_t handle : {first, spare}) EXPECT_EQ(next(), said(CommandKind::kPut, handle));
  EXPECT_EQ(next(), "");  // the run wants 30 of the 20 that are left
  release(spare);
  EXPECT_EQ(next(), said(CommandKind::kRelease, spare));
  EXPECT_EQ(next(), "run");
  EXPECT_EQ(next(), said(CommandKind::kRelease, first));
  EXPECT_EQ(next(), "");  // the run is not over, and the put would come before it
  EXPECT_EQ(controller->stats().held, 1u);
  hosts[0]->done(run);
  pass();
  EXPECT_EQ(next(), said(CommandKind::kPut, last));
  EXPECT_EQ(controller->stats().live_bytes, (std::vector<uint64_t>{60}));
}

TEST_F(Held, WhatADroppedRunWasGivenIsReleasedInItsPlace) {
  controller->set_plan_memory(5, {0, "five", {}, {{0, 10, 0}}, {{1, set, 10, -1, -1}}, {0}});
  const uint64_t given = put(60);
  EXPECT_EQ(next(), said(CommandKind::kPut, given));
  uint64_t result = 0;
  for (int i = 0; i < 2; ++i) {  // the window is 2
    ASSERT_EQ(good->submit({9, 1, {1}}, {}, &result), Status::kOk);
    pass();
    EXPECT_EQ(next(), "run");
  }
  ASSERT_EQ(good->submit({5, 1, {1}}, std::array{given}, &result), Status::kOk);
  pass();
  EXPECT_EQ(controller->stats().live_bytes[0], 10u);  // the run's result, in the place of what it takes over
  ASSERT_EQ(good->cancel(good->last_tag(), std::array{result}, "enough"), Status::kOk);
  pass();
  EXPECT_EQ(next(), said(CommandKind::kRelease, given));
  EXPECT_EQ(next(), said(CommandKind::kFail, result));
  EXPECT_EQ(next(), "");
}

TEST_F(Held, WhatARefusedRunWasGivenIsReleased) {  // the client has forgotten it
  controller->set_plan_memory(5, {0, "five", {}, {{0, 1000, 0}}, {{1, set, 10, -1, -1}}, {0}});  // it never fits
  controller->set_plan_memory(6, {0, "six", {}, {{0, 10, 0}}, {{1, set, 10, -1, -1}}, {0}});
  uint64_t result = 0;
  const uint64_t refused = put(20), late = put(20);
  for (int i = 0; i < 2; ++i) EXPECT_NE(next(), "");
  ASSERT_EQ(good->submit({5, 1, {1}}, std::array{refused}, &result), Status::kOk);
  pass();
  EXPECT_EQ(next(), said(CommandKind::kFail, result));
  EXPECT_EQ(next(), said(CommandKind::kRelease, refused));
  const ErrorText text = std::make_shared<const std::string>("too late");
  ASSERT_EQ(good->submit({6, 1, {1}}, std::array{late}, &result, {}, 1, &text), Status::kOk);
  pass();
  EXPECT_EQ(next(), said(CommandKind::kFail, result));
  EXPECT_EQ(next(), said(CommandKind::kRelease, late));
  EXPECT_EQ(controller->stats().live_bytes[0], 0u);
}

TEST_F(Held, WhatAHeldRenameNamesIsReleasedBehindIt) {
  const uint64_t spare = put(20), name = put(30), fresh = put(30), second = put(40);
  for (int i = 0; i < 3; ++i) EXPECT_NE(next(), "");
  rename(name, fresh);
  release(name);
  EXPECT_EQ(next(), "");
  release(spare);
  EXPECT_EQ(next(), said(CommandKind::kRelease, spare));
  EXPECT_EQ(next(), said(CommandKind::kPut, second));
  EXPECT_EQ(next(), said(CommandKind::kRename, name));
  EXPECT_EQ(next(), said(CommandKind::kRelease, name));
  EXPECT_EQ(controller->stats().live_bytes, (std::vector<uint64_t>{40}));
}

TEST_F(Held, IsRefusedAfterItsGrace) {
  const uint64_t first = put(60), second = put(60);
  EXPECT_EQ(next(), said(CommandKind::kPut, first));
  let_pass(249ms);
  pass();
  EXPECT_EQ(controller->stats().refused, 0u);
  for (int i = 0; i < 200 && controller->stats().refused == 0; ++i) {
    let_pass(5ms);
    pass();
  }
  EXPECT_EQ(next(), said(CommandKind::kPut, second) + " refused");  // releases what it holds of the client's memory
  EXPECT_EQ(next(), said(CommandKind::kFail, second));
  good->poll_inbox();
  EXPECT_NE(good->error_of(Handle{second}).find("60 bytes are held there by live arrays"), std::string::npos);
  EXPECT_EQ(controller->stats().live_bytes, (std::vector<uint64_t>{60}));
}

TEST_F(Held, WhatNeverFitsIsRefusedAtOnce) {
  const uint64_t big = put(101);
  EXPECT_EQ(next(), said(CommandKind::kPut, big) + " refused");
  EXPECT_EQ(next(), said(CommandKind::kFail, big));
  good->poll_inbox();
  EXPECT_NE(good->error_of(Handle{big}).find("It can never fit"), std::string::npos);
}

TEST_F(Held, SmallOnesDoNotStarveABigOne) {
  // Another client keeps four runs ahead of its reader, and releases each result when it is there.
  const Watchdog watchdog("a big run beside small ones");
  controller->set_plan_memory(5, {0, "big", {}, {{0, 50, 0}}, {{1, set, 50, -1, -1}}, {}});
  controller->set_plan_memory(6, {1, "small", {}, {{0, 25, 0}}, {{1, set, 25, -1, -1}}, {}});
  RawClient other_memory;
  Client other(Client::Options{1, 8}, other_memory.block, block);
  controller->add_client(1, other_memory.block);
  std::deque<uint64_t> results;
  std::deque<RunRecord> running;
  uint64_t big = 0, small_runs = 0;
  bool has_run = false;
  const auto play = [&] {
    for (auto bytes = hosts[0]->next(); !bytes.empty(); bytes = hosts[0]->next()) {
      const auto header = read_record<RecordHeader>(bytes);
      if (header.kind == RecordKind::kCommand) {  // FLOW-1: a host says what it is done with
        hosts[0]->say(CommandsDoneRecord{{RecordKind::kCommandsDone, 0, header.client}, 1, bytes.size()});
      }
      if (header.kind != RecordKind::kRun) continue;
      const auto record = read_record<RunRecord>(bytes);
      has_run = has_run || record.header.client == 0;
      running.push_back(record);
    }
  };
  while (!has_run) {
    while (results.size() < 4) {
      uint64_t result = 0;
      ASSERT_EQ(other.submit({6, 1, {1}}, {}, &result), Status::kOk);
      results.push_back(result);
      pass();
    }
    if (++small_runs == 10) {
      ASSERT_EQ(good->submit({5, 1, {1}}, {}, &big), Status::kOk);
      pass();
    }
    play();
    let_pass(100us);  // a small run takes so long
    if (!running.empty() && running.front().header.client == 1) {
      hosts[0]->done(running.front());
      running.pop_front();
      pass();
      other.release(Handle{results.front()}, 1, uint64_t{1} << 30);
      results.pop_front();
      other.poll_inbox();
    }
    pass();
    play();
  }
  EXPECT_GT(small_runs, 10u);
  EXPECT_EQ(controller->stats().refused, 0u);
  controller->remove_client(1);
}

TEST_F(Held, AHandleThatIsNamedAgainEndsItsClient) {  // MEM-7: a host of the first put may keep it
  const uint64_t first = put(60);
  EXPECT_EQ(good->command(CommandKind::kPut, 1, Handle{first}, {}, {}, set, 30), Status::kOk);
  pass();
  good->poll_inbox();
  EXPECT_NE(good->cluster_failure().find("in the place of a buffer that it has not released"), std::string::npos);
  EXPECT_EQ(controller->stats().live_bytes, (std::vector<uint64_t>{0}));
}

}  // namespace
}  // namespace pathways::test::test_controller_memory
