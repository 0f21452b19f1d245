/// Runs with a deadline: from when their deadline is known until they are over or late.
///
///   DEAD-1  a run that is not over when its deadline passes fails at its client at that moment. If no host was granted
///           the run, the controller drops it in its place in the order. If it was granted, all its hosts still run it
///           (GANG-1).
///
/// AdmissionQueue calls `watch` when it holds or orders a run, and asks for the text of a run that is read too late.
/// The Controller calls `pass` in each pass, behind all records of the pass, and sleeps until `next_ns` at most.
///
/// Invariant: see controller/deadline_heap.h.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "controller/deadline_heap.h"
#include "dispatch/controller_options.h"
#include "dispatch/grants.h"
#include "ledger/clients.h"
#include "ledger/memory_ledger.h"
#include "loops/loops.h"

namespace pathways {

class AdmissionQueue;

class Deadlines {
 public:
  Deadlines(Clients& clients, const MemoryLedger& ledger, Grants& grants, Loops& loops, ControllerStats& stats)
      : clients_(clients), ledger_(ledger), grants_(grants), loops_(loops), stats_(stats) {}

  bool empty() const { return heap_.empty(); }
  /// The next deadline, by the controller's clock; INT64_MAX: there is none.
  int64_t next_ns() const { return heap_.empty() ? INT64_MAX : heap_.next_ns(); }

  /// Notes the deadline of a run, if it has one. Called when the run is ordered, and earlier too when the run is held.
  /// `loop`: the composite that the run has begun, which has no entry of its own.
  void watch(const ClientState& client, std::span<const std::byte> record, EntryId id = DeadlineHeap::kHeld,
             uint64_t loop = 0);
  /// Fails the runs whose deadline has passed; held ones through `queue`. Returns the number of deadlines that passed.
  uint32_t pass(AdmissionQueue& queue, int64_t now);
  /// The error text for whatever depends on a late run on the hosts; the client itself has a better text.
  std::string too_late(std::span<const std::byte> run) const;

  void validate() const { heap_.validate(); }

 private:
  bool is_over(const DeadlineHeap::Item& item) const;
  void pass(const DeadlineHeap::Item& item, AdmissionQueue& queue);

  Clients& clients_;
  const MemoryLedger& ledger_;
  Grants& grants_;
  Loops& loops_;
  ControllerStats& stats_;
  DeadlineHeap heap_;
};

}  // namespace pathways
