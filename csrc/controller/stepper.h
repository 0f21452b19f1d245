/// Sequential dispatch, at the controller: which step of which run the hosts may prepare now.
///
/// Sequential dispatch is kept to measure parallel dispatch against it (`pathways bench pipeline`). A host does its
/// work for a node only when the controller sends a go for the node. The controller sends the go when all hosts of the
/// node before have reported that they enqueued that node; the node need not be done. This is the best sequential
/// dispatch that we know how to write:
///   - a step is one call together with the transfers before it, so a transfer costs no round trip of its own;
///   - the controller sends the first go of a run together with the run's record, and it passes over an empty step at
///     once.
/// One run is stepped at a time: all its calls are in their devices' FIFOs before the first call of the next run is. So
/// the FIFOs are projections of one order here too (ORD-1).
///
/// Pure: no thread, no clock, no I/O. SequentialDispatchForTesting sends what the stepper returns.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "sequencer/sequencer.h"

namespace pathways {

/// A node of a program as the stepper sees it: its number and its hosts.
struct ProgramNode {
  uint32_t number = 0;  ///< global node
  bool is_call = false;
  std::vector<uint32_t> hosts;
};

class Stepper {
 public:
  struct Step {
    uint32_t last = 0;                      ///< the hosts prepare their nodes up to this one
    std::vector<uint32_t> hosts_to_notify;  ///< hosts with a node in the step
    std::vector<uint32_t> heard;  ///< hosts that report its call as enqueued; empty in the last step, of transfers only
  };
  explicit Stepper(uint32_t hosts) : awaited_(hosts), over_(hosts) {}

  /// Registers the nodes of a plan, in the program's order. A run of a plan that is not registered is dispatched as a
  /// whole.
  void add_plan(uint32_t plan, std::span<const ProgramNode> nodes);
  bool knows(uint32_t plan) const { return plans_.contains(plan); }
  std::span<const Step> steps_of(uint32_t plan) const { return plans_.at(plan); }

  bool is_busy() const { return steps_ != nullptr; }
  /// Starts on a run of a registered plan. No other run may be under way.
  void begin(EntryId run, uint64_t order, uint32_t client, uint32_t plan);
  /// The next step to send a go for; nullptr while a step is under way, and when all steps of the run are done.
  const Step* next();
  uint64_t order() const { return order_; }
  uint32_t client() const { return client_; }

  /// `host` has enqueued the call of the current step. False when the report is invalid.
  bool enqueued(EntryId run, uint32_t node, uint32_t host);
  /// `host` is done with a run: the stepper waits for nothing more from that host.
  void host_done(EntryId run, uint32_t host);
  /// Waits for no host any more: `next` returns all steps that are left, one after the other.
  void await_nothing();

 private:
  void stop_awaiting(uint32_t host);

  std::unordered_map<uint32_t, std::vector<Step>> plans_;
  const std::vector<Step>* steps_ = nullptr;  ///< of the run under way; nullptr: none is
  size_t at_ = 0;                             ///< how many steps were begun
  EntryId run_ = 0;
  uint64_t order_ = 0;
  uint32_t client_ = 0;
  uint32_t left_ = 0;          ///< hosts that have not yet reported the current step
  std::vector<bool> awaited_;  ///< by host: it has not yet reported the current step
  std::vector<bool> over_;     ///< by host: it is done with the run
};

}  // namespace pathways
