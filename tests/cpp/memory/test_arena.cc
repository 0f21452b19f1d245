// memory/arena.h
//
//   ARENA-1 disjoint   ArenaTest.PayloadsAreAlignedAndDisjoint, ArenaTest.RandomStress
//   ARENA-2 counted    ArenaTest.LastReleaseFrees, ArenaTest.CountsAcrossProcesses, ArenaTest.OneReleaseTooManyAborts,
//                      ArenaTest.BorrowersReturnByName, ArenaTest.ALeaseTooManyAborts, ArenaTest.ThreadStress
//   ARENA-3 merged     ArenaTest.NeighboursMerge, ArenaTest.RandomStress
//   ARENA-4 fits       ArenaTest.FitsExactly, ArenaTest.FailsOnlyWhenFull
//   ARENA-5 leased      ArenaTest.WhatADeadBorrowerHeldIsReclaimed
//   trim               ArenaTrim.GivesPagesBack, ArenaTrim.GoesOnWhileOthersAllocate
#include "memory/arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "support.h"

namespace pathways::test::test_arena {
namespace {

constexpr std::size_t kBytes = 1 << 20;

class ArenaTest : public testing::Test {
 protected:
  std::uint64_t allocate(std::size_t bytes) {
    std::uint64_t offset = 0;
    EXPECT_EQ(arena->allocate(bytes, &offset), Status::kOk);
    return offset;
  }
  void TearDown() override { arena->validate(); }

  Segment memory = Segment::create("arena-test", kBytes);
  Arena* arena = Arena::create(memory.data(), memory.size());
};

TEST_F(ArenaTest, RefusesWrongMemory) {
  EXPECT_THROW(Arena::create(memory.data() + 8, 4096), Error);
  EXPECT_THROW(Arena::create(nullptr, kBytes), Error);
  EXPECT_THROW(Arena::create(memory.data(), Arena::min_bytes() - 1), Error);
  const Segment zeros = Segment::heap(kBytes);
  EXPECT_THROW(Arena::attach(zeros.data()), Error);
  Arena* smallest = Arena::create(zeros.data(), Arena::min_bytes());
  std::uint64_t offset = 0;
  EXPECT_EQ(smallest->allocate(64, &offset), Status::kOk);
  EXPECT_EQ(smallest->allocate(0, &offset), Status::kNoMemory);
  EXPECT_EQ(offset, 0U);
}

TEST_F(ArenaTest, PayloadsAreAlignedAndDisjoint) {
  std::vector<std::pair<std::uint64_t, std::size_t>> blocks;
  for (const std::size_t bytes : std::initializer_list<std::size_t>{0, 1, 63, 64, 65, 127, 1000, 4096, 100'000}) {
    const std::uint64_t offset = allocate(bytes);
    EXPECT_NE(offset, 0U);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(arena->at(offset)) % 64, 0U);
    EXPECT_GE(arena->block_bytes(offset), std::max<std::size_t>(bytes, 1));
    EXPECT_LT(arena->block_bytes(offset), bytes + 128);
    std::memset(arena->at(offset), static_cast<int>(blocks.size()), arena->block_bytes(offset));
    blocks.emplace_back(offset, arena->block_bytes(offset));
  }
  arena->validate();
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    for (std::size_t b = 0; b < blocks[i].second; ++b)
      ASSERT_EQ(arena->at(blocks[i].first)[b], static_cast<std::byte>(i));
  }
}

TEST_F(ArenaTest, LastReleaseFrees) {
  const std::uint64_t offset = allocate(1000);
  const std::uint64_t used = arena->bytes_in_use();
  EXPECT_EQ(used, 1024 + 64U);
  arena->retain(offset);
  EXPECT_EQ(arena->was_references(offset), 2U);
  arena->release(offset);
  EXPECT_EQ(arena->bytes_in_use(), used);
  arena->release(offset);
  EXPECT_EQ(arena->bytes_in_use(), 0U);
  EXPECT_EQ(arena->high_water(), used);
  EXPECT_EQ(allocate(1000), offset) << "the block is used again";
}

TEST_F(ArenaTest, OneReleaseTooManyAborts) {
  const std::uint64_t offset = allocate(10);
  arena->release(offset);
  EXPECT_DEATH(arena->release(offset), "check failed");
  EXPECT_DEATH(arena->retain(offset), "check failed");
  EXPECT_DEATH(static_cast<void>(arena->at(0)), "check failed");
  EXPECT_DEATH(static_cast<void>(arena->at(offset + 1)), "check failed");
  EXPECT_DEATH(static_cast<void>(arena->at(1 << 30)), "check failed");
}

TEST_F(ArenaTest, BorrowersReturnByName) {
  const std::uint64_t offset = allocate(100);
  arena->lease_out(offset, 0b1011, 1);
  EXPECT_EQ(arena->was_references(offset), 4U);
  arena->return_lease(offset, 1);
  arena->release(offset);
  arena->return_lease(offset, 0);
  EXPECT_EQ(arena->was_references(offset), 1U);
  EXPECT_NE(arena->bytes_in_use(), 0U);
  arena->return_lease(offset, 3);
  EXPECT_EQ(arena->bytes_in_use(), 0U);
  EXPECT_EQ(allocate(100), offset) << "and it may be lent again";
  arena->lease_out(offset, 1, 2);
  arena->validate();
}

TEST_F(ArenaTest, ALeaseTooManyAborts) {
  const std::uint64_t never = allocate(10), leased = allocate(10), ended = allocate(10), freed = allocate(10);
  arena->lease_out(leased, 0b1, 1);
  arena->lease_out(ended, 0b1, 2);
  arena->return_lease(ended, 0);
  arena->release(freed);
  EXPECT_DEATH(arena->lease_out(freed, 0b1, 3), "check failed");
  EXPECT_DEATH(arena->return_lease(leased, Arena::kBorrowers), "check failed");
  EXPECT_DEATH(arena->return_lease(never, 0), "check failed");
  EXPECT_DEATH(arena->return_lease(leased, 1), "check failed");
  EXPECT_DEATH(arena->return_lease(ended, 0), "check failed");
  EXPECT_DEATH(arena->lease_out(ended, 0b10, 4), "check failed") << "once in its life";
}

TEST_F(ArenaTest, WhatADeadBorrowerHeldIsReclaimed) {
  // Blocks lent to 0 and 1, the client's own reference gone: with stamps 1 to 6.
  std::uint64_t offsets[6];
  for (int i = 0; i < 6; ++i) {
    offsets[i] = allocate(1000);
    arena->lease_out(offsets[i], 0b11, static_cast<std::uint64_t>(i) + 1);
    arena->release(offsets[i]);
  }
  const std::uint64_t each = arena->bytes_in_use() / 6;
  arena->return_lease(offsets[0], 1);  // 1 has given one back, then it dies; it has heard of four
  arena->return_lease(offsets[1], 0);
  arena->reclaim(1, 4);
  EXPECT_EQ(arena->bytes_in_use(), 5 * each) << "only 1 still had the second block";
  EXPECT_EQ(arena->was_references(offsets[0]), 1U);
  EXPECT_EQ(arena->was_references(offsets[3]), 1U);
  EXPECT_EQ(arena->was_references(offsets[4]), 2U) << "that is for its successor";
  arena->reclaim(1, 4);
  EXPECT_EQ(arena->bytes_in_use(), 5 * each);
  for (const int i : {0, 2, 3, 4, 5}) arena->return_lease(offsets[i], 0);
  EXPECT_EQ(arena->bytes_in_use(), 2 * each);
  arena->validate();
  arena->reclaim(1, 6);
  EXPECT_EQ(arena->bytes_in_use(), 0U);
  EXPECT_NE(allocate(arena->max_block()), 0U);
}

// TRUST-1: offsets and lengths from messages.
TEST_F(ArenaTest, AViewFindsLiveBlocksAndNothingElse) {
  const ArenaView view(memory.data(), memory.size());
  std::uint64_t offset = 0;
  ASSERT_EQ(arena->allocate(1000, &offset), Status::kOk);
  EXPECT_EQ(view.find(offset, 1000), arena->at(offset));
  EXPECT_EQ(view.find(offset, 1024), arena->at(offset));
  EXPECT_EQ(view.find(offset, 1025), nullptr);
  for (const std::uint64_t wrong : {std::uint64_t{0}, std::uint64_t{64}, offset + 8, offset + 64, std::uint64_t{kBytes},
                                    std::uint64_t{1} << 40, UINT64_MAX - 63, UINT64_MAX}) {
    EXPECT_EQ(view.find(wrong, 1), nullptr) << wrong;
    EXPECT_FALSE(view.return_lease(wrong, 0)) << wrong;
    EXPECT_FALSE(view.release(wrong)) << wrong;
  }
  for (const std::uint64_t wrong : {UINT64_MAX, UINT64_MAX - offset, std::uint64_t{kBytes}}) {
    EXPECT_EQ(view.find(offset, wrong), nullptr) << wrong;
  }
  EXPECT_EQ(view.find_leased(offset, 1, 3), nullptr);
  arena->lease_out(offset, 1U << 3, 1);
  EXPECT_EQ(view.find_leased(offset, 1, 3), arena->at(offset));
  EXPECT_EQ(view.find_leased(offset, 1, 2), nullptr);
  EXPECT_EQ(view.find_leased(offset, 1, 63), nullptr);
  EXPECT_FALSE(view.return_lease(offset, 2));
  EXPECT_TRUE(view.return_lease(offset, 3));
  EXPECT_FALSE(view.return_lease(offset, 3));  // once
  EXPECT_EQ(view.find_leased(offset, 1, 3), nullptr);
  EXPECT_TRUE(view.release(offset));
  EXPECT_FALSE(view.release(offset));
  EXPECT_EQ(view.find(offset, 1), nullptr);
  EXPECT_EQ(arena->bytes_in_use(), 0U);
  EXPECT_THROW(ArenaView(memory.data(), Arena::min_bytes() - 1), Error);
  EXPECT_THROW(ArenaView(memory.data() + 64, kBytes - 64), Error);
}

TEST_F(ArenaTest, AViewStaysInsideWhatIsMapped) {
  Segment other = Segment::heap(kBytes);
  Arena* theirs = Arena::create(other.data(), kBytes);
  const ArenaView view(other.data(), kBytes);
  std::uint64_t offset = 0;
  ASSERT_EQ(theirs->allocate(64, &offset), Status::kOk);
  auto* words = reinterpret_cast<std::uint64_t*>(other.data());
  words[1] = 0, words[2] = UINT64_MAX;                                              // where blocks begin and end
  *reinterpret_cast<std::uint64_t*>(other.data() + offset - 64) = UINT64_MAX - 64;  // how long the block is
  EXPECT_EQ(view.find(offset, kBytes), nullptr);
  EXPECT_EQ(view.find(offset, kBytes - offset), other.data() + offset);  // its own bytes, whatever they are
  EXPECT_EQ(view.find(kBytes, 1), nullptr);
}

TEST_F(ArenaTest, NeighboursMerge) {
  std::uint64_t offsets[3];
  for (std::uint64_t& offset : offsets) offset = allocate(1000);
  const std::uint64_t wall = allocate(arena->max_block() - 3 * (1024 + 64) - 64);
  // In each order of release, what they leave is one block.
  int order[3] = {0, 1, 2};
  do {
    for (const int i : order) arena->release(offsets[i]);
    const std::uint64_t whole = allocate(3 * 1024 + 2 * 64);
    EXPECT_EQ(whole, offsets[0]);
    arena->release(whole);
    for (std::uint64_t& offset : offsets) offset = allocate(1000);
    arena->validate();
  } while (std::next_permutation(order, order + 3));
  for (const std::uint64_t offset : offsets) arena->release(offset);
  arena->release(wall);
  EXPECT_NE(allocate(arena->max_block()), 0U);
}

TEST_F(ArenaTest, FitsExactly) {
  const std::uint64_t all = allocate(arena->max_block());
  std::uint64_t offset = 0;
  EXPECT_EQ(arena->allocate(1, &offset), Status::kNoMemory);
  EXPECT_EQ(arena->allocate(arena->max_block() + 1, &offset), Status::kInvalid);
  EXPECT_EQ(arena->allocate(SIZE_MAX, &offset), Status::kInvalid);
  arena->release(all);
  EXPECT_EQ(arena->bytes_in_use(), 0U);
  EXPECT_EQ(arena->high_water(), arena->capacity());
}

TEST_F(ArenaTest, FailsOnlyWhenFull) {
  // Two holes of one size class (16,384 to 17,407 bytes with their headers) are all that is free. The first that the
  // class lists is too small; the request fits the other only.
  constexpr std::size_t kLarge = 17'280;
  constexpr std::size_t kSmall = 16'384;
  const std::uint64_t large = allocate(kLarge);
  allocate(64);
  const std::uint64_t small = allocate(kSmall);
  std::uint64_t offset = 0;
  while (arena->allocate(1, &offset) == Status::kOk) {
  }
  arena->release(small);
  arena->release(large);
  EXPECT_EQ(allocate(kLarge), large);
  EXPECT_EQ(arena->allocate(kLarge, &offset), Status::kNoMemory);
  EXPECT_EQ(allocate(kSmall), small);
}

TEST_F(ArenaTest, RandomStress) {
  std::mt19937_64 random(test::seed());
  struct Live {
    std::uint64_t offset;
    std::size_t bytes;
    int mark;
  };
  std::vector<Live> live;
  int mark = 0;
  for (int step = 0; step < 6'000 * test::kStressScale; ++step) {
    if (random() % 100 < 55) {
      const std::size_t bytes = random() % (std::size_t{1} << (random() % 17));
      std::uint64_t offset = 0;
      const Status status = arena->allocate(bytes, &offset);
      if (status == Status::kOk) {
        std::memset(arena->at(offset), ++mark & 0xff, bytes);
        live.push_back({offset, bytes, mark & 0xff});
      } else {
        ASSERT_EQ(status, Status::kNoMemory);
      }
    } else if (!live.empty()) {
      const std::size_t at = random() % live.size();
      const Live gone = live[at];
      const std::byte* payload = arena->at(gone.offset);
      for (std::size_t b = 0; b < gone.bytes; b += 61) ASSERT_EQ(payload[b], static_cast<std::byte>(gone.mark));
      arena->release(gone.offset);
      live[at] = live.back();
      live.pop_back();
    }
    if (step % 500 == 0) arena->validate();
  }
  for (const Live& each : live) arena->release(each.offset);
  EXPECT_EQ(arena->bytes_in_use(), 0U);
  arena->validate();
  EXPECT_NE(allocate(arena->max_block()), 0U) << "one free block is left";
}

TEST_F(ArenaTest, ThreadStress) {
  const test::Watchdog watchdog("ArenaTest.ThreadStress");
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(test::seed() + static_cast<std::uint64_t>(t));
      for (int i = 0; i < 4'000 * test::kStressScale; ++i) {
        std::uint64_t offset = 0;
        const std::size_t bytes = 8 + random() % 5000;
        if (arena->allocate(bytes, &offset) != Status::kOk) continue;
        std::memset(arena->at(offset), t, bytes);
        arena->retain(offset);
        arena->release(offset);
        for (std::size_t b = 0; b < bytes; b += 97) {
          if (arena->at(offset)[b] != static_cast<std::byte>(t)) std::abort();
        }
        arena->release(offset);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(arena->bytes_in_use(), 0U);
}

TEST_F(ArenaTest, CountsAcrossProcesses) {
  constexpr int kBlocks = 200;
  std::vector<std::uint64_t> offsets;
  for (int i = 0; i < kBlocks; ++i) {
    offsets.push_back(allocate(1000));
    std::memset(arena->at(offsets.back()), i & 0xff, 1000);
    arena->retain(offsets.back());  // the child's reference
  }
  test::Child child([&] {
    const Segment mine = test::second_view(memory);
    Arena* view = Arena::attach(mine.data());
    for (int i = 0; i < kBlocks; ++i) {
      const std::uint64_t offset = offsets[static_cast<std::size_t>(i)];
      if (view->at(offset)[999] != static_cast<std::byte>(i & 0xff)) return 1;
      view->release(offset);
    }
    return 0;
  });
  const test::Watchdog watchdog("CountsAcrossProcesses");
  for (const std::uint64_t offset : offsets) arena->release(offset);
  EXPECT_EQ(child.wait(), 0);
  EXPECT_EQ(arena->bytes_in_use(), 0U) << "whoever was last gave it back";
  EXPECT_NE(allocate(arena->max_block()), 0U);
}

/// What is trimmed reads as zeros afterwards, so its pages are gone; nothing else changes.
void trims(Segment memory, const char* how) {
  SCOPED_TRACE(how);
  constexpr std::size_t kBlock = 3 << 20;
  Arena* arena = Arena::create(memory.data(), memory.size());
  std::vector<std::uint64_t> offsets(8);
  for (std::uint64_t& offset : offsets) {
    ASSERT_EQ(arena->allocate(kBlock + 64, &offset), Status::kOk);
    std::memset(arena->at(offset), 7, arena->block_bytes(offset));
  }
  const auto count = [&](std::uint64_t offset, int value) {
    const std::byte* data = arena->at(offset);
    return std::count(data, data + arena->block_bytes(offset), static_cast<std::byte>(value));
  };
  for (const std::size_t kept : {std::size_t{1}, std::size_t{4}}) arena->retain(offsets[kept]);
  for (const std::uint64_t offset : offsets) arena->release(offset);
  std::uint64_t bytes = 0;
  for (std::uint64_t at = arena->trim(0, &bytes); at != 0;) at = arena->trim(at, &bytes);
  arena->validate();
  EXPECT_GT(bytes, 5 * kBlock);
  for (const std::size_t kept : {std::size_t{1}, std::size_t{4}}) {
    EXPECT_EQ(count(offsets[kept], 7), static_cast<std::ptrdiff_t>(arena->block_bytes(offsets[kept])));
    arena->release(offsets[kept]);
  }
  std::uint64_t whole = 0;
  ASSERT_EQ(arena->allocate(arena->max_block(), &whole), Status::kOk);
  EXPECT_LT(count(whole, 7), static_cast<std::ptrdiff_t>(3 * kBlock));
  arena->release(whole);
}

TEST(ArenaTrim, GivesPagesBack) {
  trims(Segment::create("arena-trim", 32 << 20), "shared");
  trims(Segment::heap(32 << 20), "private");
}

TEST(ArenaTrim, GoesOnWhileOthersAllocate) {
  const test::Watchdog watchdog("GoesOnWhileOthersAllocate");
  const Segment memory = Segment::create("arena-trim", 32 << 20);
  Arena* arena = Arena::create(memory.data(), memory.size());
  std::thread other([&] {
    for (std::uint32_t i = 0; i < 300; ++i) {
      std::uint64_t offset = 0;
      ASSERT_EQ(arena->allocate(100'000 + i * 3000, &offset), Status::kOk);
      const std::size_t bytes = arena->block_bytes(offset);
      std::memset(arena->at(offset), static_cast<int>(i & 0xff), bytes);
      for (std::size_t b = 0; b < bytes; b += 1000) ASSERT_EQ(arena->at(offset)[b], static_cast<std::byte>(i & 0xff));
      arena->release(offset);
    }
  });
  for (int round = 0; round < 100; ++round) {
    std::uint64_t bytes = 0;
    for (std::uint64_t at = arena->trim(0, &bytes); at != 0;) at = arena->trim(at, &bytes);
  }
  other.join();
  arena->validate();
}

}  // namespace
}  // namespace pathways::test::test_arena
