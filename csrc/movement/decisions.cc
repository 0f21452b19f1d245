#include "movement/decisions.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace pathways {

void Decisions::begin(uint32_t slot) {
  Run& run = runs_[slot];
  const Branches& branches = run.plan->plan.branches();
  if (branches.empty()) return;
  undecided_.emplace(run.order, Undecided{slot, static_cast<uint32_t>(branches.choices().size())});
}

void Decisions::value_there(uint32_t slot, uint32_t value, Value ref, uint64_t devices) {
  Run& run = runs_[slot];
  const Plan& plan = run.plan->plan;
  for (const uint32_t select : plan.branches().selects_reading(value)) {
    const NodeRecord& node = plan.node(select);
    const ChoiceState& chosen = run.choices[node.computation];
    if (chosen.is_case() && plan.inputs(node)[chosen.taken] == value) queues_.satisfy({slot, select});
  }
  for (const uint32_t choice : plan.branches().choices_reading(value)) {
    if (ref == nullptr) {
      decide(slot, choice, 0, run.errors[value]);
      continue;
    }
    run.choices[choice].is_enqueued = true;
    is_enqueued_ = true;
    tracker_.add(devices,
                 {PendingValue::Kind::kDecision, false, slot, choice, refs_.begin_scalar(ref), 0, run.ages[value]});
  }
}

void Decisions::read(const PendingValue& item, uint32_t error) {
  const ChoiceRecord& choice = runs_[item.run].plan->plan.branches().choice(item.index);
  int64_t number = 0;
  if (error == 0 && device_.readiness(item.value) == Readiness::kDeleted) {
    error = errors_.add("the scalar that decides between branches was donated before it was read");
  } else if (error == 0 && device_.read_scalar(item.value, &number) != Status::kOk) {
    error = errors_.add(std::string(device_.last_error()));
  } else if (error == 0 && (number < 0 || number >= int64_t{choice.cases})) {
    error = errors_.add("ComputationError: the number of the branch to take is " + std::to_string(number) +
                        ", expected 0 to " + std::to_string(choice.cases - 1));
  }
  decide(item.run, item.index, static_cast<uint32_t>(number), error);
}

/// Exactly once per choice of a run. The run may be over after that.
void Decisions::decide(uint32_t slot, uint32_t index, uint32_t taken, uint32_t error) {
  Run& run = runs_[slot];
  const Plan& plan = run.plan->plan;
  const Branches& branches = plan.branches();
  ChoiceState& state = run.choices[index];
  PW_CHECK(!state.is_decided());
  state.taken = error == 0 ? taken : ChoiceState::kFailed;
  state.error = error;
  const auto at = undecided_.find(run.order);
  PW_CHECK(at != undecided_.end() && at->second.slot == slot);
  tell(run, branches.choice(index), state);
  if (--at->second.choices == 0) undecided_.erase(at);
  for (const uint32_t select : branches.selects_of(index)) {
    queues_.satisfy({slot, select});
    const uint32_t input = state.is_case() ? plan.inputs(plan.node(select))[taken] : kNoValue;
    const bool is_there = input == kNoValue || run.values[input] != nullptr || run.errors[input] != 0;
    if (is_there) queues_.satisfy({slot, select});
  }
  for (const uint32_t predicate : branches.predicates_of(index)) settle_predicate(slot, predicate);
  flow_.close_step(slot);
}

void Decisions::tell(const Run& run, const ChoiceRecord& choice, const ChoiceState& state) {
  Decision decision{Outcome::kDone, state.taken, {}};
  if (state.error != 0) decision = {Outcome::kFailed, 0, errors_.text(state.error)};
  if (state.error == kDead) decision = {Outcome::kDead, 0, {}};
  for (const uint32_t host : run.plan->plan.told(choice)) {
    if (!peers_.is_dead(host, run.order)) link_.decided(host, run.order, choice.number, decision);
  }
}

/// The choice of a predicate is decided, or its parent is settled: when both are, its nodes go on, and its children.
void Decisions::settle_predicate(uint32_t slot, uint32_t index) {
  Run& run = runs_[slot];
  PredicateState& state = run.predicates[index];
  PW_DCHECK(state.missing > 0);
  if (--state.missing != 0) return;
  const Branches& branches = run.plan->plan.branches();
  const PredicateRecord& predicate = branches.predicate(index);
  const ChoiceState& chosen = run.choices[predicate.choice];
  if (predicate.parent != kNoPredicate) state.verdict = run.predicates[predicate.parent].verdict;
  if (state.verdict == 0) state.verdict = chosen.is_case() && chosen.taken != predicate.which ? kDead : chosen.error;
  if (predicate.bit != kNoBit) run.taken.add(predicate.bit, state.verdict);
  for (const uint32_t node : branches.nodes_of(index)) queues_.satisfy({slot, node});
  for (const uint32_t child : branches.children_of(index)) settle_predicate(slot, child);
}

/// A reference to the value of the case that was taken. Nothing dead leaves a select outside of all branches, even if a
/// peer says that a value is dead which is not (TRUST-1).
void Decisions::select(NodeRef ref) {
  Run& run = runs_[ref.run];
  const Plan& plan = run.plan->plan;
  const NodeRecord& node = plan.node(ref.node);
  const ChoiceState& chosen = run.choices[node.computation];
  const auto inputs = plan.inputs(node);
  const uint32_t output = plan.outputs(node)[0];
  uint32_t error = chosen.error;
  if (error == 0) {
    const uint32_t value = inputs[chosen.taken];
    if (run.values[value] != nullptr) {
      flow_.deliver(ref.run, output, refs_.retain(run.values[value]), node.devices, run.ages[value]);
    } else {
      error = run.errors[value];
    }
  }
  if (error == kDead && node.predicate == kNoPredicate) {
    error = errors_.add("a host said that a branch was not taken, which was");
  }
  if (error != 0) flow_.propagate_error(ref.run, output, error);
  flow_.read_done(run, inputs);
  flow_.close_step(ref.run);
}

bool Decisions::owes_before(const Run& run, const NodeRecord& node) const {
  if (undecided_.empty() || !queues_.blocks(node)) return false;
  const bool waits_in_launch = queues_.waits_in_launch(node);
  for (const auto& [order, undecided] : undecided_) {
    if (order > run.order) return false;
    const Run& earlier = runs_[undecided.slot];
    const auto choices = earlier.plan->plan.branches().choices();
    for (uint32_t i = 0; i < choices.size(); ++i) {
      const ChoiceRecord& choice = choices[i];
      const ChoiceState& state = earlier.choices[i];
      if (state.is_decided() || choice.told_count == 0) continue;
      if (order == run.order && choice.first_node > node.global_node) continue;
      if (waits_in_launch || (choice.value != kNoValue && !state.is_enqueued)) return true;
    }
  }
  return false;
}

bool Decisions::awaits_peers(uint64_t order) const {
  for (const auto& [each, undecided] : undecided_) {
    if (each > order) return false;
    const Run& run = runs_[undecided.slot];
    const auto choices = run.plan->plan.branches().choices();
    for (uint32_t i = 0; i < choices.size(); ++i) {
      if (!run.choices[i].is_decided() && choices[i].source != host_) return true;
    }
  }
  return false;
}

// ---------------------------------------------------------------------------------------------------------- peers

Status Decisions::on_decision(uint64_t order, uint32_t number, uint32_t host, const Decision& decision) {
  const auto at = undecided_.find(order);
  if (at == undecided_.end()) return Status::kOk;  // a run that this host refused, or whose owner it has missed
  const uint32_t slot = at->second.slot;
  const Run& run = runs_[slot];
  const Branches& branches = run.plan->plan.branches();
  const uint32_t index = branches.find(number);
  if (index == kNoPredicate) return Status::kInvalid;
  const ChoiceRecord& choice = branches.choice(index);
  if (host == host_ || choice.source != host || run.choices[index].is_decided()) return Status::kInvalid;
  switch (decision.outcome) {
    case Outcome::kDone:
      if (decision.taken >= choice.cases) return Status::kInvalid;
      decide(slot, index, decision.taken, 0);
      return Status::kOk;
    case Outcome::kFailed:
      decide(slot, index, 0, errors_.add(std::string(decision.text)));
      return Status::kOk;
    case Outcome::kDead:
      if (choice.scope == kNoPredicate) return Status::kInvalid;
      decide(slot, index, 0, kDead);
      return Status::kOk;
  }
  return Status::kInvalid;
}

void Decisions::refuse(uint64_t order, const Plan& plan, const std::string& why) {
  for (const ChoiceRecord& choice : plan.branches().choices()) {
    for (const uint32_t host : plan.told(choice)) {
      link_.decided(host, order, choice.number, {Outcome::kFailed, 0, why});
    }
  }
}

void Decisions::miss(uint32_t slot, const Lost& lost) {
  Run& run = runs_[slot];
  const auto choices = run.plan->plan.branches().choices();
  for (uint32_t i = 0; i < choices.size(); ++i) {
    if (run.choices[i].is_decided() || choices[i].source != lost.host || lost.host == host_) continue;
    decide(slot, i, 0, errors_.add(lost.text));
  }
}

void Decisions::clear() { undecided_.clear(); }

void Decisions::validate() const {
  for (const auto& [order, undecided] : undecided_) {
    const Run& run = runs_[undecided.slot];
    PW_CHECK(run.plan != nullptr && run.order == order && run.open >= undecided.choices);
    const auto open = std::count_if(run.choices.begin(), run.choices.end(),
                                    [](const ChoiceState& each) { return !each.is_decided(); });
    PW_CHECK(static_cast<uint32_t>(open) == undecided.choices && open != 0);
  }
}

}  // namespace pathways
