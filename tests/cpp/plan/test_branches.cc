// The branches of a plan: choices, predicates and selects come back, and nothing malformed comes through.
//
//   PLAN-2, PLAN-4  Refuses.Tables, Refuses.Order; Fuzz: what gets past the validator is safe to walk
//   PLAN-5          Refuses.DeadValues, and what is allowed: RoundTrip.Nested
#include "plan/branches.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "base/status.h"
#include "plan/plan.h"
#include "support.h"

namespace pathways::test::test_branches {
namespace {

using Block = std::vector<std::byte>;
using Node = PlanBuilder::Node;

Node node(NodeKind kind, uint32_t number, std::vector<uint32_t> inputs, std::vector<uint32_t> outputs,
          uint32_t predicate = kNoPredicate) {
  Node n;
  n.kind = kind;
  n.global_node = number;
  n.inputs = std::move(inputs);
  n.outputs = std::move(outputs);
  n.devices = 1;
  n.predicate = predicate;
  return n;
}

Node call(uint32_t number, std::vector<uint32_t> inputs, std::vector<uint32_t> outputs, uint32_t predicate) {
  return node(NodeKind::kCall, number, std::move(inputs), std::move(outputs), predicate);
}

Node select(uint32_t number, uint32_t choice, std::vector<uint32_t> inputs, uint32_t output, uint32_t predicate) {
  Node n = node(NodeKind::kSelect, number, std::move(inputs), {output}, predicate);
  n.computation = choice;
  return n;
}

Node send(uint32_t number, uint32_t input, uint32_t predicate) {
  Node n = node(NodeKind::kTransfer, number, {input}, {}, predicate);
  n.devices = 0;
  n.input_devices = 1;
  n.destinations = {7};
  return n;
}

Node receive(uint32_t number, uint32_t output, uint32_t predicate) {
  Node n = node(NodeKind::kTransfer, number, {}, {output}, predicate);
  n.sources = {7};
  return n;
}

/// What a test may change before the plan is made.
struct Parts {
  std::vector<PlanBuilder::Choice> choices;
  std::vector<PredicateRecord> predicates;
  std::vector<Node> nodes;
  std::vector<uint32_t> results;

  Block block() const {
    PlanBuilder builder(3, 2, 11);
    builder.set_arguments({0, 1});
    builder.set_results(results);
    for (const auto& c : choices) builder.add(c);
    for (const auto& p : predicates) builder.add(p);
    for (const auto& n : nodes) builder.add(n);
    return builder.finish();
  }
};

/// Host 3. Argument 1 decides between two branches; in the first, a value that host 7 reads decides between three.
///   predicates 0, 1: of the outer choice; 2, 3, 4: of the inner choice, inside predicate 0
Parts good() {
  Parts p;
  p.choices = {{4, 3, 3, 1, 2, kNoPredicate, 0, {7, 9}}, {6, 7, 7, kNoValue, 3, 0, 2, {2}}};
  p.predicates = {{0, 0, kNoPredicate, 0}, {0, 1, kNoPredicate, 1}, {1, 0, 0, 2}, {1, 1, 0, 3}, {1, 2, 0, kNoBit}};
  p.nodes = {call(1, {0}, {2}, 0),
             call(2, {2, 0}, {3}, 2),
             receive(3, 4, 3),
             send(4, 2, 4),
             select(5, 1, {3, 4, 0}, 5, 0),  // case 2 gives a value from outside
             call(6, {5}, {6}, 0),
             call(7, {0}, {7, 8}, 1),
             select(8, 0, {6, 7}, 9, kNoPredicate),
             call(9, {9}, {10}, kNoPredicate)};
  p.results = {10, 9, kNoValue, 0};
  return p;
}

TEST(RoundTrip, Nested) {
  const Plan plan = Plan::parse(good().block());
  const Branches& b = plan.branches();
  ASSERT_EQ(b.choices().size(), 2u);
  ASSERT_EQ(b.predicates().size(), 5u);
  EXPECT_TRUE(b.choice(0).owner == 3 && b.choice(0).value == 1 && b.choice(1).value == kNoValue);
  EXPECT_EQ(plan.told(b.choice(0)).size(), 2u);
  EXPECT_EQ(plan.told(b.choice(1))[0], 2u);
  EXPECT_EQ(b.find(6), 1u);
  EXPECT_EQ(b.find(5), kNoPredicate);
  EXPECT_EQ(b.predicate(3).which, 1u);
  EXPECT_TRUE(b.is_within(4, 0) && b.is_within(4, 4) && b.is_within(4, kNoPredicate) && !b.is_within(0, 4));
  const auto list = [](std::span<const uint32_t> items) { return std::vector<uint32_t>(items.begin(), items.end()); };
  using Items = std::vector<uint32_t>;
  EXPECT_EQ(list(b.nodes_of(0)), Items({1, 6}));  // a select waits for its choice instead
  EXPECT_EQ(list(b.nodes_of(3)), Items());        // a transfer that only receives waits for its sources
  EXPECT_EQ(list(b.nodes_of(4)), Items({4}));
  EXPECT_EQ(list(b.children_of(0)), Items({2, 3, 4}));
  EXPECT_EQ(list(b.predicates_of(1)), Items({2, 3, 4}));
  EXPECT_EQ(list(b.selects_of(0)), Items({8}));
  EXPECT_EQ(list(b.selects_reading(0)), Items({5}));
  EXPECT_EQ(list(b.choices_reading(1)), Items({0}));
  EXPECT_EQ(plan.initial_missing()[2], 4u);  // two inputs, a device, the predicate
  EXPECT_EQ(plan.initial_missing()[3], 0u);
  EXPECT_EQ(plan.initial_missing()[5], 2u);
  EXPECT_EQ(plan.initial_readers()[3], 1u);  // by the select, which is no consumer
  EXPECT_TRUE(plan.consumers(3).empty());
  EXPECT_EQ(plan.step_count(), 11u);  // nine nodes, two choices
}

TEST(RoundTrip, NoBranchesCostNothingPerNode) {
  PlanBuilder plain(0, 1, 1);
  plain.set_arguments({0});
  EXPECT_EQ(plain.finish().size(), sizeof(PlanHeader) + 2 * sizeof(NodeRecord) + 2 * sizeof(uint32_t));
  EXPECT_TRUE(Plan::parse(plain.finish()).branches().empty());
}

template <typename Change>
void refused(Change&& change, const std::string& why) {
  Parts parts = good();
  change(parts);
  std::string text = "accepted";
  try {
    (void)Plan::parse(parts.block());
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kInvalid);
    text = error.what();
  }
  EXPECT_NE(text.find(why), std::string::npos) << "expected \"" << why << "\" in: " << text;
}

TEST(Refuses, Tables) {
  refused([](Parts& p) { p.choices[1].number = 4; }, "choice 1: PLAN-4");
  refused([](Parts& p) { p.choices[1].number = kMaxGlobalNodes; }, "choice 1: PLAN-4");
  refused([](Parts& p) { p.choices[1].cases = 0; }, "it has no case");
  refused([](Parts& p) { p.choices[0].value = kNoValue; }, "its owner alone has its value");
  refused([](Parts& p) { p.choices[0].source = 7; }, "its owner alone has its value");
  refused([](Parts& p) { p.choices[1].value = 2; }, "its owner alone has its value");
  refused([](Parts& p) { p.choices[1].source = 3; }, "its owner alone has its value");
  refused([](Parts& p) { p.choices[0].value = 99; }, "choice 0: PLAN-4, it reads an unknown value");
  refused([](Parts& p) { p.choices[0].scope = 5; }, "choice 0: PLAN-4, its scope");
  refused([](Parts& p) { p.choices[0].told = {7, 7}; }, "it tells a host twice");
  refused([](Parts& p) { p.choices[0].told = {3}; }, "it tells a host twice");
  refused([](Parts& p) { p.choices[1].told = {7}; }, "it tells a host twice");
  refused([](Parts& p) { p.predicates[0].choice = 2; }, "predicate 0: PLAN-4");
  refused([](Parts& p) { p.predicates[1].which = 2; }, "predicate 1: PLAN-4");
  refused([](Parts& p) { p.predicates[1].bit = 64; }, "a bit that no host reports");
  refused([](Parts& p) { p.nodes[0].predicate = 5; }, "node 1: PLAN-4, an unknown predicate");
  refused([](Parts& p) { p.nodes[4].computation = 2; }, "node 5: PLAN-4, it selects by an unknown choice");
  refused([](Parts& p) { p.nodes[4].inputs = {3, 4}; }, "node 5: PLAN-4, a select has one input per case");
  refused(
      [](Parts& p) {
        for (uint32_t i = 4; i < 4 + kMostNested; ++i) p.predicates.push_back({0, 0, i, kNoBit});
      },
      "nested too deep");
}

TEST(Refuses, Order) {
  refused([](Parts& p) { p.predicates[2].parent = 2; }, "predicate 2: PLAN-2");
  refused([](Parts& p) { p.predicates[2].parent = 4; }, "predicate 2: PLAN-2");
  refused([](Parts& p) { p.choices[1].first_node = 3; }, "node 2: PLAN-2, its choice is not made");
  refused([](Parts& p) { p.choices[0].first_node = 2; }, "node 1: PLAN-2, its choice is not made");
  refused([](Parts& p) { p.choices[0].value = 10; }, "node 1: PLAN-2, its choice is not made");
  const auto without_predicates = [](Parts& p, uint32_t first_node) {  // only selects depend on the outer choice
    p.choices[0].first_node = first_node;
    p.nodes = {select(8, 0, {0, 0}, 2, kNoPredicate)};
    for (uint32_t v = 3; v < 11; ++v) p.nodes.push_back(call(8 + v, {}, {v}, kNoPredicate));
    p.results = {2};
  };
  refused([&](Parts& p) { without_predicates(p, 8); }, "accepted");
  refused([&](Parts& p) { without_predicates(p, 9); }, "node 1: PLAN-2, its choice is not made");
}

TEST(Refuses, DeadValues) {
  refused([](Parts& p) { p.results[1] = 6; }, "PLAN-5, a result may be dead");
  refused([](Parts& p) { p.results[1] = 5; }, "PLAN-5, a result may be dead");  // a select inside a branch
  refused([](Parts& p) { p.nodes[8].inputs = {7}; }, "node 9: PLAN-5, it reads a value of a branch");
  refused([](Parts& p) { p.nodes[6].inputs = {2}; }, "node 7: PLAN-5, it reads a value of a branch");  // of the other
  refused([](Parts& p) { p.nodes[5].inputs = {3}; }, "node 6: PLAN-5, it reads a value of a branch");  // of an inner
  refused([](Parts& p) { p.nodes[7].inputs = {7, 6}; }, "node 8: PLAN-5, the value that it selects");
  refused([](Parts& p) { p.nodes[7].inputs = {3, 7}; }, "node 8: PLAN-5, the value that it selects");
  refused([](Parts& p) { p.nodes[4].predicate = kNoPredicate; }, "node 5: PLAN-5, its choice is made in another");
  refused([](Parts& p) { p.nodes[4].predicate = 1; }, "node 5: PLAN-5, its choice is made in another");
  refused([](Parts& p) { p.predicates[2].parent = kNoPredicate; }, "predicate 2: PLAN-5");
  refused([](Parts& p) { p.predicates[2].parent = 1; }, "predicate 2: PLAN-5");
  refused([](Parts& p) { p.choices[0].scope = 0; }, "predicate 0: PLAN-5");
  refused([](Parts& p) { p.choices[1] = {6, 3, 3, 7, 3, 0, 2, {2}}; }, "PLAN-2, its choice is not made");
  refused([](Parts& p) { p.nodes[7].predicate = 1; }, "node 9: PLAN-5, it reads");
  // The value of a choice is of the branch that the choice says, or of one around it.
  const auto owned = [](Parts& p, uint32_t scope) {
    p.choices[1] = {6, 3, 3, 2, 3, scope, 2, {2}};
    p.nodes[0].predicate = 1;
    p.nodes[3].inputs = p.nodes[1].inputs = {0};
  };
  refused([&](Parts& p) { owned(p, 0); }, "choice 1: PLAN-5, its value is made in another branch");
}

TEST(Fuzz, WhatIsAcceptedIsSafe) {
  std::mt19937_64 random(test::seed());
  const Block valid = good().block();
  uint32_t accepted = 0, refused_blocks = 0;
  for (int change = 0; change < 4000 * test::kStressScale; ++change) {
    Block block = valid;
    for (uint64_t words = 1 + random() % 2; words > 0; --words) {
      const size_t at = random() % (block.size() / 4) * 4;
      const auto word = random() % 4 == 0 ? 0xffffffffu : static_cast<uint32_t>(random() % 12);
      std::memcpy(block.data() + at, &word, sizeof word);
    }
    try {
      const Plan plan = Plan::parse(std::move(block));
      ++accepted;
      const Branches& b = plan.branches();
      for (uint32_t i = 0; i < plan.nodes().size(); ++i) {
        const NodeRecord& n = plan.node(i);
        uint32_t depth = 0;
        for (uint32_t p = n.predicate; p != kNoPredicate; p = b.predicate(p).parent) {
          ASSERT_LT(p, b.predicates().size());
          ASSERT_LT(b.predicate(p).choice, b.choices().size());
          ASSERT_LE(++depth, kMostNested);
        }
        if (n.kind != NodeKind::kSelect) continue;
        ASSERT_EQ(n.input_count, b.choice(n.computation).cases);
        for (const uint32_t v : plan.inputs(n)) ASSERT_LT(v, plan.value_count());
      }
      for (const ChoiceRecord& c : b.choices()) {
        if (c.value != kNoValue) {
          ASSERT_LT(c.value, plan.value_count());
        }
        for (const uint32_t host : plan.told(c)) ASSERT_NE(host, plan.host());
      }
    } catch (const Error& error) {
      ASSERT_EQ(error.status(), Status::kInvalid);
      ++refused_blocks;
    }
  }
  std::printf("%u refused, %u harmless\n", refused_blocks, accepted);
  EXPECT_GT(refused_blocks, accepted);
}

}  // namespace
}  // namespace pathways::test::test_branches
