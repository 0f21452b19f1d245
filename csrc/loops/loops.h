/// The composites that clients have called and that are not over: each is a walk (loops/composite.h) of which the
/// next runs are ordered as earlier ones end.
///
/// AdmissionQueue begins a composite when it is admitted. Then the controller makes one record per run, as a client
/// would: with a place in the order, at most `parallel` of them ordered and not over. Other clients' runs come between
/// them. What runs give to each other lies in buffers of the client with hidden handles.
///
///   ORD-1, SHARE-1  every run of a composite is an entry of its own. DeviceShares says when it may enter, and it is
///            charged as a run of its plan.
///   FLOW-1   its releases are commands of the client: it goes on when hosts have read them.
///   CLI-1    (order of one client) the client's later records wait in its ring until the last run of its composite has
///            its place, because they may read its results. `ClientState::loop` says so. Cancels have their own ring.
///   MEM-2    the composite is admitted as a whole (loops/composites.h); its runs are not checked again. The need
///            and the blocks of donated arguments are given back when its last run is over.
///   WALK-1   a buffer with a hidden handle is taken by one run, or released by a command behind all runs that name it.
///            Both are behind the run that makes it. So its index may be used again from then on (ORD-1).
///   DEAD-1, ERR-2  at its deadline, at a cancel, and when one of its hosts is lost, a composite ends: no more of its
///            runs are ordered, those that no host was granted are dropped, and granted ones go on (GANG-1). Results
///            that no granted run makes fail, at the client and on their hosts. What is then owned is released.
///   ERR-1    a run that fails gives its error to what it makes, and so to the runs behind it, through what they carry.
///            The walk goes on: results that do not depend on it are right.
///   OWN-1    the client is gone: nothing more is ordered, and its buffers go with it (Controller::remove). The need
///            stays until the granted runs are over.
///   COST-3   O(values of the run) per run, and one record per run and host. Nothing is searched.
///   WALK-4   a run that decides whether a loop goes on says so with its end (RunDoneRecord, plan/branches.h); until
///            then nothing of its composite is ordered. A run of a loop that runs ahead says likewise whether it did
///            something; meanwhile the next ones are ordered. If the scalar has failed, the loop ends; what is behind
///            the loop reads the scalar too, and so fails with its error. A verdict counts for the run with whose end
///            it comes, so it counts once (TRUST-1).
///
/// Invariants: a client has at most one composite that is not `is_ordered`, and `ClientState::loop` is its number;
/// `in_flight` counts the entries that Grants knows by that number; a composite that is ordered and has none is gone.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dispatch/device_shares.h"
#include "dispatch/grants.h"
#include "dispatch/host_rings.h"
#include "ledger/client_records.h"
#include "ledger/clients.h"
#include "ledger/memory_ledger.h"
#include "loops/composites.h"

namespace pathways {

class Loops {
 public:
  Loops(Composites& composites, Clients& clients, MemoryLedger& ledger, DeviceShares& shares, Grants& grants,
        HostRings& hosts, ControllerStats& stats)
      : composites_(composites),
        clients_(clients),
        ledger_(ledger),
        shares_(shares),
        grants_(grants),
        hosts_(hosts),
        stats_(stats) {}

  Composites& composites() { return composites_; }
  /// A command of a client that drops a plan has its place.
  void forget_composite(std::span<const std::byte> command) {
    composites_.forget(static_cast<uint32_t>(read_record<CommandRecord>(command).token));
  }
  /// Begins a composite that is admitted, valid and not misplaced; `ClientState::loop` is its number then. Its client
  /// is evicted instead when one of its plans is gone, or it has another number of arguments.
  void begin(ClientState& client, std::span<const std::byte> record, const std::shared_ptr<const Composite>& composite);
  /// Orders what may be ordered now. Returns how many things were done.
  uint32_t advance();
  /// SHARE-2: the next run of the client's composite may enter. Returns how many things were done.
  uint32_t advance(const ClientState& client);
  /// Ends the client's composite with this tag; false: there is none.
  bool cancel(const ClientState& client, uint64_t tag, std::string_view text);
  /// DEAD-1: whether a composite with this number is there, and has not ended before its last run; and ends such a one.
  bool may_end(uint64_t number) const;
  void end(uint64_t number, std::string_view text, uint16_t detail) { end(*find(number), text, detail); }
  /// Some hosts are lost: ends the composites that need them.
  void hosts_lost(std::string_view text);
  void client_gone(uint32_t client);

  /// Clients whose composites were ordered, or have ended, since the last call: their later records may go on.
  std::vector<uint32_t> take_ordered() { return std::exchange(ordered_, {}); }
  bool empty() const { return loops_.empty(); }
  void validate() const;

 private:
  struct Loop {
    Loop(const std::shared_ptr<const Composite>& called, std::span<const uint64_t> arguments)
        : composite(called), walk(*called, arguments) {}
    std::shared_ptr<const Composite> composite;
    CompositeWalk walk;
    uint64_t number = 0;
    uint32_t client = 0;
    std::vector<std::byte> record;  ///< the client's
    std::shared_ptr<const PlanMemory> memory;
    uint64_t admitted = 0;        ///< the number of its admission
    std::vector<BlockId> blocks;  ///< of its donated arguments
    uint32_t in_flight = 0;
    EntryId deciding = 0;            ///< while the walk waits: the run that decides
    bool is_ordered = false;         ///< all its runs are, or it has ended
    bool has_ended = false;          ///< before its last run
    std::vector<bool> is_made;       ///< by result: a run that makes it has its place and was not dropped
    std::vector<uint64_t> leftover;  ///< donated arguments that a run took which did not go to all hosts
  };

  uint32_t advance(Loop& loop);
  bool order(Loop& loop, ClientState& client, const CompositeStep& step);
  void end(Loop& loop, std::string_view text, uint16_t detail = 0);
  void close(Loop& loop);
  void over(Loop& loop);
  void release(ClientState& client, const Composite& composite, std::vector<uint64_t> handles);
  void send(ClientState& client, GroupId group, std::span<const std::byte> command);
  Loop* find(uint64_t number) const;

  Composites& composites_;
  Clients& clients_;
  MemoryLedger& ledger_;
  DeviceShares& shares_;
  Grants& grants_;
  HostRings& hosts_;
  ControllerStats& stats_;
  std::unordered_map<uint64_t, std::unique_ptr<Loop>> loops_;  ///< by number
  std::vector<uint64_t> ready_;                                ///< those to be looked at
  std::vector<uint64_t> looked_;                               ///< scratch
  std::vector<uint32_t> ordered_;                              ///< see take_ordered()
  std::vector<uint64_t> ahead_;                                ///< by entry of a run: CompositeWalk::ahead()
  std::vector<std::byte> run_;                                 ///< scratch: a record
  uint64_t last_ = 0;                                          ///< number
};

}  // namespace pathways
