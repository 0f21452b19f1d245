// futures/future_table.h, within one process
//   FUT-1 once     FutureTableTest.LeavesPendingOnce, .CountsParts, .FailsOnce, .OneOfManyCompletersIsTold
//   FUT-3 stale    FutureTableTest.RefusesStaleHandles, .RefusesForgedHandles, .RetiresUsedUpSlots,
//   .LateCompletionIsStale FUT-4 memory   FutureTableTest.EveryPartsWritesAreVisible (ThreadSanitizer says if not)
//   PARK-1         FutureTableTest.WaitEndsWith*, .ManyThreadsWait
// Waiters (FUT-2): test_future_waiters.cc. Other processes: test_future_processes.cc. All interleavings: tests/model.
#include "futures/future_table.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "support.h"

namespace pathways::test::test_future_table {
namespace {

using namespace std::chrono_literals;

class FutureTableTest : public testing::Test {
 protected:
  static constexpr std::uint32_t kCapacity = 100;
  Handle make(std::uint32_t parts = 1) {
    Handle handle;
    EXPECT_EQ(table->allocate(parts, &handle), Status::kOk);
    return handle;
  }
  void TearDown() override { table->validate(); }

  Segment memory = Segment::heap(FutureTable::bytes_for(kCapacity));
  FutureTable* table = FutureTable::create(memory.data(), kCapacity);
};

TEST_F(FutureTableTest, RefusesWrongArguments) {
  EXPECT_THROW(FutureTable::bytes_for(0), Error);
  EXPECT_THROW(FutureTable::bytes_for((1U << 26) + 1), Error);
  EXPECT_THROW(FutureTable::create(memory.data() + 8, 1), Error);
  EXPECT_THROW(FutureTable::create(nullptr, 1), Error);
  EXPECT_EQ(FutureTable::attach(memory.data()), table);
  const Segment zeros = Segment::heap(4096);
  EXPECT_THROW(FutureTable::attach(zeros.data()), Error);
  Handle handle;
  EXPECT_EQ(table->allocate(0, &handle), Status::kInvalid);
  EXPECT_EQ(table->allocate(FutureTable::kMaxParts + 1, &handle), Status::kInvalid);
  EXPECT_EQ(table->allocate(FutureTable::kMaxParts, &handle), Status::kOk);
}

TEST_F(FutureTableTest, LeavesPendingOnce) {
  const Handle handle = make();
  EXPECT_TRUE(handle.valid());
  EXPECT_EQ(table->poll(handle), FutureState::kPending);
  EXPECT_EQ(table->in_use(), 1U);
  EXPECT_EQ(table->complete(handle), Completion::kReady);
  EXPECT_EQ(table->poll(handle), FutureState::kReady);
  EXPECT_EQ(table->complete(handle), Completion::kStale);
  EXPECT_EQ(table->fail(handle), Completion::kStale);
  EXPECT_EQ(table->poll(handle), FutureState::kReady);
  EXPECT_EQ(table->error_of(handle), 0U);
  EXPECT_EQ(table->release(handle), Status::kOk);
  EXPECT_EQ(table->poll(handle), FutureState::kFree);
  EXPECT_EQ(table->in_use(), 0U);
}

TEST_F(FutureTableTest, CountsParts) {
  const Handle handle = make(5);
  EXPECT_EQ(table->complete(handle), Completion::kPending);
  EXPECT_EQ(table->complete(handle, 3), Completion::kPending);
  EXPECT_EQ(table->complete(handle, 0), Completion::kStale);
  EXPECT_EQ(table->complete(handle, 2), Completion::kStale) << "more than expected is refused";
  EXPECT_EQ(table->poll(handle), FutureState::kPending);
  EXPECT_EQ(table->complete(handle), Completion::kReady);
}

TEST_F(FutureTableTest, FailsOnce) {
  const Handle handle = make(3);
  EXPECT_EQ(table->complete(handle), Completion::kPending);
  EXPECT_EQ(table->fail(handle, 0xabcdef), Completion::kReady);
  EXPECT_EQ(table->poll(handle), FutureState::kFailed);
  EXPECT_EQ(table->error_of(handle), 0xabcdefU);
  EXPECT_EQ(table->fail(handle, 7), Completion::kStale);
  EXPECT_EQ(table->complete(handle), Completion::kStale);
  EXPECT_EQ(table->error_of(handle), 0xabcdefU);
  EXPECT_EQ(table->release(handle), Status::kOk);
  EXPECT_EQ(table->error_of(handle), 0U);
}

TEST_F(FutureTableTest, RefusesStaleHandles) {
  const Handle old = make();
  EXPECT_EQ(table->release(old), Status::kOk);
  const Handle young = make();
  EXPECT_EQ(young.index(), old.index()) << "the slot is used again";
  EXPECT_NE(young.generation(), old.generation());
  EXPECT_EQ(table->poll(old), FutureState::kFree);
  EXPECT_EQ(table->complete(old), Completion::kStale);
  EXPECT_EQ(table->fail(old), Completion::kStale);
  EXPECT_EQ(table->release(old), Status::kStale);
  EXPECT_FALSE(table->mark_waited(old));
  EXPECT_EQ(table->wait(old, 1h, SpinPolicy::sleep_at_once()), FutureState::kFree);
  EXPECT_EQ(table->poll(young), FutureState::kPending);
  EXPECT_EQ(table->release(young), Status::kOk);
  EXPECT_EQ(table->release(young), Status::kStale) << "double release";
}

TEST_F(FutureTableTest, LateCompletionIsStale) {
  const Handle handle = make(2);
  EXPECT_EQ(table->complete(handle), Completion::kPending);
  EXPECT_EQ(table->release(handle), Status::kOk) << "pending may be released";
  EXPECT_EQ(table->complete(handle), Completion::kStale);
}

TEST_F(FutureTableTest, RefusesForgedHandles) {
  for (const Handle forged : {Handle{}, Handle::make(kCapacity, 1), Handle::make(UINT32_MAX, 1), Handle::make(0, 2),
                              Handle::make(kCapacity, 0), Handle{UINT64_MAX}}) {
    EXPECT_EQ(table->poll(forged), FutureState::kFree);
    EXPECT_EQ(table->complete(forged), Completion::kStale);
    EXPECT_EQ(table->fail(forged), Completion::kStale);
    EXPECT_EQ(table->release(forged), Status::kStale);
    EXPECT_FALSE(table->mark_waited(forged));
    EXPECT_EQ(table->error_of(forged), 0U);
  }
}

TEST_F(FutureTableTest, RetiresUsedUpSlots) {
  table = FutureTable::create(memory.data(), 2, UINT32_MAX - 1);
  for (int i = 0; i < 4; ++i) {  // two slots, two generations left in each
    const Handle handle = make();
    EXPECT_NE(handle.generation(), 0U);
    EXPECT_EQ(table->release(handle), Status::kOk);
    EXPECT_EQ(table->poll(handle), FutureState::kFree);
    table->validate();
  }
  Handle none;
  EXPECT_EQ(table->allocate(1, &none), Status::kFull);
  EXPECT_EQ(table->in_use(), 0U);
}

TEST_F(FutureTableTest, FillsUp) {
  std::vector<Handle> all(kCapacity);
  std::set<std::uint32_t> indices;
  for (Handle& handle : all) {
    handle = make();
    indices.insert(handle.index());
  }
  EXPECT_EQ(indices.size(), kCapacity);
  Handle none;
  EXPECT_EQ(table->allocate(1, &none), Status::kFull);
  EXPECT_EQ(table->in_use(), kCapacity);
  table->validate();
  EXPECT_EQ(table->release(all[42]), Status::kOk);
  EXPECT_EQ(make().index(), 42U);
}

TEST_F(FutureTableTest, AllocatesManyOrNone) {
  const std::vector<std::uint32_t> parts = {1, 2, 3};
  std::vector<Handle> handles(3);
  ASSERT_EQ(table->allocate_many(parts, handles), Status::kOk);
  EXPECT_EQ(table->in_use(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::uint32_t left = parts[i]; left > 1; --left) EXPECT_EQ(table->complete(handles[i]), Completion::kPending);
    EXPECT_EQ(table->complete(handles[i]), Completion::kReady);
  }
  std::vector<Handle> too_many(kCapacity - 2);
  EXPECT_EQ(table->allocate_many(std::vector<std::uint32_t>(kCapacity - 2, 1), too_many), Status::kFull);
  EXPECT_EQ(table->in_use(), 3U) << "none was taken";
  std::vector<Handle> rest(kCapacity - 3);
  EXPECT_EQ(table->allocate_many(std::vector<std::uint32_t>(kCapacity - 3, 1), rest), Status::kOk);
  EXPECT_EQ(table->allocate_many(parts, rest), Status::kInvalid) << "sizes differ";
  EXPECT_EQ(table->allocate_many({}, {}), Status::kOk);
}

TEST_F(FutureTableTest, WaitEndsWithCompletion) {
  const test::Watchdog watchdog("WaitEndsWithCompletion");
  for (const SpinPolicy spin : {SpinPolicy::sleep_at_once(), SpinPolicy::adaptive()}) {
    const Handle ready = make();
    const Handle failed = make();
    const Handle released = make();
    std::thread completer([&] {
      std::this_thread::sleep_for(3ms);
      EXPECT_EQ(table->complete(ready), Completion::kReady);
      std::this_thread::sleep_for(3ms);
      EXPECT_EQ(table->fail(failed), Completion::kReady);
      std::this_thread::sleep_for(3ms);
      EXPECT_EQ(table->release(released), Status::kOk);
    });
    EXPECT_EQ(table->wait(ready, std::chrono::nanoseconds::max(), spin), FutureState::kReady);
    EXPECT_EQ(table->wait(failed, 1h, spin), FutureState::kFailed);
    EXPECT_EQ(table->wait(released, 1h, spin), FutureState::kFree);
    completer.join();
  }
}

TEST_F(FutureTableTest, WaitEndsWithTime) {
  const Handle handle = make();
  EXPECT_EQ(table->wait(handle, 0ns, SpinPolicy::sleep_at_once()), FutureState::kPending);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(table->wait(handle, 10ms, SpinPolicy::adaptive()), FutureState::kPending);
  EXPECT_GE(std::chrono::steady_clock::now() - start, 10ms);
  const auto again = std::chrono::steady_clock::now();
  EXPECT_EQ(table->wait(handle, FutureTable::kRecheck + 10ms, SpinPolicy::sleep_at_once()), FutureState::kPending);
  EXPECT_GE(std::chrono::steady_clock::now() - again, FutureTable::kRecheck + 10ms);
}

TEST_F(FutureTableTest, OnlyWaitedFuturesRing) {
  const std::uint32_t before = table->doorbell().ticket();
  EXPECT_EQ(table->complete(make()), Completion::kReady);
  EXPECT_EQ(table->doorbell().ticket(), before);
  const Handle waited = make(2);
  EXPECT_TRUE(table->mark_waited(waited));
  EXPECT_EQ(table->complete(waited), Completion::kPending);
  EXPECT_EQ(table->doorbell().ticket(), before);
  EXPECT_EQ(table->complete(waited), Completion::kReady);
  EXPECT_NE(table->doorbell().ticket(), before);
  EXPECT_FALSE(table->mark_waited(waited));
}

TEST_F(FutureTableTest, OneOfManyCompletersIsTold) {
  const test::Watchdog watchdog("OneOfManyCompletersIsTold");
  constexpr int kRounds = 500 * test::kStressScale;
  constexpr int kThreads = 3;
  std::vector<Handle> handles(kRounds);
  std::atomic<int> ready{0};
  std::atomic<int> made{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(test::seed() + static_cast<std::uint64_t>(t));
      for (int i = 0; i < kRounds; ++i) {
        while (made.load(std::memory_order_acquire) <= i) std::this_thread::yield();
        const Completion done = t == 2 && random() % 4 == 0 ? table->fail(handles[static_cast<std::size_t>(i)])
                                                            : table->complete(handles[static_cast<std::size_t>(i)]);
        ready.fetch_add(done == Completion::kReady ? 1 : 0);
      }
    });
  }
  for (int i = 0; i < kRounds; ++i) {
    handles[static_cast<std::size_t>(i)] = make(kThreads - 1);
    made.store(i + 1, std::memory_order_release);
    const FutureState state = table->wait(handles[static_cast<std::size_t>(i)], 1min, SpinPolicy::adaptive());
    ASSERT_TRUE(state == FutureState::kReady || state == FutureState::kFailed);
    ASSERT_EQ(table->release(handles[static_cast<std::size_t>(i)]), Status::kOk);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ready.load(), kRounds);
}

TEST_F(FutureTableTest, EveryPartsWritesAreVisible) {
  const test::Watchdog watchdog("EveryPartsWritesAreVisible");
  for (int round = 0; round < 50 * test::kStressScale; ++round) {
    int values[3] = {};  // plain memory, one writer each
    const Handle handle = make(3);
    std::vector<std::thread> writers;
    for (int t = 0; t < 3; ++t) {
      writers.emplace_back([&, t] {
        values[t] = t + 1;
        static_cast<void>(table->complete(handle));
      });
    }
    ASSERT_EQ(table->wait(handle, 1min, SpinPolicy::adaptive()), FutureState::kReady);
    EXPECT_EQ(values[0] + values[1] + values[2], 6);
    for (std::thread& writer : writers) writer.join();
    ASSERT_EQ(table->release(handle), Status::kOk);
  }
}

TEST_F(FutureTableTest, ManyThreadsAllocateAndRelease) {
  const test::Watchdog watchdog("ManyThreadsAllocateAndRelease");
  std::vector<Atomic<std::uint32_t>> holders(kCapacity);
  std::vector<std::thread> threads;
  for (std::uint32_t t = 1; t <= 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(test::seed() + t);
      std::vector<Handle> mine;
      for (int i = 0; i < 5'000 * test::kStressScale; ++i) {
        if (mine.size() < 30 && random() % 2 == 0) {
          std::vector<Handle> fresh(1 + random() % 5);
          if (table->allocate_many(std::vector<std::uint32_t>(fresh.size(), 1), fresh) != Status::kOk) continue;
          for (const Handle handle : fresh) {
            if (holders[handle.index()].exchange(t, std::memory_order_relaxed) != 0) std::abort();  // two holders
            mine.push_back(handle);
          }
        } else if (!mine.empty()) {
          const Handle handle = mine.back();
          mine.pop_back();
          if (random() % 2 == 0 && table->complete(handle) != Completion::kReady) std::abort();
          holders[handle.index()].store(0, std::memory_order_relaxed);
          if (table->release(handle) != Status::kOk) std::abort();
        }
      }
      for (const Handle handle : mine) {
        holders[handle.index()].store(0, std::memory_order_relaxed);
        if (table->release(handle) != Status::kOk) std::abort();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(table->in_use(), 0U);
}

TEST_F(FutureTableTest, ManyThreadsWait) {
  const test::Watchdog watchdog("ManyThreadsWait");
  for (int round = 0; round < 30 * test::kStressScale; ++round) {
    const Handle handle = make();
    std::vector<std::thread> waiters;
    for (int t = 0; t < 3; ++t) {
      waiters.emplace_back([&, t] {
        const auto spin = t == 0 ? SpinPolicy::adaptive() : SpinPolicy::sleep_at_once();
        EXPECT_EQ(table->wait(handle, 1h, spin), FutureState::kReady);
      });
    }
    EXPECT_EQ(table->complete(handle), Completion::kReady);
    for (std::thread& waiter : waiters) waiter.join();
    EXPECT_EQ(table->release(handle), Status::kOk);
  }
}

}  // namespace
}  // namespace pathways::test::test_future_table
