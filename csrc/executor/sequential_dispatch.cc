#include "executor/sequential_dispatch.h"

#include "sync/atomic.h"

namespace pathways {
namespace {

/// Whether a node begins when its inputs are there: it must wait for its go, too, which prepares it.
bool waits_for_go(const NodeRecord& node) {
  return (node.kind == NodeKind::kTransfer || is_exchange(node.kind)) && node.input_count != 0;
}

}  // namespace

/// A call waits in any case until it heads the FIFOs of its devices, and its go puts it there. A transfer that sends,
/// or an exchange, waits for one thing more, which its go satisfies.
void SequentialDispatch::begin_run(uint32_t slot) {
  Run& run = runs_[slot];
  run.prepared = 0;
  const auto nodes = run.plan->plan.nodes();
  for (uint32_t i = 0; i < nodes.size(); ++i) {
    if (waits_for_go(nodes[i])) ++run.missing[i];
  }
  if (run.plan->plan.step_count() != 0) runs_waiting_.emplace(run.order, slot);
}

void SequentialDispatch::on_go(uint64_t order, uint32_t last) {
  const auto found = runs_waiting_.find(order);
  if (found == runs_waiting_.end()) return;
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
    dispatcher_.prepare_node({slot, next}, nodes[next]);
    if (waits_for_go(nodes[next])) queues_.satisfy({slot, next});
  }
  run.prepared = next;
  if (next == nodes.size()) runs_waiting_.erase(found);
  flow_.close_step(slot);
  dispatcher_.drain();
  ++goes_;
  go_ns_ += static_cast<uint64_t>(monotonic_ns() - begin);
}

}  // namespace pathways
