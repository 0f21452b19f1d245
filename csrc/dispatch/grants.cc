#include "dispatch/grants.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <functional>
#include <numeric>

#include "base/check.h"
#include "ledger/client_records.h"
#include "plan/branches.h"

namespace pathways {

Grants::Grants(const ControllerOptions& options, HostRings& hosts, Clients& clients, MemoryLedger& ledger,
               DeviceShares& shares, ControllerStats& stats)
    : hosts_(hosts),
      clients_(clients),
      ledger_(ledger),
      shares_(shares),
      stats_(stats),
      clock_(options.clock),
      sequencer_(hosts.count(), options.window),
      trace_(options.clock),
      gangs_(hosts.count()) {
  std::vector<uint32_t> all(hosts.count());
  std::iota(all.begin(), all.end(), 0u);
  sequencer_.add_group(kAllHosts, std::move(all));
  for (uint32_t h = 0; h < hosts.count(); ++h) {
    if (hosts.is_lost(h)) sequencer_.close(h);  // it comes later
  }
}

void Grants::add_group(GroupId group, std::vector<uint32_t> hosts) {
  if (!sequencer_.has_group(group)) sequencer_.add_group(group, std::move(hosts));
}

bool Grants::has_lost_and_others(GroupId group) const {
  bool has_lost = false, has_others = false;
  for (const uint32_t h : sequencer_.hosts_of(group)) (hosts_.is_lost(h) ? has_lost : has_others) = true;
  return has_lost && has_others;
}

void Grants::set_parts(uint32_t plan, GroupId group, const PlanMemory& memory) {
  const auto is_known = [&](GroupId each) { return has_group(each); };
  if (!std::all_of(memory.argument_groups->begin(), memory.argument_groups->end(), is_known)) {
    throw Error(Status::kInvalid, "an argument lies on a group that nobody made");
  }
  auto parts = RunParts::make(memory, group, sequencer_);
  if (plan >= parts_.size() && parts == nullptr) return;
  if (plan >= parts_.size()) parts_.resize(plan + 1);
  parts_[plan] = std::move(parts);
}

void Grants::forget_plans_of(uint32_t client) {
  times_.forget_client(client);
  for (auto& parts : parts_) {
    if (parts != nullptr && parts->client() == client) parts.reset();
  }
}

// ------------------------------------------------------------------------------------------------------- forwarded

EntryId Grants::submit(ClientState& client, std::span<const std::byte> record, GroupId group, EntryKind kind,
                       uint64_t tag) {
  if (!over_.empty()) settle_times();  // the new entry may get the number of one that is over
  const EntryId id = sequencer_.submit(client.id, group, kind, tag);
  if (kind == EntryKind::kRun) times_.entered(id, read_record<RunRecord>(record).plan, client.id);
  const bool is_granted = !sequencer_.granted().empty();
  if (trace_.is_on()) trace_.ordered(client.id, id, sequencer_.entry(id), record, is_granted);
  if (!is_granted) {
    if (id >= kept_.size()) kept_.resize(id + 1);
    kept_[id].assign(record.begin(), record.end());
    client.credits.record_waits(record.size());
    return id;
  }
  // Only this entry can have been granted: a new entry makes room for no other.
  PW_DCHECK(sequencer_.granted().size() == 1 && sequencer_.granted().front() == id);
  forward(sequencer_.entry(id), id, record);
  sequencer_.settle(id);
  sequencer_.granted().clear();
  return id;
}

EntryId Grants::submit_composite_run(ClientState& client, std::span<const std::byte> run, GroupId group,
                                     uint64_t composite) {
  const EntryId id = submit(client, run, group, EntryKind::kRun, kElementTag);
  if (id >= composite_of_.size()) composite_of_.resize(id + 1);
  composite_of_[id] = composite;
  return id;
}

void Grants::settle_granted() {
  // Settling retires commands and dropped entries. It frees no room, so the list does not grow in this loop.
  auto& granted = sequencer_.granted();
  for (const EntryId id : granted) {
    const Entry entry = sequencer_.entry(id);
    if (entry.state == EntryState::kDropped) {
      ++stats_.dropped;
      if (trace_.is_on()) trace_.left(id, OrderOutcome::kDropped);
      if (!instead_.empty()) forward_instead(id);
      ledger_.holds().drop(hold_of(kept_[id]));
      if (entry.kind == EntryKind::kRun) retire(id, entry.client);
    } else {
      forward(entry, id, kept_[id]);
    }
    if (ClientState* client = clients_.find(entry.client)) client->credits.record_goes(kept_[id].size());
    kept_[id].clear();
    if (kept_[id].capacity() > 4096) kept_[id].shrink_to_fit();
    sequencer_.settle(id);
  }
  granted.clear();
}

void Grants::forward(const Entry& entry, EntryId id, std::span<const std::byte> record) {
  if (trace_.is_on()) trace_.left(id, OrderOutcome::kGranted);
  stats_.records_out += sequencer_.hosts_of(entry.group).size();
  if (entry.kind == EntryKind::kRun) {
    ++stats_.granted;
    forward_run(entry, id, record);
  } else {
    forward_command(entry, record);
  }
}

void Grants::forward_run(const Entry& entry, EntryId id, std::span<const std::byte> record) {
  auto head = read_record<RunRecord>(record);
  const ForControllerOnly cut = for_controller_only(head.header, record.size());
  if (cut.bytes != 0) head.header.detail &= static_cast<uint16_t>(~kRunHasSubmitted);
  head.header.client = entry.client;
  head.tag = id;
  head.order = entry.order;
  const RunParts* parts = head.plan < parts_.size() ? parts_[head.plan].get() : nullptr;
  const auto hosts = sequencer_.hosts_of(entry.group);
  const auto whole = static_cast<uint32_t>(record.size() - cut.bytes);
  for (size_t i = 0; i < hosts.size(); ++i) {
    hosts_.outbox_of(hosts[i]).send(parts == nullptr ? whole : parts->bytes(i, head), [&](std::byte* out) {
      if (parts != nullptr) return parts->write(i, head, record, out);
      std::memcpy(out, &head, sizeof head);
      std::memcpy(out + sizeof head, record.data() + sizeof head, cut.at - sizeof head);
      if (cut.at != whole) std::memcpy(out + cut.at, record.data() + cut.at + cut.bytes, whole - cut.at);
    });
  }
}

void Grants::forward_command(const Entry& entry, std::span<const std::byte> record) {
  auto header = read_record<RecordHeader>(record);
  header.client = entry.client;
  const auto bytes = static_cast<uint32_t>(record.size());
  const auto hosts = sequencer_.hosts_of(entry.group);
  ClientState* client = header.kind == RecordKind::kCommand ? clients_.find(entry.client) : nullptr;
  if (client != nullptr) keep(*client, record, hosts);
  const bool is_booked = header.kind == RecordKind::kCommand && makes_buffer(record);
  const SpaceSetId set = is_booked ? read_record<CommandRecord>(record).space_set : kNoSpaceSet;
  for (const uint32_t h : hosts) {
    if (client != nullptr) client->credits.command_sent(h, bytes);
    hosts_.outbox_of(h).send(bytes, [&](std::byte* out) {
      std::memcpy(out, record.data(), bytes);
      std::memcpy(out, &header, sizeof header);
      if (!is_booked) return;
      const uint64_t devices = ledger_.devices_of(set, h);
      std::memcpy(out + offsetof(CommandRecord, space_devices), &devices, sizeof devices);
    });
  }
}

/// Keeps what the controller will need of a command when one of the command's hosts is lost.
void Grants::keep(ClientState& client, std::span<const std::byte> command, std::span<const uint32_t> hosts) {
  const auto record = read_record<CommandRecord>(command);
  if (static_cast<CommandKind>(record.header.detail) == CommandKind::kBackend && record.token != 0) {
    // No waiting entry names the plan: a successor need not know it.
    forgotten_.push_back(static_cast<uint32_t>(record.token));
    shares_.forget_plan(static_cast<uint32_t>(record.token));
    times_.forget_plan(static_cast<uint32_t>(record.token));
    if (record.token < parts_.size()) parts_[record.token].reset();
  }
  if (!client.sent.keep(record, command, hosts)) {
    clients_.fault(client, "it described more than " + std::to_string(kMostDefinedBytes >> 20) + " MiB of placements");
  }
}

// ------------------------------------------------------------------------------------------------------------ over

void Grants::run_done(uint32_t h, const RunDoneRecord& record) {
  const auto id = static_cast<EntryId>(record.tag);
  Entry& entry = sequencer_.entry(id);
  const bool ganged = record.gangs != 0;
  if (ganged && record.gangs != record.expected) {  // GANG-1: all gangs or none, and the same on all hosts
    throw Error(Status::kInvalid, gangs_broken(h, entry) + std::to_string(record.gangs) + " of the " +
                                      std::to_string(record.expected) + " gangs");
  }
  if (record.expected != 0 && entry.counted && entry.ganged != ganged) {
    disagree(h, entry, (ganged ? "the gangs, another of its hosts none" : "no gangs, another of its hosts did"));
  }
  if (const uint64_t wrong = (entry.chosen ^ record.chosen) & entry.known & record.known; wrong != 0) {
    const bool holds = (record.chosen & wrong & ~(wrong - 1)) != 0;
    disagree(h, entry,
             std::string(holds ? "a branch" : "nothing of a branch") + " (predicate bit " +
                 std::to_string(std::countr_zero(wrong)) + "), another of its hosts " + (holds ? "did not" : "did"));
  }
  gangs_[h] += record.gangs;
  if (record.expected != 0) {
    entry.counted = true;
    entry.ganged = ganged;
  }
  entry.known |= record.known;
  entry.chosen |= record.chosen & record.known;
  const uint32_t client = entry.client;
  if (times_.is_other_batch(h, record.batch)) settle_times();
  times_.run_done(id, h, client, record.busy_ns, record.batch);
  if (sequencer_.complete(id, h)) retire(id, client);
  if (!sequencer_.granted().empty()) settle_granted();
}

void Grants::settle_times() {
  if (!times_.is_divided()) {
    const bool is_charged = shares_.has_runs();
    const int64_t now = is_charged ? clock_() : 0;
    times_.divide([&](const DeviceTimes::Part& part) {
      if (ClientState* client = clients_.find(part.client)) client->device_ns += static_cast<uint64_t>(part.took_ns);
      if (is_charged) shares_.took(part.id, part.host, part.took_ns, now);
    });
  }
  for (const EntryId id : over_) shares_.over(id);
  over_.clear();
}

std::string Grants::gangs_broken(uint32_t h, const Entry& entry) {
  return "GANG-1 broken in run " + std::to_string(entry.order) + ": host " + std::to_string(h) + " launched ";
}

/// Nobody knows which host of the run is wrong, so none of them is read any more. Not on the hot path.
void Grants::disagree(uint32_t h, const Entry& entry, const std::string& what) {
  const std::string text = gangs_broken(h, entry) + what;
  for (const uint32_t each : sequencer_.hosts_of(entry.group)) {
    if (each != h && !hosts_.is_lost(each) && !hosts_.has_fault(each)) hosts_.fault(each, text);
  }
  throw Error(Status::kInvalid, text);
}

void Grants::retire(EntryId id, uint32_t of_client) {
  ++stats_.retired;
  ledger_.leave(id);
  over_.push_back(id);
  if (times_.is_divided()) settle_times();
  if (is_composite_run(id)) {
    const Entry& entry = sequencer_.entry(id);  // free, but not used again so far
    const bool goes_on = (entry.known & entry.chosen & kVerdictMask) != 0;
    composite_runs_over_.push_back({std::exchange(composite_of_[id], 0), id, goes_on});
    return;
  }
  ClientState* client = clients_.find(of_client);
  if (client == nullptr) return;
  client->credits.run_over();
  clients_.run_over(*client);
}

// --------------------------------------------------------------------------------------------------------- dropped

void Grants::drop(EntryId id, std::string_view text, uint16_t detail) {
  release_donated(id);
  if (ClientState* owner = clients_.find(sequencer_.entry(id).client)) {
    clients_.tell_results(*owner, kept_[id], text, detail);
    for (auto& command : failure_commands(owner->id, kept_[id], ledger_.memory_of_entry(id), text)) {
      instead_[id].push_back(std::move(command));
    }
  }
  sequencer_.cancel(id);
  settle_granted();
}

/// A dropped run never takes over its donated arguments, because no host was granted the run. So in the run's place its
/// hosts get a command to release them. The ledger counted them as released when the run was ordered, and later entries
/// rely on that room.
void Grants::release_donated(EntryId id) {
  const std::vector<uint64_t> handles = donated_by(kept_[id], ledger_.memory_of_entry(id));
  if (handles.empty()) return;
  const Entry& entry = sequencer_.entry(id);
  instead_[id].push_back(release_command(entry.client, entry.group, handles));
}

bool Grants::drop_run(const ClientState& client, uint64_t tag, std::string_view text) {
  for (EntryId id = 0; id < kept_.size(); ++id) {
    if (kept_[id].empty()) continue;
    const Entry& entry = sequencer_.entry(id);
    if (entry.client != client.id || entry.kind != EntryKind::kRun || entry.tag != tag || is_composite_run(id))
      continue;
    if (entry.state == EntryState::kWaiting) drop(id, text);
    return true;
  }
  return false;
}

/// Sends what the hosts of a dropped run get in the run's place.
void Grants::forward_instead(EntryId id) {
  const auto found = instead_.find(id);
  if (found == instead_.end()) return;
  for (const std::vector<std::byte>& command : found->second) {
    const auto record = read_record<CommandRecord>(command);
    ClientState* client = clients_.find(record.header.client);
    for (const uint32_t h : sequencer_.hosts_of(record.group)) {
      if (hosts_.is_lost(h)) continue;  // its successor has none of these buffers
      if (client != nullptr) client->credits.command_sent(h, command.size());
      hosts_.outbox_of(h).send(static_cast<uint32_t>(command.size()),
                               [&](std::byte* out) { std::memcpy(out, command.data(), command.size()); });
    }
  }
  instead_.erase(found);
}

void Grants::drop_all(std::vector<std::pair<EntryId, std::string>> runs) {
  std::ranges::sort(runs, std::greater{}, [&](const auto& run) { return sequencer_.entry(run.first).order; });
  for (const auto& [id, text] : runs) drop(id, text);
}

void Grants::drop_all_of(uint32_t client) {
  std::vector<EntryId> waiting;
  for_each_waiting([&](EntryId id, const Entry& entry, std::span<const std::byte>) {
    if (entry.client == client) waiting.push_back(id);
  });
  drop_silently(waiting);
}

/// The youngest first, so that dropping an older entry grants none of these.
void Grants::drop_silently(std::vector<EntryId>& waiting) {
  std::ranges::sort(waiting, std::greater{}, [&](EntryId id) { return sequencer_.entry(id).order; });
  for (const EntryId id : waiting) {
    sequencer_.cancel(id);
    settle_granted();
  }
}

void Grants::announce_gone(uint32_t client) {
  // GANG-1: each host gets this notice behind everything of the client that was granted to it, and a gang is granted to
  // all of its hosts at once. The client has nothing waiting any more, and entries of other clients do not concern it,
  // so the notice need not wait behind them. Nor does it wait for lost hosts, which may never come back: their
  // successors hear of it when they come, if they may know the client (Recovery::restore).
  for (uint32_t h = 0; h < hosts_.count(); ++h) {
    if (!hosts_.is_lost(h)) announce_gone(client, h);
  }
}

void Grants::announce_gone(uint32_t client, uint32_t host) {
  const ClientGoneRecord record{{RecordKind::kClientGone, 0, client}};
  ++stats_.records_out;
  hosts_.outbox_of(host).send(sizeof record, [&](std::byte* out) { std::memcpy(out, &record, sizeof record); });
}

// ------------------------------------------------------------------------------------------------------ lost hosts

void Grants::complete_in_place_of(uint32_t host) {
  for (const EntryId id : sequencer_.running_on(host)) {
    // GANG-1: nobody knows whether the lost host launched its gangs; its successor begins to count at 0.
    const uint32_t client = sequencer_.entry(id).client;
    if (sequencer_.complete(id, host)) retire(id, client);
  }
}

void Grants::open(uint32_t host) {
  gangs_[host] = 0;
  sequencer_.open(host);
  settle_granted();
}

// ---------------------------------------------------------------------------------------------------------- checks

uint64_t Grants::waiting() const {
  return static_cast<uint64_t>(
      std::count_if(kept_.begin(), kept_.end(), [](const auto& record) { return !record.empty(); }));
}

void Grants::validate() const {
  for_each_waiting([&](EntryId id, const Entry& entry, std::span<const std::byte>) {
    PW_CHECK(entry.state == EntryState::kWaiting || entry.state == EntryState::kDropped);
    PW_CHECK(entry.state == EntryState::kDropped || !instead_.contains(id));
  });
  for (const auto& each : instead_) PW_CHECK(each.first < kept_.size() && !kept_[each.first].empty());
}

}  // namespace pathways
