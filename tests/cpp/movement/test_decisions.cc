// Branches on the executor: who is told, what is taken, what is dead, and what an error of the predicate does.
//
//   ORD-1, PLAN-5   Branch.TakesOneCase, Branch.NestedInOneThatIsNotTaken
//   MEM-4           Branch.BothCasesDonateOneBuffer
//   GANG-1          Told.AnErrorLaunchesNoGang, Told.BitsSayWhatWasTaken
//   GANG-2          Owes.*
//   ERR-1, ERR-2    Branch.NumberOutOfRange, Told.LosesItsOwner, Told.RefusedRun
//   TRUST-1         Told.RefusesWhatMakesNoSense, Told.OnlyABranchIsDead
// tests/cpp/cluster/test_branch_model.cc plays random programs over several hosts.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "executor/bench_pair.h"

namespace pathways::test::test_decisions {
namespace {

using Node = PlanBuilder::Node;
constexpr uint32_t kNone = kNoPredicate;

Node with(Node node, uint32_t number, uint32_t predicate = kNone) {
  node.global_node = number;
  node.predicate = predicate;
  return node;
}

Node select(uint32_t number, std::vector<uint32_t> inputs, uint32_t output, uint32_t choice = 0,
            uint32_t predicate = kNone) {
  Node n = with(call(std::move(inputs), {output}), number, predicate);
  n.kind = NodeKind::kSelect;
  n.computation = choice;
  return n;
}

/// Argument 0 decides between a call on argument 1 and a call on argument 2; argument 1 of value 1, and so on.
/// Values: 0..2 arguments, 3 and 4 the cases, 5 the result.
PlanBuilder branch(uint32_t owner = 0, uint32_t host = 0, std::vector<uint32_t> told = {}, bool gang = false,
                   uint32_t cases = 2) {
  const bool is_owner = owner == host;
  PlanBuilder builder =
      plan_of({0, 1, 2},
              {with(call({1}, {3}, 1, gang), 1, 0), with(call({2}, {4}, 1, gang), 2, 1),
               select(3, cases == 2 ? std::vector<uint32_t>{3, 4} : std::vector<uint32_t>{3, 4, 1}, 5)},
              {5}, 6, host);
  builder.add(PlanBuilder::Choice{7, owner, owner, is_owner ? 0 : kNoValue, cases, kNone, 0, std::move(told)});
  builder.add(PredicateRecord{0, 0, kNone, 4});
  builder.add(PredicateRecord{0, 1, kNone, 5});
  return builder;
}

struct Branch : Bench {
  /// Puts the arguments with these checksums, as buffers 0, 1, 2.
  void put(std::vector<uint64_t> hashes) {
    for (uint32_t i = 0; i < hashes.size(); ++i) host.put(handle(i), hashes[i]);
  }
  /// The checksum of the result in buffer `index`.
  uint64_t read(uint32_t index) {
    uint64_t out[2] = {0, 0};
    host.fetch(handle(index), handle(99), out);
    pass();
    return out[0];
  }
};

uint64_t made(uint32_t plan, uint32_t node, std::vector<uint64_t> inputs) {
  return modelled_hash(plan, node, 0, inputs);
}

TEST_F(Branch, TakesOneCase) {
  host.add_plan(0, branch(0, 0, {}, false, 3));
  const std::vector<uint64_t> expected = {made(0, 1, {301}), made(0, 2, {302}), 301};  // the last case launches nothing
  for (uint32_t which = 0; which < 3; ++which) {
    put({which, 301, 302});
    const uint64_t before = host.backend.launches();
    host.run(which + 1, 0, {handle(0), handle(1), handle(2)}, {handle(3)});
    pass();
    pass();
    EXPECT_EQ(host.link.completions(handle(3)), which + 1) << which;
    EXPECT_EQ(read(3), expected[which]);
    EXPECT_EQ(host.backend.launches() - before, which < 2 ? 1u : 0u);
    drop({handle(0), handle(1), handle(2), handle(3)});
  }
}

/// The copy of a scalar is under way: no launch waits for it but those of its branch, and it outlives the scalar.
TEST_F(Branch, WaitsForTheCopyOfItsScalar) {
  host.backend.set_scalar_ns(1000);
  host.add_plan(0, branch());
  host.add_plan(1, plan_of({0}, {call({0}, {1})}, {1}, 2));
  put({1, 301, 302});
  host.run(1, 1, {handle(1)}, {handle(4)});  // before the branch in the order
  host.run(2, 0, {handle(0), handle(1), handle(2)}, {handle(3)});
  host.release(handle(0));
  pass(500);
  EXPECT_EQ(host.link.completions(handle(3)), 0u);
  EXPECT_EQ(host.backend.launches(), 1u);  // neither case
  pass(1000);
  EXPECT_EQ(host.backend.launches(), 2u);
  pass();
  EXPECT_EQ(host.link.completions(handle(3)), 1u);
  EXPECT_EQ(host.link.completions(handle(4)), 1u);
  EXPECT_EQ(read(3), made(0, 2, {302}));
  drop({handle(1), handle(2), handle(3), handle(4)});
}

TEST_F(Branch, NumberOutOfRange) {
  host.add_plan(0, branch());
  put({9, 301, 302});
  host.run(1, 0, {handle(0), handle(1), handle(2)}, {handle(3)});
  pass();
  EXPECT_NE(host.link.failure(handle(3)).find("the number of the branch to take is 9, expected 0 to 1"),
            std::string::npos);
  EXPECT_EQ(host.backend.launches(), 0u);
  drop({handle(0), handle(1), handle(2), handle(3)});
}

TEST_F(Branch, AFailedScalarFailsTheResult) {
  host.add_plan(0, branch());
  put({1, 301, 302});
  host.run(1, 0, {handle(50), handle(1), handle(2)}, {handle(3)});
  pass();
  EXPECT_NE(host.link.failure(handle(3)).find("an argument is no buffer"), std::string::npos);
  drop({handle(0), handle(1), handle(2), handle(3)});
}

TEST_F(Branch, AFailedCaseFailsOnlyWhereItIsTaken) {
  host.add_plan(0, branch());
  for (const uint64_t which : {0u, 1u}) {
    put({which, 301, 302});
    host.run(which + 1, 0, {handle(0), handle(50), handle(2)}, {handle(3)});
    pass();
    pass();
    EXPECT_EQ(host.link.completions(handle(3)), which);
    drop({handle(0), handle(1), handle(2), handle(3)});
  }
  EXPECT_EQ(host.link.failures.size(), 1u);
}

TEST_F(Branch, SelectOfAnArgumentIsThereAtOnce) {
  PlanBuilder builder = plan_of({0, 1, 2}, {with(call({2}, {3}, 1), 1, 0), select(2, {3, 1}, 4)}, {4}, 5);
  builder.add(PlanBuilder::Choice{7, 0, 0, 0, 2, kNone, 0, {}});
  builder.add(PredicateRecord{0, 0, kNone, kNoBit});
  host.add_plan(0, builder);
  host.add_plan(1, plan_of({}, {call({}, {0})}, {0}, 1), false);
  put({1, 301});
  host.run(1, 1, {}, {handle(2)});
  host.run(2, 0, {handle(0), handle(1), handle(2)}, {handle(3)});
  pass();
  EXPECT_EQ(host.link.completions(handle(3)), 1u);
  EXPECT_EQ(host.link.runs.count(2), 0u);  // the untaken call still waits for its turn
  host.executor.set_compiled(1);
  pass();
  EXPECT_EQ(host.link.runs.count(2), 1u);
  drop({handle(0), handle(1), handle(2), handle(3)});
}

TEST_F(Branch, BothCasesDonateOneBuffer) {
  PlanBuilder builder =
      plan_of({0, 1}, {with(call({1}, {2}), 1, 0), with(call({1}, {3}), 2, 1), select(3, {2, 3}, 4)}, {4}, 5);
  builder.set_donated({1});
  builder.add(PlanBuilder::Choice{7, 0, 0, 0, 2, kNone, 0, {}});
  builder.add(PredicateRecord{0, 0, kNone, kNoBit});
  builder.add(PredicateRecord{0, 1, kNone, kNoBit});
  host.add_plan(0, builder);
  host.backend.donate(0, 1, {0});
  host.backend.donate(0, 2, {0});
  for (const uint64_t which : {0u, 1u}) {
    put({which, 301});
    host.run(which + 1, 0, {handle(0), handle(1)}, {handle(3)});
    pass();
    EXPECT_EQ(read(3), made(0, static_cast<uint32_t>(which) + 1, {301}));
    drop({handle(0), handle(3)});  // nothing is left of the buffer that was donated
  }
}

TEST_F(Branch, NestedInOneThatIsNotTaken) {
  // Argument 0 decides; inside case 0, argument 1 decides, which is known without case 0. Its number is out of range.
  const auto nested = [&](uint32_t id) {
    PlanBuilder builder =
        plan_of({0, 1, 2}, {with(call({2}, {3}), 1, 2), select(2, {3, 2}, 4, 1, 0), select(3, {4, 2}, 5)}, {5}, 6);
    builder.add(PlanBuilder::Choice{7, 0, 0, 0, 2, kNone, 0, {}});
    builder.add(PlanBuilder::Choice{8, 0, 0, 1, 2, kNone, 0, {}});
    builder.add(PredicateRecord{0, 0, kNone, 0});
    builder.add(PredicateRecord{0, 1, kNone, 1});
    builder.add(PredicateRecord{1, 0, 0, 2});
    host.add_plan(id, builder);
  };
  nested(0);
  put({1, 9, 303});
  host.run(1, 0, {handle(0), handle(1), handle(2)}, {handle(3)});
  pass();
  EXPECT_EQ(read(3), 303u);  // an error of a predicate that is not reached is none
  EXPECT_EQ(host.backend.launches(), 0u);
  EXPECT_EQ(host.link.taken[1].sure(), 7u);
  EXPECT_EQ(host.link.taken[1].chosen, 2u);
  drop({handle(0), handle(1), handle(2), handle(3)});
  put({0, 9, 303});
  host.run(2, 0, {handle(0), handle(1), handle(2)}, {handle(3)});
  pass();
  EXPECT_NE(host.link.failure(handle(3)).find("the branch to take is 9"), std::string::npos);
  EXPECT_EQ(host.link.taken[2].sure(), 3u);
  drop({handle(0), handle(1), handle(2), handle(3)});
}

/// Host 0 owns the choice and tells host 1. The branch runs on both, as gangs if so said.
struct Told : BenchPair {
  /// The result of run `order` is buffer 10 + `order`.
  void begin(uint32_t number, uint64_t order, uint64_t scalar, bool gang = false) {
    BenchHost& h = host(number);
    if (!is_known[number]) {
      h.add_plan(0, branch(0, number, number == 0 ? std::vector<uint32_t>{1} : std::vector<uint32_t>{}, gang));
      h.put(handle(1), 301);
      h.put(handle(2), 302);
    }
    is_known[number] = true;
    if (scalar != kMissing) h.put(scalar_of(order), scalar);
    h.run(order, 0, {scalar_of(order), handle(1), handle(2)}, {result(order)});
    h.poll();
  }
  void end(std::vector<uint32_t> numbers = {0, 1}) {
    settle();
    for (const uint32_t number : numbers) {
      BenchHost& h = host(number);
      for (uint32_t i = 0; i < 40; ++i) h.release(handle(i));
      h.poll();
      h.expect_empty();
    }
  }
  static uint64_t result(uint64_t order) { return handle(static_cast<uint32_t>(10 + order)); }
  static uint64_t scalar_of(uint64_t order) { return handle(static_cast<uint32_t>(20 + order)); }
  static constexpr uint64_t kMissing = ~uint64_t{0};
  bool is_known[2] = {false, false};
};

TEST_F(Told, EarlyAndLate) {
  begin(0, 1, 1);
  settle();  // host 0 tells before the run comes to host 1
  EXPECT_EQ(zero.link.decisions, 1u);
  begin(1, 1, 0);  // what host 1 has of the scalar does not count
  settle();
  EXPECT_EQ(zero.link.completions(result(1)) + one.link.completions(result(1)), 2u);
  EXPECT_EQ(one.backend.launches(), 1u);
  begin(1, 2, 1);
  settle();
  EXPECT_EQ(one.link.completions(result(2)), 0u);  // nobody has said anything yet
  EXPECT_NE(one.executor.describe_runs(1)[0].find("choice 7 is to come from host 0"), std::string::npos);
  begin(0, 2, 0);
  settle();
  EXPECT_EQ(one.link.completions(result(2)), 1u);
  end();
}

TEST_F(Told, BitsSayWhatWasTaken) {
  begin(0, 1, 1);
  begin(1, 1, 1);
  settle();
  for (BenchHost* h : {&zero, &one}) {
    EXPECT_EQ(h->link.taken[1].sure(), 0x30u);
    EXPECT_EQ(h->link.taken[1].chosen, 0x20u);
  }
  end();
}

TEST_F(Told, AnErrorLaunchesNoGang) {
  begin(0, 1, kMissing, true);
  begin(1, 1, 1, true);
  settle();
  for (BenchHost* h : {&zero, &one}) {
    EXPECT_NE(h->link.failure(result(1)).find("an argument is no buffer on host 0"), std::string::npos);
    EXPECT_EQ(h->link.runs[1], std::pair(0u, 0u));  // no gang was launched, and none is expected
    EXPECT_EQ(h->link.taken[1].sure(), 0u);
    EXPECT_EQ(h->backend.launches(), 0u);
  }
  begin(0, 2, 1, true);
  begin(1, 2, 1, true);
  settle();
  EXPECT_EQ(one.link.runs[2], std::pair(1u, 1u));
  end();
}

TEST_F(Told, RefusesWhatMakesNoSense) {
  begin(1, 1, 0);
  const auto tell = [&](uint32_t number, uint32_t from, Outcome outcome, uint32_t taken, uint64_t order = 1) {
    return one.executor.on_decision(order, number, from, {outcome, taken, "why"});
  };
  EXPECT_EQ(tell(6, 0, Outcome::kDone, 0), Status::kInvalid);  // no such choice
  EXPECT_EQ(tell(7, 2, Outcome::kDone, 0), Status::kInvalid);  // from somebody else
  EXPECT_EQ(tell(7, 1, Outcome::kDone, 0), Status::kInvalid);  // from itself
  EXPECT_EQ(tell(7, 0, Outcome::kDone, 2), Status::kInvalid);  // no such case
  EXPECT_EQ(tell(7, 0, Outcome::kDead, 0), Status::kInvalid);  // it is in no branch
  EXPECT_EQ(one.backend.launches(), 0u);
  EXPECT_EQ(tell(7, 0, Outcome::kDone, 1), Status::kOk);
  settle();
  EXPECT_EQ(one.link.completions(result(1)), 1u);
  EXPECT_EQ(tell(7, 0, Outcome::kDone, 9, 2), Status::kOk);  // the run has not come
  begin(1, 2, 0);
  settle();
  EXPECT_NE(one.link.failure(result(2)).find("host 0 told host 1 of run 2 what is none of it"), std::string::npos);
  end({1});
}

TEST_F(Told, LosesItsOwner) {
  begin(1, 1, 0);
  begin(1, 2, 0);
  EXPECT_EQ(one.executor.on_decision(1, 7, 0, {Outcome::kDone, 1, {}}), Status::kOk);  // its last words
  one.executor.on_hosts_lost(std::vector<uint32_t>{0}, "host 0 was lost");
  settle();
  EXPECT_EQ(one.link.completions(result(1)), 1u);
  EXPECT_EQ(one.link.failure(result(2)), "host 0 was lost");
  EXPECT_EQ(one.link.taken[1].sure(), 0x30u);
  EXPECT_EQ(one.link.taken[2].sure(), 0u);
  begin(1, 3, 0);  // the successor tells
  EXPECT_EQ(one.executor.on_decision(3, 7, 0, {Outcome::kDone, 0, {}}), Status::kOk);
  settle();
  EXPECT_EQ(one.link.completions(result(3)), 1u);
  end({1});
}

/// Neither the host that was lost is told of earlier runs, nor its successor.
TEST_F(Told, DoesNotTellWhoWasLost) {
  zero.add_plan(1, plan_of({}, {call({}, {0})}, {0}, 1), false);
  zero.run(1, 1, {}, {scalar_of(2)});
  begin(0, 2, kMissing);
  zero.executor.on_hosts_lost(std::vector<uint32_t>{1}, "host 1 was lost");
  zero.executor.set_compiled(1);
  settle();
  EXPECT_EQ(zero.link.runs.count(2), 1u);
  EXPECT_EQ(zero.link.decisions, 0u);
  begin(0, 3, 0);
  settle();
  EXPECT_EQ(zero.link.decisions, 1u);
  end({0});
}

TEST_F(Told, ClosedChannel) {
  begin(1, 1, 0);
  one.executor.close_peer(0, "the channel was closed");
  begin(1, 2, 0);
  settle();
  EXPECT_EQ(one.link.failure(result(1)), "the channel was closed");
  EXPECT_EQ(one.link.failure(result(2)), "the channel was closed");
  end({1});
}

TEST_F(Told, RefusedRun) {
  begin(1, 1, 0);
  zero.add_plan(0, branch(0, 0, {1}));
  zero.run(1, 0, {scalar_of(1)}, {result(1)});  // too few arguments
  settle();
  EXPECT_NE(one.link.failure(result(1)).find("takes 3 arguments"), std::string::npos);
  EXPECT_EQ(zero.executor.on_decision(1, 7, 1, {Outcome::kDone, 0, {}}), Status::kOk);  // of a run that it refused
  end();
}

/// Case 0 sends argument 1 from host 0 to host 1, which holds the result; case 1 is argument 1 of host 1.
struct Sent : BenchPair {
  void begin(uint64_t order, uint64_t scalar) {
    PlanBuilder from = plan_of({0, 1}, {with(transfer(1, {1}, {}, {}, {1}), 1, 0)}, {}, 2, 0);
    from.set_results({kNoValue});
    from.add(PlanBuilder::Choice{7, 0, 0, 0, 2, kNone, 0, {1}});
    from.add(PredicateRecord{0, 0, kNone, kNoBit});
    PlanBuilder to =
        plan_of({kNoValue, 0}, {with(transfer(1, {}, {1}, {0}, {}), 1, 0), select(2, {1, 0}, 2)}, {2}, 3, 1);
    to.add(PlanBuilder::Choice{7, 0, 0, kNoValue, 2, kNone, 0, {}});
    to.add(PredicateRecord{0, 0, kNone, kNoBit});
    if (!is_known) zero.add_plan(0, from);
    if (!is_known) one.add_plan(0, to);
    is_known = true;
    zero.put(handle(0), scalar);
    zero.put(handle(1), 301);
    one.put(handle(1), 401);
    for (BenchHost* h : {&zero, &one}) h->run(order, 0, {handle(0), handle(1)}, {handle(3)}, 0, {1});
  }
  void end() {
    for (BenchHost* h : {&zero, &one}) {
      for (uint32_t i = 0; i < 4; ++i) h->release(handle(i));
    }
    settle();
    zero.expect_empty();
    one.expect_empty();
  }
  bool is_known = false;
};

TEST_F(Sent, OnlyWhatIsTaken) {
  for (const uint64_t which : {0u, 1u}) {
    begin(which + 1, which);
    one.poll();
    EXPECT_EQ(one.backend.open_receives(), 1u);  // announced as ever
    settle();
    EXPECT_EQ(one.backend.open_receives(), 0u);
    EXPECT_EQ(one.link.read[handle(3)], which == 0 ? made(0, 1, {301}) : 401u);
    end();
  }
}

/// The owner dies between two records: the ends of a transfer have decided differently, and both end it.
TEST_F(Sent, EndsThatDecidedDifferently) {
  begin(1, 1);
  clock.advance(1000);
  zero.poll();
  while (!zero.link.outgoing.empty()) zero.link.outgoing.pop_front();  // the decision does not arrive
  one.poll();
  while (deliver(one)) {
  }
  EXPECT_EQ(one.backend.open_receives(), 1u);
  EXPECT_EQ(one.executor.on_decision(1, 7, 0, {Outcome::kFailed, 0, "the owner was lost"}), Status::kOk);
  EXPECT_EQ(one.backend.open_receives(), 1u);  // the source may still write
  settle();
  EXPECT_EQ(one.link.failure(handle(3)), "the owner was lost");
  end();
}

TEST_F(Sent, OnlyABranchIsDead) {
  one.add_plan(5, plan_of({}, {transfer(1, {}, {0}, {0}, {})}, {0}, 1, 1));
  one.run(1, 5, {}, {handle(2)});
  one.link.outgoing.clear();
  EXPECT_EQ(one.executor.on_receive_done(1, 1, 0, Outcome::kDead, {}), Status::kInvalid);
  EXPECT_EQ(one.executor.on_receive_done(1, 1, 0, Outcome::kFailed, "why"), Status::kOk);
  // A source says that its branch was not taken, and the decision says that it was: the result is not dead.
  begin(2, 1);
  EXPECT_EQ(one.executor.on_receive_done(2, 1, 0, Outcome::kDead, {}), Status::kOk);
  EXPECT_EQ(one.executor.on_decision(2, 7, 0, {Outcome::kDone, 0, {}}), Status::kOk);
  one.poll();
  EXPECT_EQ(one.link.failure(handle(3)), "a host said that a branch was not taken, which was");
  zero.link.outgoing.clear();
  end();
}

/// Host 1 has one device and blocks in gangs. It must hand on a choice of host 0 before it launches a later gang.
struct Owes : ::testing::Test {
  ModelClock clock{ModelClock::Kind::kVirtual};
  BenchHost host{clock, 1, 1, 100, 0, true};

  void relay(uint32_t first_node, uint32_t gang_node) {
    PlanBuilder builder = plan_of({kNoValue}, {with(call({}, {0}, 1, true), gang_node)}, {0}, 1, 1, 1);
    builder.add(PlanBuilder::Choice{7, 0, 0, kNoValue, 2, kNone, first_node, {2}});
    host.add_plan(0, builder);
    host.run(1, 0, {handle(0)}, {handle(1)});
    host.poll();
  }
};

TEST_F(Owes, AGangBehindIt) {
  relay(3, 3);
  EXPECT_EQ(host.backend.launches(), 0u);
  host.add_plan(1, plan_of({}, {call({}, {0}, 1, true)}, {0}, 1, 1, 1));
  host.run(2, 1, {}, {handle(2)});  // a later run waits too
  for (int i = 0; i < 200; ++i) host.poll();
  EXPECT_EQ(host.backend.launches(), 0u);
  EXPECT_EQ(host.executor.stats().overfull, 0u);
  EXPECT_EQ(host.executor.on_decision(1, 7, 0, {Outcome::kDone, 1, {}}), Status::kOk);
  host.poll();
  EXPECT_EQ(host.link.decisions, 1u);
  EXPECT_EQ(host.backend.launches(), 2u);
}

TEST_F(Owes, NoGangBeforeIt) {
  relay(4, 3);
  EXPECT_EQ(host.backend.launches(), 1u);
  EXPECT_EQ(host.executor.on_decision(1, 7, 0, {Outcome::kDone, 1, {}}), Status::kOk);
}

}  // namespace
}  // namespace pathways::test::test_decisions
