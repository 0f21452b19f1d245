// Plans for Python: build one node by node, encode it, check it, and describe an encoded one.
#include "plan/plan.h"

#include <pybind11/stl.h>

#include <cstring>

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
  }
  return "?";
}

py::list describe(const Plan& plan) {
  py::list nodes;
  const auto list = [](std::span<const uint32_t> items) { return std::vector<uint32_t>(items.begin(), items.end()); };
  for (const NodeRecord& n : plan.nodes()) {
    nodes.append(py::dict("kind"_a = kind_name(n.kind), "computation"_a = n.computation, "node"_a = n.global_node,
                          "inputs"_a = list(plan.inputs(n)), "outputs"_a = list(plan.outputs(n)),
                          "sources"_a = list(plan.sources(n)), "destinations"_a = list(plan.destinations(n)),
                          "devices"_a = n.devices, "input_devices"_a = n.input_devices, "gang"_a = n.gang != 0));
  }
  return nodes;
}

}  // namespace

void register_plans(py::module_& m) {
  m.attr("NO_VALUE") = kNoValue;
  py::class_<PlanBuilder>(m, "PlanBuilder", "Writes one host's plan; argument and result nodes are added by itself.")
      .def(py::init<uint32_t, uint32_t, uint32_t>(), "host"_a, "devices"_a, "values"_a)
      .def("set_arguments", &PlanBuilder::set_arguments, "values"_a)
      .def("set_results", &PlanBuilder::set_results, "values"_a)
      .def("set_donated", &PlanBuilder::set_donated, "positions"_a)
      .def(
          "call",
          [](PlanBuilder& b, uint32_t computation, uint32_t node, std::vector<uint32_t> inputs,
             std::vector<uint32_t> outputs, uint64_t devices, bool gang) {
            PlanBuilder::Node n;
            n.kind = NodeKind::kCall;
            n.computation = computation;
            n.global_node = node;
            n.inputs = std::move(inputs);
            n.outputs = std::move(outputs);
            n.devices = devices;
            n.gang = gang;
            b.add(std::move(n));
          },
          "computation"_a, "node"_a, "inputs"_a, "outputs"_a, "devices"_a, "gang"_a)
      .def(
          "transfer",
          [](PlanBuilder& b, uint32_t route, uint32_t node, std::vector<uint32_t> inputs, std::vector<uint32_t> outputs,
             uint64_t input_devices, uint64_t devices, std::vector<uint32_t> sources,
             std::vector<uint32_t> destinations, bool spread) {
            PlanBuilder::Node n;
            n.kind = NodeKind::kTransfer;
            n.computation = route;
            n.global_node = node;
            n.inputs = std::move(inputs);
            n.outputs = std::move(outputs);
            n.input_devices = input_devices;
            n.devices = devices;
            n.sources = std::move(sources);
            n.destinations = std::move(destinations);
            n.spread = spread;
            b.add(std::move(n));
          },
          "route"_a, "node"_a, "inputs"_a, "outputs"_a, "input_devices"_a, "devices"_a, "sources"_a, "destinations"_a,
          "spread"_a)
      .def("finish", [](const PlanBuilder& b) { return to_bytes(b.finish()); }, "The encoded plan.");
  m.def(
      "check_plan", [](const py::bytes& block) { (void)from_bytes(block); }, "block"_a,
      "Raises ValueError, naming what is wrong and where, unless `block` is a well-formed plan.");
  m.def(
      "describe_plan", [](const py::bytes& block) { return describe(from_bytes(block)); }, "block"_a,
      "The nodes of an encoded plan, as dictionaries.");
}

}  // namespace pathways::bind
