#include "executor/launcher.h"

#include <algorithm>

namespace pathways {

namespace {

constexpr int64_t kLongLaunchNs = 100'000;

}  // namespace

/// GANG-2.
bool Launcher::owes_before(const Run& run, const NodeRecord& node) {
  return transfers_.owes_before(run, node) || rows_.owes_before(run, node) || decisions_.owes_before(run, node);
}

bool Launcher::must_wait(const Run& run, const NodeRecord& node) {
  return queues_.is_full(node) || !memory_.has_room(*run.plan, node) || owes_before(run, node) ||
         queues_.conflicts_with_running_gang(node);
}

/// For a trace: what `must_wait` found.
uint8_t Launcher::why_it_waits(const Run& run, const NodeRecord& node) {
  return static_cast<uint8_t>((queues_.is_full(node) ? kThrottledByBound : 0) |
                              (memory_.has_room(*run.plan, node) ? 0 : kThrottledByMemory) |
                              (owes_before(run, node) ? kThrottledByTransfers : 0) |
                              (queues_.conflicts_with_running_gang(node) ? kThrottledByGang : 0));
}

bool Launcher::launch(NodeRef ref) {
  Run& run = runs_[ref.run];
  const Plan& plan = run.plan->plan;
  const NodeRecord& node = plan.node(ref.node);
  if (const uint32_t verdict = run.verdict(node); verdict != 0) {
    skip(ref, verdict);
    return true;
  }
  if (must_wait(run, node)) {
    if (run.is_traced()) trace_.throttled(run, ref.node, why_it_waits(run, node));
    queues_.throttle(ref);
    return true;
  }
  const auto outputs = plan.outputs(node);
  const auto& failure = run.plan->failure;
  uint32_t error = failure ? errors_.add(*failure) : run.input_errors[ref.node];
  outputs_.assign(outputs.size(), nullptr);
  const auto taken = run.plan->donated(node);
  // A plan that could not be compiled has no executable on any host, so no host launches its calls. A gang is launched
  // even when an input has failed (GANG-1).
  const bool is_launched = !failure && (error == 0 || node.gang != 0);
  const int64_t launched_ns = is_launched ? now_ns_() : 0;
  bool answers = false;
  if (is_launched) run.launched_ns = launched_ns;
  if (is_launched) {
    const Status status = enqueue(run, ref.node, node);
    if (status == Status::kPending) {
      attended_.emplace(node_key(run.order, ref.node), Attended{ref, launched_ns});
      return true;
    }
    tracker_.next_age();
    if (!taken.empty() && status == Status::kOk && error == 0) {
      answers = tracker_.take_over(node.devices, taken, inputs_, input_ages_);
    }
    book(run, node);
    // The error of a failed input says more than the error of a launch on its placeholder.
    if (status != Status::kOk && error == 0) error = errors_.add(std::string(device_.last_error()));
  }
  // A gang that was launched on placeholders runs although its results have failed, so it counts as in flight (GANG-3).
  // A launch that the backend refused has no output.
  const bool runs = error == 0 || queues_.blocks(node);
  const bool counts =
      queues_.counts() && is_launched && runs && !outputs.empty() && outputs_[0] != nullptr && !run.plan->moves(node);
  finish(ref, error, counts, counts || answers, launched_ns);
  return !is_launched || !queues_.computes_in_launch() || now_ns_() - launched_ns < kLongLaunchNs;
}

/// The call is not taken, or its predicate failed. It leaves its FIFOs at its turn like every other (ORD-1), and drops
/// what it would have taken over (MEM-4).
void Launcher::skip(NodeRef ref, uint32_t verdict) {
  Run& run = runs_[ref.run];
  const Plan& plan = run.plan->plan;
  const NodeRecord& node = plan.node(ref.node);
  outputs_.assign(plan.outputs(node).size(), nullptr);
  run.untaken_gangs += node.gang;
  finish(ref, verdict, false, false, 0);
}

/// Gives the call to the backend, with a placeholder for each input that failed.
Status Launcher::enqueue(const Run& run, uint32_t index, const NodeRecord& node) {
  const auto inputs = run.plan->plan.inputs(node);
  const NodeContext where = run.context(index);
  bool has_stand_ins = false;
  inputs_.clear();
  input_ages_.clear();
  for (uint32_t i = 0; i < inputs.size(); ++i) {
    const Value value = run.values[inputs[i]];
    if (value != nullptr) {
      inputs_.push_back(value);
      input_ages_.push_back(run.ages[inputs[i]]);
    } else {
      inputs_.push_back(device_.placeholder(where, i));
      has_stand_ins = true;
    }
  }
  // GANG-2: peers wait for what was sent before. The same holds if the call computes before it returns: the record that
  // tells a peer of its data would otherwise go out behind all launches that are ready.
  const bool is_away = queues_.waits_in_launch(node) || queues_.computes_in_launch();
  if (is_away) link_.leave();
  const Status status = device_.launch(where, inputs_, outputs_);
  if (is_away) link_.come_back();
  for (uint32_t i = 0; has_stand_ins && i < inputs.size(); ++i) {
    if (run.values[inputs[i]] == nullptr) refs_.drop(inputs_[i]);
  }
  return status;
}

void Launcher::book(Run& run, const NodeRecord& node) {
  memory_.book_launch(run, node, outputs_);
  ++launches_;
  if (node.gang != 0) {  // GANG-1
    ++run.gangs;
    ++gangs_;
  }
}

/// The outputs of the call are defined, or fail with `error`. The call leaves the FIFOs of its devices, which go on to
/// the next call.
void Launcher::finish(NodeRef ref, uint32_t error, bool counts, bool is_watched, int64_t launched_ns) {
  Run& run = runs_[ref.run];
  const Plan& plan = run.plan->plan;
  const NodeRecord& node = plan.node(ref.node);
  const auto inputs = plan.inputs(node), outputs = plan.outputs(node);
  Readiness seen = Readiness::kPending;  // of the first output, if a trace has looked at it
  if (run.is_traced() && error == kDead) {
    run.times[ref.node].is_over = true;  // there is nothing to show
  } else if (run.is_traced()) {
    seen = trace_launch(run, ref.node, error, counts, launched_ns);
    is_watched = is_watched || (seen == Readiness::kPending && error == 0);
  }
  // MEM-1: XLA reads what is moved until the copy is there. Meanwhile later calls are launched.
  const bool moves = error == 0 && !inputs.empty() && run.plan->moves(node);
  Value watched = nullptr;
  if (error != 0 && counts) {
    watched = refs_.retain(outputs_[0]);  // its results have failed, but the gang runs (GANG-3)
  } else if (error == 0 && !outputs.empty()) {
    is_watched = is_watched || moves || std::any_of(outputs.begin(), outputs.end(), [&](uint32_t value) {
                   return !plan.results_of(value).empty();
                 });
    if (is_watched) watched = refs_.retain(outputs_[run.plan->watched[ref.node]]);
  }
  for (uint32_t i = 0; i < outputs.size(); ++i) {
    if (error == 0) {
      flow_.define(ref.run, outputs[i], outputs_[i], node.devices, tracker_.age());
    } else {
      if (outputs_[i] != nullptr) refs_.drop(outputs_[i]);
      flow_.propagate_error(ref.run, outputs[i], error);
    }
  }
  // After the outputs: a transfer of an output is ready before the next call of these devices, and starts before it.
  queues_.leave(node);
  if (watched != nullptr) {
    ++run.open;
    const auto kind = error == 0 ? PendingValue::Kind::kNode : PendingValue::Kind::kStandIn;
    const std::span<const uint64_t> made_of =
        error == 0 ? std::span<const uint64_t>(input_ages_) : std::span<const uint64_t>();
    if (counts) queues_.begin_launch(node);
    PendingValue item{kind, counts, ref.run, ref.node, watched, 0, tracker_.age()};
    item.launched_ns = launched_ns;
    item.was_ready = seen == Readiness::kReady && error == 0 && watched == outputs_[0];
    if (moves) item.held = refs_.retain(run.values[inputs[0]]);
    tracker_.add(node.devices, item, made_of);
  } else if (launched_ns != 0) {  // SHARE-5: nobody notices its end
    const int64_t now_ns = now_ns_();
    run.count_time(clock_.began_ns(objects_.payer(run), node.devices, launched_ns, now_ns), now_ns);
  }
  flow_.read_done(run, inputs);
  flow_.close_step(ref.run);
}

/// Traces a call that left its FIFOs. Returns what is known of its first output: kPending when its end must still be
/// noticed. When it is kReady, nobody needs to look again.
Readiness Launcher::trace_launch(Run& run, uint32_t index, uint32_t error, bool counts, int64_t launched_ns) {
  trace_.launched(run, index, launched_ns);
  // Where launches in flight are counted, a launch seldom computes within the call, and its end is watched for anyway.
  if (error == 0 && counts) return Readiness::kPending;
  const bool has_output = !outputs_.empty() && outputs_[0] != nullptr;
  Readiness seen = Readiness::kFailed;  // it says nothing of its end
  if (error == 0 && has_output) seen = device_.readiness(outputs_[0]);
  if (seen != Readiness::kPending) trace_.ended(run, index, now_ns_(), error != 0, true);
  return seen;
}

void Launcher::on_launched(uint64_t order, uint32_t node, std::span<const Value> made,
                           const std::optional<std::string>& error) {
  const auto found = attended_.find(node_key(order, node));
  if (found == attended_.end()) {  // clear() dropped everything meanwhile
    for (const Value value : made) device_.drop(value);
    return;
  }
  const auto [ref, launched_ns] = found->second;
  attended_.erase(found);
  Run& run = runs_[ref.run];
  const NodeRecord& call = run.plan->plan.node(ref.node);
  outputs_.assign(made.begin(), made.end());
  outputs_.resize(run.plan->plan.outputs(call).size(), nullptr);
  input_ages_.clear();
  tracker_.next_age();
  book(run, call);
  uint32_t failed = run.input_errors[ref.node];
  if (failed == 0 && error) failed = errors_.add(*error);
  finish(ref, failed, false, false, launched_ns);
}

}  // namespace pathways
