// futures/read_back.h
//   READ-1 whole  ReadBack.LateWritersAreTurnedAway, .BusySlotsAreNotOpened, .StressedByLateHosts (and ThreadSanitizer)
#include "futures/read_back.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "base/status.h"
#include "support.h"

namespace pathways::test::test_read_back {
namespace {

using namespace test;

struct ReadBack : testing::Test {
  static constexpr uint32_t kFutures = ReadBackArea::kLargeSlots + 4;
  Handle make(uint32_t parts = 1) {
    Handle handle;
    EXPECT_EQ(table->allocate(parts, &handle), Status::kOk);
    return handle;
  }

  Segment table_memory = Segment::heap(FutureTable::bytes_for(kFutures));
  FutureTable* table = FutureTable::create(table_memory.data(), kFutures);
  Segment memory = Segment::heap(ReadBackArea::bytes_for(kFutures));
  ReadBackArea* area = ReadBackArea::create(memory.data(), kFutures);
  // As a host has them.
  FutureView completer{table_memory.data(), table_memory.size()};
  ReadBackView writer{memory.data(), memory.size()};
};

TEST_F(ReadBack, SlotsAreDisjointAndAligned) {
  std::set<const std::byte*> begins;
  const std::byte* end = memory.data() + memory.size();
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{64}, size_t{65}, size_t{4096}}) {
    for (const uint32_t index : {0u, 1u, ReadBackArea::kLargeSlots - 1, ReadBackArea::kLargeSlots, kFutures - 1}) {
      std::byte* slot = area->slot(Handle::make(index, 1), bytes);
      if (bytes > 64 && index >= ReadBackArea::kLargeSlots) {
        EXPECT_EQ(slot, nullptr);
        continue;
      }
      ASSERT_NE(slot, nullptr);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(slot) % 64, 0u);
      EXPECT_LE(slot + (bytes <= 64 ? 64 : 4096), end);
      begins.insert(slot);
    }
  }
  EXPECT_EQ(begins.size(), 5u + 3u);
  EXPECT_EQ(area->slot(Handle::make(0, 1), 4097), nullptr);
  EXPECT_EQ(area->slot(Handle::make(kFutures, 1), 1), nullptr);
  EXPECT_EQ(ReadBackArea::attach(memory.data()), area);
  EXPECT_THROW(ReadBackArea::attach(table_memory.data()), Error);
}

TEST_F(ReadBack, LateWritersAreTurnedAway) {
  const Handle handle = make(2);
  ASSERT_TRUE(area->try_open(handle, 8));
  ReadBackSlot place;
  ASSERT_TRUE(writer.begin_write(completer, handle, &place));
  EXPECT_EQ(place.small, area->slot(handle, 8));
  EXPECT_EQ(place.large, area->slot(handle, 65));
  writer.end_write(handle);
  (void)table->fail(handle);
  EXPECT_FALSE(writer.begin_write(completer, handle, &place));  // the other part has failed it
  ASSERT_EQ(table->release(handle), Status::kOk);
  EXPECT_FALSE(writer.begin_write(completer, handle, &place));
  const Handle next = make();
  ASSERT_EQ(next.index(), handle.index());
  EXPECT_TRUE(area->try_open(next, 8));
  EXPECT_FALSE(writer.begin_write(completer, handle, &place));
  EXPECT_FALSE(writer.begin_write(completer, Handle::make(kFutures, 1), &place));
}

TEST_F(ReadBack, BusySlotsAreNotOpened) {
  const Handle handle = make();
  ReadBackSlot place;
  ASSERT_TRUE(writer.begin_write(completer, handle, &place));
  ASSERT_EQ(table->release(handle), Status::kOk);  // deleted while it is written
  const Handle next = make();
  ASSERT_EQ(next.index(), handle.index());
  EXPECT_FALSE(area->try_open(next, 8));
  writer.end_write(handle);
  EXPECT_TRUE(area->try_open(next, 8));
}

// Two hosts write values, together or alone, as late as they like; a client that releases futures at any time, and so
// uses few of them over and over, reads only what was written for the future that it sees ready.
TEST_F(ReadBack, StressedByLateHosts) {
  const Watchdog watchdog("late hosts");
  constexpr uint64_t kRounds = 20000 * uint64_t{kStressScale};
  struct Job {
    Handle handle;
    uint64_t tag;
    uint32_t begin, end;  ///< what this host writes of the eight words; equal: it has no part in this one
    bool wanted;
  };
  constexpr size_t kWindow = 64;
  struct Lane {
    std::array<Job, kWindow> jobs;
    Atomic<uint64_t> posted{0}, taken{0};
  };
  std::array<Lane, 2> lanes;
  const auto host = [&](uint32_t part) {
    Lane& lane = lanes[part];
    std::mt19937_64 random(seed() + part + 1);
    for (uint64_t at = 0; at < kRounds; ++at) {
      while (lane.posted.load(std::memory_order_acquire) <= at) thread_yield();
      const Job job = lane.jobs[at % kWindow];
      if (random() % 64 == 0) thread_yield();
      ReadBackSlot place;
      if (job.wanted && job.begin != job.end && writer.begin_write(completer, job.handle, &place)) {
        auto* words = reinterpret_cast<uint64_t*>(place.small);
        for (uint32_t i = job.begin; i < job.end; ++i) {
          words[i] = job.tag;
          if (random() % 16 == 0) thread_yield();
        }
        writer.end_write(job.handle);
      }
      if (job.begin != job.end) (void)table->complete(job.handle);
      lane.taken.store(at + 1, std::memory_order_release);
    }
  };
  std::thread first(host, 0u), second(host, 1u);
  std::mt19937_64 random(seed());
  uint64_t read = 0, refused = 0;
  for (uint64_t at = 0; at < kRounds; ++at) {
    for (Lane& lane : lanes) {
      while (at - lane.taken.load(std::memory_order_acquire) >= kWindow) thread_yield();
    }
    const uint64_t who = random() % 3;  // host 0 alone, host 1 alone, both
    const Handle handle = make(who == 2 ? 2 : 1);
    const bool wanted = area->try_open(handle, 64);
    refused += wanted ? 0 : 1;
    for (uint32_t part = 0; part < 2; ++part) {
      Lane& lane = lanes[part];
      const uint32_t half = who == 2 ? part * 4 : 0;
      lane.jobs[at % kWindow] = {handle, at, half, who == 2 ? half + 4 : who == part ? 8u : 0u, wanted};
      lane.posted.store(at + 1, std::memory_order_release);
    }
    const uint64_t patience = random() % 2 == 0 ? random() % 4 : UINT64_MAX;
    for (uint64_t looks = 0; looks < patience && table->poll(handle) == FutureState::kPending; ++looks) thread_yield();
    if (wanted && table->poll(handle) == FutureState::kReady) {
      const auto* slot = reinterpret_cast<const uint64_t*>(area->slot(handle, 64));
      for (uint32_t i = 0; i < 8; ++i) ASSERT_EQ(slot[i], at);
      ++read;
    }
    ASSERT_EQ(table->release(handle), Status::kOk);
  }
  first.join();
  second.join();
  EXPECT_GT(read, 0u);
  std::printf("read %llu of %llu, %llu slots were busy\n", static_cast<unsigned long long>(read),
              static_cast<unsigned long long>(kRounds), static_cast<unsigned long long>(refused));
}

}  // namespace
}  // namespace pathways::test::test_read_back
