/// SequentialDispatch: runs that are prepared node by node, for measurements: the baseline without parallel
/// preparation.
///
/// The controller sends such a run as kRunStepwise, and then a go for its next nodes. Each go prepares these nodes, and
/// the host reports each call when it is enqueued (HostLink::enqueued).
///
/// Threading: the executor's thread only.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "executor/dataflow.h"
#include "executor/executor_part.h"

namespace pathways {

class SequentialDispatch : private ExecutorPart {
 public:
  SequentialDispatch(const ExecutorPart& part, Dataflow& flow) : ExecutorPart(part), flow_(flow) {}

  /// Makes every node of a new run wait for its go.
  void begin_run(uint32_t slot);
  /// Prepares the nodes of a run up to global node `last`. Does nothing when the run is not known.
  void on_go(uint64_t order, uint32_t last);
  void clear() { runs_waiting_.clear(); }

  uint64_t goes() const { return goes_; }
  /// Time spent on preparing the nodes of these gos.
  uint64_t go_ns() const { return go_ns_; }

 private:
  Dataflow& flow_;
  std::unordered_map<uint64_t, uint32_t> runs_waiting_;  ///< by order: slots of runs with nodes that wait for a go
  uint64_t goes_ = 0, go_ns_ = 0;
};

}  // namespace pathways
