#include "executor/run_trace.h"

namespace pathways {

RunTraceRecord RunTrace::record_of(const Run& run, uint32_t node, TraceKind kind) {
  RunTraceRecord record{};
  record.kind = kind;
  record.client = run.client;
  record.order = run.order;
  record.plan = run.plan->id;
  record.node = node;
  record.dispatched_ns = run.dispatched_ns;
  if (kind == TraceKind::kRun) return record;
  const Plan& plan = run.plan->plan;
  const NodeRecord& of = plan.node(node);
  record.devices = kind == TraceKind::kSend ? of.input_devices : of.devices;
  if (kind == TraceKind::kCall) return record;
  const auto values = kind == TraceKind::kReceive ? plan.outputs(of) : plan.inputs(of);
  const auto& sizes = run.plan->sizes.values;
  if (!values.empty() && values[0] < sizes.size()) record.bytes = sizes[values[0]];
  return record;
}

void RunTrace::begin(Run& run) {
  run.dispatched_ns = monotonic_ns();
  run.times.assign(run.plan->plan.nodes().size(), NodeTimes{});
}

void RunTrace::throttled(Run& run, uint32_t node, uint8_t why) {
  NodeTimes& times = run.times[node];
  if (times.ready_ns == 0) times.ready_ns = monotonic_ns();
  times.throttled_by |= why;
}

void RunTrace::launched(Run& run, uint32_t node, int64_t at_ns) {
  NodeTimes& times = run.times[node];
  times.launched_ns = at_ns;
  if (times.ready_ns == 0) times.ready_ns = at_ns;
}

void RunTrace::ended(Run& run, uint32_t node, int64_t at_ns, bool has_failed, bool is_seen_at_launch) {
  NodeTimes& times = run.times[node];
  if (times.is_over) return;
  times.is_over = true;
  const bool is_call = run.plan->plan.node(node).kind == NodeKind::kCall;
  RunTraceRecord record = record_of(run, node, is_call ? TraceKind::kCall : TraceKind::kMove);
  record.waited_for = times.waited_for;
  record.throttled_by = times.throttled_by;
  record.has_failed = has_failed ? 1 : 0;
  record.is_end_seen = is_seen_at_launch ? 1 : 0;
  record.ready_ns = times.ready_ns;
  record.launched_ns = times.launched_ns;
  record.ended_ns = at_ns;
  ring_.add(record);
}

void RunTrace::exchanged(const Run& run, uint32_t node, TraceKind kind, uint32_t peer, const ExchangeTimes& times,
                         int64_t at_ns, bool has_failed) {
  RunTraceRecord record = record_of(run, node, kind);
  const bool is_send = kind == TraceKind::kSend;
  record.waited_for = run.times[node].waited_for;
  record.throttled_by = !is_send && times.was_stalled ? kThrottledByMemory : 0;
  record.has_failed = has_failed ? 1 : 0;
  record.peer = peer;
  record.ready_ns = is_send ? times.source_ready_ns : times.announced_ns;
  record.launched_ns = is_send ? times.send_ns : times.announced_ns;
  record.ended_ns = at_ns;
  ring_.add(record);
}

void RunTrace::over(Run& run, int64_t at_ns) {
  RunTraceRecord record = record_of(run, 0, TraceKind::kRun);
  record.ended_ns = at_ns;
  ring_.add(record);
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
