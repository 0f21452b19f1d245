// Memory for blocks that come from another machine: hosts return them in any order, and free pages go back.
//
//   TRUST-1  ReceivedArenas.AHostThatWritesNonsense
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "link/received_arena.h"
#include "memory/segment.h"
#include "support.h"

namespace pathways::test::test_received_arena {
namespace {

constexpr size_t kBytes = size_t{8} << 20;
constexpr uint64_t kHeader = 64;

struct ReceivedArenas : testing::Test {
  uint64_t make(uint64_t bytes, std::vector<uint32_t> hosts, uint64_t stamp = 0) {
    return arena.make(bytes, hosts, stamp);
  }
  /// Bytes of memory that the segment takes.
  size_t resident() {
    std::vector<unsigned char> pages(kBytes / 4096);
    EXPECT_EQ(::mincore(segment.data(), kBytes, pages.data()), 0);
    return static_cast<size_t>(std::ranges::count_if(pages, [](unsigned char page) { return (page & 1) != 0; })) * 4096;
  }
  Segment segment = Segment::create("arena", kBytes);
  ReceivedArena arena{Arena::create(segment.data(), kBytes), kBytes};
  ArenaView view{segment.data(), kBytes};
};

TEST_F(ReceivedArenas, ABlockIsThereUntilAllAreDoneWithIt) {
  const uint64_t at = make(1000, {0, 3, 60});
  ASSERT_NE(at, 0u);
  EXPECT_NE(view.find_leased(at, 1000, 3), nullptr);
  EXPECT_EQ(view.find_leased(at, 1000, 1), nullptr);
  EXPECT_TRUE(view.return_lease(at, 0));
  EXPECT_TRUE(view.return_lease(at, 3));
  arena.drop(at);
  EXPECT_NE(arena.collect(), 0u);
  EXPECT_TRUE(view.release(at));
  EXPECT_EQ(arena.collect(), 0u);
  EXPECT_EQ(view.find(at, 1), nullptr);
  // The maker may be the last.
  const uint64_t again = make(1000, {0});
  EXPECT_TRUE(view.return_lease(again, 0));
  EXPECT_NE(arena.collect(), 0u);
  EXPECT_NE(make(1000, {0}), again);
  arena.drop(again);
  EXPECT_EQ(make(1000, {0}), again);
}

TEST_F(ReceivedArenas, WhatFindsNoRoom) {
  EXPECT_EQ(make(kBytes, {0}), 0u);
  EXPECT_EQ(make(UINT64_MAX, {0}), 0u);
  EXPECT_EQ(make(UINT64_MAX - 127, {0}), 0u);
  EXPECT_EQ(make(1, {}), 0u);
  const uint64_t most = make(kBytes - (64 << 10), {0});
  ASSERT_NE(most, 0u);
  EXPECT_EQ(make(64 << 10, {0}), 0u);
  arena.drop(most);
  EXPECT_TRUE(view.return_lease(most, 0));
  EXPECT_EQ(make(kBytes - (64 << 10), {0}), most);  // found out when it is needed
}

TEST_F(ReceivedArenas, WhatALostHostHad) {
  const uint64_t old = make(100, {1, 2}, 5), young = make(100, {1}, 6), stampless = make(100, {1});
  for (const uint64_t each : {old, young, stampless}) arena.drop(each);
  EXPECT_TRUE(view.return_lease(old, 2));
  arena.reclaim(1, 5);
  (void)arena.collect();
  EXPECT_EQ(view.find(old, 1), nullptr);
  EXPECT_NE(view.find_leased(young, 1, 1), nullptr);
  EXPECT_NE(view.find_leased(stampless, 1, 1), nullptr);
}

/// What a host writes into the headers takes no memory from a block that its maker still fills.
TEST_F(ReceivedArenas, AHostThatWritesNonsense) {
  const uint64_t first = make(1000, {0}), second = make(1000, {0});
  EXPECT_TRUE(view.return_lease(first, 0));
  EXPECT_TRUE(view.return_lease(second, 0));
  std::memset(arena.at(first) - kHeader + 32, 0xff, 8);  // the next in the list of what was returned
  std::memset(arena.at(second) - kHeader + 32, 0xff, 8);
  (void)arena.collect();
  const uint64_t made[] = {make(1000, {0}), make(1000, {0})};
  for (const uint64_t each : made) EXPECT_TRUE(each != 0 && each != first && each != second);
  arena.drop(first);
  arena.drop(first);
  arena.drop(second);
  EXPECT_NE(arena.collect(), 0u);  // the two that were made
  for (const uint64_t each : made) {
    arena.drop(each);
    EXPECT_TRUE(view.return_lease(each, 0));
  }
  EXPECT_EQ(arena.collect(), 0u);
}

/// Against a model: no two blocks overlap, bytes stay, and all memory comes back, its pages too.
TEST_F(ReceivedArenas, RandomBlocks) {
  std::mt19937_64 random(seed());
  const auto below = [&](uint64_t n) { return random() % n; };
  struct Block {
    std::vector<std::byte> value;
    std::vector<uint32_t> hosts;
    bool is_held = true;
  };
  std::map<uint64_t, Block> blocks;
  const auto check = [&](uint64_t at, const Block& block) {
    return std::memcmp(arena.at(at), block.value.data(), block.value.size()) == 0;
  };
  uint64_t made = 0;
  const auto step = [&](bool may_make) {
    if (may_make && below(2) == 0) {
      std::vector<uint32_t> hosts;
      for (const uint32_t host : {0u, 5u, 47u, 48u}) {
        if (below(2) == 0) hosts.push_back(host);
      }
      Block block{pattern(1 + below(below(4) == 0 ? 900'000 : 5'000), random()), hosts};
      const uint64_t at = make(block.value.size(), hosts);
      ASSERT_TRUE(at == 0 || !hosts.empty());
      if (at == 0) return;
      ++made;
      std::memcpy(arena.at(at), block.value.data(), block.value.size());
      const auto after = blocks.upper_bound(at);
      ASSERT_TRUE(after == blocks.end() || at + block.value.size() + kHeader <= after->first);
      ASSERT_TRUE(after == blocks.begin() || std::prev(after)->first + std::prev(after)->second.value.size() <= at);
      ASSERT_TRUE(blocks.emplace(at, std::move(block)).second);
    } else if (!blocks.empty()) {
      auto found = blocks.begin();
      std::advance(found, static_cast<std::ptrdiff_t>(below(blocks.size())));
      auto& [at, block] = *found;
      ASSERT_TRUE(check(at, block));
      if (block.is_held && (block.hosts.empty() || below(2) == 0)) {
        arena.drop(at);
        block.is_held = false;
      } else if (!block.hosts.empty()) {
        const uint32_t host = block.hosts.back();
        block.hosts.pop_back();
        ASSERT_TRUE(host < Arena::kBorrowers ? view.return_lease(at, host) : view.release(at));
      }
      if (!block.is_held && block.hosts.empty()) blocks.erase(found);
    }
    if (below(3) == 0) (void)arena.collect();
    if (below(5) == 0) (void)arena.trim();
  };
  for (int i = 0; i < 4000 * kStressScale && !HasFatalFailure(); ++i) step(true);
  for (const auto& [at, block] : blocks) ASSERT_TRUE(check(at, block));
  while (!blocks.empty() && !HasFatalFailure()) step(false);
  EXPECT_GT(made, 500u);
  EXPECT_EQ(arena.collect(), 0u);
  while (arena.trim()) {
  }
  EXPECT_LE(resident(), size_t{8} * 4096);
}

}  // namespace
}  // namespace pathways::test::test_received_arena
