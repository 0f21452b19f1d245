// Hosts that the test loses and restores, between a client and a controller.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "controller/played.h"

namespace pathways::test {

inline constexpr const char* kWhy = "HostLostError: host 1 was killed";

/// Hosts 0 and 1, each an island, and 2, which knows neither. Groups: 1 = {0}, 2 = {0, 1}, 3 = {1}, 4 = {2}.
struct Loss : Cluster {
  Loss() : Cluster(2, 3) {
    controller->add_group(3, {1});
    controller->add_group(4, {2});
  }
  void lose(uint32_t h) { EXPECT_EQ(controller->lose_hosts({h}, kWhy), ++losses); }
  void restore(uint32_t h, const std::vector<uint32_t>& gone = {}) {
    auto fresh = std::make_unique<PlayedHost>(h, 3, block);
    controller->restore_host(h, fresh->block, gone);
    hosts[h] = std::move(fresh);  // the old memory goes: nobody may touch it
  }
  uint64_t put(GroupId group) {
    Handle handle;
    EXPECT_EQ(good->allocate(1, &handle), Status::kOk);
    EXPECT_EQ(good->command(CommandKind::kPut, group, handle, {}, {}), Status::kOk);
    return handle.raw;
  }
  uint64_t fetch(uint64_t what, GroupId group) {
    Handle token;
    EXPECT_EQ(good->allocate(1, &token), Status::kOk);
    EXPECT_EQ(good->command(CommandKind::kFetch, group, Handle{what}, token, {}), Status::kOk);
    return token.raw;
  }
  void complete(uint64_t raw) {
    while (good_memory.block->futures()->complete(Handle{raw}) == Completion::kPending) {
    }
  }
  FutureState state(uint64_t raw) {
    good->poll_inbox();
    return good->poll(Handle{raw});
  }
  std::string why(uint64_t raw) { return state(raw) == FutureState::kFailed ? good->error_of(Handle{raw}) : ""; }
  uint64_t losses = 0;
};

}  // namespace pathways::test
