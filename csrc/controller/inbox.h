/// The controller's reading half: takes records from the clients' and hosts' rings, checks them, and passes them on.
///
/// A client's valid record goes to AdmissionQueue, and so does a cancel. A host's record goes to Grants, to the
/// client's credits, or to the client.
///
/// One pass takes a bounded batch from every ring, so a client that floods the controller delays another client by one
/// batch at most.
/// COST-3   A pass looks only at hosts whose bit is set (ReadyBitmap).
/// COST-4   And only at clients that have rung, or that it has not finished with (ReadyClients).
/// OWN-1    A client that sends an invalid record is marked to be evicted (Controller); the other clients notice
///          nothing.
/// FAULT-1  A host that sends an invalid record is not read any more, and whoever started it ends it. Nothing of that
///          record has been applied: it is checked as a whole before.
/// SPEAK-1  A host fails only values in which it has a part. What it says of others is dropped.
/// TRUST-1  The controller copies a record out of its ring before it reads the record, and accesses a client's block
///          through a ClientView only. The ring that a record came by says which client sent it. A run must name a plan
///          of its own client, and that plan's hosts.
/// MEM-6    No run of a client enters the order unless the ledger knows the plan's memory and each handle that the run
///          makes; so no client, whatever its library does, runs work that is not counted.
/// FLOW-1   The controller bounds the work that a client has under way (messages/credits.h). It reads no further record
///          of a client that is at a bound until the hosts have done earlier work of that client. A client's cancels
///          come on a ring of their own, which the controller always reads.
/// SHARE-2  A run that may not enter the order yet stays in its client's ring, and so does what comes behind it.
/// ERR-2    When a client submits a run that needs lost hosts and surviving hosts, the controller does not read that
///          client further until all hosts of the run are there.
///
/// Invariant: `unread_` counts the clients whose `is_unread` is true.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "controller/admission_queue.h"
#include "dispatch/controller_options.h"
#include "dispatch/device_shares.h"
#include "dispatch/grants.h"
#include "dispatch/host_rings.h"
#include "ledger/clients.h"
#include "ledger/memory_ledger.h"
#include "messages/ready_bitmap.h"
#include "messages/records.h"
#include "sync/mailbox.h"

namespace pathways {

class Inbox {
 public:
  /// `ready_bitmap`: hosts whose rings have records. `mailbox`: what a record names may be registered in the mail.
  Inbox(const ControllerOptions& options, ReadyBitmap& ready_bitmap, const Mailbox& mailbox, HostRings& hosts,
        Clients& clients, MemoryLedger& ledger, DeviceShares& shares, Grants& grants, AdmissionQueue& queue,
        ControllerStats& stats);

  /// TRUST-1: see Controller::register_plan().
  void register_plan(uint32_t plan, uint32_t client, GroupId group);

  /// The hosts of a client's plan. Throws Error(kInvalid) when it is no plan of the client's.
  GroupId group_of(uint32_t plan, uint32_t client) const;

  /// Takes a batch from each host that has marked its bit. Throws Error(kInvalid) for an invalid record.
  uint32_t drain_hosts();
  /// Takes a batch from one host; 0: it has sent nothing more.
  uint32_t drain_host(uint32_t host);
  /// Looks at a host's ring in the next pass, whatever its bit says.
  void look_at(uint32_t host) { ready_hosts_.push_back(host); }

  /// Takes a batch from each client that is ready and may be read further, and every ready client's cancels.
  uint32_t drain_clients();
  /// Takes a batch from one client. SHARE-2: Controller calls it when the client's next run may enter.
  uint32_t drain_client(ClientState& client);
  /// Clients that are not read further because they have too much under way; and how many of them can be read further,
  /// now that this pass has done some of their work.
  uint32_t unread() const { return unread_; }
  uint32_t readable() const;
  /// The client is gone.
  void forget(const ClientState& client) { unread_ -= client.is_unread ? 1U : 0U; }

  void validate() const;

 private:
  struct PlanOwner {
    uint32_t client = UINT32_MAX;  ///< UINT32_MAX: the plan is not registered
    GroupId group = 0;
    bool is_dropped = false;  ///< a command that was taken drops it, although the order may not have come to it
  };

  uint32_t drain_cancels(ClientState& client);
  static bool is_full(const ClientState& client);
  bool take(ClientState& client, std::span<const std::byte> record);
  bool may_enter(const ClientState& client, std::span<const std::byte> record, bool is_refused);
  void cancel(ClientState& client, uint64_t tag);
  std::string unsound(const ClientState& client, std::span<const std::byte> record);
  std::string foreign(const ClientState& client, std::span<const std::byte> record, bool* may_be_in_the_mail) const;
  std::string uncounted(std::span<const std::byte> run) const;
  void note_dropped_plan(std::span<const std::byte> command);
  void take(uint32_t host, std::span<const std::byte> record);
  void commands_done(uint32_t host, const CommandsDoneRecord& record);

  const ControllerOptions& options_;
  ReadyBitmap& ready_bitmap_;
  const Mailbox& mailbox_;
  HostRings& hosts_;
  Clients& clients_;
  MemoryLedger& ledger_;
  DeviceShares& shares_;
  Grants& grants_;
  AdmissionQueue& queue_;
  ControllerStats& stats_;
  std::vector<uint32_t> ready_hosts_;                   ///< hosts whose rings are to be read
  std::vector<std::byte> client_record_, host_record_;  ///< scratch: the record being read, copied (TRUST-1)
  std::vector<uint8_t> named_;                          ///< scratch: which indices of handles a run names
  std::vector<PlanOwner> plan_owners_;                  ///< by plan
  uint32_t unread_ = 0;
};

}  // namespace pathways
