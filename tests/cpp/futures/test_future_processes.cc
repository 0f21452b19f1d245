// futures/future_table.h, across processes: the owner here, completers in children
//   FUT-1 once     FutureProcesses.OneOfTheProcessesIsTold
//   FUT-2 waiter   FutureProcesses.WaitersRunInTheOwner, .SweepFindsWhatAKilledCompleterLeft
//   FUT-3 stale    FutureProcesses.KilledCompletersLeaveAValidTable
//   PARK-1         FutureProcesses.ACompletionWakesTheOwner, .AKilledCompleterDelaysAWaitOnly
#include <gtest/gtest.h>

#include <atomic>
#include <new>
#include <thread>
#include <vector>

#include "futures/future_table.h"
#include "support.h"

namespace pathways::test::test_future_processes {
namespace {

using namespace std::chrono_literals;

class FutureProcesses : public testing::Test {
 protected:
  static constexpr std::uint32_t kCapacity = 1000;
  Handle make(std::uint32_t parts = 1) {
    Handle handle;
    EXPECT_EQ(table->allocate(parts, &handle), Status::kOk);
    return handle;
  }
  /// What a child sees: its own mapping of the same memory.
  template <class Body>
  int elsewhere(Body body) {
    const Segment mine = test::second_view(memory);
    return body(FutureTable::attach(mine.data()));
  }

  Segment memory = Segment::create("futures-test", FutureTable::bytes_for(kCapacity));
  FutureTable* table = FutureTable::create(memory.data(), kCapacity);
};

TEST_F(FutureProcesses, KnowsItsOwner) {
  EXPECT_TRUE(table->is_owner());
  test::Child child([&] { return elsewhere([](FutureTable* view) { return view->is_owner() ? 1 : 0; }); });
  EXPECT_EQ(child.wait(), 0);
}

TEST_F(FutureProcesses, ACompletionWakesTheOwner) {
  std::vector<Handle> handles;
  for (int i = 0; i < 200; ++i) handles.push_back(make());
  test::Child child([&] {
    return elsewhere([&](FutureTable* view) {
      for (std::size_t i = 0; i < handles.size(); ++i) {
        if (i % 16 == 0) ::usleep(500);  // so that the owner sleeps now and then
        if (i % 3 == 0 ? view->fail(handles[i], 9) != Completion::kReady
                       : view->complete(handles[i]) != Completion::kReady) {
          return 1;
        }
      }
      return 0;
    });
  });
  const test::Watchdog watchdog("ACompletionWakesTheOwner");
  for (std::size_t i = 0; i < handles.size(); ++i) {
    ASSERT_EQ(table->wait(handles[i], 1h, SpinPolicy::sleep_at_once()),
              i % 3 == 0 ? FutureState::kFailed : FutureState::kReady);
    EXPECT_EQ(table->error_of(handles[i]), i % 3 == 0 ? 9U : 0U);
    ASSERT_EQ(table->release(handles[i]), Status::kOk);
  }
  EXPECT_EQ(child.wait(), 0);
  table->validate();
}

TEST_F(FutureProcesses, OneOfTheProcessesIsTold) {
  std::vector<Handle> handles;
  for (std::uint32_t i = 0; i < kCapacity; ++i) handles.push_back(make(2));
  const Segment counters = Segment::create("futures-counters", 4096);
  auto* told = new (counters.data()) Atomic<std::uint32_t>(0);
  const auto finish_all = [&] {
    return elsewhere([&](FutureTable* view) {
      for (const Handle handle : handles) {
        if (view->complete(handle) == Completion::kReady) told->fetch_add(1, std::memory_order_relaxed);
      }
      return 0;
    });
  };
  test::Child first(finish_all);
  test::Child second(finish_all);
  const test::Watchdog watchdog("OneOfTheProcessesIsTold");
  for (const Handle handle : handles) ASSERT_EQ(table->wait(handle, 1h, SpinPolicy::adaptive()), FutureState::kReady);
  EXPECT_EQ(first.wait(), 0);
  EXPECT_EQ(second.wait(), 0);
  EXPECT_EQ(told->load(std::memory_order_relaxed), kCapacity);
}

struct Counter : Waiter {
  Counter() : Waiter{[](Waiter* self, FutureState) { ++static_cast<Counter*>(self)->runs; }} {}
  int runs = 0;
};

TEST_F(FutureProcesses, WaitersRunInTheOwner) {
  std::vector<Handle> handles;
  std::vector<Counter> waiters(kCapacity);
  for (std::uint32_t i = 0; i < kCapacity; ++i) {
    handles.push_back(make());
    table->add_waiter(handles.back(), &waiters[i]);
  }
  test::Child child([&] {
    return elsewhere([&](FutureTable* view) {
      for (const Handle handle : handles) {
        if (view->complete(handle) != Completion::kReady) return 1;
      }
      return 0;
    });
  });
  const test::Watchdog watchdog("WaitersRunInTheOwner");
  for (std::uint32_t ran = 0; ran < kCapacity;) {
    const std::uint32_t ticket = table->doorbell().ticket();
    table->run_waiters();
    ran = 0;
    for (const Counter& waiter : waiters) ran += waiter.runs == 1 ? 1U : 0U;
    if (ran < kCapacity) {
      ASSERT_EQ(table->doorbell().wait(ticket, 30s, SpinPolicy::sleep_at_once()), Status::kOk);
    }
  }
  EXPECT_EQ(child.wait(), 0);
  table->run_waiters();
  table->sweep_waiters();
  for (const Counter& waiter : waiters) EXPECT_EQ(waiter.runs, 1);
}

TEST_F(FutureProcesses, KilledCompletersLeaveAValidTable) {
  std::mt19937_64 random(test::seed());
  for (int round = 0; round < 4 * test::kStressScale; ++round) {
    std::vector<Handle> handles;
    for (int i = 0; i < 500; ++i) handles.push_back(make());
    test::Child child([&] {
      return elsewhere([&](FutureTable* view) {
        for (;;) {
          for (const Handle handle : handles) static_cast<void>(view->complete(handle));
        }
        return 0;
      });
    });
    ::usleep(static_cast<useconds_t>(random() % 3000));
    child.kill();
    // The owner now takes over: what is pending fails, once; nothing is half done.
    for (const Handle handle : handles) {
      const bool was_ready = table->poll(handle) == FutureState::kReady;
      EXPECT_EQ(table->fail(handle), was_ready ? Completion::kStale : Completion::kReady);
      ASSERT_EQ(table->release(handle), Status::kOk);
    }
    table->validate();
  }
}

TEST_F(FutureProcesses, AKilledCompleterDelaysAWaitOnly) {
  // The worst case made on purpose: the word says ready, but its completer died before it could ring.
  const test::Watchdog watchdog("AKilledCompleterDelaysAWaitOnly");
  const Handle handle = make();
  std::thread late([&] {
    std::this_thread::sleep_for(10ms);
    // The table's words follow its header; ready is state 2.
    auto* word = reinterpret_cast<Atomic<std::uint64_t>*>(memory.data() + sizeof(FutureTable)) + handle.index();
    std::uint64_t seen = word->load(std::memory_order_relaxed);
    while (!word->compare_exchange(seen, (std::uint64_t{handle.generation()} << 32) | 2, std::memory_order_release,
                                   std::memory_order_relaxed)) {
    }
  });
  EXPECT_EQ(table->wait(handle, 1h, SpinPolicy::sleep_at_once()), FutureState::kReady);
  late.join();
}

TEST_F(FutureProcesses, SweepFindsWhatAKilledCompleterLeft) {
  const Handle handle = make();
  Counter waiter;
  table->add_waiter(handle, &waiter);
  auto* word = reinterpret_cast<Atomic<std::uint64_t>*>(memory.data() + sizeof(FutureTable)) + handle.index();
  word->store((std::uint64_t{handle.generation()} << 32) | 2, std::memory_order_release);
  table->run_waiters();
  EXPECT_EQ(waiter.runs, 0);
  table->sweep_waiters();
  EXPECT_EQ(waiter.runs, 1);
  EXPECT_EQ(table->release(handle), Status::kOk);
  EXPECT_EQ(waiter.runs, 1);
}

}  // namespace
}  // namespace pathways::test::test_future_processes
