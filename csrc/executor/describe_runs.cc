/// What the executor's live runs wait for, as text for people.
#include "executor/executor.h"

#include <algorithm>
#include <cstdint>

namespace pathways {

std::string Executor::describe_run(uint32_t slot) const {
  const Run& run = runs_[slot];
  const Plan& plan = run.plan->plan;
  std::string text = "run " + std::to_string(run.order) + " of client " + std::to_string(run.client) + ", plan " +
                     std::to_string(run.plan->id) + ": " + std::to_string(run.open) + " steps open";
  if (!run.plan->compiled) text += "; not compiled yet";
  const auto nodes = plan.nodes();
  const auto throttled = queues_.throttled();
  for (uint32_t i = 0; i < nodes.size(); ++i) {
    const NodeRecord& node = nodes[i];
    if (is_exchange(node.kind)) {
      const std::string what = rows_.describe(node_key(run.order, node.global_node));
      if (!what.empty()) text += "; exchange " + std::to_string(node.global_node) + ": " + what;
    }
    if (node.kind != NodeKind::kCall && node.kind != NodeKind::kTransfer) continue;
    const std::string name =
        (node.kind == NodeKind::kCall ? "; call " : "; transfer ") + std::to_string(node.global_node);
    const auto is_this = [&](const NodeRef& ref) { return ref.run == slot && ref.node == i; };
    if (run.missing[i] != 0) {
      text += name + " waits for " + std::to_string(run.missing[i]) + " of what it needs";
    } else if (launcher_.is_attended(run, i)) {
      text += name + " calls its client back";
    } else if (std::any_of(throttled.begin(), throttled.end(), is_this)) {
      text += name + (memory_.has_room(*run.plan, node) ? " waits for its turn" : " waits for memory");
    }
    const uint64_t key = node_key(run.order, node.global_node);
    const PendingTransfer* transfer = node.kind == NodeKind::kTransfer ? transfers_.find(key) : nullptr;
    if (transfer == nullptr) continue;
    text += name + ": " + std::to_string(transfer->sends_left) + " sends, " + std::to_string(transfer->receives_left) +
            " sources to come";
    if (receives_.is_waiting(key)) text += ", no room to receive";
    if (transfer->sends_left != 0 && transfer->source_ready) text += ", nobody has said where to write";
  }
  for (uint32_t i = 0; i < run.choices.size(); ++i) {
    if (run.choices[i].is_decided()) continue;
    const ChoiceRecord& choice = plan.branches().choice(i);
    text += "; choice " + std::to_string(choice.number) +
            (choice.source == options_.host ? run.choices[i].is_enqueued ? " is computed" : " has no value yet"
                                            : " is to come from host " + std::to_string(choice.source));
  }
  return text;
}

std::vector<std::string> Executor::describe_runs(size_t most) const {
  std::vector<uint32_t> slots = live_runs();
  if (slots.size() > most) slots.resize(most);
  std::vector<std::string> lines;
  lines.reserve(slots.size());
  for (const uint32_t slot : slots) lines.push_back(describe_run(slot));
  return lines;
}

}  // namespace pathways
