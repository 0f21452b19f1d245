#include "runs/plan_table.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace pathways {

void PlanTable::add(uint32_t id, Plan plan, uint32_t client) {
  PW_CHECK(find(id) == nullptr);
  if (id >= entries_.size()) entries_.resize(id + 1);
  entries_[id] = std::make_unique<PlanEntry>();
  entries_[id]->id = id;
  entries_[id]->client = client;
  entries_[id]->plan = std::move(plan);
  entries_[id]->watched.resize(entries_[id]->plan.nodes().size());
}

PlanEntry* PlanTable::set_compiled(uint32_t id, std::optional<std::string> error, PlanSizes sizes) {
  PlanEntry* entry = find(id);
  if (entry == nullptr) {
    device_.forget_plan(id);  // it was removed while it was compiled
    return nullptr;
  }
  if (entry->compiled) return nullptr;
  entry->compiled = true;
  entry->failure = std::move(error);
  entry->sizes = std::move(sizes);
  measure(*entry);
  return entry;
}

/// Computes the memory that each node of a compiled plan needs: its outputs and temporaries, less the inputs that the
/// outputs take over.
void PlanTable::measure(PlanEntry& entry) {
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

void PlanTable::remove(uint32_t id) {
  PlanEntry* entry = find(id);
  if (entry == nullptr) return;
  if (entry->live == 0) {
    forget(id);
  } else {
    entry->removed = true;
  }
}

void PlanTable::remove_plans_of(uint32_t client) {
  for (uint32_t id = 0; id < entries_.size(); ++id) {
    if (entries_[id] != nullptr && entries_[id]->client == client) remove(id);
  }
}

void PlanTable::begin_run(PlanEntry& entry, uint32_t client) {
  ++entry.live;
  if (entry.account == PlanEntry::kNoAccount) entry.account = ledger_.open(client, entry.id);
}

void PlanTable::end_run(PlanEntry& entry) {
  PW_DCHECK(entry.live > 0);
  if (--entry.live == 0 && entry.removed) forget(entry.id);
}

void PlanTable::close_accounts_of(uint32_t client) {
  for (const auto& entry : entries_) {
    if (entry != nullptr && entry->live == 0 && entry->account != PlanEntry::kNoAccount &&
        ledger_.accounts()[entry->account].client == client) {
      ledger_.close(entry->account);
      entry->account = PlanEntry::kNoAccount;
    }
  }
}

void PlanTable::forget_runs() {
  for (auto& entry : entries_) {
    if (entry) entry->live = 0, entry->waiting.clear();
  }
}

void PlanTable::forget(uint32_t id) {
  if (entries_[id]->account != PlanEntry::kNoAccount) ledger_.close(entries_[id]->account);
  entries_[id].reset();
  device_.forget_plan(id);
}

}  // namespace pathways
