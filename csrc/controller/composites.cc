#include "controller/composites.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/status.h"

namespace pathways {
namespace {

constexpr uint64_t kTurnsTried = 3;
constexpr size_t kMostTried = 1 << 16;  // runs

[[noreturn]] void refuse(const std::string& what) { throw Error(Status::kInvalid, "a composite " + what); }

}  // namespace

/// The buffers are numbered, and what each takes is known.
struct Composites::Trial {
  Trial(const Composites& composites, const Composite& composite) : all(composites), whole(composite) {}

  PlanMemory run() {
    PlanMemory memory;
    memory.client = whole.client;
    memory.name = whole.name;
    memory.results.resize(whole.results.size());
    memory.donated = whole.donated;
    std::vector<uint64_t> arguments(whole.arguments);
    for (uint64_t& argument : arguments) argument = add({});
    std::vector<bool> is_made(whole.results.size());
    CompositeWalk walk(whole, arguments);
    uint64_t runs = 0;
    for (const CompositeStep* step = walk.next(); step != nullptr; step = walk.next()) {
      if (++runs > kMostTried) refuse("has too many loops in each other");
      const PlanMemory& plan = *all.ledger_.memory_of(step->plan);
      const auto inputs = walk.inputs();
      if (walk.wrong() != nullptr) break;
      reach(plan);
      for (const uint32_t position : step->donated) {
        const PlanMemory::Result& taken = buffers[inputs[position]];
        if (inputs[position] >= whole.arguments && !all.cover_.covers(step->group, taken.group)) {
          refuse("takes a value in a run that does not go to all its hosts");
        }
        count(taken, false);
      }
      std::vector<uint64_t> outputs;
      for (uint32_t i = 0; i < step->outputs.size(); ++i) {
        outputs.push_back(add(plan.results[i]));
        const int32_t result = walk.result_of(i);
        if (result >= 0) {
          const PlanMemory::Result& made = plan.results[i];
          memory.results[static_cast<size_t>(result)] = {made.group, made.set, made.bytes, -1, -1};
          is_made[static_cast<size_t>(result)] = true;
        } else {
          count(plan.results[i], true);
        }
      }
      walk.ran(outputs);
      for (const uint64_t buffer : std::exchange(walk.released(), {})) count(buffers[buffer], false);
    }
    if (walk.wrong() != nullptr) refuse(std::string("is wrong: ") + walk.wrong());
    const auto missing = std::find(is_made.begin(), is_made.end(), false);
    if (missing != is_made.end()) {
      refuse("has result " + std::to_string(missing - is_made.begin()) + ", which no single run makes");
    }
    const uint64_t ahead = total(runs);
    std::map<SpaceId, uint64_t> kept;  // by the results, whose blocks are added when the composite has entered
    for (const PlanMemory::Result& result : memory.results) {
      if (result.set == kNoSpaceSet) continue;
      for (const SpaceId space : all.ledger_.admission().spaces_of(result.set)) kept[space] += result.bytes;
    }
    for (const auto& each : kept) most.try_emplace(each.first, 0);
    for (const auto& [space, need] : most) memory.needs.push_back({space, kept[space], need + eager[space] * ahead});
    memory.biggest = biggest;
    return memory;
  }

  /// How many runs may be in flight. `runs`: of the trial.
  uint64_t total(uint64_t runs) const {
    const bool has_loops = std::any_of(whole.steps.begin(), whole.steps.end(), [](const CompositeStep& step) {
      return step.kind == CompositeStep::Kind::kLoop && step.count > kTurnsTried;
    });
    return has_loops ? whole.parallel : std::min<uint64_t>(whole.parallel, runs);
  }
  uint64_t add(const PlanMemory::Result& kept) {
    buffers.push_back(kept);
    return buffers.size() - 1;
  }
  void count(const PlanMemory::Result& kept, bool is_made) {
    if (kept.set == kNoSpaceSet) return;
    for (const SpaceId space : all.ledger_.admission().spaces_of(kept.set)) {
      uint64_t& bytes = live[space];
      bytes = is_made ? bytes + kept.bytes : bytes - kept.bytes;
      most[space] = std::max(most[space], bytes);
    }
  }
  void reach(const PlanMemory& plan) {
    for (const SpaceNeed& need : plan.needs) {
      uint64_t& top = most[need.space];
      if (live[need.space] + need.peak > top) {
        top = live[need.space] + need.peak;
        biggest = plan.biggest;
      }
      eager[need.space] = std::max(eager[need.space], need.eager);
    }
  }

  const Composites& all;
  const Composite& whole;
  std::vector<PlanMemory::Result> buffers;
  std::map<SpaceId, uint64_t> live, most, eager;
  std::string biggest;
};

PlanMemory Composites::add(uint32_t number, Composite composite) {
  check(composite);
  bind(composite);
  find_finals(composite);
  for (CompositeStep& step : composite.steps) {
    if (step.kind == CompositeStep::Kind::kRun) step.donated = ledger_.memory_of(step.plan)->donated;
  }
  Composite tried = composite;
  for (CompositeStep& step : tried.steps) step.count = std::min(step.count, kTurnsTried);
  PlanMemory memory = Trial(*this, tried).run();
  known_[number] = std::make_shared<const Composite>(std::move(composite));
  return memory;
}

bool Composites::is_whole(const Composite& composite) const {
  return std::all_of(composite.steps.begin(), composite.steps.end(), [&](const CompositeStep& step) {
    if (step.kind != CompositeStep::Kind::kRun) return true;
    const PlanMemory* memory = ledger_.memory_of(step.plan);
    return memory != nullptr && memory->client == composite.client;
  });
}

/// The numbers in it are in range, and the loops nest.
void Composites::check(const Composite& composite) const {
  if (composite.steps.empty() || composite.steps.size() > kMostSteps) {
    refuse("has 1 to " + std::to_string(kMostSteps) + " steps, got " + std::to_string(composite.steps.size()));
  }
  if (composite.values > kMostValues || composite.arguments > composite.values) refuse("has too many values");
  if (composite.parallel == 0 || composite.parallel > kMostParallel) {
    refuse("has 1 to " + std::to_string(kMostParallel) + " runs in flight, got " + std::to_string(composite.parallel));
  }
  const auto in_range = [&](std::span<const uint32_t> values, uint32_t end) {
    if (std::any_of(values.begin(), values.end(), [&](uint32_t v) { return v >= end; })) refuse("names no such value");
  };
  in_range(composite.results, composite.values);
  in_range(composite.donated, composite.arguments);
  std::vector<const CompositeStep*> around;
  std::vector<bool> is_made(composite.values);
  for (const CompositeStep& step : composite.steps) {
    in_range(step.inputs, composite.values);
    in_range(step.outputs, composite.values);
    for (const uint32_t value : step.outputs) {
      if (value < composite.arguments || is_made[value]) refuse("makes a value twice");
      is_made[value] = true;
    }
    if (step.kind == CompositeStep::Kind::kRun) {
      const PlanMemory* memory = ledger_.memory_of(step.plan);
      if (memory == nullptr || memory->client != composite.client) {
        refuse("names plan " + std::to_string(step.plan) + ", which is no compiled plan of its client");
      }
      if (memory->results.size() != step.outputs.size()) refuse("gives a plan another number of results than it has");
      in_range(memory->donated, static_cast<uint32_t>(step.inputs.size()));
      if (!cover_.covers(composite.group, step.group)) refuse("has a plan on hosts that are not its own");
    } else if (step.kind == CompositeStep::Kind::kLoop) {
      if (step.count == 0) refuse("has a loop of 0 iterations");
      if (step.inputs.size() != step.outputs.size()) refuse("has a loop that binds another number of values");
      around.push_back(&step);
      if (around.size() > kMostDepth) refuse("has too many loops in each other");
    } else {
      if (around.empty()) refuse("ends a loop that it has not begun");
      const size_t carried = around.back()->inputs.size();
      if (step.inputs.size() != carried || step.outputs.size() != carried) {
        refuse("has a loop that binds another number of values");
      }
      around.pop_back();
    }
  }
  if (!around.empty()) refuse("has a loop without an end");
}

/// Binds each loop to its end, which learns what is gone behind an iteration.
void Composites::bind(Composite& composite) {
  std::vector<uint32_t> around;
  for (uint32_t at = 0; at < composite.steps.size(); ++at) {
    CompositeStep& step = composite.steps[at];
    if (step.kind == CompositeStep::Kind::kLoop) around.push_back(at);
    if (step.kind != CompositeStep::Kind::kEnd) continue;
    step.partner = around.back();
    composite.steps[step.partner].partner = at;
    step.locals.clear();
    for (uint32_t inner = step.partner; inner < at; ++inner) {
      const auto& made = composite.steps[inner].outputs;
      step.locals.insert(step.locals.end(), made.begin(), made.end());
    }
    around.pop_back();
  }
}

/// WALK-3. A value is a result's if it is the composite's result, or what is carried into such a value by the last
/// iteration; and if it is named so only once.
void Composites::find_finals(Composite& composite) {
  std::vector<int32_t> result_of(composite.values, -1);
  const auto once = [](std::span<const uint32_t> values, uint32_t value) {
    return std::count(values.begin(), values.end(), value) == 1;
  };
  for (uint32_t r = 0; r < composite.results.size(); ++r) {
    if (once(composite.results, composite.results[r])) result_of[composite.results[r]] = static_cast<int32_t>(r);
  }
  for (auto step = composite.steps.rbegin(); step != composite.steps.rend(); ++step) {
    if (step->kind == CompositeStep::Kind::kEnd) {
      for (size_t i = 0; i < step->inputs.size(); ++i) {
        const uint32_t value = step->inputs[i];
        const bool is_made_here = std::find(step->locals.begin(), step->locals.end(), value) != step->locals.end();
        if (is_made_here && once(step->inputs, value)) result_of[value] = result_of[step->outputs[i]];
      }
    } else if (step->kind == CompositeStep::Kind::kRun) {
      step->finals.clear();
      for (const uint32_t value : step->outputs) step->finals.push_back(result_of[value]);
    }
  }
}

}  // namespace pathways
