/// RunTable: the state of the runs that are under way on a host: what each node still waits for, and which values
/// exist.
///
/// A run has a slot until all its steps are done and its results are settled. Slots and their tables are used again, so
/// a run in the steady state allocates nothing. The table holds the state only; runs/dataflow.h moves values
/// through it.
///
/// Threading: the executor's thread only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/check.h"
#include "device/device.h"
#include "plan/plan.h"
#include "runs/host_link.h"
#include "runs/plan_table.h"
#include "runs/value_refs.h"

namespace pathways {

/// A node of a run, by the run's slot.
struct NodeRef {
  uint32_t run;
  uint32_t node;
};

/// A node of a run, by the run's place in the order. Keys are sorted as the order is. `node`: below kMaxGlobalNodes.
inline uint64_t node_key(uint64_t order, uint32_t node) { return order << 20 | (node & 0xfffffu); }
inline uint64_t order_of(uint64_t key) { return key >> 20; }
inline uint32_t node_of(uint64_t key) { return static_cast<uint32_t>(key & 0xfffffu); }

/// What a node waited for last, before it was ready.
enum class WaitedFor : uint8_t { kInput = 0, kEarlierCall = 1, kCompilation = 2 };

/// What a trace records of a node of a traced run (runs/run_trace.h). Times as in RunTraceRecord.
struct NodeTimes {
  int64_t ready_ns = 0;
  int64_t launched_ns = 0;
  /// What came last. A call that reads an output of the call before it on its device has waited for that call.
  WaitedFor waited_for = WaitedFor::kInput;
  uint8_t throttled_by = 0;
  bool is_over = false;
};

/// The same of a transfer between hosts, on one of them.
struct ExchangeTimes {
  int64_t source_ready_ns = 0;  ///< the value to send exists
  int64_t send_ns = 0;          ///< the last send of it began
  int64_t announced_ns = 0;     ///< the sources were told where to write
  bool was_stalled = false;     ///< there was no memory to receive into at first
};

/// A choice of a run on this host.
struct ChoiceState {
  static constexpr uint32_t kUndecided = 0xffffffffu, kFailed = 0xfffffffeu;
  uint32_t taken = kUndecided;  ///< the case
  uint32_t error = 0;           ///< why there is none
  bool is_enqueued = false;     ///< on its owner: the scalar exists as a value

  bool is_decided() const { return taken != kUndecided; }
  bool is_case() const { return is_decided() && taken != kFailed; }
};

struct PredicateState {
  uint32_t missing = 0;  ///< its choice and its parent, as far as they are not settled
  uint32_t verdict = 0;  ///< when it is settled: 0 if it holds, kDead if not, or an error
};

struct Run {
  PlanEntry* plan = nullptr;  ///< nullptr: the slot is free
  uint64_t order = 0;
  uint64_t tag = 0;
  uint32_t client = 0;
  uint32_t open = 0;  ///< steps that are not done, and results that are not settled
  uint32_t gangs = 0;
  int64_t busy_ns = 0;        ///< time in which this host's devices were busy for it, as far as it is over
  int64_t counted_ns = 0;     ///< until when that is counted
  int64_t launched_ns = 0;    ///< when its last launch began; 0: none has
  int64_t dispatched_ns = 0;  ///< traced: when its record was read; 0: it is not traced
  std::vector<Value> values;
  std::vector<uint64_t> ages;              ///< per value, valid once the value exists
  std::vector<uint32_t> errors;            ///< per value: 0, or its error
  std::vector<uint32_t> readers;           ///< per value: readers that are not launched yet
  std::vector<uint32_t> missing;           ///< per node: how many things it still waits for
  std::vector<uint32_t> input_errors;      ///< per node: error of a failed input
  std::vector<uint64_t> results;           ///< handles
  std::vector<uint64_t> wanted;            ///< READ-1: a bit per result, or empty
  std::vector<ChoiceState> choices;        ///< per choice
  std::vector<PredicateState> predicates;  ///< per predicate
  TakenBranches taken;                     ///< what is known of its predicates
  uint32_t untaken_gangs = 0;              ///< that nobody launches
  std::vector<NodeTimes> times;            ///< per node, while the run is traced

  void begin_branches(const Branches& branches);
  bool is_traced() const { return dispatched_ns != 0; }
  /// Resets the run to the state before any node of the plan: no value exists.
  void begin(const Plan& of);
  /// Of a node whose predicate is settled: 0 if it is taken, kDead if not, or the error of its predicate.
  uint32_t verdict(const NodeRecord& node) const {
    return node.predicate == kNoPredicate ? 0 : predicates[node.predicate].verdict;
  }
  /// Its devices were busy for it from `began_ns` to `now_ns`. Time in which several were busy counts once.
  void count_time(int64_t began_ns, int64_t now_ns) {
    busy_ns += std::max<int64_t>(0, now_ns - std::max(counted_ns, began_ns));
    counted_ns = std::max(counted_ns, now_ns);
  }
  NodeContext context(uint32_t node) const {
    return {order, client, plan->id, node, plan->plan.node(node).computation};
  }
};

class RunTable {
 public:
  /// A free slot, whose run must begin now.
  uint32_t acquire();
  void release(uint32_t slot);
  Run& operator[](uint32_t slot) { return *runs_[slot]; }
  const Run& operator[](uint32_t slot) const { return *runs_[slot]; }
  /// Slots, free ones included.
  uint32_t size() const { return static_cast<uint32_t>(runs_.size()); }
  uint32_t live() const { return live_; }

  /// A node of the run waits for one thing less. True: it waits for nothing more.
  bool satisfy(NodeRef ref) {
    uint32_t& missing = runs_[ref.run]->missing[ref.node];
    PW_DCHECK(missing > 0);
    return --missing == 0;
  }
  /// Drops all values, and forgets all runs.
  void clear(ValueRefs& refs);

  /// Bytes of memory that a host keeps for one run of a plan: its counters and handles.
  static size_t run_bytes(const Plan& plan);
  /// For debug builds and tests.
  void validate() const;

 private:
  std::vector<std::unique_ptr<Run>> runs_;
  std::vector<uint32_t> free_;
  uint32_t live_ = 0;
};

}  // namespace pathways
