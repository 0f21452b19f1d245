#include "executor/value_settler.h"

#include <algorithm>
#include <string>

namespace pathways {

void ValueSettler::settle(const PendingValue& item, Readiness readiness) {
  if (item.counts) queues_.end_launch(runs_[item.run].plan->plan.node(item.index));
  const bool has_failed = readiness == Readiness::kFailed && item.kind != PendingValue::Kind::kStandIn;
  const uint32_t error = has_failed ? failure(item) : 0;
  switch (item.kind) {
    case PendingValue::Kind::kNode: {
      count_time(item);
      trace_end(item, error != 0);
      const Plan& plan = runs_[item.run].plan->plan;
      for (uint32_t value : plan.outputs(plan.node(item.index))) settle_results(item.run, value, error);
      flow_.close_step(item.run);
      break;
    }
    case PendingValue::Kind::kStandIn:
      count_time(item);
      trace_end(item, true);
      flow_.close_step(item.run);
      break;
    case PendingValue::Kind::kMove:
      trace_end(item, error != 0);
      flow_.close_step(item.run);
      break;
    case PendingValue::Kind::kValue:
      settle_results(item.run, item.index, error);
      flow_.close_step(item.run);
      break;
    case PendingValue::Kind::kSend:
      // The launch that made what is sent is watched by nobody else, if it makes no result of the run.
      // The run may be over, when the host that it is sent to is lost.
      if (Run& run = runs_[item.run]; run.plan != nullptr && run.order == order_of(item.key) && run.launched_ns != 0) {
        count_time(run, run.plan->plan.node(item.index).input_devices, run.launched_ns);
      }
      transfers_.source_settled(item.key, error);
      break;
    case PendingValue::Kind::kRows:
      if (Run& run = runs_[item.run]; run.launched_ns != 0)
        count_time(run, rows_.input_devices(item.key), run.launched_ns);
      rows_.input_settled(item.key, error);
      break;
    case PendingValue::Kind::kDecision:
      decisions_.read(item, error);
      break;
    case PendingValue::Kind::kFetch:
      if (error != 0) {
        fetches_.refuse(item.index, errors_.text(error));
      } else {
        fetches_.settle(item.index, item.value);
      }
      break;
    case PendingValue::Kind::kPut:
      // `run` names the client: a put belongs to no run.
      if (error == 0) {
        link_.complete(item.run, Handle{item.key});
      } else {
        objects_.fail_put(item.run, Handle{item.key}, item.age, error);
      }
      break;
  }
  refs_.drop(item.value);
  if (item.held != nullptr) refs_.drop(item.held);
}

void ValueSettler::trace_end(const PendingValue& item, bool has_failed) {
  Run& run = runs_[item.run];
  if (run.is_traced()) trace_.ended(run, item.index, clock_.now_ns(), has_failed);
}

void ValueSettler::count_time(const PendingValue& launch) {
  if (launch.held != nullptr) return;  // no device computes while it moves its input
  Run& run = runs_[launch.run];
  const uint64_t devices = run.plan->plan.node(launch.index).devices;
  count_time(run, devices, launch.launched_ns);
}

void ValueSettler::count_time(Run& run, uint64_t devices, int64_t launched_ns) {
  const int64_t now_ns = clock_.now_ns();
  run.count_time(clock_.began_ns(objects_.payer(run), devices, launched_ns, now_ns), now_ns);
}

/// Completes the results that a value of a run is bound to, or fails them with `error`.
void ValueSettler::settle_results(uint32_t slot, uint32_t value, uint32_t error) {
  const Run& run = runs_[slot];
  for (const uint32_t result : run.plan->plan.results_of(value)) {
    uint32_t failed = error;
    if (failed == 0 && read_back(run, result) != Status::kOk) failed = errors_.add(std::string(work_.last_error()));
    if (failed == 0) {
      link_.complete(run.client, Handle{run.results[result]});
    } else {
      objects_.fail(run.client, Handle{run.results[result]}, run.order, failed);
    }
  }
}

/// READ-1: writes a ready result to the client's memory, if the client wants it with the completion.
Status ValueSettler::read_back(const Run& run, uint32_t result) {
  const Handle handle{run.results[result]};
  if (run.wanted.empty() || (run.wanted[result / 64] >> (result % 64) & 1) == 0) return Status::kOk;
  const Object* object = objects_.find(run.client, handle);
  // When the handle was released or the client is gone, nobody will read it.
  if (object == nullptr || object->value == nullptr) return Status::kOk;
  return link_.read_back(run.client, handle, [&](ReadBackSlot slot) { return work_.read_back(object->value, slot); });
}

/// The error of a value that has failed: that of a failed input of its maker, if there is one, else its maker's own.
uint32_t ValueSettler::failure(const PendingValue& item) {
  if (const uint32_t known = errors_.of_launch(item.age)) return known;
  if (item.kind == PendingValue::Kind::kFetch || item.kind == PendingValue::Kind::kPut ||
      item.kind == PendingValue::Kind::kMove) {
    return errors_.add(std::string(device_.last_error()));
  }
  Run& run = runs_[item.run];
  const Plan& plan = run.plan->plan;
  const uint32_t maker = maker_of(run, item);
  uint32_t error = maker == kNone ? 0 : run.errors[plan.outputs(plan.node(maker))[0]];
  if (maker != kNone) {
    for (uint32_t input : plan.inputs(plan.node(maker))) {
      if (error == 0) error = cause(item.run, input);
    }
  }
  if (error == 0) {
    (void)device_.readiness(item.value);  // sets last_error() again: the inputs may have changed it
    if (maker != kNone) device_.explain(run.context(maker));
    error = errors_.add(std::string(device_.last_error()));
  }
  if (maker != kNone) {
    for (uint32_t output : plan.outputs(plan.node(maker))) run.errors[output] = error;
  }
  if (item.kind == PendingValue::Kind::kNode) errors_.launch_failed(item.age, error);
  return error;
}

/// The call of the plan that made a value, also when transfers within the host come between. kNone: the value is an
/// argument, or was received.
uint32_t ValueSettler::maker_of(const Run& run, uint32_t value) {
  const Plan& plan = run.plan->plan;
  const auto nodes = plan.nodes();
  for (uint32_t i = 0; i < nodes.size(); ++i) {
    const auto outputs = plan.outputs(nodes[i]);
    if (std::find(outputs.begin(), outputs.end(), value) == outputs.end()) continue;
    if (nodes[i].kind == NodeKind::kCall) return i;
    if (nodes[i].kind == NodeKind::kTransfer && nodes[i].input_count != 0) {
      return maker_of(run, plan.inputs(nodes[i])[0]);
    }
    if (nodes[i].kind == NodeKind::kSelect) {
      const ChoiceState& chosen = run.choices[nodes[i].computation];
      return chosen.is_case() ? maker_of(run, plan.inputs(nodes[i])[chosen.taken]) : kNone;
    }
  }
  return kNone;
}

/// The launch whose failure the item shows. A value that was moved within the host, but not selected, has the error of
/// its move.
uint32_t ValueSettler::maker_of(const Run& run, const PendingValue& item) {
  const Plan& plan = run.plan->plan;
  switch (item.kind) {
    case PendingValue::Kind::kNode:
      return item.index;
    case PendingValue::Kind::kSend:
      return maker_of(run, plan.inputs(plan.node(item.index))[0]);
    case PendingValue::Kind::kRows:
      return maker_of(run, item.index);
    case PendingValue::Kind::kDecision:
      return maker_of(run, plan.branches().choice(item.index).value);
    default:
      break;
  }
  if (plan.branches().empty()) return kNone;
  const auto nodes = plan.nodes();
  const bool is_selected = std::any_of(nodes.begin(), nodes.end(), [&](const NodeRecord& node) {
    return node.kind == NodeKind::kSelect && plan.outputs(node)[0] == item.index;
  });
  return is_selected ? maker_of(run, item.index) : kNone;
}

/// Why a value of a run failed, as far as is known now; 0 if it did not.
uint32_t ValueSettler::cause(uint32_t slot, uint32_t value) {
  const Plan& plan = runs_[slot].plan->plan;
  const uint32_t maker = maker_of(runs_[slot], value);
  const uint64_t age = runs_[slot].ages[value];
  if (maker == kNone) {  // made by another run
    if (const uint32_t known = errors_.of_launch(age)) return known;
  } else if (const uint32_t known = runs_[slot].errors[plan.outputs(plan.node(maker))[0]]) {
    return known;
  }
  const PendingValue* item = maker == kNone ? tracker_.find_launch(age) : tracker_.find_launch(slot, maker);
  if (item == nullptr) return 0;
  return device_.readiness(item->value) == Readiness::kFailed ? failure(*item) : 0;
}

Value ValueSettler::another_output(const PendingValue& item, std::span<const Value> taken) {
  const Run& run = runs_[item.run];
  const Plan& plan = run.plan->plan;
  const auto outputs = plan.outputs(plan.node(item.index));
  const auto is_there = [&](Value value) {
    return value != nullptr && !std::binary_search(taken.begin(), taken.end(), value) &&
           device_.readiness(value) != Readiness::kDeleted;
  };
  for (uint32_t i = 0; i < outputs.size(); ++i) {
    Value found = is_there(run.values[outputs[i]]) ? run.values[outputs[i]] : nullptr;
    for (const uint32_t result : plan.results_of(outputs[i])) {
      if (found != nullptr) break;
      const Object* object = objects_.find(run.client, Handle{run.results[result]});
      if (object != nullptr && object->state == ObjectState::kDefined && is_there(object->value)) found = object->value;
    }
    if (found == nullptr) continue;
    run.plan->watched[item.index] = i;
    return found;
  }
  return nullptr;
}

}  // namespace pathways
