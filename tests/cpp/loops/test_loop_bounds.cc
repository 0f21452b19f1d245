// What a client may do with composites, and what it may not.
//
//   TRUST-1  LoopBounds.WrongOnesAreRefused, LoopBounds.NoClientNamesAHiddenHandle,
//            LoopBounds.AClientThatGivesADonatedArgumentTwiceIsEvicted
//   FLOW-1   LoopBounds.AHostThatReadsNothingStopsTheLoop
//   DEAD-1   LoopBounds.OneWhoseRunsAllHaveTheirPlacesIsCancelledToo
#include <functional>

#include "loops/played_loops.h"

namespace pathways::test::test_loop_bounds {
namespace {

struct LoopBounds : Loops {};

TEST_F(LoopBounds, WrongOnesAreRefused) {
  const auto refused = [&](const std::function<void(Composite&)>& spoil, const char* why) {
    Composite wrong = simple(3);
    spoil(wrong);
    try {
      controller->register_composite(kNumber, std::move(wrong));
      ADD_FAILURE() << "was taken: " << why;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  refused([](Composite& c) { c.donated.clear(); }, "a kept argument");
  refused([](Composite& c) { c.steps[1].inputs = {2}; }, "not there");
  refused([](Composite& c) { c.steps[2].inputs = {1}; }, "has taken");
  refused([](Composite& c) { c.results = {1}; }, "which no single run makes");
  refused(
      [](Composite& c) {
        c.steps[1].inputs = {0};
        c.steps[0].count = 2;
      },
      "has taken");
  refused([](Composite& c) { c.steps[1].plan = 77; }, "plan 77");
  refused([](Composite& c) { c.steps[0].count = 0; }, "0 iterations");
  refused([](Composite& c) { c.steps.pop_back(); }, "without an end");
  refused([](Composite& c) { c.steps[1].outputs = {2, 3}; }, "number of results");
  refused([](Composite& c) { c.steps[1].outputs = {9}; }, "no such value");
  refused([](Composite& c) { c.parallel = 0; }, "runs in flight");
  refused([](Composite& c) { c.group = 40; }, "nobody made");
  refused([](Composite& c) { c.group = 1; }, "not its own");
  refused([](Composite& c) { c.donated = {0, 0}; }, "twice");
  refused([](Composite& c) { c.results.assign(Composites::kMostValues + 1, 3); }, "too many");
  // A call would go through a loop without a run, and order nothing.
  const auto nest = [](Composite& c, size_t depth, uint64_t count) {
    for (size_t i = 0; i < depth; ++i) c.steps.push_back(bound(Kind::kLoop, count, {}, {}));
    for (size_t i = 0; i < depth; ++i) c.steps.push_back(bound(Kind::kEnd, 0, {}, {}));
  };
  refused([&](Composite& c) { nest(c, 1, uint64_t{1} << 62); }, "without a run");
  // No trial is long.
  refused(
      [&](Composite& c) {
        add(5, 50, {});
        c.values = 54;
        std::vector<uint32_t> outputs;
        for (uint32_t i = 0; i < 50; ++i) outputs.push_back(4 + i);
        for (int i = 0; i < 10; ++i) c.steps.push_back(bound(Kind::kLoop, 3, {}, {}));
        c.steps.push_back(run(5, {}, outputs));
        for (int i = 0; i < 10; ++i) c.steps.push_back(bound(Kind::kEnd, 0, {}, {}));
      },
      "too many loops");
  controller->register_composite(kNumber, simple(3));
  refused([](Composite& c) { c.steps[1].plan = kNumber; }, "composite 900 as a plan");
}

TEST_F(LoopBounds, APlanWhoseArgumentLiesOnFewerHosts) {
  const auto whole = simple(3);
  PlanMemory memory{0, "plan", "", {}, {}, {0}};
  memory.results = {{2, kNoSpaceSet, 0, -1, -1}};
  memory.argument_groups = {1, 1};
  controller->set_plan_memory(1, memory);
  const auto refused = [&](const char* why) {
    try {
      controller->register_composite(kNumber, whole);
      ADD_FAILURE() << "was taken: " << why;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  refused("number of arguments");
  memory.argument_groups = {1};
  controller->set_plan_memory(1, memory);
  refused("does not go to all its hosts");
  memory.argument_groups = {2};
  controller->set_plan_memory(1, memory);
  controller->register_composite(kNumber, whole);
}

TEST_F(LoopBounds, AClientThatGivesADonatedArgumentTwiceIsEvicted) {
  add(1, 1, {0});
  Composite whole{"loop", 0, 2, 2, 5, 10, {0}, {4}, {}};
  whole.steps = {bound(Kind::kLoop, 3, {0}, {2}), run(1, {2}, {3}), bound(Kind::kEnd, 0, {3}, {4})};
  controller->register_composite(kNumber, whole);
  const uint64_t argument = buffer(7);
  (void)call({argument, argument}, 1);
  pass();
  EXPECT_EQ(controller->stats().clients, 0u);
}

TEST_F(LoopBounds, NoClientNamesAHiddenHandle) {
  const uint64_t hidden = Handle::make(Handle::kHidden | 1, 1).raw;
  uint64_t result = 0;
  ASSERT_EQ(good->submit({5, 2, {2}}, std::array{hidden}, &result), Status::kOk);
  pass();
  EXPECT_EQ(controller->stats().clients, 0u);
}

TEST_F(LoopBounds, AHostThatReadsNothingStopsTheLoop) {
  // Each iteration is a run on host 0 alone, and drops a buffer that both hosts are told of.
  constexpr uint32_t kTurns = 20000;
  controller->register_plan(1, 0, 1);
  PlanMemory memory{0, "plan", "", {}, {}, {0}};
  memory.results = {{1, kNoSpaceSet, 0, -1, -1}, {1, kNoSpaceSet, 0, -1, -1}};
  controller->set_plan_memory(1, std::move(memory));
  donated_of[1] = {0};
  Composite made{"loop", 0, 2, 1, 5, 10, {0}, {3}, {}};
  made.steps = {bound(Kind::kLoop, kTurns, {0}, {1}), run(1, {1}, {2, 4}), bound(Kind::kEnd, 0, {2}, {3})};
  controller->register_composite(kNumber, made);
  (void)call({buffer(7)}, 1);
  size_t before = 0;
  for (bool is_moving = true; is_moving; before = order.size()) {
    pass();
    for (auto bytes = hosts[0]->next(); !bytes.empty(); bytes = hosts[0]->next()) take(0, bytes);
    while (!running[0].empty()) complete(0);
    pass();
    is_moving = order.size() != before;
  }
  EXPECT_LT(order.size(), 2 * kMostCommands);
  EXPECT_GT(order.size(), kMostCommands / 2);
}

TEST_F(LoopBounds, OneWhoseRunsAllHaveTheirPlacesIsCancelledToo) {
  controller->register_composite(kNumber, simple(8));
  const uint64_t result = call({buffer(7)}, 1)[0];
  pass();
  EXPECT_EQ(controller->stats().waiting, 4u);  // behind the hosts' window
  ASSERT_EQ(good->cancel(good->last_tag(), {&result, 1}, "enough"), Status::kOk);
  pass();
  EXPECT_EQ(controller->stats().waiting, 0u);
  finish();
  EXPECT_EQ(order.size(), 4u);
  EXPECT_EQ(hidden(), 0u);
  EXPECT_TRUE(controller->is_idle());
}

}  // namespace
}  // namespace pathways::test::test_loop_bounds
