// A client that calls composites, and hosts that a test plays: a played host keeps what each handle means, as a number,
// and computes numbers from numbers.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <string>

#include "controller/played.h"
#include "plan/branches.h"
#include "support.h"

namespace pathways::test {

using Kind = CompositeStep::Kind;

inline uint64_t mixed(uint64_t a, uint64_t b) { return (a ^ (b * 0x9e3779b97f4a7c15ull)) * 0xff51afd7ed558ccdull + b; }
inline uint64_t output_of(uint32_t plan, std::span<const uint64_t> inputs, uint32_t output) {
  uint64_t value = mixed(plan, output);
  for (const uint64_t input : inputs) value = mixed(value, input);
  return value;
}

inline CompositeStep run(uint32_t plan, std::vector<uint32_t> inputs, std::vector<uint32_t> outputs) {
  CompositeStep step;
  step.plan = plan;
  step.inputs = std::move(inputs);
  step.outputs = std::move(outputs);
  return step;
}
inline CompositeStep bound(Kind kind, uint64_t count, std::vector<uint32_t> inputs, std::vector<uint32_t> outputs) {
  CompositeStep step = run(0, std::move(inputs), std::move(outputs));
  step.kind = kind;
  step.count = count;
  return step;
}

inline constexpr uint32_t kNumber = 900;  // of the composite

struct Loops : Cluster {
  explicit Loops(std::vector<uint64_t> budgets = {}) : Cluster(4, 2, std::move(budgets)) {}

  /// A plan on both hosts.
  void add(uint32_t plan, uint32_t results, std::vector<uint32_t> donated, uint64_t peak = 0, uint64_t bytes = 0) {
    PlanMemory memory{0, "plan", "", {}, {}, donated};
    if (peak != 0) memory.needs.push_back({0, peak, 0});
    for (uint32_t i = 0; i < results; ++i) {
      memory.results.push_back({2, bytes == 0 ? kNoSpaceSet : set, bytes, -1, -1});
    }
    controller->register_plan(plan, 0, 2);
    controller->set_plan_memory(plan, std::move(memory));
    donated_of[plan] = std::move(donated);
  }
  /// carry -> carry, `count` times.
  Composite simple(uint64_t count, uint32_t parallel = 10) {
    add(1, 1, {0});
    Composite made{"loop", 0, 2, 1, 4, parallel, {0}, {3}, {}};
    made.steps = {bound(Kind::kLoop, count, {0}, {1}), run(1, {1}, {2}), bound(Kind::kEnd, 0, {2}, {3})};
    return made;
  }
  /// carry -> carry, as long as a run of plan 1, of which one comes before each iteration, says so. Plan 2 is behind
  /// it.
  Composite decided(uint64_t most = UINT64_MAX) {
    add(1, 1, {0});
    add(2, 1, {});
    decider = 1;
    Composite made{"while", 0, 2, 1, 6, 10, {0}, {5}, {}};
    made.steps = {run(1, {0}, {1}), bound(Kind::kLoop, most, {1}, {2}), run(1, {2}, {3}),
                  bound(Kind::kEnd, 0, {3}, {4}), run(2, {4}, {5})};
    made.steps[1].is_decided = true;
    return made;
  }
  std::vector<uint64_t> call(const std::vector<uint64_t>& arguments, uint32_t results, int64_t deadline_ns = 0) {
    std::vector<uint64_t> handles(results);
    static const ErrorText text = make_error_text("late");
    const ProgramRef program{kNumber, 2, std::vector<uint32_t>(results, 2)};
    const Status status = deadline_ns == 0 ? good->submit(program, arguments, handles.data())
                                           : good->submit(program, arguments, handles.data(), {}, deadline_ns, &text);
    EXPECT_EQ(status, Status::kOk);
    return handles;
  }
  /// A buffer of the client, which the hosts know.
  uint64_t buffer(uint64_t value) {
    Handle handle;
    EXPECT_EQ(good->allocate(1, &handle), Status::kOk);
    objects[handle.raw] = value;
    return handle.raw;
  }
  /// The hosts read what has come. Both keep the same buffers; the first one's are looked at.
  void read() {
    for (uint32_t h = 0; h < hosts.size(); ++h) {
      if (is_lost[h]) continue;
      for (auto bytes = hosts[h]->next(); !bytes.empty(); bytes = hosts[h]->next()) take(h, bytes);
    }
  }
  void take(uint32_t h, std::span<const std::byte> bytes) {
    const auto header = read_record<RecordHeader>(bytes);
    if (header.kind == RecordKind::kRun) {
      running[h].push_back(read_record<RunRecord>(bytes));
      if (h == 0) compute(bytes);
    } else if (header.kind == RecordKind::kCommand && h == 0) {
      const auto command = read_record<CommandRecord>(bytes);
      const auto kind = static_cast<CommandKind>(header.detail);
      if (kind == CommandKind::kFail) failed.insert(command.handle);
      for (size_t at = 0; kind == CommandKind::kRelease && at < command.bytes; at += sizeof(uint64_t)) {
        objects.erase(word_at(bytes, sizeof command + at));
      }
    } else if (header.kind == RecordKind::kClientGone && h == 0) {
      objects.clear();
    }
  }
  void compute(std::span<const std::byte> bytes) {
    const auto record = read_record<RunRecord>(bytes);
    order.push_back(record.plan);
    std::vector<uint64_t> inputs;
    for (uint32_t i = 0; i < record.arguments; ++i) {
      const auto found = objects.find(argument_of(bytes, i));
      ASSERT_NE(found, objects.end()) << "plan " << record.plan << " reads a buffer that is not there";
      inputs.push_back(found->second);
    }
    for (const uint32_t position : donated_of[record.plan]) objects.erase(argument_of(bytes, position));
    for (uint32_t i = 0; i < record.results; ++i) {
      const uint64_t handle = result_of(bytes, i);
      for (const auto& known : objects) {  // FUT-3: an index means one buffer
        ASSERT_TRUE(Handle{known.first}.index() != Handle{handle}.index());
      }
      objects[handle] = output_of(record.plan, inputs, i);
    }
  }
  /// A run of plan `decider` ends with the next of `verdicts`, from the second host, which is its owner.
  void complete(uint32_t h) {
    const RunRecord run = running[h].front();
    running[h].pop_front();
    if (run.plan != decider || h != 1) {
      hosts[h]->done(run);
      return;
    }
    ASSERT_FALSE(verdicts.empty());
    hosts[h]->decided(run, verdicts.front() < 0 ? 0 : kVerdictMask, verdicts.front() > 0 ? kVerdictMask : 0);
    verdicts.pop_front();
  }
  /// Everything to its end.
  void finish() {
    for (bool is_busy = true; is_busy;) {
      pass();
      read();
      is_busy = false;
      for (uint32_t h = 0; h < hosts.size(); ++h) {
        while (!is_lost[h] && !running[h].empty()) {
          complete(h);
          is_busy = true;
        }
      }
    }
  }
  size_t hidden() const {
    return static_cast<size_t>(
        std::count_if(objects.begin(), objects.end(), [](const auto& each) { return Handle{each.first}.is_hidden(); }));
  }

  SpaceSetId set = 0;
  std::map<uint32_t, std::vector<uint32_t>> donated_of;  // by plan
  std::map<uint64_t, uint64_t> objects;                  // by handle
  std::set<uint64_t> failed;
  uint32_t decider = UINT32_MAX;  // a plan
  std::deque<int> verdicts;       // 1: the loop goes on; 0: it ends; -1: the scalar has failed
  std::vector<uint32_t> order;    // plans
  std::deque<RunRecord> running[2];
  bool is_lost[2] = {false, false};
};

}  // namespace pathways::test
