#include "runs/launch_memory.h"

namespace pathways {

void LaunchMemory::book_launch(const Run& run, const NodeRecord& node, std::span<const Value> outputs) {
  const PlanSizes& sizes = run.plan->sizes;
  if (sizes.values.empty()) return;
  const Plan& plan = run.plan->plan;
  if (node.computation < sizes.launches.size()) {
    const PlanSizes::Launch& launch = sizes.launches[node.computation];
    const auto inputs = plan.inputs(node);
    for (const uint32_t position : launch.donated) {
      if (run.values[inputs[position]] != nullptr) ledger_.consume(run.values[inputs[position]]);
    }
    if (launch.temporary != 0) {
      uint64_t made = launch.temporary;
      for (const uint32_t value : plan.outputs(node)) made += sizes.values[value];
      ledger_.touch(node.devices, made);
    }
  }
  const auto values = plan.outputs(node);
  for (uint32_t i = 0; i < values.size(); ++i) {
    if (outputs[i] != nullptr) ledger_.add(outputs[i], run.plan->account, node.devices, sizes.values[values[i]]);
  }
}

void LaunchMemory::book(const Run& run, uint64_t devices, uint32_t output, Value value) {
  const PlanSizes& sizes = run.plan->sizes;
  if (!sizes.values.empty()) ledger_.add(value, run.plan->account, devices, sizes.values[output]);
}

}  // namespace pathways
