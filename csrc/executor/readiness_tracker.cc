/// The executor's pending values: the executor checks each enqueued value until XLA has computed it, and then moves on
/// what waits for that value.
///
/// Each set of devices has a ready queue of pending values, in the order in which their values were enqueued. `poll`
/// checks the front of each ready queue. LOOK-1 says which value is asked whether it is ready. GANG-2 says which values
/// may be settled before the front.
#include <algorithm>

#include "base/check.h"
#include "executor/executor.h"

namespace pathways {
namespace {

constexpr size_t kMostAtOnce = 64;  // pending values of a ready queue that one check may settle

}  // namespace

void Executor::add_pending(uint64_t devices, const PendingValue& item, std::span<const uint64_t> input_ages) {
  if (item.counts) queues_.begin_launch(runs_[item.run].plan->plan.node(item.index));
  ++stats_.waiting;
  auto queue = std::find_if(ready_queues_.begin(), ready_queues_.end(),
                            [&](const ReadyQueue& l) { return l.devices == devices; });
  if (queue == ready_queues_.end()) queue = ready_queues_.insert(queue, ReadyQueue{devices, {}});
  auto& pending = queue->pending;
  if (pending.empty() || pending.back().age <= item.age) {  // the usual case
    const bool is_chained = !pending.empty() && pending.back().kind == PendingValue::Kind::kNode &&
                            std::find(input_ages.begin(), input_ages.end(), pending.back().age) != input_ages.end();
    pending.push_back(item);
    pending.back().chained = is_chained;
    return;
  }
  auto at = std::prev(pending.end());
  while (at != pending.begin() && std::prev(at)->age > item.age) --at;
  at->chained = false;  // another one comes before it now
  pending.insert(at, item);
}

/// The length of the chain at the front: each of its pending values was computed from the one before.
size_t Executor::chain_length(const ReadyQueue& queue) {
  const size_t most = std::min(queue.pending.size(), kMostAtOnce);
  size_t length = 1;
  while (length < most && queue.pending[length].chained) ++length;
  return length;
}

/// LOOK-1: the launch that was just made has taken over the inputs at `positions`. From now on these values tell
/// nothing. So a pending value that holds one of them gets another output of its launch, or this launch answers for it.
void Executor::take_over(const NodeRecord& node, std::span<const uint32_t> positions) {
  const auto queue = std::find_if(ready_queues_.begin(), ready_queues_.end(),
                                  [&](const ReadyQueue& l) { return l.devices == node.devices; });
  if (queue == ready_queues_.end()) return;
  taken_.clear();
  for (const uint32_t position : positions) {
    const Value value = inputs_[position];
    const uint64_t age = input_ages_[position];
    const auto is_younger = [](const PendingValue& item, uint64_t than) { return item.age < than; };
    auto item = std::lower_bound(queue->pending.begin(), queue->pending.end(), age, is_younger);
    for (; item != queue->pending.end() && item->age == age; ++item) {
      if (item->value != value || item->taken_by != 0) continue;
      if (taken_.empty()) {
        for (const uint32_t each : positions) taken_.push_back(inputs_[each]);
        std::sort(taken_.begin(), taken_.end());
      }
      if (!use_another_output(*item)) item->taken_by = age_;
    }
  }
}

/// Gives the pending value of a launch another output of the launch, one that nobody has taken over. Later runs of the
/// plan use that output too. False when there is none.
bool Executor::use_another_output(PendingValue& item) {
  if (item.kind != PendingValue::Kind::kNode) return false;
  const Run& run = runs_[item.run];
  const Plan& plan = run.plan->plan;
  const auto outputs = plan.outputs(plan.node(item.index));
  Client* c = client(run.client);
  const auto is_there = [&](Value value) {
    return value != nullptr && !std::binary_search(taken_.begin(), taken_.end(), value) &&
           backend_.readiness(value) != Readiness::kDeleted;
  };
  for (uint32_t i = 0; i < outputs.size(); ++i) {
    Value found = is_there(run.values[outputs[i]]) ? run.values[outputs[i]] : nullptr;
    for (const uint32_t result : plan.results_of(outputs[i])) {
      if (found != nullptr || c == nullptr) break;
      const Object* object = c->objects.find(Handle{run.results[result]});
      if (object != nullptr && object->state == ObjectState::kDefined && is_there(object->value)) found = object->value;
    }
    if (found == nullptr) continue;
    refs_.retain(found);
    refs_.drop(item.value);
    item.value = found;
    run.plan->watched[item.index] = i;
    return true;
  }
  return false;
}

/// LOOK-1: the position of the pending value that answers for the one at `at`: `at` itself, or the launch that took its
/// value over.
size_t Executor::answering(const ReadyQueue& queue, size_t at) {
  while (queue.pending[at].taken_by != 0) {
    const uint64_t age = queue.pending[at].taken_by;
    while (queue.pending[at].age < age) ++at;  // it is in the queue: values are settled from the front on
    PW_DCHECK(queue.pending[at].age == age && queue.pending[at].kind == PendingValue::Kind::kNode);
  }
  return at;
}

/// The readiness of a pending value. A value that was taken over, as were all other outputs of its launch, is ready
/// when its taker is ready or has failed: nobody can read the value any more.
Readiness Executor::look(size_t queue, size_t at) {
  PendingValue& item = ready_queues_[queue].pending[at];
  if (item.taken_by != 0) {
    return look(queue, answering(ready_queues_[queue], at)) == Readiness::kPending ? Readiness::kPending
                                                                                   : Readiness::kReady;
  }
  const Readiness readiness = backend_.readiness(item.value);
  if (readiness != Readiness::kDeleted) return readiness;
  taken_.clear();  // who deleted it is not known here: a failed launch, or another user of the array
  return use_another_output(item) ? backend_.readiness(item.value) : Readiness::kReady;
}

/// Settles what is ready at the front of a ready queue. Returns the number of pending values settled.
uint32_t Executor::settle_ready(size_t queue) {
  uint32_t done = 0;
  while (!ready_queues_[queue].pending.empty()) {
    const size_t chain = chain_length(ready_queues_[queue]);
    Readiness readiness = Readiness::kPending;
    size_t count = 0;
    for (const size_t candidate : {chain, chain / 2, size_t{1}}) {
      if (candidate == 0 || candidate == count) continue;
      count = candidate;
      readiness = look(queue, count - 1);
      // A failure counts only at the front, so that the first value that failed is reported with its own error.
      if (readiness == Readiness::kReady || count == 1) break;
    }
    if (readiness == Readiness::kPending) {
      const uint32_t between = settle_between(queue);
      if (between == 0) return done;
      done += between;
      continue;
    }
    for (; count != 0; --count, ++done) {
      const PendingValue item = ready_queues_[queue].pending.front();
      ready_queues_[queue].pending.pop_front();
      --stats_.waiting;
      settle(item, readiness);  // may add ready queues
    }
  }
  return done;
}

/// LOOK-1: when a pending value further down answers for the front, the position of the first pending value before that
/// one which has a value of its own.
std::optional<size_t> Executor::first_between(const ReadyQueue& queue) {
  const size_t answer = answering(queue, 0);
  for (size_t at = 0; at < answer; ++at) {
    if (queue.pending[at].taken_by == 0) return at;
  }
  return std::nullopt;
}

/// GANG-2: the launch that answers for the front may be a gang. Another host may need a send that is pending between
/// the two before it can launch its part of the gang. So a pending value between the two is settled out of turn when it
/// is ready, together with those that it answers for. Returns the number of pending values settled.
uint32_t Executor::settle_between(size_t queue) {
  const std::optional<size_t> own = first_between(ready_queues_[queue]);
  if (!own) return 0;
  const Readiness readiness = look(queue, *own);
  if (readiness == Readiness::kPending) return 0;
  auto& pending = ready_queues_[queue].pending;
  between_.clear();
  for (size_t at = 0; at <= *own; ++at) {
    if (answering(ready_queues_[queue], at) == *own) between_.push_back(at);
  }
  settling_.clear();
  for (const size_t at : between_) settling_.push_back(pending[at]);
  for (auto at = between_.rbegin(); at != between_.rend(); ++at) {
    pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(*at));
    if (*at < pending.size()) pending[*at].chained = false;  // another one comes before it now
  }
  for (const PendingValue& item : settling_) {
    --stats_.waiting;
    settle(item, item.taken_by == 0 ? readiness : Readiness::kReady);  // may add ready queues
  }
  return static_cast<uint32_t>(settling_.size());
}

/// The error of a value that has failed: that of a failed input of its maker, if there is one, else its maker's own.
uint32_t Executor::failure(const PendingValue& item) {
  if (const uint32_t known = errors_.of_launch(item.age)) return known;
  if (item.kind != PendingValue::Kind::kNode && item.kind != PendingValue::Kind::kSend) {
    return errors_.add(std::string(backend_.last_error()));
  }
  Run& run = runs_[item.run];
  const NodeRecord& node = run.plan->plan.node(item.index);
  const Plan& plan = run.plan->plan;
  const uint32_t maker = item.kind == PendingValue::Kind::kNode ? item.index : maker_of(plan, plan.inputs(node)[0]);
  uint32_t error = maker == kNone ? 0 : run.errors[plan.outputs(plan.node(maker))[0]];
  if (maker != kNone) {
    for (uint32_t input : plan.inputs(plan.node(maker))) {
      if (error == 0) error = cause(item.run, input);
    }
  }
  if (error == 0) {
    (void)backend_.readiness(item.value);  // sets last_error() again: the inputs may have changed it
    if (maker != kNone) backend_.explain(run.context(maker));
    error = errors_.add(std::string(backend_.last_error()));
  }
  if (maker != kNone) {
    for (uint32_t output : plan.outputs(plan.node(maker))) run.errors[output] = error;
  }
  if (item.kind == PendingValue::Kind::kNode) errors_.launch_failed(item.age, error);
  return error;
}

/// The call of the plan that made a value, also when transfers within the host come between. kNone: the value is an
/// argument, or was received.
uint32_t Executor::maker_of(const Plan& plan, uint32_t value) {
  const auto nodes = plan.nodes();
  for (uint32_t i = 0; i < nodes.size(); ++i) {
    const auto outputs = plan.outputs(nodes[i]);
    if (std::find(outputs.begin(), outputs.end(), value) == outputs.end()) continue;
    if (nodes[i].kind == NodeKind::kCall) return i;
    if (nodes[i].kind == NodeKind::kTransfer && nodes[i].input_count != 0) {
      return maker_of(plan, plan.inputs(nodes[i])[0]);
    }
  }
  return kNone;
}

/// Why a value of a run failed, as far as is known now; 0 if it did not.
uint32_t Executor::cause(uint32_t slot, uint32_t value) {
  const Plan& plan = runs_[slot].plan->plan;
  const uint32_t maker = maker_of(plan, value);
  const uint64_t age = runs_[slot].ages[value];
  if (maker == kNone) {  // made by another run
    if (const uint32_t known = errors_.of_launch(age)) return known;
  } else if (const uint32_t known = runs_[slot].errors[plan.outputs(plan.node(maker))[0]]) {
    return known;
  }
  for (const ReadyQueue& queue : ready_queues_) {
    for (const PendingValue& item : queue.pending) {
      if (item.kind != PendingValue::Kind::kNode) continue;
      if (maker == kNone ? item.age != age : item.run != slot || item.index != maker) continue;
      return backend_.readiness(item.value) == Readiness::kFailed ? failure(item) : 0;
    }
  }
  return 0;
}

/// READ-1: writes a ready result to the client's memory, if the client wants it with the completion.
Status Executor::read_back(const Run& run, uint32_t result) {
  const Handle handle{run.results[result]};
  if (run.wanted.empty() || (run.wanted[result / 64] >> (result % 64) & 1) == 0) return Status::kOk;
  Client* c = client(run.client);
  const Object* object = c == nullptr ? nullptr : c->objects.find(handle);
  ReadBackSlot slot;
  // When the handle was released or the client is gone, nobody will read it.
  if (object == nullptr || object->value == nullptr || !link_.begin_read_back(run.client, handle, &slot)) {
    return Status::kOk;
  }
  const Status status = backend_.read_back(object->value, slot);
  link_.end_read_back(run.client, handle);
  return status;
}

/// Completes a result of a run, or fails it with `error`.
void Executor::resolve_result(const Run& run, uint32_t result, uint32_t error) {
  if (error == 0 && read_back(run, result) != Status::kOk) error = errors_.add(std::string(backend_.last_error()));
  if (error == 0) {
    link_.complete(run.client, Handle{run.results[result]});
  } else {
    fail_object(run.client, Handle{run.results[result]}, error);
  }
}

void Executor::settle(const PendingValue& item, Readiness readiness) {
  if (item.counts) queues_.end_launch(runs_[item.run].plan->plan.node(item.index));
  const bool has_failed = readiness == Readiness::kFailed && item.kind != PendingValue::Kind::kStandIn;
  const uint32_t error = has_failed ? failure(item) : 0;
  switch (item.kind) {
    case PendingValue::Kind::kNode: {
      Run& run = runs_[item.run];
      const Plan& plan = run.plan->plan;
      for (uint32_t value : plan.outputs(plan.node(item.index))) {
        for (uint32_t result : plan.results_of(value)) resolve_result(run, result, error);
      }
      close_step(item.run);
      break;
    }
    case PendingValue::Kind::kStandIn:
      close_step(item.run);
      break;
    case PendingValue::Kind::kValue: {
      Run& run = runs_[item.run];
      for (uint32_t result : run.plan->plan.results_of(item.index)) resolve_result(run, result, error);
      close_step(item.run);
      break;
    }
    case PendingValue::Kind::kSend:
      source_settled(item.key, error);
      break;
    case PendingValue::Kind::kFetch: {
      if (error != 0) {
        refuse_fetch(item.index, errors_.text(error));
        break;
      }
      fetch_now(fetches_[item.index], item.value);
      end_fetch(item.index, !fetches_[item.index].is_task);
      break;
    }
    case PendingValue::Kind::kPut:
      // `run` names the client: a put belongs to no run.
      if (error == 0) {
        link_.complete(item.run, Handle{item.key});
      } else {
        fail_object(item.run, Handle{item.key}, error);
      }
      break;
  }
  refs_.drop(item.value);
}

void Executor::watched(std::vector<Value>* out) const {
  out->clear();
  for (const ReadyQueue& queue : ready_queues_) {
    if (queue.pending.empty()) continue;
    out->push_back(queue.pending[answering(queue, 0)].value);
    if (const auto own = first_between(queue)) out->push_back(queue.pending[*own].value);
  }
}

void Executor::watched_half_way(std::vector<Value>* out) const {
  out->clear();
  for (const ReadyQueue& queue : ready_queues_) {
    if (queue.pending.empty()) continue;
    out->push_back(queue.pending[answering(queue, queue.pending.size() / 2)].value);
    if (const auto own = first_between(queue)) out->push_back(queue.pending[*own].value);
  }
}

}  // namespace pathways
