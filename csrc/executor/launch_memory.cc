/// The executor's part of memory: what a launch needs, and what is booked for it (MEM-1).
#include <algorithm>

#include "executor/executor.h"

namespace pathways {

/// Computes the memory that each node of a compiled plan needs: its outputs and temporaries, less the inputs that the
/// outputs take over.
void Executor::measure(PlanEntry& entry) {
  const PlanSizes& sizes = entry.sizes;
  if (sizes.values.empty()) return;
  for (const NodeRecord& node : entry.plan.nodes()) {
    uint64_t more = 0, less = 0;
    for (const uint32_t value : entry.plan.outputs(node)) more += sizes.values[value];
    if (node.kind == NodeKind::kCall && node.computation < sizes.launches.size()) {
      const PlanSizes::Launch& launch = sizes.launches[node.computation];
      more += launch.temporary;
      const auto inputs = entry.plan.inputs(node);
      for (const uint32_t position : launch.donated) less += sizes.values[inputs[position]];
    }
    entry.room.push_back(more - std::min(more, less));
  }
}

/// Whether the memory that a call, or a transfer within the host, needs is free now.
bool Executor::has_room(const Run& run, const NodeRecord& node) const {
  const PlanEntry& entry = *run.plan;
  if (entry.room.empty() || options_.device_bytes == 0 || may_overfill_) return true;
  return ledger_.fits(node.devices, entry.room[static_cast<size_t>(&node - entry.plan.nodes().data())]);
}

void Executor::book_launch(const Run& run, const NodeRecord& node) {
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
  const auto outputs = plan.outputs(node);
  for (uint32_t i = 0; i < outputs.size(); ++i) {
    if (outputs_[i] != nullptr) ledger_.add(outputs_[i], run.plan->account, node.devices, sizes.values[outputs[i]]);
  }
}

void Executor::book(const Run& run, const NodeRecord& node, Value value) {
  const PlanSizes& sizes = run.plan->sizes;
  if (!sizes.values.empty()) {
    ledger_.add(value, run.plan->account, node.devices, sizes.values[run.plan->plan.outputs(node)[0]]);
  }
}

void Executor::forget_plan(uint32_t id) {
  if (plans_[id]->account != kNone) ledger_.close(plans_[id]->account);
  plans_[id].reset();
  backend_.forget_plan(id);
}

}  // namespace pathways
