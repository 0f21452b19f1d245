// Composites: programs with loops, which the controller orders run by run, between a client and hosts that the test
// plays. What a client may not do with them: test_loop_bounds.cc.
//
//   ORD-1, SHARE-1  Loops.RunsComeOneAfterTheOtherAndOthersComeBetween
//   CLI-1           Loops.LaterRecordsWaitForTheLastRun
//   WALK-1, WALK-2, WALK-3  Loops.RandomOnesGiveTheRightValuesAndLeaveNothing
//   WALK-4          Loops.GoOnAsTheDataSays, Loops.EndWhileTheyWaitForAVerdict, Loops.NeedARunThatDecides
//   MEM-2, MEM-3    SmallLoops.AreAdmittedAsAWhole, SmallLoops.ACarryThatMovesOnIsAdmittedWithAllThatItHolds
//   DEAD-1, ERR-2, OWN-1  Loops.EndInTheMiddleAndLeaveNothing
#include <algorithm>
#include <array>
#include <random>
#include <tuple>

#include "loops/played_loops.h"

namespace pathways::test::test_loops {
namespace {

TEST_F(Loops, RunsComeOneAfterTheOtherAndOthersComeBetween) {
  controller->register_composite(kNumber, simple(25));
  const uint64_t first = buffer(7);
  const uint64_t result = call({first}, 1)[0];
  pass();
  read();
  EXPECT_EQ(order.size(), 4u);  // the hosts' window
  EXPECT_EQ(controller->stats().waiting, 6u);
  RawClient memory;
  Client other(Client::Options{1, 8}, memory.block, block);
  controller->add_client(1, memory.block);
  uint64_t theirs = 0;
  ASSERT_EQ(other.submit({5, 2, {2}}, {}, &theirs), Status::kOk);
  finish();
  ASSERT_EQ(order.size(), 26u);
  EXPECT_EQ(std::find(order.begin(), order.end(), 5u) - order.begin(), 10);  // behind those that were ordered before
  uint64_t expected = 7;
  for (int i = 0; i < 25; ++i) expected = output_of(1, std::array{expected}, 0);
  EXPECT_EQ(objects.at(result), expected);
  EXPECT_EQ(objects.size(), 2u);
  EXPECT_EQ(good->in_flight(), 0u);
  EXPECT_TRUE(controller->is_idle());
  controller->remove_client(1);
}

TEST_F(Loops, LaterRecordsWaitForTheLastRun) {
  controller->register_composite(kNumber, simple(12));
  const uint64_t result = call({buffer(7)}, 1)[0];
  good->release(Handle{result}, 2, uint64_t{1} << 30);
  pass();
  read();
  EXPECT_EQ(controller->stats().commands, 0u);
  finish();
  EXPECT_EQ(order.size(), 12u);
  EXPECT_TRUE(objects.empty());
  EXPECT_TRUE(controller->is_idle());
}

TEST_F(Loops, EndInTheMiddleAndLeaveNothing) {
  controller->register_composite(kNumber, simple(1000));
  for (const bool is_cancelled : {true, false}) {
    objects.clear();
    const int64_t late = test_clock() + 20'000'000;
    const uint64_t result = call({buffer(7)}, 1, is_cancelled ? 0 : late)[0];
    pass();
    read();
    if (is_cancelled) {
      EXPECT_EQ(good->cancel(good->last_tag(), std::array{result}, "cancelled"), Status::kOk);
    } else {
      let_pass(20ms);
    }
    finish();
    EXPECT_TRUE(order.size() >= 4 && order.size() < 1000) << order.size();
    EXPECT_TRUE(failed.contains(result));
    EXPECT_EQ(hidden(), 0u);
    good->poll_inbox();
    EXPECT_EQ(good->poll(Handle{result}), FutureState::kFailed);
    EXPECT_TRUE(controller->is_idle());
    EXPECT_EQ(good->in_flight(), 0u);
    order.clear();
  }
  // A host is lost.
  objects.clear();
  const uint64_t result = call({buffer(7)}, 1)[0];
  pass();
  read();
  is_lost[1] = true;
  controller->lose_hosts({1}, "HostLostError: host 1");
  finish();
  EXPECT_TRUE(failed.contains(result));
  EXPECT_EQ(hidden(), 0u);
  EXPECT_EQ(good->in_flight(), 0u);
}

TEST_F(Loops, GoOnAsTheDataSays) {
  // Verdicts, and the most iterations; then the number of runs of plan 1.
  const std::vector<std::tuple<std::deque<int>, uint64_t, size_t>> cases{
      {{0}, UINT64_MAX, 1},  {{1, 0}, UINT64_MAX, 2},     {{1, 1, 1, 1, 0}, UINT64_MAX, 5},
      {{-1}, UINT64_MAX, 1}, {{1, 1, -1}, UINT64_MAX, 3}, {{1}, 1, 2},
      {{0}, 1, 1},           {{1, 1, 1}, 3, 4},           {{1, 0}, 3, 2},
  };
  for (const auto& [said, most, runs] : cases) {
    objects.clear();
    order.clear();
    Composite whole = decided(most);
    controller->register_composite(kNumber, whole);
    verdicts = said;
    const bool ends_by_count = most == 3 && said.size() == 3;
    if (ends_by_count) verdicts.push_back(1);  // the last run of a body decides, too; nobody asks
    if (most == 1 && said.front() == 1) verdicts.push_back(0);
    const uint64_t result = call({buffer(7)}, 1)[0];
    pass();
    read();
    EXPECT_EQ(order.size(), 1u);  // WALK-4: nothing else before the verdict
    finish();
    ASSERT_EQ(order.size(), runs + 1);
    uint64_t expected = 7;
    for (size_t i = 0; i < runs; ++i) expected = output_of(1, std::array{expected}, 0);
    EXPECT_EQ(objects.at(result), output_of(2, std::array{expected}, 0));
    EXPECT_EQ(hidden(), 0u);
    EXPECT_EQ(good->in_flight(), 0u);
    EXPECT_TRUE(controller->is_idle());
    good->release(Handle{result}, 2, uint64_t{1} << 30);
    finish();
  }
}

TEST_F(Loops, EndWhileTheyWaitForAVerdict) {
  for (const bool is_client_gone : {false, true}) {
    controller->register_composite(kNumber, decided());
    verdicts.assign(40, 1);
    objects.clear();
    order.clear();
    const uint64_t result = call({buffer(7)}, 1)[0];
    for (int i = 0; i < 5; ++i) {
      pass();
      read();
      for (uint32_t h = 0; h < hosts.size() && i < 4; ++h) complete(h);
    }
    EXPECT_EQ(order.size(), 5u);
    if (is_client_gone) {
      controller->remove_client(0);
    } else {
      EXPECT_EQ(good->cancel(good->last_tag(), std::array{result}, "cancelled"), Status::kOk);
    }
    finish();
    EXPECT_EQ(order.size(), 5u);
    EXPECT_EQ(hidden(), 0u);
    EXPECT_TRUE(is_client_gone || failed.contains(result));
    EXPECT_TRUE(controller->is_idle());
  }
}

TEST_F(Loops, NeedARunThatDecides) {
  const auto refused = [&](const Composite& wrong) {
    try {
      controller->register_composite(kNumber, wrong);
    } catch (const Error& error) {
      return std::string(error.what()).find("of which no run decides") != std::string::npos;
    }
    return false;
  };
  Composite nothing_before = decided();
  nothing_before.steps.erase(nothing_before.steps.begin());
  nothing_before.steps[0].inputs = {0};
  EXPECT_TRUE(refused(nothing_before));
  Composite loop_at_the_end = decided();
  loop_at_the_end.values = 8;
  loop_at_the_end.steps[3].inputs = {7};
  loop_at_the_end.steps.insert(loop_at_the_end.steps.begin() + 2,
                               {bound(Kind::kLoop, 2, {2}, {6}), run(1, {6}, {3}), bound(Kind::kEnd, 0, {3}, {7})});
  loop_at_the_end.steps.erase(loop_at_the_end.steps.begin() + 5);
  EXPECT_TRUE(refused(loop_at_the_end));
}

TEST_F(Loops, GiveNoResultOutOfALoopThatIsDecided) {
  for (const uint64_t most : {uint64_t{1}, UINT64_MAX}) {
    Composite wrong = decided(most);
    add(4, 2, {0});
    wrong.values = 7;
    wrong.steps[2] = run(4, {2}, {3, 6});
    wrong.results = {6};  // which iteration's, and what if there is none?
    try {
      controller->register_composite(kNumber, wrong);
      FAIL();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("result 0, which no single run makes"), std::string::npos);
    }
  }
}

TEST_F(Loops, CarryOnTheSameHosts) {
  // A run on host 0 makes the first carry, a body on both hosts the others. Without an iteration, the run behind the
  // loop would take a buffer that lies elsewhere than what it took in the trial.
  add(1, 1, {0});
  add(2, 1, {});
  controller->register_plan(3, 0, kOneHost | 0);
  controller->set_plan_memory(3, {0, "plan", "", {}, {{kOneHost | 0, kNoSpaceSet, 0, -1, -1}}, {}});
  Composite made = decided();
  made.steps[0].plan = 3;
  try {
    controller->register_composite(kNumber, made);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("values on different hosts as one"), std::string::npos);
  }
}

TEST_F(Loops, GoWithTheirClient) {
  controller->register_composite(kNumber, simple(1000));
  (void)call({buffer(7)}, 1);
  pass();
  read();
  controller->remove_client(0);
  finish();
  EXPECT_TRUE(order.size() < 20);
  EXPECT_TRUE(objects.empty());
  EXPECT_TRUE(controller->is_idle());
}

/// One place of 100 bytes.
struct SmallLoops : Loops {
  SmallLoops() : Loops({100}) { set = controller->add_space_set({0}); }
};

TEST_F(SmallLoops, AreAdmittedAsAWhole) {
  Composite whole = simple(30);
  add(1, 1, {0}, 20, 10);  // a carry of 10 bytes, a peak of 20
  controller->register_composite(kNumber, whole);
  Handle put;
  ASSERT_EQ(good->allocate(1, &put), Status::kOk);
  ASSERT_EQ(good->command(CommandKind::kPut, 2, put, {}, {}, set, 65), Status::kOk);
  objects[put.raw] = 1;
  (void)call({buffer(7)}, 1);
  pass();
  EXPECT_EQ(controller->stats().held, 1u);  // 65, 10 of the result, 30 of the runs
  EXPECT_TRUE(order.empty());
  good->release(put, 2, uint64_t{1} << 30);
  finish();
  EXPECT_EQ(order.size(), 30u);
  EXPECT_EQ(controller->stats().live_bytes, (std::vector<uint64_t>{10}));
  add(2, 1, {0}, 120, 10);
  whole.steps[1].plan = 2;
  controller->register_composite(kNumber, whole);
  const uint64_t never = call({buffer(7)}, 1)[0];
  finish();
  EXPECT_TRUE(failed.contains(never));
  EXPECT_EQ(controller->stats().refused, 1u);
  EXPECT_TRUE(controller->is_idle());
}

TEST_F(SmallLoops, ACarryThatMovesOnIsAdmittedWithAllThatItHolds) {
  add(1, 1, {}, 10, 10);
  Composite whole{"delay", 0, 2, 1, 43, 10, {}, {42}, {}};
  std::vector<uint32_t> first(20, 0), read, next, after;
  for (uint32_t i = 0; i < 20; ++i) read.push_back(1 + i);
  next.push_back(1 + 20);
  next.insert(next.end(), read.begin(), read.end() - 1);
  for (uint32_t i = 0; i < 20; ++i) after.push_back(2 + 20 + i);
  add(2, 1, {}, 10, 10);  // makes the result from the last carry
  whole.steps = {bound(Kind::kLoop, 50, first, read), run(1, {1}, {1 + 20}), bound(Kind::kEnd, 0, next, after),
                 run(2, {after.back()}, {42})};
  controller->register_composite(kNumber, whole);
  const uint64_t never = call({buffer(7)}, 1)[0];
  finish();
  EXPECT_TRUE(failed.contains(never));  // 200 bytes of carries
  EXPECT_EQ(controller->stats().refused, 1u);
  whole.steps[0].count = 3;
  controller->register_composite(kNumber, whole);
  const uint64_t result = call({buffer(7)}, 1)[0];
  finish();
  EXPECT_TRUE(objects.contains(result) && !failed.contains(result));
  EXPECT_TRUE(controller->is_idle());
}

TEST_F(SmallLoops, AValueGoesBehindItsLastReader) {
  add(1, 1, {}, 40, 40);
  add(2, 1, {}, 10, 10);
  Composite whole{"bigs", 0, 2, 1, 9, 10, {}, {8}, {}};
  // Values 1, 3 and 7 are big, and no run takes them. Value 3 is read by each iteration of a loop.
  whole.steps = {run(1, {0}, {1}),    run(2, {1}, {2}),
                 run(1, {0}, {3}),    bound(Kind::kLoop, 5, {2}, {4}),
                 run(2, {4, 3}, {5}), bound(Kind::kEnd, 0, {5}, {6}),
                 run(1, {0}, {7}),    run(2, {6, 7}, {8})};
  controller->register_composite(kNumber, whole);
  const uint64_t result = call({buffer(7)}, 1)[0];
  finish();
  EXPECT_TRUE(objects.contains(result) && !failed.contains(result));
  EXPECT_EQ(controller->stats().refused, 0u) << "120 bytes of 100, if they are kept to the end";
  EXPECT_TRUE(controller->is_idle());
}

/// A random composite. Each loop begins with buffers that a run before it has made for it.
struct Random {
  explicit Random(uint64_t seed) : random(seed) {}
  uint32_t below(uint32_t end) { return static_cast<uint32_t>(random() % end); }

  uint32_t value() { return whole.values++; }
  /// A run that reads some of the values. `takes`: which of them it takes, where it may.
  std::vector<uint32_t> add_run(const std::vector<uint32_t>& known, std::set<uint32_t>& takes, uint32_t outputs) {
    std::vector<uint32_t> inputs;
    for (const uint32_t each : known) {
      if (takes.contains(each) || below(3) == 0) inputs.push_back(each);
    }
    std::shuffle(inputs.begin(), inputs.end(), random);
    std::vector<uint32_t> donated, made;
    for (uint32_t i = 0; i < inputs.size(); ++i) {
      if (takes.contains(inputs[i]) && below(4) != 0) donated.push_back(i);
    }
    for (uint32_t i = 0; i < outputs; ++i) made.push_back(value());
    plans.push_back({outputs, donated});
    whole.steps.push_back(run(static_cast<uint32_t>(plans.size()), inputs, made));
    return made;
  }
  std::vector<uint32_t> add_loop(std::vector<uint32_t> known, uint32_t depth) {
    std::set<uint32_t> none;
    const auto first = add_run(known, none, 1 + below(3));
    std::vector<uint32_t> carry, after;
    for (size_t i = 0; i < first.size(); ++i) carry.push_back(value());
    whole.steps.push_back(bound(Kind::kLoop, 1 + below(5), first, carry));
    known.insert(known.end(), carry.begin(), carry.end());
    if (depth < 2 && below(2) == 0) known.push_back(add_loop(known, depth + 1).front());
    std::set<uint32_t> takes(carry.begin(), carry.end());
    auto last = add_run(known, takes, static_cast<uint32_t>(carry.size()) + below(2));
    last.resize(carry.size());
    for (size_t i = 0; i < carry.size(); ++i) after.push_back(value());
    whole.steps.push_back(bound(Kind::kEnd, 0, last, after));
    return after;
  }
  void make() {
    whole = {"random", 0, 2, 3, 3, 1 + below(6), {0}, {}, {}};
    std::vector<uint32_t> known{1, 2};
    for (uint32_t i = 0; i < 2; ++i) known.push_back(add_loop(known, 0).back());
    std::set<uint32_t> takes{0};
    known.push_back(0);
    whole.results = {known[3], add_run(known, takes, 1)[0]};
  }
  /// What it means.
  std::map<uint32_t, uint64_t> meaning(const std::vector<uint64_t>& arguments) {
    std::map<uint32_t, uint64_t> values;
    for (uint32_t i = 0; i < arguments.size(); ++i) values[i] = arguments[i];
    interpret(0, whole.steps.size(), values);
    return values;
  }
  void interpret(size_t at, size_t end, std::map<uint32_t, uint64_t>& values) {
    for (; at < end; ++at) {
      const CompositeStep& step = whole.steps[at];
      std::vector<uint64_t> inputs;
      for (const uint32_t v : step.inputs) inputs.push_back(values.at(v));
      if (step.kind == Kind::kRun) {
        for (uint32_t i = 0; i < step.outputs.size(); ++i) values[step.outputs[i]] = output_of(step.plan, inputs, i);
        continue;
      }
      size_t close = at + 1;
      for (int depth = 1; depth != 0; ++close) {
        depth += whole.steps[close].kind == Kind::kLoop ? 1 : whole.steps[close].kind == Kind::kEnd ? -1 : 0;
      }
      --close;
      std::vector<uint64_t> carry = inputs;
      for (uint64_t turn = 0; turn < step.count; ++turn) {
        for (size_t i = 0; i < carry.size(); ++i) values[step.outputs[i]] = carry[i];
        interpret(at + 1, close, values);
        for (size_t i = 0; i < carry.size(); ++i) carry[i] = values.at(whole.steps[close].inputs[i]);
      }
      for (size_t i = 0; i < carry.size(); ++i) values[whole.steps[close].outputs[i]] = carry[i];
      at = close;
    }
  }

  std::mt19937_64 random;
  Composite whole;
  std::vector<std::pair<uint32_t, std::vector<uint32_t>>> plans;  // from 1 on: results, donated
};

TEST_F(Loops, RandomOnesGiveTheRightValuesAndLeaveNothing) {
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random made(seed);
    made.make();
    for (uint32_t i = 0; i < made.plans.size(); ++i) add(i + 1, made.plans[i].first, made.plans[i].second);
    controller->register_composite(kNumber, made.whole);
    const std::vector<uint64_t> arguments{buffer(seed), buffer(seed + 1), buffer(seed + 2)};
    const auto results = call(arguments, 2);
    // Half of them end in the middle.
    if (seed % 2 == 0) {
      for (uint32_t turns = made.below(6); turns != 0; --turns) {
        pass();
        read();
        for (uint32_t h = 0; h < 2; ++h) {
          if (!running[h].empty()) complete(h);
        }
      }
      EXPECT_EQ(good->cancel(good->last_tag(), results, "cancelled"), Status::kOk);
    }
    finish();
    ASSERT_EQ(hidden(), 0u);
    ASSERT_FALSE(objects.contains(arguments[0]));  // it was donated
    ASSERT_TRUE(controller->is_idle());
    auto meaning = made.meaning({seed, seed + 1, seed + 2});
    for (size_t r = 0; r < 2; ++r) {
      if (failed.contains(results[r])) {
        ASSERT_TRUE(seed % 2 == 0 && !objects.contains(results[r]));
      } else {
        ASSERT_EQ(objects.at(results[r]), meaning.at(made.whole.results[r]));
      }
    }
    for (const uint64_t handle : {arguments[0], arguments[1], arguments[2], results[0], results[1]}) {
      good->release(Handle{handle}, 2, uint64_t{1} << 30);
    }
    finish();
    ASSERT_TRUE(objects.empty());
  }
}

}  // namespace
}  // namespace pathways::test::test_loops
