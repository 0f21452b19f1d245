// The plan: what goes in comes out, and nothing malformed comes through.
//
//   PLAN-1..4  (PLAN-5 and branches: test_branches.cc) Refuses.*, by name; Fuzz: bit flips and truncations never get
//   past the validator into something unsafe COST-2     Size.IsConstant: the same bytes per host for 2 and for 4,096
//   shards
#include "plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>

#include "base/status.h"
#include "simulate/program.h"
#include "support.h"

namespace pathways {
namespace {

using Block = std::vector<std::byte>;

PlanBuilder::Node call(std::vector<uint32_t> inputs, std::vector<uint32_t> outputs, uint64_t devices = 1) {
  PlanBuilder::Node n;
  n.kind = NodeKind::kCall;
  n.inputs = std::move(inputs);
  n.outputs = std::move(outputs);
  n.devices = devices;
  return n;
}

PlanBuilder::Node transfer(std::vector<uint32_t> inputs, std::vector<uint32_t> outputs, std::vector<uint32_t> sources,
                           std::vector<uint32_t> destinations, uint32_t number = 9) {
  PlanBuilder::Node n;
  n.kind = NodeKind::kTransfer;
  n.global_node = number;
  n.inputs = std::move(inputs);
  n.outputs = std::move(outputs);
  n.sources = std::move(sources);
  n.destinations = std::move(destinations);
  n.devices = n.outputs.empty() ? 0 : 1;
  n.input_devices = n.inputs.empty() ? 0 : 1;
  return n;
}

/// Host 3, two devices, five values: an argument, two calls, a transfer to host 7 and one from it.
PlanBuilder good() {
  PlanBuilder builder(3, 2, 5);
  builder.set_arguments({0, kNoValue});
  builder.set_results({kNoValue, 2, 4, 2});
  PlanBuilder::Node gang = call({0, 0}, {1, 2}, 3);
  gang.gang = true;
  gang.computation = 5;
  gang.global_node = 1;
  builder.add(gang);
  builder.add(transfer({1}, {}, {}, {7}, 2));
  builder.add(transfer({}, {3}, {7}, {}, 3));
  builder.add(call({3, 2}, {4}, 2));
  return builder;
}

std::string refusal(Block block) {
  try {
    (void)Plan::parse(std::move(block));
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kInvalid);
    return error.what();
  }
  return "accepted";
}

void expect_refused(const PlanBuilder& builder, const std::string& why) {
  const std::string text = refusal(builder.finish());
  EXPECT_NE(text.find(why), std::string::npos) << "expected \"" << why << "\" in: " << text;
}

NodeRecord& node_at(Block& block, size_t index) {
  return *reinterpret_cast<NodeRecord*>(block.data() + sizeof(PlanHeader) + index * sizeof(NodeRecord));
}
PlanHeader& header_of(Block& block) { return *reinterpret_cast<PlanHeader*>(block.data()); }

void expect_refused(const std::function<void(Block&)>& change, const std::string& why) {
  Block block = good().finish();
  change(block);
  const std::string text = refusal(std::move(block));
  EXPECT_NE(text.find(why), std::string::npos) << "expected \"" << why << "\" in: " << text;
}

TEST(RoundTrip, EverythingComesBack) {
  const Plan plan = Plan::parse(good().finish());
  EXPECT_EQ(plan.host(), 3u);
  EXPECT_EQ(plan.devices(), 2u);
  EXPECT_EQ(plan.value_count(), 5u);
  EXPECT_EQ(plan.nodes().size(), 6u);
  EXPECT_EQ(plan.step_count(), 4u);
  EXPECT_EQ(plan.gang_count(), 1u);
  EXPECT_EQ(plan.argument_count(), 2u);
  EXPECT_EQ(plan.arguments()[1], kNoValue);
  EXPECT_EQ(plan.result_count(), 4u);
  const NodeRecord& gang = plan.node(1);
  EXPECT_TRUE(gang.gang == 1 && gang.computation == 5 && gang.devices == 3 && gang.global_node == 1);
  EXPECT_EQ(plan.inputs(gang).size(), 2u);
  EXPECT_EQ(plan.outputs(gang)[1], 2u);
  EXPECT_EQ(plan.destinations(plan.node(2))[0], 7u);
  EXPECT_EQ(plan.sources(plan.node(3))[0], 7u);
  // Derived: value 0 is read twice by node 1, value 2 by node 4 and bound to results 1 and 3.
  EXPECT_EQ(plan.initial_readers()[0], 2u);
  EXPECT_EQ(plan.consumers(0).size(), 2u);
  EXPECT_EQ(plan.results_of(2).size(), 2u);
  EXPECT_EQ(plan.results_of(2)[1], 3u);
  EXPECT_EQ(plan.initial_missing()[1], 4u);  // two readings, two devices
  EXPECT_EQ(plan.initial_missing()[2], 1u);
  EXPECT_EQ(plan.initial_missing()[3], 0u);
  // The block itself is what was built.
  EXPECT_EQ(refusal({plan.block().begin(), plan.block().end()}), "accepted");
}

TEST(RoundTrip, EmptyProgram) {
  const Plan plan = Plan::parse(PlanBuilder(0, 1, 0).finish());
  EXPECT_EQ(plan.nodes().size(), 2u);
  EXPECT_EQ(plan.step_count(), 0u);
}

TEST(Refuses, Blocks) {
  EXPECT_NE(refusal({}).find("shorter"), std::string::npos);
  expect_refused([](Block& b) { b[0] = std::byte{0}; }, "magic");
  expect_refused([](Block& b) { header_of(b).version = 9; }, "version 9");
  expect_refused([](Block& b) { b.resize(b.size() - 4); }, "bytes");
  expect_refused([](Block& b) { b.resize(b.size() + 4); }, "bytes");
  expect_refused([](Block& b) { header_of(b).nodes += 1; }, "bytes");
  expect_refused([](Block& b) { header_of(b).devices = 0; }, "1 to 64");
  expect_refused([](Block& b) { header_of(b).devices = 65; }, "1 to 64");
  expect_refused([](Block& b) { header_of(b).values = 0xffffffff; }, "PLAN-4");
}

TEST(Refuses, Plan1SingleAssignment) {
  PlanBuilder twice = good();
  twice.add(call({0}, {4}));
  expect_refused(twice, "PLAN-1");
  PlanBuilder never(0, 1, 2);
  never.set_arguments({0});
  never.add(call({0, 0, 0}, {}));
  expect_refused(never, "PLAN-1");
  PlanBuilder argument_twice(0, 1, 1);
  argument_twice.set_arguments({0, 0});
  expect_refused(argument_twice, "PLAN-1");
}

TEST(Refuses, Plan2Order) {
  PlanBuilder early(0, 1, 2);
  early.add(call({1}, {0}));
  early.add(call({}, {1}));
  expect_refused(early, "PLAN-2");
  PlanBuilder itself(0, 1, 1);
  itself.add(call({0}, {0}));
  expect_refused(itself, "PLAN-2");
  PlanBuilder result(0, 1, 1);
  result.set_results({0});
  expect_refused(result, "PLAN-2");
}

TEST(Refuses, Plan3Shape) {
  expect_refused([](Block& b) { node_at(b, 0).kind = NodeKind::kCall; }, "PLAN-3");
  expect_refused([](Block& b) { node_at(b, 5).kind = NodeKind::kArgument; }, "PLAN-3");
  expect_refused([](Block& b) { node_at(b, 1).kind = NodeKind::kResult; }, "PLAN-3");
  expect_refused([](Block& b) { node_at(b, 1).kind = static_cast<NodeKind>(77); }, "unknown kind");
}

TEST(Refuses, Plan4Bounds) {
  expect_refused([](Block& b) { node_at(b, 1).input_count = 1000; }, "PLAN-4");
  expect_refused([](Block& b) { node_at(b, 1).input_begin = 0xffffffff; }, "PLAN-4");
  expect_refused([](Block& b) { node_at(b, 1).output_begin += 1; }, "PLAN-4");
  expect_refused([](Block& b) { node_at(b, 1).devices = 4; }, "PLAN-4");
  expect_refused([](Block& b) { node_at(b, 2).input_devices = 1u << 20; }, "PLAN-4");
  expect_refused([](Block& b) { header_of(b).argument_begin = 0xfffffff0; }, "PLAN-4");
  expect_refused([](Block& b) { header_of(b).results = 3; }, "PLAN-4");
  PlanBuilder unknown(0, 1, 1);
  unknown.set_arguments({0});
  unknown.add(call({5}, {}));
  expect_refused(unknown, "PLAN-4");
  PlanBuilder writes(0, 1, 1);
  writes.set_arguments({0});
  writes.add(call({}, {5}));
  expect_refused(writes, "PLAN-4");
}

TEST(Refuses, Calls) {
  PlanBuilder nowhere(0, 1, 1);
  nowhere.add(call({}, {0}, 0));
  expect_refused(nowhere, "without local devices");
  expect_refused([](Block& b) { node_at(b, 1).gang = 2; }, "gang");
  expect_refused([](Block& b) { node_at(b, 2).gang = 1; }, "gang");
  expect_refused([](Block& b) { node_at(b, 1).spread = 1; }, "spread");
  expect_refused([](Block& b) { node_at(b, 2).spread = 2; }, "spread");
}

TEST(Refuses, Transfers) {
  const auto with = [](PlanBuilder::Node node) {
    PlanBuilder builder(3, 2, 3);
    builder.set_arguments({0, 1});
    builder.add(std::move(node));
    return builder;
  };
  expect_refused(with(transfer({0, 1}, {2}, {3}, {3})), "exactly one value");
  expect_refused(with(transfer({}, {2}, {}, {})), "exactly one value");
  expect_refused(with(transfer({0}, {2}, {7}, {})), "exactly one value");
  expect_refused(with(transfer({}, {2}, {7}, {7})), "exactly one value");
  expect_refused(with(transfer({0}, {2}, {7, 7}, {7})), "twice");
  expect_refused(with(transfer({0}, {2}, {3, 7}, {7})), "itself");
  expect_refused(with(transfer({0}, {2}, {7}, {7}, 1u << 20)), "too big");
  PlanBuilder same = good();
  same.add(transfer({0}, {}, {}, {7}, 2));
  expect_refused(same, "one number");
  PlanBuilder call_with_source(0, 1, 1);
  PlanBuilder::Node node = call({}, {0});
  node.sources = {1};
  call_with_source.add(node);
  expect_refused(call_with_source, "only transfers");
}

TEST(Refuses, TablesThatDiffer) {
  const auto word_of = [](Block& b, uint32_t at) -> uint32_t& {
    return *reinterpret_cast<uint32_t*>(b.data() + sizeof(PlanHeader) + header_of(b).nodes * sizeof(NodeRecord) +
                                        at * 4);
  };
  expect_refused([&](Block& b) { word_of(b, header_of(b).argument_begin) = kNoValue; }, "argument");
  expect_refused([&](Block& b) { word_of(b, header_of(b).result_begin + 1) = 1; }, "result");
  expect_refused([&](Block& b) { word_of(b, header_of(b).result_begin + 1) = 99; }, "unknown value");
}

/// Whatever gets through must be safe to walk, for the executor indexes by it without looking again.
void walk(const Plan& plan) {
  std::vector<uint32_t> missing(plan.initial_missing().begin(), plan.initial_missing().end());
  for (uint32_t i = 0; i < plan.nodes().size(); ++i) {
    const NodeRecord& n = plan.node(i);
    for (const uint32_t v : plan.inputs(n)) ASSERT_LT(v, plan.value_count());
    for (const uint32_t v : plan.outputs(n)) {
      ASSERT_LT(v, plan.value_count());
      for (const uint32_t c : plan.consumers(v)) {
        ASSERT_GT(c, i);
        ASSERT_GT(missing[c], 0u);
        --missing[c];
      }
      for (const uint32_t r : plan.results_of(v)) ASSERT_LT(r, plan.result_count());
    }
    const uint32_t more = waits_for_predicate(n) ? 1 : 0;
    if (n.kind == NodeKind::kCall) {
      ASSERT_EQ(missing[i], static_cast<uint32_t>(__builtin_popcountll(n.devices)) + more);
    }
    if (n.kind == NodeKind::kTransfer) {
      ASSERT_EQ(missing[i], more);
    }
  }
}

TEST(Fuzz, FlippedAndTruncated) {
  std::mt19937_64 random(test::seed());
  const std::vector<ModelledSlice> slices = {{{0, 1}, 3}, {{1, 2}, 2}, {{1}, 1}};
  uint32_t accepted = 0, refused = 0;
  for (int plans = 0; plans < 40; ++plans) {
    const Block valid = make_random_program(slices, 8, {0, 1, 2}, random()).plan_of(1, 4);
    walk(Plan::parse(valid));
    for (int change = 0; change < 60 * test::kStressScale; ++change) {
      Block block = valid;
      if (random() % 8 == 0) {
        block.resize(random() % block.size());
        // A truncation that restates its own size is as malformed.
        if (random() % 2 == 0 && block.size() >= sizeof(PlanHeader)) {
          header_of(block).total_bytes = static_cast<uint32_t>(block.size());
        }
      } else if (random() % 2 == 0) {  // a word of the size of what stands there
        const size_t at = random() % (block.size() / 4) * 4;
        const auto word = static_cast<uint32_t>(random() % 16);
        std::memcpy(block.data() + at, &word, sizeof word);
      } else {
        for (uint64_t flips = 1 + random() % 3; flips > 0; --flips) {
          block[random() % block.size()] ^= static_cast<std::byte>(1u << random() % 8);
        }
      }
      try {
        walk(Plan::parse(std::move(block)));
        ++accepted;  // e.g. another computation number, or another device
      } catch (const Error& error) {
        ASSERT_EQ(error.status(), Status::kInvalid);
        ++refused;
      }
      if (::testing::Test::HasFailure()) return;
    }
  }
  std::printf("%u refused, %u harmless\n", refused, accepted);
  EXPECT_GT(refused, accepted);
}

TEST(Size, IsConstant) {  // COST-2
  const auto bytes = [](uint32_t hosts) {
    ModelledSlice slice{{}, 1};
    for (uint32_t h = 0; h < hosts; ++h) slice.hosts.push_back(h);
    const ModelledProgram chain = make_chain(slice, 2);
    const Plan plan = Plan::parse(chain.plan_of(hosts / 2, 1));
    EXPECT_EQ(plan.nodes().size(), 4u);
    return plan.bytes();
  };
  EXPECT_EQ(bytes(2), bytes(4096));
  EXPECT_EQ(bytes(8), bytes(4096));
}

}  // namespace
}  // namespace pathways
