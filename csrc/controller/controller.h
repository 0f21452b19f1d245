/// The controller: moves the clients' records from their rings into one order, and what is granted into the hosts'
/// rings. `Controller` is the whole, for its users; each part of the work is a class with a header of its own.
///
/// Who owns what, from the bottom up. A class knows the classes above it in this list, and no others; so calls go up
/// the list only, but for two that return below (Deadlines::pass calls AdmissionQueue; ClusterEnd comes back by mail).
///
///   ClientState     one client: a field per class that writes it. ClientCredits (FLOW-1), HeldRecords, SentCommands
///                   and HandleTable are the parts with rules of their own
///   Clients         the clients; what is sent to them; who is to be evicted (OWN-1); in it, ReadyClients: who is
///                   looked at (COST-4, READY-2)
///   HostRings       the hosts' rings; which hosts are lost; what is to be flushed (COST-3)
///   ClusterEnd      the cluster's status, and the text that all clients read
///   MemoryLedger    the ledger of memory, and which handle has which block of it (MEM-1)
///   DeviceShares    when a client's run may enter the order, and what it is charged (SHARE-1..5)
///   Grants          the order, the records that wait in it, what dropped runs leave behind (ORD-1, GANG-1); in it,
///                   DeviceTimes
///   Loops           composites under way, which become runs one by one (CLI-1, WALK-1); Composites: what was
///                   registered
///   Deadlines       runs that have a deadline (DEAD-1)
///   AdmissionQueue  held records, turns and claims; who is refused (MEM-2, MEM-3)
///   Inbox           what is read from the rings and how it is checked; plans' owners (TRUST-1, FLOW-1)
///   OrderTrace      when runs were submitted, ordered and granted, while a trace is on (TRACE-3); in Grants
///   Recovery        lost hosts and their successors (ERR-2, ARENA-5)
///   Controller      the mailbox, the thread, the statistics, the pass, the end of a client (OWN-1), suspended clients
///
/// One pass (`step`), in this order:
///   1. mail: registrations, removals, losses, suspensions, questions, each as a whole
///   2. Inbox, hosts: a run that is done goes to Grants, which retires it and sends what became grantable
///   3. Inbox, clients: a record goes to AdmissionQueue. It is held or refused there, or booked in MemoryLedger and
///      submitted to Grants, which sends it to the hosts' outboxes when it is granted
///   4. clients with a fault are evicted (OWN-1)
///   5. Deadlines that have passed
///   6. Loops: the next runs of composites
///   7. AdmissionQueue: held records that fit now
///   8. DeviceShares: runs whose turn it is, one after the other, enter as in steps 3, 6 and 7
///   9. HostRings and Clients: what was sent is published, and each reader's doorbell is rung once
/// A pass takes a bounded batch from every ring (Inbox). It never waits for a reader (see messages/outbox.h), and never
/// for a value. `start` runs the passes on a native thread that never takes Python's lock (GIL-1). In an embedded
/// cluster the submitting thread calls `step` itself.
///
/// In builds with PATHWAYS_DCHECK, `step` calls each class's `validate`, which checks the invariants of that header.
///
/// Threading: `step` by one thread; all the classes above belong to it. The registration calls by any thread: they
/// leave mail, which the next step reads.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_set>
#include <vector>

#include "controller/admission_queue.h"
#include "controller/deadlines.h"
#include "controller/inbox.h"
#include "controller/recovery.h"
#include "dispatch/cluster_end.h"
#include "dispatch/controller_options.h"
#include "dispatch/device_shares.h"
#include "dispatch/grants.h"
#include "dispatch/host_rings.h"
#include "ledger/client_limits.h"
#include "ledger/clients.h"
#include "ledger/memory_ledger.h"
#include "ledger/plan_memory.h"
#include "loops/loops.h"
#include "messages/records.h"
#include "messages/shared_segments.h"
#include "sequencer/sequencer.h"
#include "sync/bell_set.h"
#include "sync/mailbox.h"

namespace pathways {

class Controller {
 public:
  using Options = ControllerOptions;
  static constexpr GroupId kAllHosts = Grants::kAllHosts;

  /// `status`: the block that clients read; nullptr: the one in `block`. Throws Error(kInvalid) for no hosts, or too
  /// many.
  Controller(Options options, ControllerBlock* block, std::vector<HostView> hosts, StatusBlock* status = nullptr);
  ~Controller();

  /// Throws Error(kInvalid) for no hosts, an unknown or a repeated one, or a group number of 2^24 or more.
  void add_group(GroupId group, std::vector<uint32_t> hosts);
  /// Registers memory spaces that hold buffers together, and returns the set's number. Throws Error(kInvalid) for an
  /// unknown or a repeated space.
  SpaceSetId add_space_set(std::vector<SpaceId> spaces);
  /// The bytes of each of these memory spaces. Throws Error(kInvalid) as `add_space_set` does.
  void set_budget(std::vector<SpaceId> spaces, uint64_t bytes);
  /// Registers the memory that a plan takes. Call it before the plan's first run is submitted.
  void set_plan_memory(uint32_t plan, PlanMemory memory);
  /// TRUST-1: registers the plan's client, and the hosts that its runs go to. Call it before the first run is
  /// submitted.
  /// `devices`: those that its runs use (SHARE-1); none: its runs are ordered as they come.
  void register_plan(uint32_t plan, uint32_t client, GroupId group, std::vector<HostDevice> devices = {});
  /// Registers a program with loops, under the number of no plan. All its plans are registered, and their memory.
  /// Throws Error(kInvalid) for one that cannot be run (TRUST-1).
  void register_composite(uint32_t number, Composite composite);
  /// A client's number is never used again. `bell`: the doorbell that this client rings, valid until remove_client()
  /// has returned; nullptr: the controller's own doorbell. Throws Error(kInvalid) when the client's rings, or its
  /// limits, are invalid. `place`: where its futures are.
  void add_client(uint32_t client, const ClientView& view, DoorbellWord* bell = nullptr,
                  const ClientLimits& limits = {}, ClientPlace place = ClientPlace::kHere);
  /// Replaces the client's limits; they act from now on. What it has already stays. It does nothing when the client is
  /// gone. Throws Error(kInvalid) for limits that are invalid.
  void limit(uint32_t client, const ClientLimits& limits);
  /// What each client has and does now.
  std::vector<ClientUse> client_uses();
  /// OWN-1: drops what the client has waiting, and notifies each host, behind all that it was granted, that the client
  /// is gone. It does so also for a client that was never added, because a host may have attached that client. When
  /// this returns, the controller no longer touches the client's memory; each host may use it until the notice reaches
  /// that host (Host::attached_clients).
  void remove_client(uint32_t client);
  /// ERR-2: the processes of these hosts have ended. Futures with a part there fail with `text`. Returns the number of
  /// this loss; the surviving hosts are notified in the order (host/losses.cc). Throws Error(kInvalid) for a host that
  /// is lost already.
  uint64_t lose_hosts(std::vector<uint32_t> hosts, std::string text);
  /// See HostRings. Any thread.
  std::vector<HostRings::Fault> take_faults() { return hosts_.take_faults(); }
  /// The successor of a lost host takes part from now on, with a block of its own. `gone`: clients that were removed
  /// since it was told which there are. When this returns, nobody uses the old block. Throws Error(kInvalid) for a host
  /// that is not lost.
  void restore_host(uint32_t host, const HostView& block, std::span<const uint32_t> gone = {});
  /// Plans that no entry of the order names any more; each is returned once. For such a plan, all hosts have been
  /// granted the command that drops it. The successor of a lost host must know all other plans, because entries that
  /// wait for it may name them.
  std::vector<uint32_t> take_forgotten();

  /// Takes no further record of the client, until `resume`; its records wait in its ring. For this call and the next
  /// ones: any thread may call them, and they do nothing when the client is gone.
  void suspend(uint32_t client);
  void resume(uint32_t client);
  /// Whether every admitted run of the client is over on all its hosts. True when the client is gone.
  bool is_quiet(uint32_t client);
  /// MEM-1: the client's buffers have left the devices, and no longer count against the devices' budgets.
  void offload(uint32_t client);
  /// The client's buffers are to come back. When there is no room for them beside other clients' buffers and runs,
  /// nothing changes and the error text is returned; empty: they fit.
  std::string restore(uint32_t client);
  /// SUSP-2: the clients whose work waits for memory that live buffers hold; and those of `suspended` that have work.
  std::vector<RoomRequest> room_requests(std::span<const uint32_t> suspended);
  /// SUSP-2: nobody can make room for the client.
  void refuse_room(uint32_t client);
  /// Sends a command to all hosts that are not lost, as if the client had sent it: kOffload or kRestore, which only the
  /// controller sends.
  void command_for(uint32_t client, CommandKind kind, std::vector<std::byte> payload);

  /// Runs one pass. Returns the number of records handled; 0 when there was nothing to do.
  uint32_t step();
  void start();
  void stop();
  void fail(std::string_view text) { end_.fail(text); }
  void close() { end_.close(); }
  /// Traces the order from now on, in memory for `capacity` runs (TRACE-3). Clients say when they submit.
  void start_trace(size_t capacity);
  void stop_trace();
  OrderTrace::Ring::Taken take_trace();
  /// What is counted by host and by memory space is told of the first `hosts` hosts.
  ControllerStats stats(uint32_t hosts = UINT32_MAX);
  /// True when nothing waits, is granted, or is kept in an outbox. Call it between steps only.
  bool is_idle() const;
  /// The time, by the controller's clock, at which `step` has work although nobody rings: the next deadline;
  /// INT64_MAX: none.
  int64_t next_deadline_ns() const { return deadlines_.next_ns(); }

 private:
  /// Runs `mail` on the stepping thread, and returns what it returns, or throws what it throws.
  template <typename Mail>
  auto run_mail(Mail mail);
  void set_limits(ClientState& client, const ClientLimits& limits);
  ClientUse use_of(const ClientState& client) const;
  void remove(uint32_t client);
  uint32_t evict_faulty();
  uint32_t advance_loops();
  uint32_t enter_picked();
  std::string restore_blocks(uint32_t client);
  void send_for(uint32_t client, CommandKind kind, std::span<const std::byte> payload);
  void flush();
  void validate() const;
  void loop();
  std::chrono::nanoseconds time_to_sleep() const;
  ControllerStats snapshot(uint32_t hosts) const;

  // In the order of the list above: each is built on those before it.
  const Options options_;
  ControllerBlock* const block_;
  StatusBlock* const status_;
  BellSet bells_;  ///< every doorbell that is rung for the controller
  Mailbox mailbox_;
  ControllerStats stats_;
  Clients clients_;
  HostRings hosts_;
  ClusterEnd end_;
  MemoryLedger ledger_;
  DeviceShares shares_;
  Grants grants_;
  Composites composites_;
  Loops loops_;
  Deadlines deadlines_;
  AdmissionQueue queue_;
  Inbox inbox_;
  Recovery recovery_;

  std::mutex mutex_;  ///< guards is_running_ and client_ids_
  std::unordered_set<uint32_t> client_ids_;
  bool is_running_ = false;  ///< the thread reads mail
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace pathways
