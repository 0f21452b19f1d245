// Transfers between two executors, whose messages the test delivers when and in what order it likes.
//
//   ASY-2   Pair.PostsBeforeTheRun: room is taken and posted when the run is prepared
//   ERR-1   FailingPair: a launch, a value, a send or a receive that fails
//   MEM-4   every test ends with no value, receive or exchange left; Pair.SendUnderWay: kept until it is written
//   (peers) Pair.PeerThatMakesNoSense, LostPair, Pair.RunThatThePeerRefuses
//   (room)  Pair.RoomInOrder: a younger receive never takes room before an older one that waits
//   (speed) SendsFirst: where a launch computes within the call, a send, and the record of it, do not
//           wait for the next launch, and records are read between launches that take long
#include <random>

#include "executor/bench_pair.h"
#include "executor/stub_backend.h"
#include "support.h"

namespace pathways::test::test_transfers {
namespace {

const uint64_t A = handle(1), B = handle(2), C = handle(3), D = handle(4);

struct Pair : BenchPair {
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
  zero.run(1, 0, {A}, {B, C});
  settle();
  EXPECT_EQ(one.link.completions(C), 1u);
  drop({A, B, C});
}

struct Failing {
  const char* name;
  uint32_t host;  ///< whose backend has the fault
  ModelledFaults faults;
  const char* says;   ///< in the failure of what the destination computes from the value
  bool source_is_ok;  ///< the source's own result is made
};
void PrintTo(const Failing& failing, std::ostream* to) { *to << failing.name; }

struct FailingPair : Pair, ::testing::WithParamInterface<Failing> {};

/// The first transfer fails in one way, at one end; the second one, of the same array, does not.
TEST_P(FailingPair, TheDestinationHearsWhy) {
  add_plans();
  (GetParam().host == 0 ? zero : one).backend.set_faults(GetParam().faults);
  zero.put(A, 7);
  run(1, 0, {A}, {B, C});
  run(2, 0, {A}, {D, handle(5)});
  settle();
  EXPECT_NE(one.link.failure(C).find(GetParam().says), std::string::npos) << one.link.failure(C);
  EXPECT_EQ(zero.link.completions(B), GetParam().source_is_ok ? 1u : 0u);
  EXPECT_EQ(one.link.completions(handle(5)), 1u);
  drop({A, B, C, D, handle(5)});
}

INSTANTIATE_TEST_SUITE_P(Ways, FailingPair,
                         ::testing::Values(Failing{"Launch", 0, {.fail_launch = 1}, "refused on host 0", false},
                                           Failing{"Value", 0, {.fail_value = 1}, "failed on host 0", false},
                                           Failing{"Send", 0, {.fail_send = 1}, "send failed", true},
                                           Failing{"Receive", 1, {.fail_receive = 1}, "receive was refused", true}),
                         [](const auto& of) { return of.param.name; });

TEST_F(Pair, SendUnderWay) {
  // The source's value outlives its run's last reader until it is written; another transfer overtakes nothing.
  add_plans();
  ModelledFaults faults;
  faults.send_ns = 500;
  zero.backend.set_faults(faults);
  zero.put(A, 7);
  run(1, 0, {A}, {B, C});
  run(2, 0, {A}, {D, handle(5)});
  clock.advance(250);
  zero.poll();
  while (deliver(one)) {
  }
  zero.release(B);
  zero.release(D);
  zero.poll();
  EXPECT_EQ(zero.link.outgoing.size(), 0u);
  EXPECT_EQ(zero.executor.stats().exchanges, 2u);
  EXPECT_EQ(zero.backend.live_values(), 3u);  // A, and the two on their way
  settle();
  EXPECT_EQ(one.link.completions(C) + one.link.completions(handle(5)), 2u);
  drop({A, C, handle(5)});
}

TEST_F(Pair, ClearedWhileUnderWay) {
  add_plans();
  ModelledFaults faults;
  faults.send_ns = 1000000000;
  zero.backend.set_faults(faults);
  zero.put(A, 7);
  run(1, 0, {A}, {B, C});
  settle();
  zero.executor.clear();
  EXPECT_EQ(zero.backend.live_values(), 0u);
  one.executor.clear();
}

TEST_F(Pair, PeerThatMakesNoSense) {
  add_plans();
  zero.put(A, 7);
  const std::vector<uint64_t> nowhere{0};
  EXPECT_EQ(one.executor.on_receive_done(9, 5, 0, Outcome::kDone, {}), Status::kInvalid);  // of no transfer
  run(1, 0, {A}, {B, C});
  EXPECT_EQ(one.executor.on_receive_done(1, 5, 1, Outcome::kDone, {}), Status::kInvalid);  // from itself
  EXPECT_EQ(one.executor.on_receive_done(1, 5, 3, Outcome::kDone, {}),
            Status::kInvalid);                                                   // from a host without a part in it
  EXPECT_EQ(one.executor.on_receive_ready(1, 5, 0, nowhere), Status::kInvalid);  // a source posts
  EXPECT_EQ(zero.executor.on_receive_done(1, 5, 1, Outcome::kDone, {}), Status::kInvalid);  // a destination writes
  while (deliver(one)) {
  }
  EXPECT_EQ(zero.executor.on_receive_ready(1, 5, 1, nowhere), Status::kInvalid);  // twice
  settle();
  EXPECT_EQ(one.link.completions(C), 1u);
  drop({A, B, C});
}

TEST_F(Pair, RunThatThePeerRefuses) {
  // Host 0 waits for what host 1, which does not know the plan, would send. It posts before host 1 refuses, or after.
  zero.add_plan(0, plan_of({kNoValue}, {transfer(5, {}, {0}, {1}, {}), call({0}, {1})}, {1}, 2, 0));
  for (uint64_t order : {1u, 2u}) {
    const uint64_t result = handle(static_cast<uint32_t>(order));
    if (order == 2) one.run(order, 0, {A}, {result});
    zero.run(order, 0, {A}, {result});
    if (order == 1) {
      while (deliver(zero)) {
      }
      one.run(order, 0, {A}, {result});
    }
    settle();
    EXPECT_NE(zero.link.failure(result).find("not known on host 1"), std::string::npos) << order;
    EXPECT_EQ(zero.link.runs.count(order), 1u);
    EXPECT_EQ(one.executor.stats().exchanges, 0u);  // one that is left switches off the check for hosts that are stuck
    zero.release(result);
  }
  zero.expect_empty();
  one.expect_empty();
}

struct LostPair : Pair, ::testing::WithParamInterface<int> {};

/// Whatever stage a transfer has reached, what the peer owes fails with the reason, once, and nothing is left.
TEST_P(LostPair, FailsOnceWithTheReason) {
  const int stage = GetParam();
  zero.add_plan(0, plan_of({0}, {call({0}, {1}), transfer(5, {1}, {}, {}, {1})}, {1, kNoValue}, 2, 0));
  one.add_plan(0, plan_of({kNoValue}, {transfer(5, {}, {0}, {0}, {}), call({0}, {1})}, {kNoValue, 1}, 2, 1));
  ModelledFaults faults;
  faults.no_memory = stage == 1 ? 1 : 0;
  one.backend.set_faults(faults);
  faults.no_memory = 0;
  faults.send_ns = 500;
  zero.backend.set_faults(faults);
  zero.put(A, 7);
  if (stage == 0) {  // lost before the run comes
    zero.executor.close_peer(1, "host 1 is mad");
    one.executor.close_peer(0, "host 0 is mad");
  }
  if (stage != 2) one.run(1, 0, {A}, {B, C});
  zero.run(1, 0, {A}, {B, C});
  if (stage == 3) one.link.outgoing.front().deliver(zero.executor);  // posted, the value is not ready
  if (stage >= 4) {
    clock.advance(1000);
    zero.poll();
    if (stage == 5) one.link.outgoing.front().deliver(zero.executor);  // the send is under way
  }
  zero.executor.close_peer(1, "host 1 is mad");
  one.executor.close_peer(0, "host 0 is mad");
  if (stage == 2) one.run(1, 0, {A}, {B, C});
  for (int round = 0; round < 4; ++round) {
    clock.advance(1000);
    zero.poll();
    one.poll();
  }
  EXPECT_EQ(zero.link.completions(B), 1u);
  EXPECT_EQ(one.link.failure(C), "host 0 is mad");
  for (const uint64_t h : {A, B, C}) zero.release(h), one.release(h);
  for (BenchHost* host : {&zero, &one}) {
    const ExecutorStats stats = host->executor.stats();
    EXPECT_EQ(host->backend.live_values() + stats.objects + stats.live_runs + stats.exchanges, 0u);
  }
  EXPECT_EQ(one.backend.open_receives(), stage >= 3 ? 1u : 0u);  // it may still be written
  EXPECT_EQ(zero.link.runs.size() + one.link.runs.size(), 2u);
}

INSTANTIATE_TEST_SUITE_P(Stages, LostPair, ::testing::Range(0, 6));

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
  add_plans_back(1);
  std::mt19937_64 random(seed());
  ModelledFaults faults;
  faults.send_ns = 60;
  zero.backend.set_faults(faults);
  for (uint32_t trial = 0; trial < 200 * kStressScale && !HasFailure(); ++trial) {
    zero.put(A, 7);
    run_there_and_back(random, trial * 100, A);
    EXPECT_EQ(zero.link.runs.size(), 8 * (trial + 1));
    EXPECT_TRUE(zero.link.failures.empty() && one.link.failures.empty());
    drop({A});
  }
}

/// A device that computes within the launch. Only a slow launch takes time.
struct InlineDevice : StubBackend {
  Status launch(const NodeContext&, std::span<const Value>, std::span<Value> outputs) override {
    for (Value& output : outputs) output = &value;
    events += "launch ";
    if (is_slow) let_pass(1ms);
    return Status::kOk;
  }
  void send(const NodeContext&, Value, std::span<const ReceiveBuffers>, uint64_t,
            std::span<SendState> states) override {
    std::fill(states.begin(), states.end(), SendState::kDone);
    events += "send ";
  }
  Status put(uint32_t, std::span<const std::byte>, const Leased&, const Booked&, Value* made,
             uint64_t* devices) override {
    *made = &value;
    *devices = 1;
    return Status::kOk;
  }
  uint64_t devices_of_put(uint32_t, std::span<const std::byte>) override { return 1; }

  int value = 0;
  bool is_slow = false;
  std::string events;
};

/// Two calls that depend on the argument only. The first one's value goes to another host, which waits for it. A bar
/// stands where the host would read records.
std::string events_of(uint32_t devices, bool gangs_block, bool is_slow = false) {
  InlineDevice backend;
  backend.is_slow = is_slow;
  RecordingLink link;
  link.on_leave = [&backend] { backend.events += "publish "; };
  Executor executor({.devices = devices, .quirks = {0, gangs_block, gangs_block}, .clock = test_clock}, backend, link);
  executor.add_client(0);
  executor.add_plan(
      0,
      Plan::parse(
          plan_of({0}, {call({0}, {1}), transfer(5, {1}, {}, {}, {1}), call({0}, {2})}, {2}, 3, 0, devices).finish()));
  executor.set_compiled(0);
  EXPECT_EQ(executor.on_receive_ready(1, 5, 1, std::vector<uint64_t>{0}), Status::kOk);
  executor.on_command(
      {{RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kPut), 0}, A, 0, 0, 0, 0, kNoSpaceSet, 0}, {});
  RunRecord run{};
  run.header.kind = RecordKind::kRun;
  run.tag = run.order = 1;
  run.arguments = run.results = 1;
  const uint64_t handles[] = {A, B};
  executor.on_run(run, handles);
  backend.events += "| ";
  while (executor.poll() != 0) backend.events += "| ";
  EXPECT_TRUE(link.failures.empty());
  EXPECT_EQ(link.completions(B), 1u);
  executor.clear();
  return backend.events;
}

TEST(SendsFirst, WhereALaunchComputes) {
  EXPECT_EQ(events_of(1, true), "publish launch send publish launch | | ");
  EXPECT_EQ(events_of(2, true), "launch launch | send | ");
  EXPECT_EQ(events_of(1, false), "launch launch | send | ");
}

TEST(SendsFirst, RecordsAreReadBetweenLongLaunches) {
  EXPECT_EQ(events_of(1, true, true), "publish launch | send publish launch | | ");
  EXPECT_EQ(events_of(2, true, true), "launch launch | send | ");
}

}  // namespace
}  // namespace pathways::test::test_transfers
