// Small transfers between two executors on different machines: sent before their receives are announced.
//
//   FAR-3   FarPair.BeforeTheAnnouncement, FarPair.BeforeTheRun, FarPair.RefusedThereAndSentAgain,
//           FarPairs.StreamBrokeAndSentAgain, FarPairs.NoMoreThanItsCredit, FarPair.WithoutMemory, FarPair.AnyOrder,
//           FarPair.WhatComesTooLateIsDropped
//   ERR-1   FarPairs.ReceiveFailed, FarPair.BrokeAfterItCame, FarPair.RunThatThePeerRefuses
//   ERR-2   FarPairs.LostAtAnyStage
#include <random>

#include "executor/bench_pair.h"
#include "movement/early_sends.h"
#include "support.h"

namespace pathways::test::test_early_sends {
namespace {

const uint64_t A = handle(1), B = handle(2), C = handle(3);

/// Two hosts on different machines.
struct FarHosts : HostPair {
  FarHosts() {
    for (uint32_t h = 0; h < 2; ++h) {
      host(h).backend.open_stream(1 - h, &host(1 - h).backend);
    }
    add_plans();
    zero.put(A, 7);
  }
  void run(uint32_t h, uint64_t order = 1) { host(h).run(order, 0, {A}, {B, C}); }
  void set_faults(uint32_t h, ModelledFaults faults) { host(h).backend.set_faults(faults); }
  void drop() {
    settle();
    release({A, B, C});
    expect_empty();
  }
};

struct FarPair : ::testing::Test, FarHosts {};

TEST_F(FarPair, BeforeTheAnnouncement) {
  run(1);
  run(0);
  pass();
  EXPECT_EQ(one.link.completions(C), 1u);  // no record was delivered
  EXPECT_EQ(one.link.outgoing.size(), 1u);
  EXPECT_EQ(zero.link.outgoing.size(), 0u);  // the destination sees by itself what has come
  EXPECT_EQ(zero.link.runs.size(), 0u);      // the source waits for the announcement
  settle();
  EXPECT_EQ(zero.link.runs.size(), 1u);
  drop();
}

TEST_F(FarPair, BeforeTheRun) {
  run(0);
  pass();
  run(1);
  EXPECT_EQ(one.backend.launches(), 0u);  // not while the run is prepared
  pass();
  EXPECT_EQ(one.link.completions(C), 1u);
  drop();
}

TEST_F(FarPair, RefusedThereAndSentAgain) {
  set_faults(1, {.no_room_early = 1});
  run(0);
  pass();
  run(1);
  pass();
  EXPECT_EQ(one.link.completions(C), 0u);
  settle();
  EXPECT_EQ(one.link.completions(C), 1u);
  EXPECT_EQ(one.link.failure(C), "");
  drop();
}

TEST(FarPairs, StreamBrokeAndSentAgain) {
  for (const int announced_after : {2, 20}) {  // while the send is under way, or when it has failed
    FarHosts far;
    far.set_faults(0, {.fail_send = 1, .send_ns = 5000});
    far.run(0);
    far.run(1);
    far.pass(announced_after);
    far.deliver(far.one);
    far.pass(20);
    EXPECT_EQ(far.one.link.completions(C), 1u) << announced_after;
    EXPECT_EQ(far.one.link.failure(C), "") << announced_after;
    EXPECT_TRUE(far.zero.link.outgoing.empty());
    far.drop();
  }
}

TEST(FarPairs, NoMoreThanItsCredit) {
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
  set_faults(1, {.no_memory = 5});
  run(0);
  run(1);
  clock.advance(1000);
  zero.poll();
  one.executor.poll();
  EXPECT_EQ(one.link.completions(C), 0u);
  pass();
  EXPECT_EQ(one.link.completions(C), 1u);
  drop();
}

TEST(FarPairs, ReceiveFailed) {
  for (const bool is_early : {false, true}) {
    FarHosts far;
    far.set_faults(1, {.fail_receive = 1});
    if (!is_early) far.run(1);
    far.run(0);
    far.pass(1);
    if (is_early) far.run(1);
    far.settle();
    EXPECT_EQ(far.zero.link.completions(B), 1u);
    EXPECT_NE(far.one.link.failure(C).find("receive was refused"), std::string::npos);
    far.drop();
  }
}

TEST_F(FarPair, BrokeAfterItCame) {
  // The answer is lost with the stream, so the source takes for failed what the destination has.
  run(1);
  run(0);
  pass();
  EXPECT_EQ(one.link.completions(C), 1u);
  EXPECT_EQ(one.executor.on_receive_done(1, 5, 0, Outcome::kFailed, "its stream broke"), Status::kOk);
  EXPECT_EQ(one.executor.on_receive_done(1, 5, 0, Outcome::kDone, {}), Status::kInvalid);
  EXPECT_EQ(one.executor.on_receive_done(2, 5, 0, Outcome::kFailed, "of no run yet"), Status::kInvalid);
  EXPECT_EQ(one.link.failure(C), "");
  drop();
}

TEST_F(FarPair, WhatComesTooLateIsDropped) {
  // Of a run that is over, and of one without this transfer. What is kept without need would switch off the check for
  // hosts that are stuck.
  one.add_plan(3, plan_of({0}, {call({0}, {1})}, {1}, 2, 1));
  one.put(A, 7);
  one.run(4, 3, {A}, {B});
  zero.add_plan(4, plan_of({0}, {transfer(5, {0}, {}, {}, {1})}, {kNoValue}, 1, 0));
  zero.run(4, 4, {A}, {B});
  pass();
  EXPECT_EQ(one.executor.stats().exchanges, 0u);
  zero.executor.on_hosts_lost(std::vector<uint32_t>{1}, "host 1 is lost");
  drop();
}

TEST_F(FarPair, RunThatThePeerRefuses) {
  // Host 1 does not know the plan. What comes early is dropped, before the run and after it.
  zero.add_plan(9, plan_of({0}, {call({0}, {1}), transfer(5, {1}, {}, {}, {1})}, {1, kNoValue}, 2, 0));
  for (uint64_t order : {1u, 2u}) {
    if (order == 1) one.run(order, 9, {A}, {B, C});
    zero.run(order, 9, {A}, {B, C});
    pass();
    if (order == 2) one.run(order, 9, {A}, {B, C});
    EXPECT_EQ(one.executor.stats().exchanges, 0u) << order;
    zero.release(B);
    // A host knows all plans that its peers run. So what waits for an announcement that never comes waits for a host
    // that is lost.
    zero.executor.on_hosts_lost(std::vector<uint32_t>{1}, "host 1 is lost");
    zero.poll();
    EXPECT_EQ(zero.executor.stats().exchanges, 0u) << order;
  }
  zero.release(A);
  zero.poll();
  zero.expect_empty();
}

TEST(FarPairs, LostAtAnyStage) {
  for (int stage = 0; stage < 5; ++stage) {
    for (const bool is_dead : {false, true}) {
      FarHosts far;
      BenchHost &zero = far.zero, &one = far.one;
      const bool is_announced = stage == 2 || stage == 4;
      far.set_faults(0, {.send_ns = 5000});
      far.run(0);
      if (stage >= 1) far.clock.advance(1000), zero.poll();  // under way
      if (is_announced) {
        far.run(1);
        far.deliver(one);
      }
      if (stage >= 3) far.clock.advance(9000), zero.poll();  // kept there
      if (is_dead) {
        zero.executor.on_hosts_lost(std::vector<uint32_t>{1}, "host 1 is lost");
      } else {
        zero.executor.close_peer(1, "host 1 is mad");
      }
      for (int round = 0; round < 10; ++round) far.clock.advance(1000), zero.poll();
      EXPECT_EQ(zero.executor.sends_under_way(1), 0u) << stage;
      EXPECT_EQ(zero.link.completions(B), 1u) << stage;
      EXPECT_EQ(zero.link.runs.size(), 1u) << stage << is_dead;
      // A host is told of a loss after all runs that it shares with the lost host.
      if (!is_announced) far.run(1);
      one.executor.on_hosts_lost(std::vector<uint32_t>{0}, "host 0 is lost");
      far.pass(1);
      EXPECT_EQ(one.link.completions(C) + one.link.failures.size(), 1u) << stage;
      far.zero.link.outgoing.clear();  // neither hears of the other any more
      far.one.link.outgoing.clear();
      far.drop();
    }
  }
}

TEST_F(FarPair, AnyOrder) {
  add_plans_back(1);
  std::mt19937_64 random(seed());
  for (uint32_t trial = 0; trial < 200 * kStressScale && !HasFailure(); ++trial) {
    for (uint32_t h = 0; h < 2; ++h) {
      set_faults(h, {.no_room_early = static_cast<uint32_t>(random() % 3),
                     .no_memory = static_cast<uint32_t>(random() % 3),
                     .send_ns = static_cast<int64_t>(random() % 300)});
    }
    run_there_and_back(random, trial * 100, A);
    release({A});
    expect_empty();
    for (const auto& [handle, text] : zero.link.failures) ADD_FAILURE() << text;
    for (const auto& [handle, text] : one.link.failures) ADD_FAILURE() << text;
    zero.put(A, 7);
  }
  release({A});
  EXPECT_EQ(zero.link.runs.size(), one.link.runs.size());
}

}  // namespace
}  // namespace pathways::test::test_early_sends
