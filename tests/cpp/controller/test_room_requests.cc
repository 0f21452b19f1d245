// SUSP-2: work that only live buffers keep out asks for room, until somebody leaves for it or nobody can.
#include <array>

#include "controller/played.h"
#include "support.h"

namespace pathways::test::test_room_requests {
namespace {

/// One memory space of 100 bytes, and two clients: 0 (`good`) and 1 (`other`).
struct RoomRequests : Cluster {
  RoomRequests() : Cluster(2, 2, {100}, PolicyKind::kFifo, true) {
    set = controller->add_space_set({0});
    other = std::make_unique<Client>(Client::Options{1, 8}, other_memory.block, block);
    controller->add_client(1, other_memory.block);
  }
  ~RoomRequests() override { controller->remove_client(1); }
  uint64_t put(Client& client, uint64_t bytes) {
    Handle handle;
    EXPECT_EQ(client.allocate(1, &handle), Status::kOk);
    EXPECT_EQ(client.command(CommandKind::kPut, 1, handle, {}, {}, set, bytes), Status::kOk);
    pass();
    return handle.raw;
  }
  /// Passes until somebody asks for room.
  std::vector<RoomRequest> wait_for_request() {
    const Watchdog watchdog("a request for room");
    for (;;) {
      pass();
      std::vector<RoomRequest> found = controller->room_requests({});
      if (!found.empty()) return found;
      let_pass(5ms);
    }
  }
  uint64_t held() const { return controller->stats().held; }
  uint64_t live() const { return controller->stats().live_bytes[0]; }

  SpaceSetId set = 0;
  RawClient other_memory;
  std::unique_ptr<Client> other;
};

TEST_F(RoomRequests, NameWhoHoldsTheMemoryAndEndWhenThereIsRoom) {
  put(*good, 60);
  put(*other, 60);
  EXPECT_TRUE(controller->room_requests({}).empty());  // its grace is not over
  const auto found = wait_for_request();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].client, 1u);
  EXPECT_FALSE(found[0].has_room);
  EXPECT_EQ(found[0].holders, (std::vector<uint32_t>{0}));
  for (int i = 0; i < 120; ++i) {  // more than two graces: it is not refused meanwhile
    let_pass(5ms);
    pass();
  }
  EXPECT_EQ(controller->stats().refused, 0u);

  controller->suspend(0);
  controller->offload(0);
  pass();
  EXPECT_EQ(held(), 0u);
  EXPECT_EQ(live(), 60u);
  EXPECT_TRUE(controller->room_requests({}).empty());
}

TEST_F(RoomRequests, AreRefusedWhenNobodyCanLeave) {
  put(*good, 60);
  const uint64_t second = put(*other, 60);
  wait_for_request();
  controller->refuse_room(1);
  EXPECT_TRUE(controller->room_requests({}).empty());
  const Watchdog watchdog("a refusal");
  while (controller->stats().refused == 0) {
    pass();
    let_pass(5ms);
  }
  other->poll_inbox();
  EXPECT_NE(other->error_of(Handle{second}).find("60 bytes are held there by live arrays"), std::string::npos);
  put(*other, 60);  // what comes next asks again
  EXPECT_EQ(wait_for_request().at(0).client, 1u);
}

TEST_F(RoomRequests, ASuspendedClientWithWorkAsksToComeBack) {
  const std::vector<uint32_t> away{0};
  const uint64_t mine = put(*good, 60);
  controller->suspend(0);
  controller->offload(0);
  EXPECT_TRUE(controller->room_requests(away).empty());  // it has no work
  const uint64_t theirs = put(*other, 60);
  uint64_t result = 0;
  ASSERT_EQ(good->submit({6, 1, {1}}, std::array{mine}, &result), Status::kOk);
  pass();
  auto found = controller->room_requests(away);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].client, 0u);
  EXPECT_FALSE(found[0].has_room);
  EXPECT_EQ(found[0].holders, (std::vector<uint32_t>{1}));

  other->release(Handle{theirs}, 1, uint64_t{1} << 30);
  pass();
  found = controller->room_requests(away);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_TRUE(found[0].has_room);
  EXPECT_EQ(live(), 0u);
  EXPECT_EQ(controller->restore(0), "");
  EXPECT_EQ(live(), 60u);
  controller->resume(0);
  pass();
  EXPECT_TRUE(controller->room_requests({}).empty());
  EXPECT_EQ(live(), 60u);
}

TEST_F(RoomRequests, ADroppedRecordAsksNoMore) {
  controller->set_plan_memory(5, {1, "big", {}, {{0, 60, 0}}, {{1, set, 60, -1, -1}}, {}});
  put(*good, 60);
  uint64_t result = 0;
  ASSERT_EQ(other->submit({5, 1, {1}}, {}, &result), Status::kOk);
  wait_for_request();
  EXPECT_EQ(other->cancel(other->last_tag(), std::array{result}, "dropped"), Status::kOk);
  pass();
  EXPECT_TRUE(controller->room_requests({}).empty());
  EXPECT_EQ(held(), 0u);
}

}  // namespace
}  // namespace pathways::test::test_room_requests
