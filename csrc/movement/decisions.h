/// Decisions: which branches the runs of this host take.
///
/// The owner of a choice reads the scalar when XLA has computed it and, if the devices' memory is not the host's, its
/// copy has come (Device::begin_scalar: no launch waits for that copy but those of the choice). Then it sends the case
/// to the hosts that its plan names; a host hands on what it hears to those that its own plan names (plan/branches.h).
/// Then the predicates of the choice are settled, from the outermost one on, and their nodes go on: a node that is not
/// taken leaves its FIFOs at its turn without a launch, and its outputs are dead (kDead). A select gives the input of
/// the case that was taken, as soon as that input exists.
///
/// Each choice of a run is a step of the run: it is decided exactly once on each host that has it (a case, an error, or
/// dead with the branch in which it is computed), so nothing of a run comes after its end.
///
///   GANG-1  all hosts of an island hear of a choice by one of them, so they launch a gang with a predicate alike. An
///           error of the predicate, other than an error of an input, is known to all of them; then nobody launches.
///   GANG-2  a decision goes out before the host waits for its peers in a later launch (`owes_before`), because they
///           may need it before they launch their part. A launch on several devices returns at once, but XLA runs such
///           launches one after the other. So the scalars of earlier choices must be enqueued before it. Each wait is
///           for something earlier in the order, so no cycle of waits can form.
///   ERR-2   a choice of which a lost host would have told fails with the failure reason, here and at all hosts that
///           this host tells. The host takes in what the lost host wrote before (Host::lose_peers), so the first of
///           the two counts, and only on this host. Hosts that are dead are not told, nor are their successors
///           (PEER-3).
///
/// A transfer is decided by its sources: they tell its destinations that the value is dead, as they tell of an error
/// (TransferManager). So a destination returns memory only when no source writes there any more, even if the ends of a
/// transfer have decided differently, because the owner died between two records.
///
/// Used by the executor. Threading: the executor's thread only. Allocation: per run of a plan with choices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "movement/peer_book.h"
#include "runs/dataflow.h"
#include "runs/executor_part.h"

namespace pathways {

class Decisions : private ExecutorPart, private PeerWaiter {
 public:
  Decisions(const ExecutorPart& part, Dataflow& flow, PeerBook& peers)
      : ExecutorPart(part), flow_(flow), peers_(peers) {
    peers_.add(*this);
  }

  /// A run begins, and its nodes are prepared. Does nothing for a plan without choices.
  void begin(uint32_t slot);
  /// See Dispatcher.
  void value_there(uint32_t slot, uint32_t value, Value ref, uint64_t devices);
  /// The scalar of a choice is ready, or has failed with `error`.
  void read(const PendingValue& item, uint32_t error);
  /// A select that is ready.
  void select(NodeRef ref);
  /// GANG-2: whether a choice before this call is not decided and this host must tell it.
  bool owes_before(const Run& run, const NodeRecord& node) const;

  /// `host` tells what was chosen. kInvalid: it has no such part in the run; then nothing was done.
  Status on_decision(uint64_t order, uint32_t number, uint32_t host, const Decision& decision);

  /// Runs with undecided choices.
  size_t count() const { return undecided_.size(); }
  /// Whether another host still has to tell of a choice of a run, up to this place in the order.
  bool awaits_peers(uint64_t order) const;
  /// Whether a scalar was enqueued since the last call.
  bool take_enqueued() { return std::exchange(is_enqueued_, false); }
  void clear();
  /// For debug builds and tests.
  void validate() const;

 private:
  struct Undecided {
    uint32_t slot;
    uint32_t choices;  ///< that are not decided
  };

  void decide(uint32_t slot, uint32_t choice, uint32_t taken, uint32_t error);
  void tell(const Run& run, const ChoiceRecord& choice, const ChoiceState& state);
  void settle_predicate(uint32_t slot, uint32_t predicate);
  // PeerWaiter
  void miss(uint32_t slot, const Lost& lost) override;
  void refuse(uint64_t order, const Plan& plan, const std::string& why) override;

  Dataflow& flow_;
  PeerBook& peers_;
  std::map<uint64_t, Undecided> undecided_;  ///< by order
  bool is_enqueued_ = false;
};

}  // namespace pathways
