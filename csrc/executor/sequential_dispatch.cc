/// The executor's part of sequential dispatch: each go prepares the next nodes of a stepwise run.
#include "executor/executor.h"
#include "sync/atomic.h"

namespace pathways {

/// Makes every node of a new run wait for its go. A call waits in any case until it heads the FIFOs of its devices, and
/// its go puts it there. A transfer that sends waits for one thing more, which its go satisfies.
void Executor::await_goes(uint32_t slot) {
  Run& run = runs_[slot];
  run.prepared = 0;
  const auto nodes = run.plan->plan.nodes();
  for (uint32_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].kind == NodeKind::kTransfer && nodes[i].input_count != 0) ++run.missing[i];
  }
  if (run.plan->plan.step_count() != 0) stepwise_.emplace(run.order, slot);
}

void Executor::on_go(uint64_t order, uint32_t last) {
  if (!held_.empty()) release_held();
  const auto found = stepwise_.find(order);
  if (found == stepwise_.end()) return;
  const int64_t begin = monotonic_ns();
  const uint32_t slot = found->second;
  Run& run = runs_[slot];
  ++run.open;  // one is for this function
  const auto nodes = run.plan->plan.nodes();
  const auto is_step = [&](uint32_t i) {
    return nodes[i].kind == NodeKind::kCall || nodes[i].kind == NodeKind::kTransfer;
  };
  uint32_t next = run.prepared;
  for (; next < nodes.size() && (!is_step(next) || nodes[next].global_node <= last); ++next) {
    prepare_node(slot, next, nodes[next]);
    if (nodes[next].kind == NodeKind::kTransfer && nodes[next].input_count != 0) queues_.satisfy({slot, next});
  }
  run.prepared = next;
  if (next == nodes.size()) stepwise_.erase(found);
  flow_.close_step(slot);
  drain();
  ++stats_.goes;
  stats_.go_ns += static_cast<uint64_t>(monotonic_ns() - begin);
}

}  // namespace pathways
