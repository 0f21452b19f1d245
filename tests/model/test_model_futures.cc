// Every interleaving of the future table.
//   FUT-1 once     ModelFuture.TwoParts, .CompleteAgainstFail, .CompleteAgainstRelease
//   FUT-2 waiter   ModelFuture.WaiterAgainst*, .TwoWaiters, .WaitersOfTwoGenerations, .WaiterOfAForeignCompletion
//   FUT-3 stale    ModelFuture.StaleCompletion, .DoubleRelease
//   FUT-4 memory   ModelFuture.TwoParts (plain data)
//   PARK-1         ModelFuture.Wait*
//   free list      ModelFuture.AllocateAndRelease*
#include "broken.h"
#include "expect.h"
#include "futures/future_table.h"

namespace pathways::model {
namespace {

FutureTable& make_table(Program& program, std::uint32_t capacity = 2) {
  return *FutureTable::create(program.memory(FutureTable::bytes_for(capacity)), capacity);
}

Handle allocate(FutureTable& table, std::uint32_t parts = 1) {
  Handle handle;
  require(table.allocate(parts, &handle) == Status::kOk, "there is room");
  return handle;
}

struct Counts {
  Atomic<std::uint32_t> told;
  int data[2] = {0, 0};
};

struct Counting : Waiter {
  explicit Counting(int* shared = nullptr) : Waiter{&Counting::count}, data(shared) {}
  static void count(Waiter* self, FutureState state) {
    auto* me = static_cast<Counting*>(self);
    model_write(&me->runs);
    ++me->runs;
    me->state = state;
    if (me->data != nullptr && state == FutureState::kReady) model_read(me->data);
  }
  int* data;
  int runs = 0;
  FutureState state = FutureState::kPending;
};

TEST(ModelFuture, TwoParts) {
  expect_holds([](Program& program) {
    FutureTable& table = make_table(program);
    auto& counts = program.make<Counts>();
    const Handle handle = allocate(table, 2);
    for (int t = 0; t < 2; ++t) {
      program.thread([&, handle, t] {
        model_write(&counts.data[t]);
        if (table.complete(handle) == Completion::kReady) counts.told.fetch_add(1, std::memory_order_relaxed);
      });
    }
    program.thread([&, handle] {
      if (table.poll(handle) != FutureState::kReady) return;
      model_read(&counts.data[0]);
      model_read(&counts.data[1]);
    });
    program.finally([&, handle] {
      require(table.poll(handle) == FutureState::kReady, "ready at the end");
      require(counts.told.load(std::memory_order_relaxed) == 1, "one is told");
    });
  });
}

TEST(ModelFuture, CompleteAgainstFail) {
  expect_holds([](Program& program) {
    FutureTable& table = make_table(program);
    auto& counts = program.make<Counts>();
    const Handle handle = allocate(table);
    for (int t = 0; t < 3; ++t) {
      program.thread([&, handle, t] {
        const Completion done = t == 0 ? table.complete(handle) : table.fail(handle, static_cast<std::uint32_t>(t));
        if (done == Completion::kReady) counts.told.fetch_add(1, std::memory_order_relaxed);
      });
    }
    program.finally([&, handle] {
      require(counts.told.load(std::memory_order_relaxed) == 1, "one is told");
      const bool failed = table.poll(handle) == FutureState::kFailed;
      require(failed == (table.error_of(handle) != 0), "the code belongs to the failure");
    });
  });
}

TEST(ModelFuture, CompleteAgainstRelease) {
  expect_holds([](Program& program) {
    FutureTable& table = make_table(program, 1);
    const Handle old = allocate(table);
    program.thread([&, old] { static_cast<void>(table.complete(old)); });
    program.thread([&, old] {
      require(table.release(old) == Status::kOk, "released once");
      const Handle young = allocate(table);
      require(table.poll(young) == FutureState::kPending, "a completion of the old one does not reach the young one");
    });
    program.finally([&] { table.validate(); });
  });
}

TEST(ModelFuture, StaleCompletion) {
  expect_holds([](Program& program) {
    FutureTable& table = make_table(program, 1);
    const Handle old = allocate(table);
    auto& young = program.make<Atomic<std::uint64_t>>(std::uint64_t{0});
    program.thread([&, old] { static_cast<void>(table.fail(old)); });
    program.thread([&, old] {
      static_cast<void>(table.release(old));
      young.store(allocate(table).raw, std::memory_order_release);
    });
    program.thread([&] {
      const Handle handle{young.load(std::memory_order_acquire)};
      if (handle.valid()) require(table.complete(handle) == Completion::kReady, "nobody else completes it");
    });
  });
}

TEST(ModelFuture, DoubleRelease) {
  expect_holds([](Program& program) {
    FutureTable& table = make_table(program);
    auto& counts = program.make<Counts>();
    const Handle handle = allocate(table);
    for (int t = 0; t < 2; ++t) {
      program.thread([&, handle] {
        if (table.release(handle) == Status::kOk) counts.told.fetch_add(1, std::memory_order_relaxed);
      });
    }
    program.thread([&, handle] { static_cast<void>(table.complete(handle)); });
    program.finally([&] {
      require(counts.told.load(std::memory_order_relaxed) == 1, "one release counts");
      table.validate();
    });
  });
}

void allocate_and_release(Program& program, std::uint32_t capacity, int threads, int rounds) {
  FutureTable& table = make_table(program, capacity);
  auto* holders = static_cast<int*>(program.memory(64));
  for (int t = 0; t < threads; ++t) {
    program.thread([&table, holders, rounds] {
      for (int i = 0; i < rounds; ++i) {
        Handle handle;
        if (table.allocate(1, &handle) != Status::kOk) continue;
        model_write(&holders[handle.index()]);  // a race if two hold it
        require(table.release(handle) == Status::kOk, "mine to release");
      }
    });
  }
  program.finally([&table] { table.validate(); });
}

TEST(ModelFuture, AllocateAndRelease) {
  expect_holds([](Program& program) { allocate_and_release(program, 2, 2, 1); });
}

TEST(ModelFuture, AllocateManyAgainstRelease) {
  // The walk of allocate_many() over two links, while the other thread takes and returns the first.
  expect_holds([](Program& program) {
    FutureTable& table = make_table(program, 3);
    auto* holders = static_cast<int*>(program.memory(64));
    program.thread([&, holders] {
      const std::uint32_t parts[2] = {1, 1};
      Handle two[2];
      if (table.allocate_many(parts, two) != Status::kOk) return;
      require(two[0].index() != two[1].index(), "two different ones");
      for (const Handle handle : two) model_write(&holders[handle.index()]);
    });
    program.thread([&, holders] {
      const Handle first = allocate(table);
      model_write(&holders[first.index()]);
      Handle second;
      if (table.allocate(1, &second) == Status::kOk) model_write(&holders[second.index()]);
      require(table.release(first) == Status::kOk, "mine to release");
    });
    program.finally([&] { table.validate(); });
  });
}

template <class... Bodies>
void waiter_program(Program& program, int waiters, Bodies... bodies) {
  FutureTable& table = make_table(program, 1);
  const Handle handle = allocate(table);
  auto* data = static_cast<int*>(program.memory(64));
  std::vector<Counting*> all;
  for (int w = 0; w < waiters; ++w) {
    auto& waiter = program.make<Counting>(data);
    all.push_back(&waiter);
    program.thread([&table, handle, &waiter] { table.add_waiter(handle, &waiter); });
  }
  (program.thread([&table, handle, data, bodies] { bodies(table, handle, data); }), ...);
  program.finally([all, &table] {
    table.validate();
    for (const Counting* waiter : all) {
      require(waiter->runs == 1, "a waiter runs exactly once");
      require(waiter->state != FutureState::kPending, "and not for a pending future");
    }
  });
}

constexpr auto kComplete = [](FutureTable& table, Handle handle, int* data) {
  model_write(data);
  static_cast<void>(table.complete(handle));
};
constexpr auto kRelease = [](FutureTable& table, Handle handle, int*) { static_cast<void>(table.release(handle)); };
constexpr auto kSweep = [](FutureTable& table, Handle, int*) { table.sweep_waiters(); };

TEST(ModelFuture, WaiterAgainstComplete) {
  expect_holds([](Program& program) { waiter_program(program, 1, kComplete); });
}
TEST(ModelFuture, TwoWaitersAgainstComplete) {
  expect_holds([](Program& program) { waiter_program(program, 2, kComplete); });
}
TEST(ModelFuture, WaiterAgainstCompleteAndRelease) {
  expect_holds([](Program& program) { waiter_program(program, 1, kComplete, kRelease); });
}
TEST(ModelFuture, WaiterAgainstCompleteAndSweep) {
  expect_holds([](Program& program) { waiter_program(program, 1, kComplete, kSweep); });
}

TEST(ModelFuture, WaitersOfTwoGenerations) {
  expect_holds([](Program& program) {
    FutureTable& table = make_table(program, 1);
    auto& first = program.make<Counting>();
    auto& second = program.make<Counting>();
    const Handle old = allocate(table);
    program.thread([&, old] { table.add_waiter(old, &first); });
    program.thread([&, old] {
      static_cast<void>(table.release(old));
      const Handle young = allocate(table);
      table.add_waiter(young, &second);
      require(table.complete(young) == Completion::kReady, "nobody else completes it");
    });
    program.finally([&] {
      require(first.runs == 1 && first.state == FutureState::kFree, "the old one's waiter runs for the release");
      require(second.runs == 1 && second.state == FutureState::kReady,
              "the young one's waiter runs for the completion");
    });
  });
}

TEST(ModelFuture, WaiterOfAForeignCompletion) {
  expect_holds([](Program& program) {
    FutureTable& table = make_table(program, 1);
    const Handle handle = allocate(table);
    auto& waiter = program.make<Counting>();
    table.add_waiter(handle, &waiter);
    // From here on completers think that they are another process: the owner's token is the third word.
    reinterpret_cast<std::uint64_t*>(&table)[2] ^= 2;
    program.thread([&, handle] { static_cast<void>(table.complete(handle)); });
    program.thread([&] {
      for (;;) {
        const std::uint32_t ticket = table.doorbell().ticket();
        table.run_waiters();
        if (waiter.runs == 1) break;
        static_cast<void>(table.doorbell().wait(ticket, std::chrono::nanoseconds::max(), SpinPolicy::sleep_at_once()));
      }
    });
    program.finally([&] { require(waiter.runs == 1, "a waiter runs exactly once"); });
  });
}

void wait_program(Program& program, int waiters, int completers) {
  FutureTable& table = make_table(program, 1);
  const Handle handle = allocate(table, static_cast<std::uint32_t>(completers));
  auto* data = static_cast<int*>(program.memory(64));
  for (int c = 0; c < completers; ++c) {
    program.thread([&table, handle, data, c] {
      model_write(&data[c]);
      static_cast<void>(table.complete(handle));
    });
  }
  for (int w = 0; w < waiters; ++w) {
    program.thread([&table, handle, data, completers] {
      require(table.wait(handle, std::chrono::nanoseconds::max(), SpinPolicy::sleep_at_once()) == FutureState::kReady,
              "ready");
      for (int c = 0; c < completers; ++c) model_read(&data[c]);
    });
  }
}

TEST(ModelFuture, WaitForOnePart) {
  expect_holds([](Program& program) { wait_program(program, 1, 1); });
}
TEST(ModelFuture, WaitForTwoParts) {
  expect_holds([](Program& program) { wait_program(program, 1, 2); });
}
TEST(ModelFuture, TwoWait) {
  expect_holds([](Program& program) { wait_program(program, 2, 1); });
}

template <broken::FutureMistake kMistake>
void slot_completions(Program& program) {
  auto& slot = program.make<broken::Slot<kMistake>>();
  auto& counts = program.make<Counts>();
  for (int t = 0; t < 2; ++t) {
    program.thread([&slot, &counts] {
      if (slot.complete(1)) counts.told.fetch_add(1, std::memory_order_relaxed);
    });
  }
  program.finally([&counts] { require(counts.told.load(std::memory_order_relaxed) == 1, "one is told"); });
}

template <broken::FutureMistake kMistake>
void slot_reuse(Program& program) {
  auto& slot = program.make<broken::Slot<kMistake>>();
  program.thread([&slot] { static_cast<void>(slot.complete(1)); });
  program.thread([&slot] {
    slot.reopen();
    require((slot.word.load(std::memory_order_relaxed) & 3) == slot.kPending, "the young one is pending");
  });
}

template <broken::FutureMistake kMistake>
void slot_waiter(Program& program) {
  auto& slot = program.make<broken::Slot<kMistake>>();
  program.thread([&slot] { slot.add_waiter(); });
  program.thread([&slot] { static_cast<void>(slot.complete(1)); });
  program.finally([&slot] { require(slot.runs.load(std::memory_order_relaxed) == 1, "the waiter ran once"); });
}

using broken::FutureMistake;

TEST(ModelFuture, CatchesACompletionThatIsNotAtomic) {
  expect_holds(slot_completions<FutureMistake::kNone>);
  expect_caught(Memory::kInterleaved, slot_completions<FutureMistake::kLoadThenStore>, "one is told");
}
TEST(ModelFuture, CatchesAMissingGenerationCheck) {
  expect_holds(slot_reuse<FutureMistake::kNone>);
  expect_caught(Memory::kInterleaved, slot_reuse<FutureMistake::kNoGeneration>, "the young one is pending");
}
TEST(ModelFuture, CatchesALostWaiter) {
  expect_holds(slot_waiter<FutureMistake::kNone>);
  expect_caught(Memory::kInterleaved, slot_waiter<FutureMistake::kNoLookAfterPush>, "the waiter ran once");
  expect_caught(Memory::kInterleaved, slot_waiter<FutureMistake::kMarksFirst>, "the waiter ran once");
}
TEST(ModelFuture, CatchesARelaxedCompletion) {
  expect_caught(
      Memory::kInterleaved,
      [](Program& program) {
        auto& slot = program.make<broken::Slot<FutureMistake::kRelaxedPublish>>();
        auto& data = program.make<int>(0);
        program.thread([&] {
          model_write(&data);
          static_cast<void>(slot.complete(1));
        });
        program.thread([&] {
          if ((slot.word.load(std::memory_order_acquire) & 3) == slot.kReady) model_read(&data);
        });
      },
      "data race");
}
TEST(ModelFuture, CatchesAnUncountedFreeList) {
  expect_caught(
      Memory::kInterleaved,
      [](Program& program) {
        auto& stack = program.make<broken::UncountedStack>();
        auto* holders = static_cast<int*>(program.memory(64));
        for (std::uint32_t item = 3; item > 0; --item) stack.push(item);
        program.thread([&stack, holders] {
          for (int i = 0; i < 2; ++i) {
            if (const std::uint32_t item = stack.pop(); item != 0) model_write(&holders[item]);
          }
        });
        program.thread([&stack, holders] {
          const std::uint32_t first = stack.pop();
          const std::uint32_t second = stack.pop();
          stack.push(first);
          model_write(&holders[second]);  // still held
        });
      },
      "data race");
}

}  // namespace
}  // namespace pathways::model
