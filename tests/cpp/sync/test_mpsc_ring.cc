// sync/mpsc_ring.h
//   MPSC-1 once, MPSC-2 order   MpscRing.ThreadStress, MpscRing.AcrossProcesses; all interleavings: tests/model
//   MPSC-3 full                 MpscRing.FullAndEmpty, MpscRing.Wraps
//   trust                       MpscRing.RefusesWrongMemory
#include "sync/mpsc_ring.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "support.h"

namespace pathways {
namespace {

struct Record {
  std::uint32_t producer;
  std::uint32_t number;
  std::uint64_t check;
};
using Ring = MpscRing<Record>;

Record record(std::uint32_t producer, std::uint32_t number) {
  return {producer, number, (std::uint64_t{producer} << 32) ^ ~std::uint64_t{number}};
}
bool is_whole(const Record& r) { return r.check == record(r.producer, r.number).check; }

TEST(MpscRing, FullAndEmpty) {
  const Segment memory = Segment::heap(Ring::bytes_for(4));
  Ring* ring = Ring::create(memory.data(), 4);
  Record out{};
  EXPECT_TRUE(ring->was_empty());
  EXPECT_FALSE(ring->try_pop(out));
  for (std::uint32_t i = 0; i < 4; ++i) EXPECT_TRUE(ring->try_push(record(0, i)));
  EXPECT_FALSE(ring->try_push(record(0, 4)));
  EXPECT_FALSE(ring->was_empty());
  ring->validate();
  EXPECT_TRUE(ring->try_pop(out));
  EXPECT_EQ(out.number, 0U);
  EXPECT_TRUE(ring->try_push(record(0, 4)));
  EXPECT_FALSE(ring->try_push(record(0, 5)));
  for (std::uint32_t i = 1; i < 5; ++i) {
    ASSERT_TRUE(ring->try_pop(out));
    EXPECT_EQ(out.number, i);
    EXPECT_TRUE(is_whole(out));
  }
  EXPECT_FALSE(ring->try_pop(out));
  ring->validate();
}

TEST(MpscRing, Wraps) {
  const Segment memory = Segment::heap(Ring::bytes_for(2));
  Ring* ring = Ring::create(memory.data(), 2);
  Record out{};
  for (std::uint32_t i = 0; i < 1000; ++i) {
    ASSERT_TRUE(ring->try_push(record(1, i)));
    ASSERT_TRUE(ring->try_pop(out));
    ASSERT_EQ(out.number, i);
  }
}

TEST(MpscRing, RefusesWrongMemory) {
  EXPECT_THROW(Ring::bytes_for(0), Error);
  EXPECT_THROW(Ring::bytes_for(3), Error);
  const Segment memory = Segment::heap(Ring::bytes_for(4));
  EXPECT_THROW(Ring::attach(memory.data()), Error);
  EXPECT_THROW(Ring::create(memory.data() + 4, 4), Error);
  Ring::create(memory.data(), 4);
  EXPECT_NO_THROW(Ring::attach(memory.data()));
  EXPECT_THROW(MpscRing<std::uint64_t>::attach(memory.data()), Error) << "cells of another size";
}

/// Pops everything, checks MPSC-1 and MPSC-2.
void check_all(Ring* ring, std::uint32_t producers, std::uint32_t each) {
  std::vector<std::uint32_t> next(producers, 0);
  for (std::uint64_t popped = 0; popped < std::uint64_t{producers} * each;) {
    Record out{};
    if (!ring->try_pop(out)) {
      std::this_thread::yield();
      continue;
    }
    ASSERT_TRUE(is_whole(out));
    ASSERT_LT(out.producer, producers);
    ASSERT_EQ(out.number, next[out.producer]++);
    ++popped;
  }
  EXPECT_TRUE(ring->was_empty());
  ring->validate();
}

TEST(MpscRing, ThreadStress) {
  const test::Watchdog watchdog("ThreadStress");
  constexpr std::uint32_t kEach = 10'000 * test::kStressScale;
  const Segment memory = Segment::heap(Ring::bytes_for(256));
  Ring* ring = Ring::create(memory.data(), 256);
  std::vector<std::thread> writers;
  for (std::uint32_t me = 0; me < 3; ++me) {
    writers.emplace_back([ring, me] {
      for (std::uint32_t i = 0; i < kEach; ++i) {
        while (!ring->try_push(record(me, i))) std::this_thread::yield();
      }
    });
  }
  check_all(ring, 3, kEach);
  for (std::thread& writer : writers) writer.join();
}

TEST(MpscRing, AcrossProcesses) {
  constexpr std::uint32_t kEach = 10'000;
  const Segment memory = Segment::create("mpsc-test", Ring::bytes_for(64));
  Ring* ring = Ring::create(memory.data(), 64);
  const auto write = [&](std::uint32_t me) {
    const Segment mine = test::second_view(memory);
    Ring* view = Ring::attach(mine.data());
    for (std::uint32_t i = 0; i < kEach; ++i) {
      while (!view->try_push(record(me, i))) ::usleep(10);
    }
    return 0;
  };
  test::Child first([&] { return write(0); });
  test::Child second([&] { return write(1); });
  const test::Watchdog watchdog("AcrossProcesses");
  check_all(ring, 2, kEach);
  EXPECT_EQ(first.wait(), 0);
  EXPECT_EQ(second.wait(), 0);
}

}  // namespace
}  // namespace pathways
