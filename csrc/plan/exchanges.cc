#include "plan/exchanges.h"

#include <string>
#include <utility>

#include "base/status.h"
#include "plan/malformed.h"
#include "plan/plan.h"

namespace pathways {
namespace {

using malformed::refuse;

/// The limits of the numbers that rows and slots have. Along known routes there may be no slot: back to no rows.
void check_sizes(const ExchangeRecord& r, NodeKind kind, uint32_t index) {
  if ((r.capacity == 0 && kind == NodeKind::kExchange) || uint64_t{r.capacity} * r.target_shards > INT32_MAX ||
      uint64_t{r.source_rows} * r.source_shards > INT32_MAX) {
    refuse("exchange", index, "PLAN-6, its rows or slots are none, or more than an int32 can number");
  }
  if (r.overflow > static_cast<uint32_t>(Overflow::kDrop) || r.has_unsent > 1 || (r.has_unsent == 0 && r.unsent != 0) ||
      r.padding != 0) {
    refuse("exchange", index, "PLAN-6, its flags are unknown");
  }
}

ShardHosts shards(std::span<const uint32_t> words, uint32_t count, uint32_t index) {
  std::vector<ShardHosts::Range> ranges;
  for (size_t i = 0; i + 1 < words.size(); i += 2) ranges.push_back({words[i], words[i + 1]});
  try {
    return {count, std::move(ranges)};
  } catch (const Error& error) {
    refuse("exchange", index, std::string("PLAN-6, ") + error.what());
  }
}

}  // namespace

void Exchanges::parse(const Plan& plan) {
  std::vector<uint32_t> users;
  for (uint32_t i = 0; i < plan.nodes().size(); ++i) {
    if (!is_exchange(plan.node(i).kind)) continue;
    if (plan.node(i).computation != users.size()) {
      refuse("node", i, "PLAN-6, its exchange is not the next of the table");
    }
    users.push_back(i);
  }
  if (users.size() != records_.size()) refuse("exchange", users.size(), "PLAN-6, no node has it, or it is not there");
  shapes_.reserve(records_.size());
  for (uint32_t i = 0; i < records_.size(); ++i) {
    const ExchangeRecord& r = records_[i];
    check_sizes(r, plan.node(users[i]).kind, i);
    if (r.source_count % 2 != 0 || r.target_count % 2 != 0) refuse("exchange", i, "PLAN-6, half a range of shards");
    ExchangeShape shape{shards(plan.source_ranges(r), r.source_shards, i),
                        shards(plan.target_ranges(r), r.target_shards, i), r.capacity,
                        static_cast<Overflow>(r.overflow)};
    if (r.has_unsent != 0) shape.unsent = r.unsent;
    shape.source_rows = r.source_rows;
    if (plan.node(users[i]).kind == NodeKind::kPermute) {
      shape.routes = Routes::kKnown;
      if (r.overflow != 0 || r.has_unsent != 0) refuse("exchange", i, "PLAN-6, known routes drop no row");
    }
    shapes_.push_back(std::move(shape));
    check_node(plan, users[i]);
  }
}

void Exchanges::check_node(const Plan& plan, uint32_t node) const {
  const NodeRecord& n = plan.node(node);
  const ExchangeShape& shape = shapes_[n.computation];
  const uint32_t from = shape.sources.count_on(plan.host()), to = shape.targets.count_on(plan.host());
  if (from + to == 0) refuse("node", node, "PLAN-6, the host has no shard of the exchange");
  if (static_cast<uint32_t>(__builtin_popcountll(n.input_devices)) != from ||
      static_cast<uint32_t>(__builtin_popcountll(n.devices)) != to) {
    refuse("node", node, "PLAN-6, it has other devices than shards");
  }
  const bool is_known = shape.routes == Routes::kKnown;
  const uint32_t inputs = (from != 0 ? 2u : 0u) + (is_known && to != 0 ? 1u : 0u);
  const uint32_t outputs = (to != 0 ? (is_known ? 1u : 4u) : 0u) + (!is_known && from != 0 ? 1u : 0u);
  if (n.input_count != inputs || n.output_count != outputs) {
    refuse("node", node,
           "PLAN-6, expected " + std::to_string(inputs) + " inputs and " + std::to_string(outputs) + " outputs");
  }
  if (n.predicate != kNoPredicate) refuse("node", node, "PLAN-6, an exchange in a branch");
}

}  // namespace pathways
