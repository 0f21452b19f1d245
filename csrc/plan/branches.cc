#include "plan/branches.h"

#include <algorithm>
#include <unordered_set>

#include "plan/malformed.h"
#include "plan/plan.h"

namespace pathways {
namespace {

using malformed::refuse;

}  // namespace

bool Branches::is_within(uint32_t inner, uint32_t outer) const {
  while (inner != outer && inner != kNoPredicate) inner = predicates_[inner].parent;
  return inner == outer;
}

uint32_t Branches::find(uint32_t number) const {
  const auto at = std::lower_bound(choices_.begin(), choices_.end(), number,
                                   [](const ChoiceRecord& c, uint32_t n) { return c.number < n; });
  if (at == choices_.end() || at->number != number) return kNoPredicate;
  return static_cast<uint32_t>(at - choices_.begin());
}

template <typename Each>
void Branches::Lists::build(size_t keys, Each&& each) {
  begin_.assign(keys + 1, 0);
  each([&](uint32_t key, uint32_t) { ++begin_[key + 1]; });
  for (size_t key = 0; key < keys; ++key) begin_[key + 1] += begin_[key];
  items_.resize(begin_[keys]);
  std::vector<uint32_t> next(begin_.begin(), begin_.end() - 1);
  each([&](uint32_t key, uint32_t item) { items_[next[key]++] = item; });
}

void Branches::validate(const Plan& plan) const {
  for (uint32_t i = 0; i < choices_.size(); ++i) {
    const ChoiceRecord& c = choices_[i];
    const bool is_owner = c.owner == plan.host();
    if (c.number >= kMaxGlobalNodes || (i != 0 && c.number <= choices_[i - 1].number)) {
      refuse("choice", i, "PLAN-4, the numbers of choices are too big, or not in order");
    }
    if (c.cases == 0) refuse("choice", i, "PLAN-4, it has no case");
    if (is_owner != (c.source == plan.host()) || is_owner != (c.value != kNoValue)) {
      refuse("choice", i, "PLAN-4, its owner alone has its value, and is told by nobody");
    }
    if (is_owner && c.value >= plan.value_count()) refuse("choice", i, "PLAN-4, it reads an unknown value");
    if (c.scope != kNoPredicate && c.scope >= predicates_.size()) refuse("choice", i, "PLAN-4, its scope is unknown");
    const auto told = plan.told(c);
    const std::unordered_set<uint32_t> once(told.begin(), told.end());
    if (once.size() != told.size() || once.contains(plan.host()) || once.contains(c.source)) {
      refuse("choice", i, "PLAN-4, it tells a host twice, or one that knows");
    }
  }
  std::vector<uint32_t> depth(predicates_.size(), 1);
  for (uint32_t i = 0; i < predicates_.size(); ++i) {
    const PredicateRecord& p = predicates_[i];
    if (p.choice >= choices_.size() || p.which >= choices_[p.choice].cases) {
      refuse("predicate", i, "PLAN-4, an unknown choice or case");
    }
    if (p.bit != kNoBit && p.bit > kVerdictBit) refuse("predicate", i, "PLAN-4, a bit that no host reports");
    if (p.parent != kNoPredicate) {
      if (p.parent >= i) refuse("predicate", i, "PLAN-2, its parent does not come before it");
      depth[i] = depth[p.parent] + 1;
    }
    if (depth[i] > kMostNested) refuse("predicate", i, "PLAN-4, branches are nested too deep");
    if (!is_within(p.parent, choices_[p.choice].scope)) {
      refuse("predicate", i, "PLAN-5, its choice is made in another branch");
    }
  }
}

/// The nodes are valid without their predicates. Those of the arguments come first.
void Branches::validate_nodes(const Plan& plan) const {
  const auto nodes = plan.nodes();
  std::vector<uint32_t> scopes(plan.value_count(), kNoPredicate);
  std::vector<bool> written(plan.value_count(), false);
  const auto is_made = [&](uint32_t choice, const NodeRecord& n) {
    const ChoiceRecord& c = choices_[choice];
    return n.global_node >= c.first_node && (c.value == kNoValue || written[c.value]);
  };
  for (uint32_t i = 0; i < nodes.size(); ++i) {
    const NodeRecord& n = nodes[i];
    if (n.predicate != kNoPredicate) {
      if (n.predicate >= predicates_.size()) refuse("node", i, "PLAN-4, an unknown predicate");
      if (n.kind == NodeKind::kArgument || n.kind == NodeKind::kResult) {
        refuse("node", i, "PLAN-4, arguments and results have no predicate");
      }
      for (uint32_t p = n.predicate; p != kNoPredicate; p = predicates_[p].parent) {
        if (!is_made(predicates_[p].choice, n)) refuse("node", i, "PLAN-2, its choice is not made before it");
      }
    }
    if (n.kind == NodeKind::kSelect) {
      if (n.computation >= choices_.size()) refuse("node", i, "PLAN-4, it selects by an unknown choice");
      if (!is_made(n.computation, n)) refuse("node", i, "PLAN-2, its choice is not made before it");
      validate_select(plan, i, scopes);
    } else {
      validate_reads(plan, i, scopes);
    }
    for (const uint32_t value : plan.outputs(n)) {
      scopes[value] = n.predicate;
      written[value] = true;
    }
  }
  for (uint32_t i = 0; i < choices_.size(); ++i) {
    const ChoiceRecord& c = choices_[i];
    if (c.value != kNoValue && !is_within(c.scope, scopes[c.value])) {
      refuse("choice", i, "PLAN-5, its value is made in another branch");
    }
  }
}

void Branches::validate_reads(const Plan& plan, uint32_t node, std::span<const uint32_t> scopes) const {
  const NodeRecord& n = plan.node(node);
  for (const uint32_t value : plan.inputs(n)) {
    if (is_within(n.predicate, scopes[value])) continue;
    refuse("node", node,
           n.kind == NodeKind::kResult ? "PLAN-5, a result may be dead, it needs a select"
                                       : "PLAN-5, it reads a value of a branch without a select");
  }
}

void Branches::validate_select(const Plan& plan, uint32_t node, std::span<const uint32_t> scopes) const {
  const NodeRecord& n = plan.node(node);
  const ChoiceRecord& c = choices_[n.computation];
  const auto inputs = plan.inputs(n);
  if (inputs.size() != c.cases || n.output_count != 1) {
    refuse("node", node, "PLAN-4, a select has one input per case and one output");
  }
  if (!is_within(n.predicate, c.scope)) refuse("node", node, "PLAN-5, its choice is made in another branch");
  for (uint32_t which = 0; which < inputs.size(); ++which) {
    const uint32_t scope = scopes[inputs[which]];
    if (is_within(n.predicate, scope)) continue;
    const PredicateRecord& p = predicates_[scope];
    if (p.choice != n.computation || p.which != which || !is_within(n.predicate, p.parent)) {
      refuse("node", node, "PLAN-5, the value that it selects for a case is made in another branch");
    }
  }
}

void Branches::derive(const Plan& plan) {
  if (empty()) return;
  const auto nodes = plan.nodes();
  const auto count = static_cast<uint32_t>(nodes.size());
  nodes_of_.build(predicates_.size(), [&](auto&& put) {
    for (uint32_t i = 0; i < count; ++i) {
      if (waits_for_predicate(nodes[i])) put(nodes[i].predicate, i);
    }
  });
  children_of_.build(predicates_.size(), [&](auto&& put) {
    for (uint32_t i = 0; i < predicates_.size(); ++i) {
      if (predicates_[i].parent != kNoPredicate) put(predicates_[i].parent, i);
    }
  });
  predicates_of_.build(choices_.size(), [&](auto&& put) {
    for (uint32_t i = 0; i < predicates_.size(); ++i) put(predicates_[i].choice, i);
  });
  selects_of_.build(choices_.size(), [&](auto&& put) {
    for (uint32_t i = 0; i < count; ++i) {
      if (nodes[i].kind == NodeKind::kSelect) put(nodes[i].computation, i);
    }
  });
  selects_reading_.build(plan.value_count(), [&](auto&& put) {
    std::vector<uint32_t> last(plan.value_count(), 0);  // the select that was put last; node 0 is none
    for (uint32_t i = 0; i < count; ++i) {
      if (nodes[i].kind != NodeKind::kSelect) continue;
      for (const uint32_t value : plan.inputs(nodes[i])) {
        if (last[value] != i) put(value, i);
        last[value] = i;
      }
    }
  });
  choices_reading_.build(plan.value_count(), [&](auto&& put) {
    for (uint32_t i = 0; i < choices_.size(); ++i) {
      if (choices_[i].value != kNoValue) put(choices_[i].value, i);
    }
  });
}

}  // namespace pathways
