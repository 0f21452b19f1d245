/// Sequential dispatch, seen from the controller: which step of which run the hosts may prepare now.
///
/// The other way to dispatch, kept to be measured against (`pathways bench pipeline`): a host does its work for a node
/// only when the controller says go for it, and the controller says so once all hosts of the node before it have said
/// that it is enqueued, not that it is done. It is the best of its kind that we know how to write:
///   - a step is one call together with the transfers before it, so that a transfer costs no round of its own;
///   - the first go of a run travels with the run's record, and an empty step is passed over at once.
/// One run is stepped at a time: its calls are all in their devices' FIFOs before the first of the next run is, so the
/// FIFOs are projections of one order here too (ORD-1).
///
/// Pure: no thread, no clock, no I/O; the controller sends what it is told to.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <unordered_map>
#include <vector>

#include "sequencer/sequencer.h"

namespace pathways {

/// A node of a program as the stepper sees it: whom it concerns.
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
    std::vector<uint32_t> heard;  ///< hosts that enqueue its call; none in the step of the transfers at the end
  };
  /// An entry of the order that waits until the run before it has been stepped through.
  struct Waiting {
    EntryId id;
    Entry entry;
    std::vector<std::byte> record;
  };

  explicit Stepper(uint32_t hosts) : awaited_(hosts), over_(hosts) {}

  /// Nodes in the program's order. A plan that is not known is dispatched as a whole.
  void add_plan(uint32_t plan, std::span<const ProgramNode> nodes);
  bool knows(uint32_t plan) const { return plans_.contains(plan); }
  std::span<const Step> steps_of(uint32_t plan) const { return plans_.at(plan); }

  bool is_busy() const { return steps_ != nullptr; }
  /// Starts on a run of a known plan. Nothing else may be under way.
  void begin(EntryId run, uint64_t order, uint32_t client, uint32_t plan);
  /// The step to say go for; nullptr while one is under way, and when the run has been stepped through.
  const Step* next();
  uint64_t order() const { return order_; }
  uint32_t client() const { return client_; }

  /// `host` has enqueued the call of the current step. False when that cannot be.
  bool enqueued(EntryId run, uint32_t node, uint32_t host);
  /// `host` is done with a run: nothing more is to be waited for there.
  void host_done(EntryId run, uint32_t host);

  std::deque<Waiting>& waiting() { return waiting_; }
  bool is_idle() const { return !is_busy() && waiting_.empty(); }

 private:
  void stop_awaiting(uint32_t host);

  std::unordered_map<uint32_t, std::vector<Step>> plans_;
  const std::vector<Step>* steps_ = nullptr;  ///< of the run under way
  size_t at_ = 0;                             ///< steps that were begun
  EntryId run_ = 0;
  uint64_t order_ = 0;
  uint32_t client_ = 0;
  uint32_t left_ = 0;          ///< hosts still to be heard of the current step
  std::vector<bool> awaited_;  ///< by host: it is one of them
  std::vector<bool> over_;     ///< by host: it is done with the run
  std::deque<Waiting> waiting_;
};

}  // namespace pathways
