#include "runs/run_trace.h"

#include <algorithm>

namespace pathways {

/// Bytes on each device of what a transfer sends or receives.
uint64_t RunTrace::bytes_of(const Run& run, const NodeRecord& node, TraceKind kind) {
  const Plan& plan = run.plan->plan;
  const auto values = kind == TraceKind::kReceive ? plan.outputs(node) : plan.inputs(node);
  const auto& sizes = run.plan->sizes.values;
  return !values.empty() && values[0] < sizes.size() ? sizes[values[0]] : 0;
}

void RunTrace::begin(Run& run, int64_t read_ns) {
  run.dispatched_ns = read_ns != 0 ? read_ns : now_ns_();
  run.times.assign(run.plan->plan.nodes().size(), NodeTimes{});
}

void RunTrace::throttled(Run& run, uint32_t node, uint8_t why) {
  NodeTimes& times = run.times[node];
  if (times.ready_ns == 0) times.ready_ns = now_ns_();
  times.throttled_by |= why;
}

void RunTrace::launched(Run& run, uint32_t node, int64_t at_ns) {
  NodeTimes& times = run.times[node];
  times.launched_ns = at_ns;
  if (times.ready_ns == 0) times.ready_ns = at_ns;
  latest_ns_ = std::max(latest_ns_, at_ns);
}

void RunTrace::ended(Run& run, uint32_t node, int64_t at_ns, bool has_failed, bool is_seen_at_launch) {
  NodeTimes& times = run.times[node];
  if (times.is_over) return;
  times.is_over = true;
  const NodeRecord& of = run.plan->plan.node(node);
  const TraceKind kind = of.kind == NodeKind::kCall ? TraceKind::kCall : TraceKind::kMove;
  if (at_ns != 0) {
    at_ns = std::max(at_ns, times.launched_ns);  // a look may launch and notice the end at its own, earlier time
    latest_ns_ = std::max(latest_ns_, at_ns);
  }
  ring_.add({.kind = kind,
             .waited_for = times.waited_for,
             .throttled_by = times.throttled_by,
             .has_failed = has_failed,
             .client = run.client,
             .order = run.order,
             .plan = run.plan->id,
             .node = node,
             .peer = 0,
             .is_end_seen = is_seen_at_launch,
             .devices = of.devices,
             .bytes = kind == TraceKind::kCall ? 0 : bytes_of(run, of, kind),
             .dispatched_ns = run.dispatched_ns,
             .ready_ns = times.ready_ns,
             .launched_ns = times.launched_ns,
             .ended_ns = at_ns});
}

void RunTrace::exchanged(const Run& run, uint32_t node, TraceKind kind, uint32_t peer, const ExchangeTimes& times,
                         int64_t at_ns, bool has_failed) {
  const NodeRecord& of = run.plan->plan.node(node);
  const bool is_send = kind == TraceKind::kSend;
  latest_ns_ = std::max(latest_ns_, at_ns);
  ring_.add({.kind = kind,
             .waited_for = run.times[node].waited_for,
             .throttled_by = static_cast<uint8_t>(!is_send && times.was_stalled ? kThrottledByMemory : 0),
             .has_failed = has_failed,
             .client = run.client,
             .order = run.order,
             .plan = run.plan->id,
             .node = node,
             .peer = peer,
             .is_end_seen = 0,
             .devices = is_send ? of.input_devices : of.devices,
             .bytes = bytes_of(run, of, kind),
             .dispatched_ns = run.dispatched_ns,
             .ready_ns = is_send ? times.source_ready_ns : times.announced_ns,
             .launched_ns = is_send ? times.send_ns : times.announced_ns,
             .ended_ns = at_ns});
}

void RunTrace::over(Run& run, int64_t at_ns) {
  ring_.add({.kind = TraceKind::kRun,
             .waited_for = WaitedFor::kInput,
             .throttled_by = 0,
             .has_failed = 0,
             .client = run.client,
             .order = run.order,
             .plan = run.plan->id,
             .node = 0,
             .peer = 0,
             .is_end_seen = 0,
             .devices = 0,
             .bytes = 0,
             .dispatched_ns = run.dispatched_ns,
             .ready_ns = 0,
             .launched_ns = 0,
             .ended_ns = at_ns == 0 ? 0 : std::max(at_ns, latest_ns_)});
  run.dispatched_ns = 0;
}

void RunTrace::stop(RunTable& runs) {
  if (!is_on()) return;
  for (uint32_t slot = 0; slot < runs.size(); ++slot) {  // TRACE-2
    Run& run = runs[slot];
    if (run.plan == nullptr || !run.is_traced()) continue;
    const auto nodes = run.plan->plan.nodes();
    for (uint32_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i].kind == NodeKind::kCall) ended(run, i, 0, false);
    }
    over(run, 0);
  }
  ring_.stop();
}

}  // namespace pathways
