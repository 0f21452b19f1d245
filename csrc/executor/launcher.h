/// Launcher: launches the calls that are ready.
///
/// A call is launched when nothing is missing: its inputs exist as values (XLA may still compute them), the call heads
/// the FIFO of each local device that it holds, and its plan is compiled. It is throttled where too many launches are
/// in flight, where memory is missing (MEM-1), and where a gang may not start yet (GANG-2, GANG-3).
///
///   GANG-1  a call of a gang is launched exactly once, also when some of its inputs failed: placeholders then replace
///           the failed inputs. `gangs` counts these launches, per run and in all. Only these are not
///           launched: a call of a plan that could not be compiled, and a call that is not taken or whose predicate
///           failed. All of its hosts know that (Decisions).
///   ERR-1   a call that was not launched, or whose launch failed, fails its outputs with that error. The error of a
///           failed input comes first.
///
/// An attended launch is made by a thread of the backend (Device::launch, kPending). The call stays at the head of its
/// FIFOs until `on_launched`.
///
/// Used by the executor. Threading: the executor's thread only. Allocation: none per node in the steady state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "movement/decisions.h"
#include "movement/row_exchanges.h"
#include "movement/transfer_manager.h"
#include "runs/client_objects.h"
#include "runs/dataflow.h"
#include "runs/executor_part.h"
#include "runs/launch_memory.h"

namespace pathways {

class Launcher : private ExecutorPart {
 public:
  Launcher(const ExecutorPart& part, const ClientObjects& objects, LaunchMemory& memory, Dataflow& flow,
           TransferManager& transfers, RowExchanges& rows, Decisions& decisions)
      : ExecutorPart(part),
        objects_(objects),
        memory_(memory),
        flow_(flow),
        transfers_(transfers),
        rows_(rows),
        decisions_(decisions) {}

  /// Launches a call that is ready, fails it, or throttles it. False: the launch took long, because it computed within
  /// the call; other hosts' records may have come meanwhile.
  bool launch(NodeRef ref);
  /// An attended launch is over: see Executor::on_launched.
  void on_launched(uint64_t order, uint32_t node, std::span<const Value> made, const std::optional<std::string>& error);

  uint64_t launches() const { return launches_; }
  uint64_t gangs() const { return gangs_; }
  /// Attended launches under way.
  size_t attended() const { return attended_.size(); }
  bool is_attended(const Run& run, uint32_t node) const { return attended_.contains(node_key(run.order, node)); }
  /// An attended launch that ends later finds no entry.
  void clear() { attended_.clear(); }

 private:
  bool must_wait(const Run& run, const NodeRecord& node);
  bool owes_before(const Run& run, const NodeRecord& node);
  uint8_t why_it_waits(const Run& run, const NodeRecord& node);
  Readiness trace_launch(Run& run, uint32_t index, uint32_t error, bool counts, int64_t launched_ns);
  Status enqueue(const Run& run, uint32_t index, const NodeRecord& node);
  void book(Run& run, const NodeRecord& node);
  void skip(NodeRef ref, uint32_t verdict);
  void finish(NodeRef ref, uint32_t error, bool counts, bool is_watched, int64_t launched_ns);

  struct Attended {
    NodeRef ref;
    int64_t launched_ns;
  };

  const ClientObjects& objects_;
  LaunchMemory& memory_;
  Dataflow& flow_;
  TransferManager& transfers_;
  RowExchanges& rows_;
  Decisions& decisions_;
  std::unordered_map<uint64_t, Attended> attended_;  ///< by order and node
  std::vector<Value> inputs_, outputs_;              ///< scratch: of the call that is being launched
  std::vector<uint64_t> input_ages_;                 ///< the same
  uint64_t launches_ = 0, gangs_ = 0;
};

}  // namespace pathways
