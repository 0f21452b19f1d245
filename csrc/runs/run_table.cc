#include "runs/run_table.h"

#include <algorithm>

namespace pathways {

/// `ages` need no reset, because the age of a value is read only when the value exists.
void Run::begin(const Plan& of) {
  const auto initial_readers = of.initial_readers(), initial_missing = of.initial_missing();
  if (values.size() != initial_readers.size()) {
    for (auto* each : {&errors, &readers}) each->resize(initial_readers.size());
    values.resize(initial_readers.size());
    ages.resize(initial_readers.size());
  }
  if (missing.size() != initial_missing.size()) {
    for (auto* each : {&missing, &input_errors}) each->resize(initial_missing.size());
  }
  std::copy(initial_readers.begin(), initial_readers.end(), readers.begin());
  std::copy(initial_missing.begin(), initial_missing.end(), missing.begin());
  std::fill(values.begin(), values.end(), nullptr);
  std::fill(errors.begin(), errors.end(), 0u);
  std::fill(input_errors.begin(), input_errors.end(), 0u);
  if (!of.branches().empty() || !choices.empty()) begin_branches(of.branches());
}

void Run::begin_branches(const Branches& branches) {
  choices.assign(branches.choices().size(), {});
  predicates.resize(branches.predicates().size());
  for (uint32_t i = 0; i < predicates.size(); ++i) {
    predicates[i] = {branches.predicate(i).parent == kNoPredicate ? 1u : 2u, 0};
  }
  taken = {};
  untaken_gangs = 0;
}

uint32_t RunTable::acquire() {
  ++live_;
  if (free_.empty()) {
    runs_.push_back(std::make_unique<Run>());
    return static_cast<uint32_t>(runs_.size() - 1);
  }
  const uint32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

void RunTable::release(uint32_t slot) {
  runs_[slot]->plan = nullptr;
  free_.push_back(slot);
  --live_;
}

void RunTable::clear(ValueRefs& refs) {
  for (auto& run : runs_) {
    for (Value& value : run->values) refs.reset(value);
  }
  runs_.clear();
  free_.clear();
  live_ = 0;
}

size_t RunTable::run_bytes(const Plan& plan) {
  return sizeof(Run) + plan.value_count() * (sizeof(Value) + 2 * sizeof(uint32_t)) +
         plan.nodes().size() * 2 * sizeof(uint32_t) + plan.result_count() * sizeof(uint64_t) +
         plan.branches().choices().size() * sizeof(ChoiceState) +
         plan.branches().predicates().size() * sizeof(PredicateState);
}

void RunTable::validate() const {
  PW_CHECK(live_ + free_.size() == runs_.size());
  for (const auto& run : runs_) {
    if (run->plan == nullptr) continue;
    PW_CHECK(run->open != 0);
    PW_CHECK(run->plan->live != 0);
    for (size_t value = 0; value < run->values.size(); ++value) {
      PW_CHECK(run->values[value] == nullptr || run->readers[value] != 0);  // MEM-4
    }
  }
}

}  // namespace pathways
