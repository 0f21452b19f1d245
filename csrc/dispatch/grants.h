/// The order at the controller: a record enters it, waits there for its grant, goes to its hosts' outboxes, and a run
/// is retired when all its hosts have completed it.
///
/// AdmissionQueue submits the records of clients, the Controller those that it makes itself. Inbox passes on what hosts
/// report. Deadlines and AdmissionQueue drop runs that wait. Recovery closes and opens hosts.
///
/// GANG-1        Grants checks it. Each host of a run reports whether the host launched all gangs of the run or none,
///               and all hosts must report the same; and what two hosts know of the branches that a run took must
///               agree. Otherwise the results can no longer be trusted, and one of its hosts is wrong: all hosts of the
///               run have a fault (FAULT-1), and no other host. A granted run finishes on all its hosts: only a run
///               that waits can be dropped, and it is dropped for all.
/// COST-3        For each run, the controller sends one record to each host and takes one record from it, which has
///               only the handles of the host's own arguments and results.
/// ERR-1, FUT-3  The hosts of a dropped run get, in the run's place, the failure of its results (`instead_`).
///
/// Invariants: an entry has a record in `kept_` exactly while it waits or is dropped in its place; an entry with
/// something in `instead_` is dropped and has a record in `kept_`.
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

#include "dispatch/controller_options.h"
#include "dispatch/device_shares.h"
#include "dispatch/device_times.h"
#include "dispatch/host_rings.h"
#include "dispatch/order_trace.h"
#include "dispatch/run_parts.h"
#include "ledger/clients.h"
#include "ledger/memory_ledger.h"
#include "sequencer/sequencer.h"

namespace pathways {

class Grants {
 public:
  Grants(const ControllerOptions& options, HostRings& hosts, Clients& clients, MemoryLedger& ledger,
         DeviceShares& shares, ControllerStats& stats);

  static constexpr GroupId kAllHosts = 0;  ///< the group of all hosts; it is always there

  // Groups of hosts. `add_group` does nothing for a known group. `hosts_of` takes a group of one host too (kOneHost).
  void add_group(GroupId group, std::vector<uint32_t> hosts);
  bool has_group(GroupId group) const { return sequencer_.has_group(group); }
  std::span<const uint32_t> hosts_of(GroupId group) const { return sequencer_.hosts_of(group); }
  bool is_lost(uint32_t host) const { return hosts_.is_lost(host); }
  const Sequencer& sequencer() const { return sequencer_; }
  /// Whether a group has lost hosts and surviving hosts.
  bool is_stranded(GroupId group) const { return hosts_.lost() != 0 && has_lost_and_others(group); }

  /// Each host of the plan's runs gets only its own handles from now on. `group`: these hosts. `memory`
  /// has argument groups. Throws Error(kInvalid) when nobody made one of them.
  void set_parts(uint32_t plan, GroupId group, const PlanMemory& memory);

  /// Gives a record its place in the order, and sends it to its hosts when it is granted at once.
  EntryId submit(ClientState& client, std::span<const std::byte> record, GroupId group, EntryKind kind, uint64_t tag);
  const Entry& entry(EntryId id) const { return sequencer_.entry(id); }

  // Runs that Loops makes. `composite`: its number there, not 0. Such a run is no run of the client: its end frees no
  // credit of the client, and no cancel names it.
  EntryId submit_composite_run(ClientState& client, std::span<const std::byte> run, GroupId group, uint64_t composite);
  /// Calls f(run) for each run of a composite that no host was granted, and drops it. Nobody is notified.
  template <typename F>
  void drop_composite_runs(uint64_t composite, F&& f) {
    std::vector<EntryId> waiting;
    for_each_waiting([&](EntryId id, const Entry& entry, std::span<const std::byte> run) {
      if (id >= composite_of_.size() || composite_of_[id] != composite || entry.state != EntryState::kWaiting) return;
      f(run);
      waiting.push_back(id);
    });
    drop_silently(waiting);
  }
  /// A run of a composite that is over or dropped. `goes_on`: whether the scalar by which it decides was true; false if
  /// it has none, or if that failed.
  struct CompositeRunOver {
    uint64_t composite;
    EntryId id;
    bool goes_on;
  };
  /// The caller empties it.
  std::vector<CompositeRunOver>& composite_runs_over() { return composite_runs_over_; }
  /// Calls f(id, entry, record) for each entry that no host was granted, dropped ones included.
  template <typename F>
  void for_each_waiting(F&& f) const {
    for (EntryId id = 0; id < kept_.size(); ++id) {
      if (!kept_[id].empty()) f(id, sequencer_.entry(id), std::span<const std::byte>(kept_[id]));
    }
  }

  /// Drops a run that waits in the order. No host will ever complete its results. So the controller notifies the client
  /// of their failure now, and the hosts in the run's place, before anything that comes behind the run (ERR-1, FUT-3).
  void drop(EntryId id, std::string_view text, uint16_t detail = 0);
  /// Drops runs that wait in the order, each with the reason given, the youngest first: so that dropping an older one
  /// grants none of these.
  void drop_all(std::vector<std::pair<EntryId, std::string>> runs);
  /// Drops the client's run with this tag. False when no such run waits in the order: it was granted, or never entered.
  bool drop_run(const ClientState& client, uint64_t tag, std::string_view text);
  /// Drops all that the client has waiting, without a failure: the client is gone.
  void drop_all_of(uint32_t client);
  /// The client is gone, and nothing of it waits: what is known of its plans goes.
  void forget_plans_of(uint32_t client);
  /// Notifies each host that the client is gone, behind everything of the client that was granted to it.
  void announce_gone(uint32_t client);
  /// The same for one host, which is not lost.
  void announce_gone(uint32_t client, uint32_t host);

  // What hosts report; the records are valid. `run_done` throws Error(kInvalid), and nothing happens, when GANG-1 is
  // broken.
  bool is_running_on(EntryId id, uint32_t host) const { return sequencer_.is_running_on(id, host); }
  void run_done(uint32_t host, const RunDoneRecord& record);
  /// All that one host has reported in this pass was passed to `run_done`: its time is divided among the runs.
  void settle_times();

  // ERR-2; see Recovery.
  /// The host is granted nothing from now on.
  void close(uint32_t host) { sequencer_.close(host); }
  /// The successor is granted what waited for it.
  void open(uint32_t host);
  /// Completes what a lost host was granted.
  void complete_in_place_of(uint32_t host);

  /// See Controller::take_forgotten().
  std::vector<uint32_t> take_forgotten() { return std::exchange(forgotten_, {}); }
  bool is_idle() const { return sequencer_.live() == 0; }
  /// Records that wait in the order, and launches of gangs per host, of retired runs.
  uint64_t waiting() const;
  const std::vector<uint64_t>& gangs() const { return gangs_; }

  /// The trace of the order (TRACE-3).
  OrderTrace& trace() { return trace_; }

  void validate() const;

 private:
  bool has_lost_and_others(GroupId group) const;
  void forward(const Entry& entry, EntryId id, std::span<const std::byte> record);
  void forward_run(const Entry& entry, EntryId id, std::span<const std::byte> record);
  void forward_command(const Entry& entry, std::span<const std::byte> record);
  void forward_instead(EntryId id);
  void keep(ClientState& client, std::span<const std::byte> command, std::span<const uint32_t> hosts);
  void settle_granted();
  void release_donated(EntryId id);
  void drop_silently(std::vector<EntryId>& waiting);
  bool is_composite_run(EntryId id) const { return id < composite_of_.size() && composite_of_[id] != 0; }
  void retire(EntryId id, uint32_t client);
  static std::string gangs_broken(uint32_t host, const Entry& entry);
  [[noreturn]] void disagree(uint32_t host, const Entry& entry, const std::string& what);

  HostRings& hosts_;
  Clients& clients_;
  MemoryLedger& ledger_;
  DeviceShares& shares_;
  ControllerStats& stats_;
  const Clock clock_;
  Sequencer sequencer_;
  std::vector<std::vector<std::byte>> kept_;  ///< by entry: its record while it waits for its grant
  std::unordered_map<EntryId, std::vector<std::vector<std::byte>>> instead_;  ///< what its hosts get for a dropped run
  std::vector<std::unique_ptr<const RunParts>> parts_;  ///< by plan; nullptr: its hosts get whole records
  std::vector<uint64_t> composite_of_;                  ///< by entry: the composite that it is a run of; 0: of none
  std::vector<CompositeRunOver> composite_runs_over_;
  std::vector<uint32_t> forgotten_;  ///< plans that nobody names any more: see take_forgotten()
  OrderTrace trace_;
  std::vector<uint64_t> gangs_;  ///< by host: gang launches (GANG-1)
  DeviceTimes times_;
  std::vector<EntryId> over_;  ///< runs that are over, of which `shares_` is not told before the batch is divided
};

}  // namespace pathways
