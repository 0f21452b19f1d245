#include "runs/dataflow.h"

#include <string>

#include "base/check.h"

namespace pathways {

void Dataflow::bind_argument(uint32_t slot, uint32_t value, Handle handle) {
  const uint32_t run_client = runs_[slot].client;
  Object* object = objects_.find(run_client, handle);
  if (object == nullptr) {
    propagate_error(slot, value,
                    errors_.add(objects_.missing(
                        run_client, "an argument is no buffer on host " + std::to_string(host_) +
                                        ": it was deleted, its run was cancelled, or its client is gone")));
  } else if (object->state == ObjectState::kAnnounced && object->maker == runs_[slot].order) {
    // The run would wait for itself for ever, and so would everything behind it (TRUST-1).
    propagate_error(slot, value,
                    errors_.add("a run takes a buffer that it makes itself, on host " + std::to_string(host_)));
  } else if (object->state == ObjectState::kAnnounced) {
    ++runs_[slot].open;  // the run must not end before its argument exists
    object->waiters.push_back({ObjectWaiter::Kind::kRunValue, slot, value});
  } else if (object->state == ObjectState::kFailed) {
    propagate_error(slot, value, object->error);
  } else {
    deliver(slot, value, refs_.retain(object->value), object->devices, object->age);
  }
}

void Dataflow::argument_settled(uint32_t slot, uint32_t value, const Object& object) {
  if (object.state == ObjectState::kFailed) {
    propagate_error(slot, value, object.error);
  } else {
    deliver(slot, value, refs_.retain(object.value), object.devices, object.age);
  }
  close_step(slot);
}

void Dataflow::define(uint32_t slot, uint32_t value, Value ref, uint64_t devices, uint64_t age) {
  Run& run = runs_[slot];
  const Plan& plan = run.plan->plan;
  bool is_ours = run.readers[value] == 0;  // else the readers have it, and the last one drops it
  if (!is_ours) run.values[value] = ref;
  run.ages[value] = age;
  if (!plan.branches().empty()) dispatcher_.value_there(slot, value, ref, devices);
  const auto results = plan.results_of(value);
  for (uint32_t i = 0; i < results.size(); ++i) {
    const bool is_last = is_ours && i + 1 == results.size();
    objects_.define(run.client, Handle{run.results[results[i]]}, run.order, is_last ? ref : refs_.retain(ref), devices,
                    age);
    is_ours = is_ours && !is_last;
  }
  for (uint32_t consumer : plan.consumers(value)) queues_.satisfy({slot, consumer});
  if (is_ours) refs_.drop(ref);
}

void Dataflow::deliver(uint32_t slot, uint32_t value, Value ref, uint64_t devices, uint64_t age) {
  Run& run = runs_[slot];
  if (!run.plan->plan.results_of(value).empty()) {
    ++run.open;
    tracker_.add(devices, {PendingValue::Kind::kValue, false, slot, value, refs_.retain(ref), 0, age});
  }
  define(slot, value, ref, devices, age);
}

void Dataflow::propagate_error(uint32_t slot, uint32_t value, uint32_t error) {
  Run& run = runs_[slot];
  const Plan& plan = run.plan->plan;
  run.errors[value] = error;
  PW_DCHECK(error != kDead || plan.results_of(value).empty());  // PLAN-5
  for (uint32_t result : plan.results_of(value))
    objects_.fail(run.client, Handle{run.results[result]}, run.order, error);
  for (uint32_t consumer : plan.consumers(value)) {
    if (run.input_errors[consumer] == 0) run.input_errors[consumer] = error;
    queues_.satisfy({slot, consumer});
  }
  if (!plan.branches().empty()) dispatcher_.value_there(slot, value, nullptr, 0);
}

void Dataflow::read_done(Run& run, std::span<const uint32_t> values) {
  for (uint32_t value : values) {
    if (--run.readers[value] == 0) refs_.reset(run.values[value]);
  }
}

void Dataflow::close_step(uint32_t slot) {
  Run& run = runs_[slot];
  PW_DCHECK(run.open > 0);
  if (--run.open != 0) return;
  if (run.is_traced()) trace_.over(run, clock_.now_ns());
  link_.run_done(run.client, run.tag, run.gangs, run.plan->plan.gang_count() - run.untaken_gangs,
                 {run.busy_ns, clock_.batch()}, run.taken);
  plans_.end_run(*run.plan);
  runs_.release(slot);
}

}  // namespace pathways
