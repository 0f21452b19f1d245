#include "loops/composites.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "base/status.h"

namespace pathways {
namespace {

constexpr uint64_t kTurnsTried = 3;
constexpr size_t kRunCost = 16;  // what a run of a trial takes beside its values

[[noreturn]] void refuse(const std::string& what) { throw Error(Status::kInvalid, "a composite " + what); }

}  // namespace

/// The buffers are numbered, and what each takes is known.
struct Composites::Trial {
  Trial(const Composites& composites, const Composite& composite, bool is_cut)
      : all(composites), whole(composite), has_more_runs(is_cut) {}

  PlanMemory run() {
    PlanMemory memory;
    memory.client = whole.client;
    memory.name = whole.name;
    memory.results.resize(whole.results.size());
    memory.donated = whole.donated;
    memory.is_composite = true;
    std::vector<uint64_t> arguments(whole.arguments);
    for (uint64_t& argument : arguments) argument = add({});
    std::vector<bool> is_made(whole.results.size());
    CompositeWalk walk(whole, arguments);
    uint64_t runs = 0;
    for (const CompositeStep* step = walk.next(); step != nullptr; step = walk.next()) {
      ++runs;
      let_go(walk);
      const PlanMemory& plan = *all.ledger_.memory_of(step->plan);
      const auto inputs = walk.inputs();
      if (walk.wrong() != nullptr) break;
      reach(plan);
      for (const uint32_t position : step->donated) {
        const PlanMemory::Result& taken = buffers[inputs[position]];
        if (inputs[position] >= whole.arguments &&
            !all.cover_.covers(plan.takers_of(position, step->group), taken.group)) {
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
      for (const uint64_t buffer : std::exchange(walk.taken(), {})) reuse(buffer);
      let_go(walk);
    }
    if (walk.wrong() != nullptr) refuse(std::string("is wrong: ") + walk.wrong());
    const auto missing = std::find(is_made.begin(), is_made.end(), false);
    if (missing != is_made.end()) {
      refuse("has result " + std::to_string(missing - is_made.begin()) + ", which no single run makes");
    }
    const uint64_t ahead = total(runs);
    std::map<ClassId, uint64_t> kept;  // by the results, whose blocks are added when the composite has entered
    for (const PlanMemory::Result& result : memory.results) {
      if (result.set == kNoSpaceSet) continue;
      for (const auto [id] : all.ledger_.admission().classes_of(result.set)) kept[id] += result.bytes;
    }
    for (const auto& each : kept) most.try_emplace(each.first, 0);
    std::vector<ClassNeed> needs;
    for (const auto& [id, need] : most) needs.push_back({id, kept[id], need + eager[id] * ahead});
    const SpaceClasses& classes = all.ledger_.admission().classes();
    std::sort(needs.begin(), needs.end(),
              [&](const ClassNeed& a, const ClassNeed& b) { return classes.first(a.id) < classes.first(b.id); });
    memory.by_class = RunNeeds(std::move(needs), classes);
    memory.biggest = biggest;
    return memory;
  }

  /// How many runs may be in flight. `runs`: of the trial.
  uint64_t total(uint64_t runs) const {
    return has_more_runs ? whole.parallel : std::min<uint64_t>(whole.parallel, runs);
  }
  uint64_t add(const PlanMemory::Result& kept) {
    if (free.empty()) {
      buffers.push_back(kept);
      return buffers.size() - 1;
    }
    const uint64_t buffer = free.back();
    free.pop_back();
    buffers[buffer] = kept;
    return buffer;
  }
  /// The number of a buffer that is gone may be used again; an argument's tells that it is one.
  void reuse(uint64_t buffer) {
    if (buffer >= whole.arguments) free.push_back(buffer);
  }
  /// What the walk has released is there no more when the next run comes.
  void let_go(CompositeWalk& walk) {
    for (const uint64_t buffer : std::exchange(walk.released(), {})) {
      count(buffers[buffer], false);
      reuse(buffer);
    }
  }
  void count(const PlanMemory::Result& kept, bool is_made) {
    if (kept.set == kNoSpaceSet) return;
    for (const auto [id] : all.ledger_.admission().classes_of(kept.set)) {
      uint64_t& bytes = live[id];
      bytes = is_made ? bytes + kept.bytes : bytes - kept.bytes;
      most[id] = std::max(most[id], bytes);
    }
  }
  void reach(const PlanMemory& plan) {
    for (const ClassNeed& need : plan.by_class.at(all.ledger_.admission().classes())) {
      uint64_t& top = most[need.id];
      if (live[need.id] + need.peak > top) {
        top = live[need.id] + need.peak;
        biggest = plan.biggest;
      }
      eager[need.id] = std::max(eager[need.id], need.eager);
    }
  }

  const Composites& all;
  const Composite& whole;
  bool has_more_runs;  ///< than the trial
  std::vector<PlanMemory::Result> buffers;
  std::vector<uint64_t> free;
  std::map<ClassId, uint64_t> live, most, eager;  ///< on each space of a class; no class is made during a trial
  std::string biggest;
};

PlanMemory Composites::add(uint32_t number, Composite composite) {
  check(composite);
  bind(composite);
  find_unread(composite);
  check_carries(composite);
  find_finals(composite);
  for (CompositeStep& step : composite.steps) {
    if (step.kind != CompositeStep::Kind::kRun) continue;
    const PlanMemory& plan = *ledger_.memory_of(step.plan);
    step.donated = plan.donated;
    step.is_taken_everywhere = std::all_of(plan.donated.begin(), plan.donated.end(), [&](uint32_t position) {
      return plan.takers_of(position, step.group) == composite.group;
    });
  }
  const Composite tried = shortened(composite);
  bool is_cut = false;
  for (size_t i = 0; i < tried.steps.size(); ++i) is_cut = is_cut || tried.steps[i].count != composite.steps[i].count;
  PlanMemory memory = Trial(*this, tried, is_cut).run();
  known_[number] = std::make_shared<const Composite>(std::move(composite));
  return memory;
}

/// The composite with so few iterations of each loop that it can be tried, and so many that the last of them needs as
/// much as any: 3, and one for each carry that an iteration hands on as it was, or as another carry was, because such
/// buffers may add up. A carry that stays what it is adds none.
Composite Composites::shortened(const Composite& composite) {
  Composite tried = composite;
  std::vector<uint32_t> from(composite.values);   // by value: whose buffer it is after many iterations
  std::vector<uint32_t> maker(composite.values);  // by value: 1 + the step that makes it; 0: none does
  for (uint32_t value = 0; value < composite.values; ++value) from[value] = value;
  std::vector<uint32_t> around;
  for (uint32_t at = 0; at < tried.steps.size(); ++at) {
    tried.steps[at].decides = false;
    const CompositeStep& step = tried.steps[at];
    for (const uint32_t value : step.outputs) maker[value] = at + 1;
    if (step.kind != CompositeStep::Kind::kEnd) continue;
    CompositeStep& loop = tried.steps[step.partner];
    uint64_t turns = kTurnsTried;
    for (size_t i = 0; i < step.inputs.size(); ++i) {
      const uint32_t made = from[step.inputs[i]];
      from[step.outputs[i]] = made == loop.outputs[i] ? from[loop.inputs[i]] : made;
      if (made == loop.outputs[i] || maker[made] <= step.partner) continue;
      if (tried.steps[maker[made] - 1].kind != CompositeStep::Kind::kRun) ++turns;
    }
    loop.count = std::min(loop.count, turns);
    loop.is_decided = loop.is_ahead = false;
  }
  uint64_t times = 1, cost = 0;
  for (const CompositeStep& step : tried.steps) {
    if (step.kind == CompositeStep::Kind::kLoop) times *= step.count;
    const bool is_run = step.kind == CompositeStep::Kind::kRun;
    cost += times * ((is_run ? kRunCost : 1) + step.inputs.size() + step.outputs.size() + step.locals.size());
    if (cost > kMostTried) refuse("has too many loops in each other, or carries too much in them");
    if (step.kind == CompositeStep::Kind::kEnd) times /= tried.steps[step.partner].count;
  }
  return tried;
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
  if (composite.results.size() > kMostValues) refuse("has too many results");
  if (composite.donated.size() > composite.arguments) refuse("takes an argument twice");
  in_range(composite.results, composite.values);
  in_range(composite.donated, composite.arguments);
  std::vector<bool> is_donated(composite.arguments);
  for (const uint32_t argument : composite.donated) {
    if (is_donated[argument]) refuse("takes an argument twice");
    is_donated[argument] = true;
  }
  std::vector<const CompositeStep*> around;
  const CompositeStep* before = nullptr;
  const auto needs_decision = [&] {
    if (before == nullptr || before->kind != CompositeStep::Kind::kRun) refuse("has a loop of which no run decides");
  };
  size_t empty = 0;  // the innermost loops of `around` that have no run so far
  std::vector<bool> is_made(composite.values);
  for (const CompositeStep& step : composite.steps) {
    in_range(step.inputs, composite.values);
    in_range(step.outputs, composite.values);
    for (const uint32_t value : step.outputs) {
      if (value < composite.arguments || is_made[value]) refuse("makes a value twice");
      is_made[value] = true;
    }
    if (step.kind == CompositeStep::Kind::kRun) {
      check_run(composite, step);
      empty = 0;
    } else if (step.kind == CompositeStep::Kind::kLoop) {
      if (step.count == 0) refuse("has a loop of 0 iterations");
      if (step.is_ahead && !step.is_decided) refuse("has a loop that runs ahead, but that nobody decides");
      if (step.is_decided && !step.is_ahead) needs_decision();
      if (step.inputs.size() != step.outputs.size()) refuse("has a loop that binds another number of values");
      around.push_back(&step);
      ++empty;
      if (around.size() > kMostDepth) refuse("has too many loops in each other");
    } else {
      if (around.empty()) refuse("ends a loop that it has not begun");
      const size_t carried = around.back()->inputs.size();
      if (step.inputs.size() != carried || step.outputs.size() != carried) {
        refuse("has a loop that binds another number of values");
      }
      if (empty != 0) refuse("has a loop without a run");  // a call would go through it without a pause
      const CompositeStep& loop = *around.back();
      if (loop.is_decided && !loop.is_ahead && loop.count > 1) needs_decision();
      // Only one run can do nothing as a whole.
      if (loop.is_ahead && before != &loop + 1) refuse("has a loop that runs ahead and is not one run");
      around.pop_back();
    }
    before = &step;
  }
  if (!around.empty()) refuse("has a loop without an end");
}

void Composites::check_run(const Composite& composite, const CompositeStep& step) const {
  const PlanMemory* memory = ledger_.memory_of(step.plan);
  if (memory == nullptr || memory->client != composite.client) {
    refuse("names plan " + std::to_string(step.plan) + ", which is no compiled plan of its client");
  }
  if (memory->is_composite) refuse("names composite " + std::to_string(step.plan) + " as a plan");
  if (memory->results.size() != step.outputs.size()) refuse("gives a plan another number of results than it has");
  if (!memory->may_have(step.inputs.size())) refuse("gives a plan another number of arguments than it has");
  const auto& donated = memory->donated;
  if (std::any_of(donated.begin(), donated.end(), [&](uint32_t p) { return p >= step.inputs.size(); })) {
    refuse("names no such value");
  }
  if (!cover_.covers(composite.group, step.group)) refuse("has a plan on hosts that are not its own");
}

/// A carried value lies on the same hosts in each iteration, and behind the loop. So what the trial finds of a run that
/// takes a value holds for any number of iterations. An argument may be anywhere: see `Loop::leftover`.
void Composites::check_carries(const Composite& composite) const {
  std::vector<uint32_t> same(composite.values);  // by value: one whose buffer may be this one's; a root is its own
  std::iota(same.begin(), same.end(), 0U);
  const auto root = [&](uint32_t value) {
    while (same[value] != value) value = same[value] = same[same[value]];
    return value;
  };
  const auto join = [&](const std::vector<uint32_t>& some, const std::vector<uint32_t>& others) {
    for (size_t i = 0; i < some.size(); ++i) same[root(some[i])] = root(others[i]);
  };
  for (const CompositeStep& step : composite.steps) {
    if (step.kind == CompositeStep::Kind::kRun) continue;
    join(step.inputs, step.outputs);
    if (step.kind == CompositeStep::Kind::kEnd) join(step.inputs, composite.steps[step.partner].outputs);
  }
  std::unordered_map<uint32_t, GroupId> hosts;  // by root
  for (const CompositeStep& step : composite.steps) {
    if (step.kind != CompositeStep::Kind::kRun) continue;
    const PlanMemory& plan = *ledger_.memory_of(step.plan);
    for (size_t i = 0; i < step.outputs.size(); ++i) {
      const GroupId group = plan.results[i].group;
      if (hosts.try_emplace(root(step.outputs[i]), group).first->second != group) {
        refuse("carries values on different hosts as one");
      }
    }
  }
}

/// Binds each loop to its end, which learns what is gone behind an iteration, and finds the runs that decide.
void Composites::bind(Composite& composite) {
  std::vector<uint32_t> around;
  for (uint32_t at = 0; at < composite.steps.size(); ++at) {
    CompositeStep& step = composite.steps[at];
    if (step.kind == CompositeStep::Kind::kLoop) around.push_back(at);
    if (step.kind != CompositeStep::Kind::kEnd) continue;
    step.partner = around.back();
    CompositeStep& loop = composite.steps[step.partner];
    loop.partner = at;
    const bool is_awaited = loop.is_decided && !loop.is_ahead;
    if (is_awaited) composite.steps[step.partner - 1].decides = true;
    if (is_awaited && loop.count > 1) composite.steps[at - 1].decides = true;
    step.locals.clear();
    for (uint32_t inner = step.partner; inner < at; ++inner) {
      const auto& made = composite.steps[inner].outputs;
      step.locals.insert(step.locals.end(), made.begin(), made.end());
    }
    around.pop_back();
  }
}

/// WALK-1. A value is read for the last time by a step of the body that makes it, or behind the last iteration of a
/// loop in that body.
void Composites::find_unread(Composite& composite) {
  constexpr uint32_t kNobody = 0xffffffffu;
  std::vector<uint32_t> last(composite.values, kNobody);  // by value: the step behind which nothing reads it
  std::vector<size_t> depth(composite.values);            // by value: the loops around the body that makes it
  std::vector<uint32_t> around;                           // kLoop
  const auto reach = [&](const CompositeStep& step, uint32_t at) {
    for (const uint32_t value : step.inputs) {
      const uint32_t here = depth[value] < around.size() ? composite.steps[around[depth[value]]].partner : at;
      last[value] = last[value] == kNobody ? here : std::max(last[value], here);
    }
  };
  for (uint32_t at = 0; at < composite.steps.size(); ++at) {
    const CompositeStep& step = composite.steps[at];
    reach(step, at);
    if (step.kind == CompositeStep::Kind::kLoop) around.push_back(at);
    if (step.kind == CompositeStep::Kind::kEnd) around.pop_back();
    for (const uint32_t value : step.outputs) {
      depth[value] = around.size();
      last[value] = at;
    }
  }
  for (uint32_t value = 0; value < composite.values; ++value) {
    if (last[value] != kNobody) composite.steps[last[value]].unread.push_back(value);
  }
}

/// WALK-3. A value is a result's if it is the composite's result, or what is carried into such a value by the last
/// iteration; and if it is named so only once.
void Composites::find_finals(Composite& composite) {
  std::vector<int32_t> result_of(composite.values, -1);
  std::vector<uint32_t> times(composite.values);  // scratch, 0 but while a list is looked at
  std::vector<uint32_t> maker(composite.values);  // by value: 1 + the step that makes it; 0: none does
  for (uint32_t at = 0; at < composite.steps.size(); ++at) {
    for (const uint32_t value : composite.steps[at].outputs) maker[value] = at + 1;
  }
  for (const uint32_t value : composite.results) ++times[value];
  for (uint32_t r = 0; r < composite.results.size(); ++r) {
    if (times[composite.results[r]] == 1) result_of[composite.results[r]] = static_cast<int32_t>(r);
  }
  for (const uint32_t value : composite.results) times[value] = 0;
  size_t decided = 0;  // loops around the step that are
  for (size_t at = composite.steps.size(); at-- != 0;) {
    CompositeStep* step = &composite.steps[at];
    if (step->kind == CompositeStep::Kind::kLoop && step->is_decided) --decided;
    if (step->kind == CompositeStep::Kind::kEnd) {
      if (composite.steps[step->partner].is_decided) ++decided;
      for (const uint32_t value : step->inputs) ++times[value];
      for (size_t i = 0; i < step->inputs.size(); ++i) {
        const uint32_t value = step->inputs[i];
        const bool is_made_here = maker[value] > step->partner && maker[value] <= at;
        if (is_made_here && times[value] == 1) result_of[value] = result_of[step->outputs[i]];
      }
      for (const uint32_t value : step->inputs) times[value] = 0;
    } else if (step->kind == CompositeStep::Kind::kRun) {
      step->finals.clear();
      for (const uint32_t value : step->outputs) step->finals.push_back(decided == 0 ? result_of[value] : -1);
    }
  }
}

}  // namespace pathways
