/// Sequential dispatch, for measurement only: entries leave the controller one after the other, each when the hosts
/// have enqueued all calls of the run before it (controller/stepper.h).
///
/// Grants has one of these when ControllerOptions::sequential is set, and none otherwise; nothing else of the
/// controller knows of it. Grants gives it each granted entry (`wait`), sends the entries that it returns (`next`), and
/// passes on what the hosts report. It sends the gos itself.
///
/// ERR-2: sequential dispatch ends with the first loss of a host. Before the loss, all that waits for its turn is sent,
/// in its order and without steps, as parallel dispatch would have sent it already. So what is granted never meets a
/// lost host's outbox, and the survivors hear of the loss behind it. From then on dispatch is parallel.
///
/// Invariant: while a run is being stepped, no other entry is returned (ORD-1: see controller/stepper.h).
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "controller/clients.h"
#include "controller/controller_options.h"
#include "controller/host_rings.h"
#include "controller/stepper.h"
#include "messages/records.h"

namespace pathways {

class SequentialDispatchForTesting {
 public:
  /// A granted entry; its record goes to its hosts with these flags.
  struct Granted {
    EntryId id;
    Entry entry;
    std::vector<std::byte> record;
    uint16_t flags = 0;
  };

  SequentialDispatchForTesting(HostRings& hosts, Clients& clients, ControllerStats& stats)
      : hosts_(hosts), clients_(clients), stats_(stats), stepper_(hosts.count()) {}

  /// Registers the nodes of a plan, in the program's order.
  void add_plan(uint32_t plan, std::span<const ProgramNode> nodes) { stepper_.add_plan(plan, nodes); }
  bool knows(uint32_t plan) const { return stepper_.knows(plan); }

  /// A granted entry; its turn comes behind all earlier ones.
  void wait(const Entry& entry, EntryId id, std::span<const std::byte> record);
  /// Sends the gos that are due, and returns the next entry whose turn it is. The caller sends that entry to its hosts
  /// and calls again, because the first go of a run follows the run's record. Empty: nothing more can leave now.
  std::optional<Granted> next();

  /// `host` has enqueued the call of the current step. False when the report is invalid.
  bool enqueued(uint32_t host, const EnqueuedRecord& record);
  /// `host` is done with a run.
  void host_done(EntryId run, uint32_t host) { stepper_.host_done(run, host); }
  /// Hosts will be lost. The caller then sends all that `next` returns.
  void end();
  bool is_idle() const { return !stepper_.is_busy() && waiting_.empty(); }

 private:
  void send_gos();

  HostRings& hosts_;
  Clients& clients_;
  ControllerStats& stats_;
  Stepper stepper_;
  std::deque<Granted> waiting_;  ///< entries that wait until all steps of the run before them are done
  bool is_over_ = false;         ///< a host was lost
};

}  // namespace pathways
