// The plan: what goes in comes out, and nothing malformed comes through.
//
//   PLAN-1..4  (PLAN-5 and branches: test_branches.cc) Refuses.*, by name; Fuzz: bit flips and truncations never get
//   past the validator into something unsafe
//   PLAN-6  Refuses.Plan6Exchanges; the fuzz has exchanges too
//   COST-2  Size.IsConstant: the same bytes per host for 2 and for 4,096 shards
#include "plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>

#include "base/status.h"
#include "simulate/program.h"
#include "support.h"

namespace pathways::test::test_plan {
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

ExchangeRecord& exchange_at(Block& block, size_t index) {
  const size_t before = sizeof(PlanHeader) + header_of(block).nodes * sizeof(NodeRecord);  // no choices, no predicates
  return *reinterpret_cast<ExchangeRecord*>(block.data() + before + index * sizeof(ExchangeRecord));
}
uint32_t& word_at(Block& block, uint32_t index) {
  const size_t words = sizeof(PlanHeader) + header_of(block).nodes * sizeof(NodeRecord) +
                       header_of(block).exchanges * sizeof(ExchangeRecord);
  return *reinterpret_cast<uint32_t*>(block.data() + words + index * 4);
}

/// Host 3, three devices: rows of 4 shards on hosts 3 and 5 go to 3 shards on hosts 7 and 3, and their results go back.
PlanBuilder with_exchanges() {
  const ShardHosts from(4, {{0, 3}, {2, 5}}), to(3, {{0, 7}, {2, 3}});
  PlanBuilder builder(3, 3, 8);
  builder.set_arguments({0, 1});
  builder.set_results({7, 5});
  PlanBuilder::Node there;
  there.global_node = 4;
  there.inputs = {0, 1};
  there.outputs = {2, 3, 4, 5, 6};
  there.input_devices = 3;
  there.devices = 4;
  builder.add(there, {from, to, 9, Overflow::kDrop, -1, Routes::kChosen, 6});
  PlanBuilder::Node back;
  back.global_node = 5;
  back.inputs = {2, 3, 6};
  back.outputs = {7};
  back.input_devices = 4;
  back.devices = 3;
  builder.add(back, {to, from, 6, Overflow::kError, {}, Routes::kKnown, 9});
  return builder;
}

TEST(RoundTrip, Exchanges) {
  const Plan plan = Plan::parse(with_exchanges().finish());
  ASSERT_EQ(plan.exchanges().records().size(), 2u);
  ASSERT_TRUE(plan.node(1).kind == NodeKind::kExchange && plan.node(2).kind == NodeKind::kPermute);
  const ExchangeShape& there = plan.exchanges().shape(plan.node(1).computation);
  const ExchangeShape& back = plan.exchanges().shape(plan.node(2).computation);
  EXPECT_EQ(there.hosts(), (std::vector<uint32_t>{3, 5, 7}));
  EXPECT_TRUE(there.sources.count_on(5) == 2 && there.targets.host_of(1) == 7 && there.targets.host_of(2) == 3);
  EXPECT_TRUE(there.capacity == 9 && there.overflow == Overflow::kDrop && there.unsent == -1 &&
              there.routes == Routes::kChosen && there.source_rows == 6);
  EXPECT_TRUE(back.capacity == 6 && back.overflow == Overflow::kError && !back.unsent.has_value() &&
              back.routes == Routes::kKnown && back.source_rows == 9);
  EXPECT_TRUE(back.sources.shards() == 3 && back.targets.shards() == 4);
  EXPECT_EQ(plan.step_count(), 2u);
  EXPECT_EQ(plan.initial_missing()[2], 3u);
  EXPECT_EQ(plan.initial_readers()[2], 1u);
}

TEST(RoundTrip, KnownRoutesMayLeadToNoRows) {
  Block block = with_exchanges().finish();
  exchange_at(block, 0).source_rows = 0;
  exchange_at(block, 1).capacity = 0;
  EXPECT_EQ(refusal(std::move(block)), "accepted");
}

TEST(Refuses, Plan6Exchanges) {
  const auto refuse = [](const std::function<void(Block&)>& change, const std::string& why) {
    Block block = with_exchanges().finish();
    change(block);
    const std::string text = refusal(std::move(block));
    EXPECT_NE(text.find(why), std::string::npos) << "expected \"" << why << "\" in: " << text;
  };
  refuse([](Block&) {}, "accepted");
  refuse([](Block& b) { std::swap(node_at(b, 1).computation, node_at(b, 2).computation); }, "node 1: PLAN-6, its exch");
  refuse([](Block& b) { node_at(b, 2).computation = 7; }, "node 2: PLAN-6, its exchange is not the next");
  refuse([](Block& b) { node_at(b, 1).kind = NodeKind::kPermute; }, "known routes drop no row");
  refuse([](Block& b) { node_at(b, 2).kind = NodeKind::kExchange; }, "expected 2 inputs and 5 outputs");
  refuse([](Block& b) { node_at(b, 2).kind = NodeKind::kCall; }, "exchange 1: PLAN-6, no node has it");
  refuse([](Block& b) { header_of(b).padding = 1; }, "header");
  refuse([](Block& b) { header_of(b).exchanges = 1; }, "tables need");
  refuse([](Block& b) { node_at(b, 2).global_node = 4; }, "one number");
  refuse([](Block& b) { node_at(b, 1).global_node = 1u << 20; }, "too big");
  refuse([](Block& b) { node_at(b, 1).devices = 3; }, "other devices than shards");
  refuse([](Block& b) { node_at(b, 1).input_devices = 1; }, "other devices than shards");
  refuse([](Block& b) { node_at(b, 1).spread = 1; }, "no spread");
  refuse([](Block& b) { node_at(b, 1).gang = 1; }, "no gang");
  refuse([](Block& b) { node_at(b, 1).predicate = 0; }, "PLAN-");
  refuse([](Block& b) { exchange_at(b, 0).capacity = 0; }, "int32");
  refuse([](Block& b) { exchange_at(b, 0).capacity = 0x40000000; }, "int32");
  refuse([](Block& b) { exchange_at(b, 0).source_rows = 0x20000000; }, "int32");
  refuse([](Block& b) { exchange_at(b, 0).source_shards = 2; }, "shard ranges must ascend");
  refuse([](Block& b) { exchange_at(b, 0).target_shards = 4; }, "other devices than shards");
  refuse([](Block& b) { exchange_at(b, 0).overflow = 2; }, "flags");
  refuse([](Block& b) { exchange_at(b, 0).has_unsent = 2; }, "flags");
  refuse([](Block& b) { exchange_at(b, 0).has_unsent = 0; }, "flags");
  refuse([](Block& b) { exchange_at(b, 0).padding = 1; }, "flags");
  refuse([](Block& b) { exchange_at(b, 1).overflow = 1; }, "known routes drop no row");
  refuse([](Block& b) { exchange_at(b, 1).has_unsent = 1; }, "known routes drop no row");
  refuse([](Block& b) { exchange_at(b, 0).source_begin += 2; }, "leave the table of words");
  refuse([](Block& b) { exchange_at(b, 0).source_count = 0x7fffffff; }, "leave the table of words");
  refuse([](Block& b) { --exchange_at(b, 0).source_count, --exchange_at(b, 0).target_begin; }, "table of words");
  const auto range = [](Block& b, uint32_t word) -> uint32_t& {
    return word_at(b, exchange_at(b, 0).source_begin + word);
  };
  refuse([&](Block& b) { range(b, 0) = 1; }, "shard ranges must ascend");
  refuse([&](Block& b) { range(b, 2) = 0; }, "shard ranges must ascend");
  refuse([&](Block& b) { range(b, 2) = 4; }, "shard ranges must ascend");
  refuse([&](Block& b) { range(b, 1) = 5; }, "other devices than shards");
  refuse(
      [&](Block& b) {  // one word fewer of the sources, one more of the targets
        exchange_at(b, 0).source_count -= 1;
        exchange_at(b, 0).target_begin -= 1;
        exchange_at(b, 0).target_count += 1;
      },
      "half a range");
  refuse(
      [&](Block& b) {  // no range at all
        exchange_at(b, 0).target_begin = exchange_at(b, 0).source_begin;
        exchange_at(b, 0).target_count += exchange_at(b, 0).source_count;
        exchange_at(b, 0).source_count = 0;
      },
      "a slice has at least one shard");
  PlanBuilder elsewhere(8, 3, 0);
  elsewhere.add(PlanBuilder::Node{}, {{1, {{0, 3}}}, {1, {{0, 7}}}, 1, Overflow::kError});
  expect_refused(elsewhere, "no shard of the exchange");
  PlanBuilder sources = with_exchanges();
  PlanBuilder::Node node;
  node.sources = {5};
  sources.add(node, {{1, {{0, 3}}}, {1, {{0, 7}}}, 1, Overflow::kError});
  expect_refused(sources, "only transfers have sources");
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
    if (n.kind == NodeKind::kTransfer || is_exchange(n.kind)) {
      ASSERT_EQ(missing[i], more);
    }
    if (!is_exchange(n.kind)) continue;
    ASSERT_LT(n.computation, plan.exchanges().records().size());
    const ExchangeShape& shape = plan.exchanges().shape(n.computation);
    for (const auto* side : {&shape.sources, &shape.targets}) {
      uint64_t all = 0;
      for (const auto& count : side->counts()) all += count.second;
      ASSERT_EQ(all, side->shards());
      ASSERT_TRUE(shape.has_part(side->host_of(side->shards() - 1)) && shape.has_part(side->host_of(0)));
    }
    ASSERT_TRUE(shape.has_part(plan.host()));
    ASSERT_LE(uint64_t{shape.capacity} * shape.targets.shards(), uint64_t{INT32_MAX});
  }
}

TEST(Fuzz, FlippedAndTruncated) {
  std::mt19937_64 random(test::seed());
  const std::vector<ModelledSlice> slices = {{{0, 1}, 3}, {{1, 2}, 2}, {{1}, 1}};
  uint32_t accepted = 0, refused = 0;
  for (int plans = 0; plans < 40; ++plans) {
    const Block valid =
        plans % 4 == 0 ? with_exchanges().finish() : make_random_program(slices, 8, {0, 1, 2}, random()).plan_of(1, 4);
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
}  // namespace pathways::test::test_plan
