/// RunTrace: what a host did for each traced run, and when. Off by default.
///
/// A run is traced when it was prepared while the trace was on; then `Run::times` has an entry per node. The classes of
/// the executor report here; the records lie in a ring until they are taken (TRACE-1, base/trace_ring.h).
///
/// Times are those of the host's clock. A trace over several machines must add each machine's offset where the
/// records are read (pathways/cluster/trace_timeline.py).
///
///   TRACE-2 (whole)  a traced run has one kRun record. Each of its calls, and each transfer within the host, has one
///                    record; a transfer between hosts has one per destination at the source, and one per source at the
///                    destination. A run or a call that is not over when the trace stops has a record without an end.
///
/// A trace changes no order and no result. A traced host looks at more values than others do: at one of each call and
/// of each transfer within it, because it must see their ends.
///
/// Used by the executor and its parts. Threading: the executor's thread only. A host of Python calls start, stop and
/// take with Python's lock held, as each step of that host does.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/trace_ring.h"
#include "runs/run_table.h"
#include "sync/atomic.h"

namespace pathways {

/// What a record tells of.
enum class TraceKind : uint8_t {
  kRun = 0,      ///< the run as a whole on this host
  kCall = 1,     ///< a computation
  kMove = 2,     ///< a transfer within the host
  kSend = 3,     ///< a transfer to the host `peer`
  kReceive = 4,  ///< a transfer from the host `peer`
};

/// What a ready call still waited for; several may hold.
enum Throttle : uint8_t {
  kThrottledByBound = 1,      ///< launches in flight on its devices
  kThrottledByMemory = 2,     ///< MEM-1; for a receive: memory to receive into
  kThrottledByTransfers = 4,  ///< GANG-2: earlier transfers
  kThrottledByGang = 8,       ///< GANG-3
};

/// One thing that a host did. All times in nanoseconds; 0: it did not happen, or had not happened when the trace
/// stopped.
struct RunTraceRecord {
  TraceKind kind;
  WaitedFor waited_for;  ///< until `ready_ns`
  uint8_t throttled_by;  ///< Throttle, from `ready_ns` to `launched_ns`
  uint8_t has_failed;
  uint32_t client;
  uint64_t order;
  uint32_t plan;
  uint32_t node;          ///< index in the host's plan; kRun: 0
  uint32_t peer;          ///< kSend, kReceive: the other host
  uint32_t is_end_seen;   ///< 1: its end was seen at the launch; 0: later, perhaps with others
  uint64_t devices;       ///< local devices, a bit each
  uint64_t bytes;         ///< of a transfer, on each device
  int64_t dispatched_ns;  ///< the host read the run's record
  int64_t ready_ns;       ///< nothing that other nodes make was missing; kSend: its value exists; kReceive: announced
  int64_t launched_ns;    ///< its launch began; kSend: the copy began
  int64_t ended_ns;       ///< the host noticed its end
};
static_assert(sizeof(RunTraceRecord) == 80);

class RunTrace {
 public:
  using Ring = TraceRing<RunTraceRecord>;

  explicit RunTrace(Clock clock) : now_ns_(clock) {}

  bool is_on() const { return ring_.is_on(); }
  void start(size_t capacity) { ring_.start(capacity); }
  /// Records what is not over of every traced run, and traces none of them further.
  void stop(RunTable& runs);
  Ring::Taken take() { return ring_.take(); }

  /// The run was read at `read_ns`; 0: now. Call it before its nodes are prepared, and only while the trace is on.
  void begin(Run& run, int64_t read_ns);
  // For all that follow: the run is traced (Run::is_traced).
  /// A node is ready, but something makes it wait: `why` are Throttles.
  void throttled(Run& run, uint32_t node, uint8_t why);
  /// The launch of a call began, or its copy.
  void launched(Run& run, uint32_t node, int64_t at_ns);
  /// A call or a transfer within the host is over. A second report of the same node does nothing.
  void ended(Run& run, uint32_t node, int64_t at_ns, bool has_failed, bool is_seen_at_launch = false);
  /// A part of a transfer between hosts is over.
  void exchanged(const Run& run, uint32_t node, TraceKind kind, uint32_t peer, const ExchangeTimes& times,
                 int64_t at_ns, bool has_failed);
  /// The run is over on this host.
  void over(Run& run, int64_t at_ns);

 private:
  static uint64_t bytes_of(const Run& run, const NodeRecord& node, TraceKind kind);

  const Clock now_ns_;
  Ring ring_;
  int64_t latest_ns_ = 0;  ///< the latest launch or end in a record: no run ends before
};

}  // namespace pathways
