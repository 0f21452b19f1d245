// Small transfers between two executors on different machines: sent before their receives are announced.
//
//   FAR-3   FarPair.BeforeTheAnnouncement, FarPair.BeforeTheRun, FarPair.RefusedThereAndSentAgain,
//           FarPair.StreamBrokeAndSentAgain, FarPair.NoMoreThanItsCredit, FarPair.WithoutMemory, FarPair.AnyOrder
//   ERR-1   FarPair.ReceiveFailed, FarPair.BrokeAfterItCame, FarPair.RunThatThePeerRefuses
//   ERR-2   FarPair.LostAtAnyStage
#include <random>

#include "executor/bench_pair.h"
#include "executor/early_sends.h"
#include "support.h"

namespace pathways::test {
namespace {

const uint64_t A = handle(1), B = handle(2), C = handle(3), D = handle(4), E = handle(5);

/// Which records from one host to the other wait: those of a kind that the test does not deliver yet.
struct FarPair : BenchPair {
  FarPair() {
    connect(zero, one);
    connect(one, zero);
  }
  static void connect(BenchHost& from, BenchHost& to) {
    from.backend.set_far(to.link.self, &to.backend);
    from.link.far.insert(to.link.self);
  }
  /// Host 0 calls, the value goes to host 1, which calls; results: on 0, on 1.
  static void add_plans(BenchHost& zero, BenchHost& one) {
    zero.add_plan(0, plan_of({0}, {call({0}, {1}), transfer(5, {1}, {}, {}, {1})}, {1, kNoValue}, 2, 0));
    one.add_plan(0, plan_of({kNoValue}, {transfer(5, {}, {0}, {0}, {}), call({0}, {1})}, {kNoValue, 1}, 2, 1));
  }
  /// Lets time pass, but delivers no record.
  void pass() {
    for (int round = 0; round < 10; ++round) {
      clock.advance(1000);
      zero.poll();
      one.poll();
    }
  }
  void drop(const std::vector<uint64_t>& handles) {
    settle();
    for (const uint64_t h : handles) zero.release(h), one.release(h);
    settle();
    zero.expect_empty();
    one.expect_empty();
  }
};

TEST_F(FarPair, BeforeTheAnnouncement) {
  add_plans(zero, one);
  zero.put(A, 7);
  one.run(1, 0, {A}, {B, C});
  zero.run(1, 0, {A}, {B, C});
  pass();
  EXPECT_EQ(one.link.completions(C), 1u);  // no record was delivered
  EXPECT_EQ(one.link.outgoing.size(), 1u);
  EXPECT_EQ(zero.link.outgoing.size(), 0u);  // the destination sees by itself what has come
  EXPECT_EQ(zero.link.runs.size(), 0u);      // the source waits for the announcement
  settle();
  EXPECT_EQ(zero.link.runs.size(), 1u);
  drop({A, B, C});
}

TEST_F(FarPair, BeforeTheRun) {
  add_plans(zero, one);
  zero.put(A, 7);
  zero.run(1, 0, {A}, {B, C});
  pass();
  EXPECT_EQ(one.executor.stats().exchanges, 1u);  // it is kept
  one.run(1, 0, {A}, {B, C});
  pass();
  EXPECT_EQ(one.link.completions(C), 1u);
  drop({A, B, C});
}

TEST_F(FarPair, RefusedThereAndSentAgain) {
  add_plans(zero, one);
  ModelledFaults faults;
  faults.no_room_early = 1;
  one.backend.set_faults(faults);
  zero.put(A, 7);
  zero.run(1, 0, {A}, {B, C});
  pass();
  one.run(1, 0, {A}, {B, C});
  pass();
  EXPECT_EQ(one.link.completions(C), 0u);
  settle();
  EXPECT_EQ(one.link.completions(C), 1u);
  EXPECT_EQ(one.link.failure(C), "");
  drop({A, B, C});
}

TEST_F(FarPair, StreamBrokeAndSentAgain) {
  for (const bool is_announced_first : {false, true}) {
    BenchHost zero{clock, 0}, one{clock, 1};
    connect(zero, one);
    add_plans(zero, one);
    ModelledFaults faults;
    faults.fail_send = 1;
    faults.send_ns = 5000;
    zero.backend.set_faults(faults);
    zero.put(A, 7);
    zero.run(1, 0, {A}, {B, C});
    one.run(1, 0, {A}, {B, C});
    for (int round = 0; round < 40; ++round) {
      clock.advance(1000);
      zero.poll();
      one.poll();
      if (round > (is_announced_first ? 2 : 20) && !one.link.outgoing.empty()) {
        one.link.outgoing.front().deliver(zero.executor);
        one.link.outgoing.pop_front();
      }
    }
    EXPECT_EQ(one.link.completions(C), 1u) << is_announced_first;
    EXPECT_EQ(one.link.failure(C), "") << is_announced_first;
    EXPECT_TRUE(zero.link.outgoing.empty());
    for (const uint64_t h : {A, B, C}) zero.release(h), one.release(h);
    zero.poll();
    one.poll();
    zero.expect_empty();
    one.expect_empty();
  }
}

TEST_F(FarPair, NoMoreThanItsCredit) {
  EarlySends credit;
  std::vector<EarlySend> sends;
  EXPECT_FALSE(credit.take(3, kMostEarly + 1));
  EXPECT_TRUE(credit.take(3, kMostEarly - 8));
  EXPECT_FALSE(credit.take(3, 9));
  EXPECT_TRUE(credit.take(4, 9));  // each destination has its own
  EXPECT_TRUE(credit.take(3, 8));
  sends.push_back({3, 8});
  EXPECT_FALSE(credit.take(3, 1));
  EXPECT_FALSE(credit.remove(sends, 4).has_value());
  EXPECT_TRUE(credit.remove(sends, 3).has_value());
  EXPECT_TRUE(credit.take(3, 8));

  auto kept = std::make_shared<std::atomic<uint64_t>>(24);
  const std::vector<std::byte> bytes(24);
  {
    EarlyChunk one(bytes, kept);
    EarlyChunk other = std::move(one);
    EXPECT_EQ(kept->load(), 24u);
    EXPECT_EQ(other.bytes().size(), 24u);
  }
  EXPECT_EQ(kept->load(), 0u);
}

TEST_F(FarPair, WithoutMemory) {
  add_plans(zero, one);
  ModelledFaults faults;
  faults.no_memory = 5;
  one.backend.set_faults(faults);
  zero.put(A, 7);
  zero.run(1, 0, {A}, {B, C});
  one.run(1, 0, {A}, {B, C});
  clock.advance(1000);
  zero.poll();
  one.executor.poll();
  EXPECT_EQ(one.link.completions(C), 0u);
  pass();
  EXPECT_EQ(one.link.completions(C), 1u);
  drop({A, B, C});
}

TEST_F(FarPair, ReceiveFailed) {
  for (const bool is_early : {false, true}) {
    BenchHost zero{clock, 0}, one{clock, 1};
    connect(zero, one);
    add_plans(zero, one);
    ModelledFaults faults;
    faults.fail_receive = 1;
    one.backend.set_faults(faults);
    zero.put(A, 7);
    if (!is_early) one.run(1, 0, {A}, {B, C});
    zero.run(1, 0, {A}, {B, C});
    clock.advance(1000);
    zero.poll();
    if (is_early) one.run(1, 0, {A}, {B, C});
    for (int round = 0; round < 10; ++round) {
      clock.advance(1000);
      zero.poll();
      one.poll();
      for (auto* from : {&zero, &one}) {
        auto& to = from == &zero ? one : zero;
        for (; !from->link.outgoing.empty(); from->link.outgoing.pop_front()) {
          from->link.outgoing.front().deliver(to.executor);
        }
      }
    }
    EXPECT_EQ(zero.link.completions(B), 1u);
    EXPECT_NE(one.link.failure(C).find("receive was refused"), std::string::npos);
    for (const uint64_t h : {A, B, C}) zero.release(h), one.release(h);
    zero.poll();
    one.poll();
    zero.expect_empty();
    one.expect_empty();
  }
}

TEST_F(FarPair, BrokeAfterItCame) {
  // The answer is lost with the stream, so the source takes for failed what the destination has.
  add_plans(zero, one);
  zero.put(A, 7);
  one.run(1, 0, {A}, {B, C});
  zero.run(1, 0, {A}, {B, C});
  pass();
  EXPECT_EQ(one.link.completions(C), 1u);
  EXPECT_EQ(one.executor.on_receive_done(1, 5, 0, Outcome::kFailed, "its stream broke"), Status::kOk);
  EXPECT_EQ(one.executor.on_receive_done(1, 5, 0, Outcome::kDone, {}), Status::kInvalid);
  EXPECT_EQ(one.executor.on_receive_done(2, 5, 0, Outcome::kFailed, "of no run yet"), Status::kInvalid);
  EXPECT_EQ(one.link.failure(C), "");
  drop({A, B, C});
}

TEST_F(FarPair, RunThatThePeerRefuses) {
  // Host 1 does not know the plan. What comes early is dropped, before the run and after it.
  zero.add_plan(0, plan_of({0}, {call({0}, {1}), transfer(5, {1}, {}, {}, {1})}, {1, kNoValue}, 2, 0));
  zero.put(A, 7);
  for (uint64_t order : {1u, 2u}) {
    if (order == 1) one.run(order, 0, {A}, {B, C});
    zero.run(order, 0, {A}, {B, C});
    pass();
    if (order == 2) one.run(order, 0, {A}, {B, C});
    EXPECT_EQ(one.executor.stats().exchanges, 0u) << order;
    zero.release(B);
    // What waits for an announcement that never comes ends with the run's failure, which the controller announces by
    // the loss of a host, or never: a host knows all plans that its peers run.
    zero.executor.on_hosts_lost(std::vector<uint32_t>{1}, "host 1 is lost");
    zero.poll();
    EXPECT_EQ(zero.executor.stats().exchanges, 0u) << order;
  }
  zero.release(A);
  zero.poll();
  zero.expect_empty();
}

TEST_F(FarPair, LostAtAnyStage) {
  for (int stage = 0; stage < 5; ++stage) {
    for (const bool is_dead : {false, true}) {
      BenchHost zero{clock, 0}, one{clock, 1};
      connect(zero, one);
      add_plans(zero, one);
      ModelledFaults faults;
      faults.send_ns = 5000;
      zero.backend.set_faults(faults);
      zero.put(A, 7);
      zero.run(1, 0, {A}, {B, C});
      if (stage >= 1) clock.advance(1000), zero.poll();  // under way
      if (stage == 2 || stage == 4) {                    // and announced
        one.run(1, 0, {A}, {B, C});
        one.link.outgoing.front().deliver(zero.executor);
      }
      if (stage >= 3) clock.advance(9000), zero.poll();  // kept there
      if (is_dead) {
        zero.executor.on_hosts_lost(std::vector<uint32_t>{1}, "host 1 is lost");
      } else {
        zero.executor.lose_peer(1, "host 1 is mad", Executor::LostPeer::kAlive);
      }
      for (int round = 0; round < 10; ++round) clock.advance(1000), zero.poll();
      EXPECT_EQ(zero.executor.sends_under_way(1), 0u) << stage;
      EXPECT_EQ(zero.link.completions(B), 1u) << stage;
      EXPECT_EQ(zero.link.runs.size(), 1u) << stage << is_dead;
      for (const uint64_t h : {A, B}) zero.release(h);
      zero.poll();
      zero.expect_empty();
      // A host is told of a loss after all runs that it shares with the lost host.
      if (stage != 2 && stage != 4) one.run(1, 0, {A}, {B, C});
      one.executor.on_hosts_lost(std::vector<uint32_t>{0}, "host 0 is lost");
      clock.advance(1000);
      one.poll();
      EXPECT_EQ(one.link.completions(C) + one.link.failures.size(), 1u) << stage;
      for (const uint64_t h : {A, B, C}) one.release(h);
      one.poll();
      one.expect_empty();
    }
  }
}

TEST_F(FarPair, AnyOrder) {
  add_plans(zero, one);
  // Back again: host 1 calls, host 0 receives.
  zero.add_plan(1, plan_of({kNoValue}, {transfer(5, {}, {0}, {1}, {}), call({0}, {1})}, {1}, 2, 0));
  one.add_plan(1, plan_of({0}, {call({0}, {1}), transfer(5, {1}, {}, {}, {0})}, {kNoValue}, 2, 1));
  std::mt19937_64 random(seed());
  for (uint32_t trial = 0; trial < 200 * kStressScale && !HasFailure(); ++trial) {
    ModelledFaults faults;
    for (uint32_t h = 0; h < 2; ++h) {
      faults.send_ns = static_cast<int64_t>(random() % 300);
      faults.no_room_early = static_cast<uint32_t>(random() % 3);
      faults.no_memory = static_cast<uint32_t>(random() % 3);
      host(h).backend.set_faults(faults);
    }
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
          host(h).executor.validate();
          break;
        default:
          clock.advance(static_cast<int64_t>(random() % 200));
      }
    }
    settle();
    zero.release(A);
    settle();
    zero.expect_empty();
    one.expect_empty();
    for (const auto& [handle, text] : zero.link.failures) ADD_FAILURE() << text;
    for (const auto& [handle, text] : one.link.failures) ADD_FAILURE() << text;
  }
  EXPECT_EQ(zero.link.runs.size(), one.link.runs.size());
}

}  // namespace
}  // namespace pathways::test
