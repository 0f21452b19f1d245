// Tasks: long work beside the order, on modelled devices; the test says when a task is done.
//
//   ASY-1   Tasks.WaitForTheirBufferAndForNothingElse, Tasks.WhatIsMadeIsWaitedFor: nothing here waits
//   ERR-1   Tasks.FailuresReachTheirOwnFuture, Tasks.AFailedMakerFailsItsReaders
//   OWN-1   Tasks.AClientThatGoesTakesNothingAlong
//   FUT-3   Tasks.ReleasedBeforeMade
//   MEM-7   Tasks.KeepTheirValueUntilTheirEnd, Tasks.EachHoldIsOverOnce
#include <algorithm>
#include <numeric>

#include "executor/bench_host.h"

namespace pathways::test::test_tasks {
namespace {

struct Tasks : Bench {
  void task(uint64_t handle, uint64_t token, uint32_t client = 0) {
    host.command(CommandKind::kTask, handle, token, {}, client);
  }
  /// The oldest task under way ends.
  void end(Value made = nullptr, const std::optional<std::string>& error = std::nullopt) {
    ASSERT_FALSE(host.backend.tasks().empty());
    const ModelledBackend::Task task = host.backend.tasks().front();
    host.backend.tasks().erase(host.backend.tasks().begin());
    if (task.value != nullptr) host.backend.drop(task.value);
    host.executor.on_task_done(task.number, made, 1, error);
  }
};

const uint64_t A = handle(1), B = handle(2), T = handle(3), U = handle(4);

TEST_F(Tasks, WaitForTheirBufferAndForNothingElse) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1));
  host.run(1, 0, {}, {A});
  task(A, T);  // of what is still being computed
  task(0, U);  // of nothing
  EXPECT_EQ(host.backend.tasks().size(), 1u);
  EXPECT_FALSE(host.executor.is_idle());
  end();
  EXPECT_EQ(host.link.completions(U), 1u);
  host.run(2, 0, {}, {B});  // the order goes on
  EXPECT_EQ(host.backend.launches(), 2u);
  pass();
  ASSERT_EQ(host.backend.tasks().size(), 1u);
  EXPECT_NE(host.backend.tasks()[0].value, nullptr);
  EXPECT_EQ(host.executor.stats().tasks, 1u);
  EXPECT_EQ(host.link.completions(T), 0u);
  end();
  EXPECT_EQ(host.link.completions(T), 1u);
  drop({A, B});
}

TEST_F(Tasks, BeforeItsBufferIsAnnouncedReady) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1), false);  // not compiled: the result has no value yet
  host.run(1, 0, {}, {A});
  task(A, T);
  host.release(A);  // the client's handle is over, the task's is not
  pass();
  EXPECT_TRUE(host.backend.tasks().empty());
  host.executor.set_compiled(0);
  pass();
  end();
  EXPECT_EQ(host.link.completions(T), 1u);
  drop({});
}

TEST_F(Tasks, WhatIsMadeIsWaitedFor) {
  host.add_plan(0, plan_of({0}, {call({0}, {1})}, {1}, 2));
  task(A, 0);
  host.run(1, 0, {A}, {B});
  uint64_t seen = 0;
  host.fetch(A, T, &seen);
  pass();
  EXPECT_EQ(host.backend.launches(), 0u);
  end(host.backend.make_value(7, 500));
  EXPECT_EQ(host.backend.launches(), 1u);
  EXPECT_EQ(host.link.completions(A), 0u);  // made, not ready yet
  pass();
  EXPECT_EQ(host.link.completions(A), 1u);
  EXPECT_EQ(host.link.completions(B), 1u);
  EXPECT_EQ(host.link.completions(T), 1u);
  EXPECT_EQ(seen, 7u);
  drop({A, B});
}

TEST_F(Tasks, FailuresReachTheirOwnFuture) {
  ModelledFaults faults;
  faults.fail_value = 1;
  host.backend.set_faults(faults);
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1));
  host.run(1, 0, {}, {A});
  task(A, T);
  pass();
  EXPECT_TRUE(host.backend.tasks().empty());  // of a value that failed nothing is done
  EXPECT_NE(host.link.failure(T), "");
  task(A, handle(5));  // known by now
  EXPECT_NE(host.link.failure(handle(5)), "");
  task(0, U);
  end(nullptr, "no room");
  EXPECT_EQ(host.link.failure(U), "no room");
  EXPECT_EQ(host.link.completions(U), 0u);
  task(B, handle(6));
  EXPECT_EQ(host.link.failure(handle(6)), "the buffer to read was deleted");
  faults.fail_tasks = true;
  host.backend.set_faults(faults);
  task(0, handle(7));
  EXPECT_EQ(host.link.failure(handle(7)), "a modelled task was refused");
  drop({A});
}

TEST_F(Tasks, AFailedMakerFailsItsReaders) {
  host.add_plan(0, plan_of({0}, {call({0}, {1})}, {1}, 2));
  task(A, 0);
  host.run(1, 0, {A}, {B});
  end(nullptr, "not there");
  EXPECT_EQ(host.link.failure(A), "not there");
  EXPECT_EQ(host.link.failure(B), "not there");
  EXPECT_EQ(host.backend.launches(), 0u);
  task(T, 0);
  end();  // says that it is done, and brings nothing
  EXPECT_EQ(host.link.failure(T), "the task made nothing");
  task(U, 0);
  end(host.backend.make_value(1), "half done");
  EXPECT_EQ(host.link.failure(U), "half done");
  drop({A, B, T, U});
}

TEST_F(Tasks, ReleasedBeforeMade) {
  task(A, 0);
  host.release(A);
  task(handle(1, 2), 0);  // the index is used again
  EXPECT_EQ(host.backend.tasks().size(), 2u);
  end(host.backend.make_value(1));
  end(host.backend.make_value(2));
  pass();
  uint64_t seen = 0;
  host.fetch(handle(1, 2), T, &seen);
  pass();
  EXPECT_EQ(seen, 2u);
  drop({handle(1, 2)});
}

TEST_F(Tasks, AClientThatGoesTakesNothingAlong) {
  host.executor.add_client(1);
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1));
  host.put(A, 7, 1, 1);
  host.poll();
  task(A, T, 1);
  task(B, 0, 1);
  task(A, U, 1);
  pass();
  ASSERT_EQ(host.backend.tasks().size(), 3u);
  host.run(1, 0, {}, {handle(9)}, 1);
  task(handle(9), handle(8), 1);
  host.executor.on_client_gone(1);
  end(host.backend.tasks().front().value == nullptr ? host.backend.make_value(3) : nullptr);
  pass();  // what it still had computed is not handed to a task
  while (!host.backend.tasks().empty()) {
    end(host.backend.tasks().front().value == nullptr ? host.backend.make_value(3) : nullptr);
  }
  pass();
  EXPECT_EQ(host.link.completions(T, 1), 0u);
  EXPECT_EQ(host.link.completions(B, 1), 0u);
  EXPECT_EQ(host.link.failures.size(), 0u);
  host.expect_empty();
}

TEST_F(Tasks, KeepTheirValueUntilTheirEnd) {
  host.put(A, 7);
  host.poll();
  host.hold = 5;
  task(A, T);
  pass();
  const uint64_t number = host.backend.tasks().at(0).number;
  host.executor.on_task_answered(number);
  host.executor.on_task_answered(number);
  EXPECT_EQ(host.link.completions(T), 1u);
  host.release(A);
  host.executor.on_client_gone(0);
  pass();
  EXPECT_EQ(host.backend.live_values(), 1u);
  EXPECT_TRUE(host.link.holds_over.empty());
  end(nullptr, "too late to say");
  EXPECT_EQ(host.link.holds_over, std::vector<uint64_t>{5});
  EXPECT_EQ(host.link.completions(T), 1u);
  EXPECT_EQ(host.link.failure(T), "");
  host.expect_empty();
}

TEST_F(Tasks, EachHoldIsOverOnce) {
  ModelledFaults faults;
  faults.fail_value = 1;
  host.backend.set_faults(faults);
  host.executor.add_client(1, 4);
  host.executor.add_client(2);
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1));
  host.run(1, 0, {}, {A});  // its value fails
  uint64_t holds = 0;
  const auto next = [&](uint64_t reads, uint64_t token, uint32_t client = 0) {
    host.hold = ++holds;
    task(reads, token, client);
  };
  next(A, T);  // it waits for the value
  pass();
  next(A, T);             // of what has failed
  next(handle(7), T);     // of what is not there
  next(handle(9), 0, 1);  // it makes what its client cannot name
  next(B, 0, 2);
  host.put(handle(5), 7);
  host.poll();
  host.run(2, 0, {}, {handle(6)});
  next(handle(6), T);  // its client is gone before the value is ready
  host.executor.on_client_gone(0);
  pass();
  next(A, T);  // its client is gone
  faults.fail_tasks = true;
  host.backend.set_faults(faults);
  next(handle(8), 0, 2);  // the backend refuses it
  ASSERT_EQ(host.backend.tasks().size(), 1u);
  EXPECT_EQ(host.link.holds_over.size(), holds - 1);
  end();
  auto over = host.link.holds_over;
  std::sort(over.begin(), over.end());
  std::vector<uint64_t> expected(holds);
  std::iota(expected.begin(), expected.end(), 1);
  EXPECT_EQ(over, expected);
}

TEST_F(Tasks, AnUnknownEndIsIgnored) {
  task(A, 0);
  host.executor.clear();
  host.backend.tasks().clear();
  host.executor.on_task_done(1, host.backend.make_value(1), 1, std::nullopt);
  host.executor.on_task_done(99, nullptr, 0, "late");
  EXPECT_EQ(host.backend.live_values(), 0u);
}

TEST_F(Tasks, HandlesOutOfRangeAreRefused) {
  host.executor.add_client(2, 4);
  task(handle(9), 0, 2);
  task(0, 0, 2);
  EXPECT_NE(host.link.failure(handle(9), 2), "");
  EXPECT_TRUE(host.backend.tasks().empty());
  host.expect_empty();
}

}  // namespace
}  // namespace pathways::test::test_tasks
