// futures/future_table.h: waiters, within one process
//   FUT-2 waiter   FutureWaiters.BeforeCompletion, .AfterCompletion, .AfterRelease, .OfAReleasedFuture,
//   .MayUseTheTable,
//                  .OfSeveralGenerations, .Stress (during). All interleavings: tests/model
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "futures/future_table.h"
#include "support.h"

namespace pathways::test::test_future_waiters {
namespace {

/// Remembers how often it ran, and with what.
struct Recorder : Waiter {
  Recorder() : Waiter{&Recorder::record} {}
  static void record(Waiter* self, FutureState state) {
    auto* me = static_cast<Recorder*>(self);
    me->state.store(state);
    me->runs.fetch_add(1);
  }
  std::atomic<int> runs{0};
  std::atomic<FutureState> state{FutureState::kPending};
};

class FutureWaiters : public testing::Test {
 protected:
  static constexpr std::uint32_t kCapacity = 64;
  Handle make(std::uint32_t parts = 1) {
    Handle handle;
    EXPECT_EQ(table->allocate(parts, &handle), Status::kOk);
    return handle;
  }
  void TearDown() override { table->validate(); }

  Segment memory = Segment::heap(FutureTable::bytes_for(kCapacity));
  FutureTable* table = FutureTable::create(memory.data(), kCapacity);
};

TEST_F(FutureWaiters, BeforeCompletion) {
  const Handle handle = make(2);
  std::array<Recorder, 3> waiters;
  for (Recorder& waiter : waiters) table->add_waiter(handle, &waiter);
  EXPECT_EQ(table->complete(handle), Completion::kPending);
  for (Recorder& waiter : waiters) EXPECT_EQ(waiter.runs, 0);
  EXPECT_EQ(table->complete(handle), Completion::kReady);
  for (Recorder& waiter : waiters) {
    EXPECT_EQ(waiter.runs, 1);
    EXPECT_EQ(waiter.state, FutureState::kReady);
  }
  table->run_waiters();
  table->sweep_waiters();
  EXPECT_EQ(table->release(handle), Status::kOk);
  for (Recorder& waiter : waiters) EXPECT_EQ(waiter.runs, 1);
}

TEST_F(FutureWaiters, AfterCompletion) {
  const Handle ready = make();
  const Handle failed = make();
  EXPECT_EQ(table->complete(ready), Completion::kReady);
  EXPECT_EQ(table->fail(failed, 5), Completion::kReady);
  Recorder first;
  Recorder second;
  table->add_waiter(ready, &first);
  table->add_waiter(failed, &second);
  EXPECT_EQ(first.runs, 1);
  EXPECT_EQ(first.state, FutureState::kReady);
  EXPECT_EQ(second.runs, 1);
  EXPECT_EQ(second.state, FutureState::kFailed);
}

TEST_F(FutureWaiters, AfterRelease) {
  const Handle handle = make();
  EXPECT_EQ(table->release(handle), Status::kOk);
  Recorder waiter;
  table->add_waiter(handle, &waiter);
  EXPECT_EQ(waiter.runs, 1);
  EXPECT_EQ(waiter.state, FutureState::kFree);
  Recorder forged;
  table->add_waiter(Handle::make(kCapacity + 7, 1), &forged);
  EXPECT_EQ(forged.runs, 1);
  EXPECT_EQ(forged.state, FutureState::kFree);
}

TEST_F(FutureWaiters, OfAReleasedFuture) {
  const Handle handle = make();
  Recorder waiter;
  table->add_waiter(handle, &waiter);
  EXPECT_EQ(table->release(handle), Status::kOk);
  EXPECT_EQ(waiter.runs, 1);
  EXPECT_EQ(waiter.state, FutureState::kFree);
}

TEST_F(FutureWaiters, OfSeveralGenerations) {
  const Handle old = make();
  EXPECT_EQ(table->release(old), Status::kOk);
  const Handle young = make();
  ASSERT_EQ(young.index(), old.index());
  Recorder waits;
  Recorder late;
  table->add_waiter(young, &waits);
  table->add_waiter(old, &late);  // empties the slot's list, and must put `waits` back
  EXPECT_EQ(late.runs, 1);
  EXPECT_EQ(late.state, FutureState::kFree);
  EXPECT_EQ(waits.runs, 0);
  table->sweep_waiters();
  EXPECT_EQ(waits.runs, 0);
  EXPECT_EQ(table->complete(young), Completion::kReady);
  EXPECT_EQ(waits.runs, 1);
  EXPECT_EQ(waits.state, FutureState::kReady);
}

struct Chained : Waiter {
  explicit Chained(FutureTable* in) : Waiter{&Chained::next_step}, table(in) {}
  static void next_step(Waiter* self, FutureState) {
    auto* me = static_cast<Chained*>(self);
    const Handle done = me->handle;
    EXPECT_EQ(me->table->release(done), Status::kOk);
    if (--me->left == 0) return;
    Handle next_handle;
    EXPECT_EQ(me->table->allocate(1, &next_handle), Status::kOk);
    me->table->add_waiter(next_handle, me);  // itself again: the table let go of it
    EXPECT_EQ(me->table->complete(next_handle), Completion::kReady);
  }
  FutureTable* table;
  int left = 5;
};

TEST_F(FutureWaiters, MayUseTheTable) {
  Chained waiter(table);
  const Handle handle = make();
  table->add_waiter(handle, &waiter);
  EXPECT_EQ(table->complete(handle), Completion::kReady);
  EXPECT_EQ(waiter.left, 0);
  EXPECT_EQ(table->in_use(), 0U);
}

TEST_F(FutureWaiters, Stress) {
  // Adders, completers and a releaser on few slots, so that generations of one slot meet. Each waiter runs once.
  const test::Watchdog watchdog("FutureWaiters.Stress");
  table = FutureTable::create(memory.data(), 4);
  constexpr int kRounds = 3'000 * test::kStressScale;
  std::vector<Recorder> waiters(2 * kRounds);
  std::atomic<std::uint64_t> current{0};
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kRounds; ++i) {
        table->add_waiter(Handle{current.load()}, &waiters[static_cast<std::size_t>(2 * i + t)]);
      }
    });
  }
  threads.emplace_back([&] {
    while (!over.load()) static_cast<void>(table->complete(Handle{current.load()}));
  });
  std::thread releaser([&] {
    std::mt19937_64 random(test::seed());
    while (!over.load()) {
      const Handle handle = make();
      current.store(handle.raw);
      if (random() % 2 == 0) std::this_thread::yield();
      if (random() % 4 == 0) static_cast<void>(table->fail(handle));
      EXPECT_EQ(table->release(handle), Status::kOk);
    }
  });
  threads[0].join();
  threads[1].join();
  over.store(true);
  threads[2].join();
  releaser.join();
  for (const Recorder& waiter : waiters) {
    ASSERT_EQ(waiter.runs.load(), 1);
    ASSERT_NE(waiter.state.load(), FutureState::kPending);
  }
}

}  // namespace
}  // namespace pathways::test::test_future_waiters
