// Plans for Python: build one node by node, encode it, check it, and describe an encoded one.
#include "plan/plan.h"

#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "bind/bind.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace pathways::bind {
namespace {

py::bytes to_bytes(const std::vector<std::byte>& block) {
  return py::bytes(reinterpret_cast<const char*>(block.data()), block.size());
}

Plan from_bytes(const py::bytes& bytes) {
  const std::string_view view = bytes;
  std::vector<std::byte> block(view.size());
  if (!view.empty()) std::memcpy(block.data(), view.data(), view.size());
  return Plan::parse(std::move(block));
}

const char* kind_name(NodeKind kind) {
  switch (kind) {
    case NodeKind::kArgument:
      return "argument";
    case NodeKind::kCall:
      return "call";
    case NodeKind::kTransfer:
      return "transfer";
    case NodeKind::kResult:
      return "result";
    case NodeKind::kSelect:
      return "select";
    case NodeKind::kExchange:
      return "exchange";
    case NodeKind::kPermute:
      return "permute";
  }
  return "?";
}

/// With what all nodes have.
PlanBuilder::Node make_node(uint32_t number, std::vector<uint32_t> inputs, std::vector<uint32_t> outputs,
                            uint64_t devices, uint32_t predicate) {
  PlanBuilder::Node node;
  node.global_node = number;
  node.inputs = std::move(inputs);
  node.outputs = std::move(outputs);
  node.devices = devices;
  node.predicate = predicate;
  return node;
}

using ShardRanges = std::vector<std::pair<uint32_t, uint32_t>>;  // first shard, host

ShardHosts to_shards(uint32_t shards, const ShardRanges& ranges) {
  std::vector<ShardHosts::Range> out;
  for (const auto& [first, host] : ranges) out.push_back({first, host});
  return {shards, std::move(out)};
}

ShardRanges list_ranges(const ShardHosts& shards) {
  ShardRanges out;
  for (const ShardHosts::Range& range : shards.ranges()) out.emplace_back(range.first, range.host);
  return out;
}

py::list describe_exchanges(const Plan& plan) {
  py::list out;
  for (uint32_t i = 0; i < plan.exchanges().records().size(); ++i) {
    const ExchangeShape& shape = plan.exchanges().shape(i);
    out.append(py::dict("source_shards"_a = shape.sources.shards(), "sources"_a = list_ranges(shape.sources),
                        "target_shards"_a = shape.targets.shards(), "targets"_a = list_ranges(shape.targets),
                        "source_rows"_a = shape.source_rows, "capacity"_a = shape.capacity,
                        "drops"_a = shape.overflow == Overflow::kDrop, "unsent"_a = shape.unsent,
                        "known"_a = shape.routes == Routes::kKnown));
  }
  return out;
}

py::list describe(const Plan& plan) {
  py::list nodes;
  const auto list = [](std::span<const uint32_t> items) { return std::vector<uint32_t>(items.begin(), items.end()); };
  for (const NodeRecord& n : plan.nodes()) {
    nodes.append(py::dict("kind"_a = kind_name(n.kind), "computation"_a = n.computation, "node"_a = n.global_node,
                          "inputs"_a = list(plan.inputs(n)), "outputs"_a = list(plan.outputs(n)),
                          "sources"_a = list(plan.sources(n)), "destinations"_a = list(plan.destinations(n)),
                          "devices"_a = n.devices, "input_devices"_a = n.input_devices, "gang"_a = n.gang != 0,
                          "predicate"_a = n.predicate));
  }
  return nodes;
}

py::dict describe_branches(const Plan& plan) {
  py::list choices, predicates;
  for (const ChoiceRecord& c : plan.branches().choices()) {
    const auto told = plan.told(c);
    choices.append(py::dict("number"_a = c.number, "owner"_a = c.owner, "source"_a = c.source, "value"_a = c.value,
                            "cases"_a = c.cases, "scope"_a = c.scope, "first_node"_a = c.first_node,
                            "told"_a = std::vector<uint32_t>(told.begin(), told.end())));
  }
  for (const PredicateRecord& p : plan.branches().predicates()) {
    predicates.append(py::dict("choice"_a = p.choice, "which"_a = p.which, "parent"_a = p.parent, "bit"_a = p.bit));
  }
  return py::dict("choices"_a = choices, "predicates"_a = predicates);
}

}  // namespace

void register_plans(py::module_& m) {
  m.attr("NO_VALUE") = kNoValue;
  m.attr("NO_PREDICATE") = kNoPredicate;
  m.attr("NO_BIT") = kNoBit;
  m.attr("PREDICATE_BITS") = kPredicateBits;
  m.attr("VERDICT_BIT") = kVerdictBit;
  py::class_<PlanBuilder>(m, "PlanBuilder", "Writes one host's plan; argument and result nodes are added by itself.")
      .def(py::init<uint32_t, uint32_t, uint32_t>(), "host"_a, "devices"_a, "values"_a)
      .def("set_arguments", &PlanBuilder::set_arguments, "values"_a)
      .def("set_results", &PlanBuilder::set_results, "values"_a)
      .def("set_donated", &PlanBuilder::set_donated, "positions"_a)
      .def(
          "call",
          [](PlanBuilder& b, uint32_t computation, uint32_t node, std::vector<uint32_t> inputs,
             std::vector<uint32_t> outputs, uint64_t devices, bool gang, uint32_t predicate) {
            PlanBuilder::Node n = make_node(node, std::move(inputs), std::move(outputs), devices, predicate);
            n.kind = NodeKind::kCall;
            n.computation = computation;
            n.gang = gang;
            b.add(std::move(n));
          },
          "computation"_a, "node"_a, "inputs"_a, "outputs"_a, "devices"_a, "gang"_a, "predicate"_a = kNoPredicate)
      .def(
          "transfer",
          [](PlanBuilder& b, uint32_t route, uint32_t node, std::vector<uint32_t> inputs, std::vector<uint32_t> outputs,
             uint64_t input_devices, uint64_t devices, std::vector<uint32_t> sources,
             std::vector<uint32_t> destinations, bool spread, uint32_t predicate) {
            PlanBuilder::Node n = make_node(node, std::move(inputs), std::move(outputs), devices, predicate);
            n.kind = NodeKind::kTransfer;
            n.computation = route;
            n.input_devices = input_devices;
            n.sources = std::move(sources);
            n.destinations = std::move(destinations);
            n.spread = spread;
            b.add(std::move(n));
          },
          "route"_a, "node"_a, "inputs"_a, "outputs"_a, "input_devices"_a, "devices"_a, "sources"_a, "destinations"_a,
          "spread"_a, "predicate"_a = kNoPredicate)
      .def(
          "select",
          [](PlanBuilder& b, uint32_t choice, uint32_t node, std::vector<uint32_t> inputs, uint32_t output,
             uint64_t devices, uint32_t predicate) {
            PlanBuilder::Node n = make_node(node, std::move(inputs), {output}, devices, predicate);
            n.kind = NodeKind::kSelect;
            n.computation = choice;
            b.add(std::move(n));
          },
          "choice"_a, "node"_a, "inputs"_a, "output"_a, "devices"_a, "predicate"_a = kNoPredicate,
          "Gives the input of the case that the choice took; one input per case.")
      .def(
          "exchange",
          [](PlanBuilder& b, uint32_t node, std::vector<uint32_t> inputs, std::vector<uint32_t> outputs,
             uint64_t input_devices, uint64_t devices, uint32_t source_shards, const ShardRanges& sources,
             uint32_t target_shards, const ShardRanges& targets, uint32_t source_rows, uint32_t capacity, bool drops,
             std::optional<int32_t> unsent, bool known, uint32_t predicate) {
            PlanBuilder::Node n = make_node(node, std::move(inputs), std::move(outputs), devices, predicate);
            n.input_devices = input_devices;
            b.add(std::move(n), ExchangeShape{to_shards(source_shards, sources), to_shards(target_shards, targets),
                                              capacity, drops ? Overflow::kDrop : Overflow::kError, unsent,
                                              known ? Routes::kKnown : Routes::kChosen, source_rows});
          },
          "node"_a, "inputs"_a, "outputs"_a, "input_devices"_a, "devices"_a, "source_shards"_a, "sources"_a,
          "target_shards"_a, "targets"_a, "source_rows"_a, "capacity"_a, "drops"_a, "unsent"_a, "known"_a,
          "predicate"_a = kNoPredicate,
          "Sends rows. `sources`, `targets`: (first shard, host) of each range. csrc/plan/exchanges.h has the values.")
      .def(
          "choice",
          [](PlanBuilder& b, uint32_t number, uint32_t owner, uint32_t source, uint32_t value, uint32_t cases,
             uint32_t first_node, std::vector<uint32_t> told, uint32_t scope) {
            return b.add(PlanBuilder::Choice{number, owner, source, value, cases, scope, first_node, std::move(told)});
          },
          "number"_a, "owner"_a, "source"_a, "value"_a, "cases"_a, "first_node"_a, "told"_a, "scope"_a = kNoPredicate,
          "A scalar that decides; returns its index. csrc/plan/branches.h has the fields.")
      .def(
          "predicate",
          [](PlanBuilder& b, uint32_t choice, uint32_t which, uint32_t parent, uint32_t bit) {
            return b.add(PredicateRecord{choice, which, parent, bit});
          },
          "choice"_a, "which"_a, "parent"_a = kNoPredicate, "bit"_a = kNoBit,
          "Holds if the choice took case `which` and the parent holds; returns its index.")
      .def("finish", [](const PlanBuilder& b) { return to_bytes(b.finish()); }, "The encoded plan.");
  m.def(
      "check_plan", [](const py::bytes& block) { (void)from_bytes(block); }, "block"_a,
      "Raises ValueError, naming what is wrong and where, unless `block` is a well-formed plan.");
  m.def(
      "describe_plan", [](const py::bytes& block) { return describe(from_bytes(block)); }, "block"_a,
      "The nodes of an encoded plan, as dictionaries.");
  m.def(
      "describe_exchanges", [](const py::bytes& block) { return describe_exchanges(from_bytes(block)); }, "block"_a,
      "The shapes of the exchanges of an encoded plan, as dictionaries.");
  m.def(
      "describe_branches", [](const py::bytes& block) { return describe_branches(from_bytes(block)); }, "block"_a,
      "The choices and predicates of an encoded plan, as dictionaries.");
}

}  // namespace pathways::bind
