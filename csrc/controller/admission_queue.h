/// Which records enter the order, wait, or are refused. Every valid record of a client comes here (Inbox), and every
/// cancel.
///
/// MEM-2    A run is admitted (sequencer/admission.h) before it gets its place in the order. A run that is not admitted
///          holds back the later records of its own client, but no other client's. Only releases and fetches of buffers
///          that no held record names pass it, and the steps of saves that read no buffer. Held records are tried
///          again, the oldest client first, whenever a run has ended or a block was released. A run that only live
///          buffers keep out gets turns. In a turn nobody else is admitted to the run's memory spaces; otherwise
///          clients that release some buffers and make others could keep the run out for ever.
/// MEM-3    A run that can never fit fails at once. A run that only live buffers keep out fails after a short grace, in
///          which releases that are on their way can arrive. It waits longer while another client that holds some of
///          these buffers has runs in flight, and for a new grace when a record of another client has failed, some
///          times at most. A record of a client for whose tasks hosts keep memory waits until they are over.
/// MEM-5    A record that its client's quota has no room for waits for its own client only: it gets no turns and keeps
///          nobody out. It fails when it can never fit. When only the client's own buffers keep it out, it fails after
///          the grace, or waits until the client has released some, as the client has asked (AtQuota).
/// FLOW-1   Held records of a client that has as much under way as allowed are not ordered.
/// SHARE-2  A held run for which there is memory enters when the policy says so (DeviceShares).
/// ERR-2    A held run that needs lost hosts and surviving hosts stays held until all its hosts are there.
///
/// State: the line of clients with held records, and each client's line (HeldRecords) and turns (ClientState).
/// Invariants: `holding_` lists exactly the clients whose `held` is not empty, each once; the oldest first.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "controller/deadlines.h"
#include "dispatch/controller_options.h"
#include "dispatch/device_shares.h"
#include "dispatch/grants.h"
#include "ledger/clients.h"
#include "ledger/memory_ledger.h"
#include "loops/loops.h"

namespace pathways {

class AdmissionQueue {
 public:
  AdmissionQueue(const ControllerOptions& options, Clients& clients, MemoryLedger& ledger, DeviceShares& shares,
                 Grants& grants, Deadlines& deadlines, Loops& loops, ControllerStats& stats)
      : options_(options),
        clients_(clients),
        ledger_(ledger),
        shares_(shares),
        grants_(grants),
        deadlines_(deadlines),
        loops_(loops),
        stats_(stats),
        cover_(grants.sequencer()) {}

  /// Takes a valid record: orders it, holds it, or refuses it (MEM-3).
  void take(ClientState& client, std::span<const std::byte> record);
  /// Takes a valid run whose cancel came before: it fails in its place.
  void take_cancelled(ClientState& client, std::span<const std::byte> run);
  /// ERR-2: takes a valid run that names a lost buffer: it fails in its place. Nothing of it waits for a lost host.
  void take_lost(ClientState& client, std::span<const std::byte> run, std::string_view text);
  /// Drops a run that no host was granted, in the order or held. Else nothing happens.
  void cancel(ClientState& client, uint64_t tag);
  /// Fails a held run at its client now. False when no such run is held. The records before the run may still use the
  /// old meaning of its results' handles, so the run's hosts get the failure in the run's place.
  bool drop_held(ClientState& client, uint64_t tag, std::string_view text, uint16_t detail = 0);

  bool has_held() const { return !holding_.empty(); }
  /// Records that are held, of all clients.
  uint64_t held() const;
  /// Orders the held records that fit now, if something has changed or somebody's time is over.
  void retry();
  /// SHARE-2: the client's first held record is a run that may enter now.
  void retry_picked(ClientState& client);
  /// CLI-1: all runs of the client's composite are ordered, so what waited behind it may be.
  void go_on(ClientState& client) {
    order_releases(client);
    retry_soon();
  }
  /// Tries the held records again in this pass, although no run has ended and no block was released.
  void retry_soon() { version_ = UINT64_MAX; }
  /// SUSP-2: the clients that ask for room, the oldest first.
  std::vector<RoomRequest> room_requests() const;
  /// SUSP-2: nobody makes room for the client, so it fails or waits as if nobody could (MEM-3).
  void refuse_room(ClientState& client);
  /// The client is gone.
  void forget(ClientState& client) {
    std::erase(holding_, &client);
    if (first_held_ == &client) first_held_ = nullptr;
    retry_soon();  // its claims no longer keep others out
  }

  void validate() const;

 private:
  Judgement admit(ClientState& client, std::span<const std::byte> record);
  void order(ClientState& client, std::span<const std::byte> record);
  void order_command(ClientState& client, std::span<const std::byte> command);
  void order_task(ClientState& client, std::span<const std::byte> command);
  void order_release_where_it_lies(ClientState& client, std::span<const std::byte> command);
  void hold(ClientState& client, std::span<const std::byte> record);
  void release_ahead(ClientState& client, std::span<const std::byte> command);
  void order_releases(ClientState& client);
  bool retry(ClientState& client);
  void first_held_is_over(ClientState& client, std::span<const std::byte> record);
  void renew_graces(const ClientState& failed);
  bool may_wait(ClientState& client, std::span<const std::byte> record, const Judgement& judgement);
  bool may_wait_for_blocks(ClientState& client, std::span<const std::byte> record, SpaceId worst);
  bool is_held_by_busy(const ClientState& client, SpaceId space) const;
  void refuse(ClientState& client, std::span<const std::byte> record, const Judgement& judgement);
  void refuse_unordered(ClientState& client, std::span<const std::byte> run, std::string_view text,
                        uint16_t detail = 0);
  void fail_results(ClientState& client, std::span<const std::byte> record, std::string_view text, uint16_t detail = 0);
  void fail_on_hosts(ClientState& client, std::span<const std::byte> record, std::string_view text);
  void release_donated(ClientState& client, std::span<const std::byte> run, const PlanMemory* memory);
  void fail_on_survivors(ClientState& client, std::span<const std::byte> run, std::string_view text);

  const ControllerOptions& options_;
  Clients& clients_;
  MemoryLedger& ledger_;
  DeviceShares& shares_;
  Grants& grants_;
  Deadlines& deadlines_;
  Loops& loops_;
  ControllerStats& stats_;
  GroupCover cover_;
  std::vector<ClientState*> holding_;        ///< clients with held records, the oldest first
  const ClientState* first_held_ = nullptr;  ///< the first of them that only live buffers keep out, in this pass
  uint64_t version_ = 0;                     ///< the ledger's version when the held records were last tried
};

}  // namespace pathways
