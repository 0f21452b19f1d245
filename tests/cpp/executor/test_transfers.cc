// Transfers between two executors, whose messages the test delivers when and in what order it likes.
//
//   ASY-2   Pair.PostsBeforeTheRun: room is taken and posted when the run is prepared
//   ERR-1   Pair.SourceFailed, Pair.ReceiveFailed, Pair.SendFailed
//   MEM-4   every test ends with no value, receive or exchange left
//   (room)  Pair.RoomInOrder: a younger receive never takes room before an older one that waits
#include <random>

#include "executor/bench_host.h"
#include "support.h"

namespace pathways::test {
namespace {

const uint64_t A = handle(1), B = handle(2), C = handle(3), D = handle(4);

struct Pair : ::testing::Test {
  ModelClock clock{ModelClock::Kind::kVirtual};
  BenchHost zero{clock, 0}, one{clock, 1};

  BenchHost& host(uint32_t number) { return number == 0 ? zero : one; }
  /// Host 0 calls, the value goes to host 1, which calls; results: on 0, on 1.
  void add_plans(uint32_t id = 0, bool compiled = true) {
    zero.add_plan(id, plan_of({0}, {call({0}, {1}), transfer(5, {1}, {}, {}, {1})}, {1, kNoValue}, 2, 0), compiled);
    one.add_plan(id, plan_of({kNoValue}, {transfer(5, {}, {0}, {0}, {}), call({0}, {1})}, {kNoValue, 1}, 2, 1));
  }
  bool deliver(BenchHost& from) {
    if (from.link.outgoing.empty()) return false;
    const auto message = from.link.outgoing.front();
    from.link.outgoing.pop_front();
    message.deliver(host(message.host).executor);
    return true;
  }
  void settle() {
    for (int round = 0; round < 50; ++round) {
      clock.advance(1000);
      zero.poll();
      one.poll();
      while (deliver(zero) || deliver(one)) {
      }
    }
  }
  void run(uint64_t order, uint32_t plan, const std::vector<uint64_t>& arguments,
           const std::vector<uint64_t>& results) {
    zero.run(order, plan, arguments, results);
    one.run(order, plan, arguments, results);
  }
  void drop(std::vector<uint64_t> handles) {
    for (const uint64_t h : handles) {
      zero.release(h);
      one.release(h);
    }
    settle();
    zero.expect_empty();
    one.expect_empty();
    EXPECT_EQ(zero.link.runs.size(), one.link.runs.size());
  }
};

TEST_F(Pair, InTurn) {
  add_plans();
  zero.put(A, 7);
  run(1, 0, {A}, {B, C});
  settle();
  EXPECT_EQ(zero.link.completions(B), 1u);
  EXPECT_EQ(one.link.completions(C), 1u);
  drop({A, B, C});
}

TEST_F(Pair, PostsBeforeTheRun) {
  add_plans();
  zero.put(A, 7);
  one.run(1, 0, {A}, {B, C});
  EXPECT_EQ(one.link.outgoing.size(), 1u);
  while (deliver(one)) {
  }
  EXPECT_EQ(zero.executor.stats().exchanges, 1u);  // made by the post
  zero.run(1, 0, {A}, {B, C});
  settle();
  EXPECT_EQ(one.link.completions(C), 1u);
  drop({A, B, C});
}

TEST_F(Pair, SourceFailed) {
  add_plans();
  ModelledFaults faults;
  faults.fail_launch = 1;
  zero.backend.set_faults(faults);
  zero.put(A, 7);
  run(1, 0, {A}, {B, C});
  run(2, 0, {A}, {D, handle(5)});
  settle();
  EXPECT_NE(one.link.failure(C).find("refused on host 0"), std::string::npos);
  EXPECT_EQ(one.link.completions(handle(5)), 1u);
  drop({A, B, C, D, handle(5)});
}

TEST_F(Pair, SourceFailsLate) {
  add_plans();
  ModelledFaults faults;
  faults.fail_value = 1;
  zero.backend.set_faults(faults);
  zero.put(A, 7);
  run(1, 0, {A}, {B, C});
  settle();
  EXPECT_NE(one.link.failure(C).find("failed on host 0"), std::string::npos);
  drop({A, B, C});
}

TEST_F(Pair, SendFailed) {
  add_plans();
  ModelledFaults faults;
  faults.fail_send = 1;
  zero.backend.set_faults(faults);
  zero.put(A, 7);
  run(1, 0, {A}, {B, C});
  settle();
  EXPECT_EQ(zero.link.completions(B), 1u);
  EXPECT_NE(one.link.failure(C).find("send failed"), std::string::npos);
  drop({A, B, C});
}

TEST_F(Pair, ReceiveFailed) {
  add_plans();
  ModelledFaults faults;
  faults.fail_receive = 1;
  one.backend.set_faults(faults);
  zero.put(A, 7);
  run(1, 0, {A}, {B, C});
  settle();
  EXPECT_EQ(zero.link.completions(B), 1u);
  EXPECT_NE(one.link.failure(C).find("receive was refused"), std::string::npos);
  drop({A, B, C});
}

TEST_F(Pair, RoomInOrder) {
  add_plans();
  ModelledFaults faults;
  faults.no_memory = 3;
  one.backend.set_faults(faults);
  zero.put(A, 7);
  run(1, 0, {A}, {B, C});              // finds no room
  one.run(2, 0, {A}, {D, handle(5)});  // does not ask before the first got some
  EXPECT_EQ(one.link.outgoing.size(), 0u);
  one.executor.poll();
  EXPECT_EQ(one.link.outgoing.size(), 0u);
  one.executor.poll();
  EXPECT_EQ(one.link.outgoing.size(), 0u);
  one.executor.poll();
  EXPECT_EQ(one.link.outgoing.size(), 2u);
  zero.run(2, 0, {A}, {D, handle(5)});
  settle();
  EXPECT_EQ(one.link.completions(C) + one.link.completions(handle(5)), 2u);
  drop({A, B, C, D, handle(5)});
}

TEST_F(Pair, LocalEnds) {
  // Both ends on one host: moved by the backend, nothing is posted.
  zero.add_plan(0, plan_of({0}, {transfer(1, {0}, {1}, {0}, {0}), call({1}, {2})}, {1, 2}, 3, 0));
  zero.put(A, 7);
  zero.run(1, 0, {A}, {B, C});
  zero.run(2, 0, {handle(9)}, {D, handle(5)});
  clock.advance(1000);
  zero.poll();
  EXPECT_TRUE(zero.link.outgoing.empty());
  EXPECT_EQ(zero.link.completions(B) + zero.link.completions(C), 2u);
  EXPECT_NE(zero.link.failure(handle(5)), "");
  for (const uint64_t h : {A, B, C, D, handle(5)}) zero.release(h);
  zero.expect_empty();
}

TEST_F(Pair, ToItselfAndAway) {
  zero.add_plan(0, plan_of({0}, {transfer(1, {0}, {1}, {0}, {0, 1})}, {1, kNoValue}, 2, 0));
  one.add_plan(0, plan_of({kNoValue}, {transfer(1, {}, {0}, {0}, {})}, {kNoValue, 0}, 1, 1));
  zero.put(A, 7);
  run(1, 0, {A}, {B, C});
  run(2, 0, {handle(9)}, {D, handle(5)});
  settle();
  EXPECT_EQ(zero.link.completions(B) + one.link.completions(C), 2u);
  EXPECT_NE(zero.link.failure(D), "");
  EXPECT_EQ(zero.link.failure(D), one.link.failure(handle(5)));
  drop({A, B, C, D, handle(5)});
}

TEST_F(Pair, AnyOrderOfDelivery) {
  add_plans();
  // Back again: host 1 calls, host 0 receives.
  zero.add_plan(1, plan_of({kNoValue}, {transfer(5, {}, {0}, {1}, {}), call({0}, {1})}, {1}, 2, 0));
  one.add_plan(1, plan_of({0}, {call({0}, {1}), transfer(5, {1}, {}, {}, {0})}, {kNoValue}, 2, 1));
  std::mt19937_64 random(seed());
  for (uint32_t trial = 0; trial < 200 * kStressScale && !HasFailure(); ++trial) {
    std::deque<std::function<void()>> queue[2];
    zero.put(A, 7);
    const uint64_t base = trial * 100;
    for (uint64_t i = 1; i <= 4; ++i) {
      const uint64_t there = handle(static_cast<uint32_t>(10 + i)), here = handle(static_cast<uint32_t>(20 + i));
      const uint64_t home = handle(static_cast<uint32_t>(30 + i));
      for (uint32_t h = 0; h < 2; ++h) {
        queue[h].push_back([=, this] { host(h).run(base + 2 * i, 0, {A}, {here, there}); });
        queue[h].push_back([=, this] { host(h).run(base + 2 * i + 1, 1, {there}, {home}); });
        queue[h].push_back([=, this] {
          for (const uint64_t value : {here, there, home}) host(h).release(value);
        });
      }
    }
    while (!queue[0].empty() || !queue[1].empty()) {
      const uint32_t h = random() % 2;
      switch (random() % 4) {
        case 0:
          if (!queue[h].empty()) {
            queue[h].front()();
            queue[h].pop_front();
          }
          break;
        case 1:
          deliver(host(h));
          break;
        case 2:
          host(h).executor.poll();
          break;
        default:
          clock.advance(static_cast<int64_t>(random() % 120));
          break;
      }
    }
    settle();
    EXPECT_EQ(zero.link.runs.size(), 8 * (trial + 1));
    EXPECT_TRUE(zero.link.failures.empty() && one.link.failures.empty());
    drop({A});
  }
}

}  // namespace
}  // namespace pathways::test
