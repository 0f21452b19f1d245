#include "controller/admission_queue.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/check.h"
#include "dispatch/controller_options.h"
#include "ledger/client_records.h"

namespace pathways {
namespace {

constexpr uint32_t kMostPatience = 6;  // bounds the time between two turns of a held record: 2^6 graces
constexpr uint32_t kMostRenewals = 8;  // new graces that a held record gets because other clients' records failed
constexpr std::string_view kCancelled = "CancelledError: the run was cancelled before it started";

}  // namespace

void AdmissionQueue::take_cancelled(ClientState& client, std::span<const std::byte> run) {
  if (client.held.empty()) {
    refuse_unordered(client, run, kCancelled);
  } else {
    hold(client, run);
    cancel(client, read_record<RunRecord>(run).tag);
  }
}

void AdmissionQueue::take(ClientState& client, std::span<const std::byte> bytes) {
  if (!client.held.empty()) {
    hold(client, bytes);
    return;
  }
  if (is_late(bytes, options_.clock)) {
    ++stats_.late;
    refuse_unordered(client, bytes, deadlines_.too_late(bytes), kFailedByDeadline);
    return;
  }
  const Judgement judgement = admit(client, bytes);
  if (judgement.fits()) return;
  if (judgement.verdict == Verdict::kNever) {
    refuse(client, bytes, judgement);
    return;
  }
  if (grants_.trace().is_on()) grants_.trace().waits(client.id, kWaitsForMemory);
  client.not_kept_out();
  holding_.push_back(&client);
  hold(client, bytes);
  retry_soon();  // with the other held records: its memory spaces may be claimed
}

/// Admits a record and puts it into the order, if it fits now.
Judgement AdmissionQueue::admit(ClientState& client, std::span<const std::byte> bytes) {
  const Judgement judgement = ledger_.check(client.id, bytes);
  if (judgement.fits()) order(client, bytes);
  return judgement;
}

/// Gives an admitted record its place in the order, and updates the ledger and the handle table. MEM-7: a record after
/// which a host would keep memory that the ledger has released gets no place, and its client is evicted.
void AdmissionQueue::order(ClientState& client, std::span<const std::byte> bytes) {
  if (!is_run(bytes)) {
    order_command(client, bytes);
    return;
  }
  const auto record = read_record<RunRecord>(bytes);
  const PlanMemory* memory = ledger_.memory_of(record.plan);
  const auto* handles = reinterpret_cast<const uint64_t*>(bytes.data() + sizeof record);  // records are 8-aligned
  if (const char* wrong = MemoryLedger::misplaced(client, record, handles, memory, cover_); wrong != nullptr) {
    clients_.fault(client, wrong);
    return;
  }
  if (const auto composite = loops_.composites().find(record.plan); composite != nullptr) {
    loops_.begin(client, bytes, composite);
    if (client.loop != 0) deadlines_.watch(client, bytes, DeadlineHeap::kHeld, client.loop);
    return;
  }
  client.credits.run_admitted();
  if (memory == nullptr || memory->results.size() != record.results) {
    (void)ledger_.apply(client, bytes, cover_);
    const EntryId id = grants_.submit(client, bytes, record.group, EntryKind::kRun, record.tag);
    shares_.entered(client.id, record.plan, id);
    deadlines_.watch(client, bytes, id);
    return;
  }
  const uint64_t number = ledger_.enter(client, bytes, *memory);
  const EntryId id = grants_.submit(client, bytes, record.group, EntryKind::kRun, record.tag);
  ledger_.entered(id, client, record.plan, number);
  shares_.entered(client.id, record.plan, id);
  deadlines_.watch(client, bytes, id);
}

void AdmissionQueue::order_command(ClientState& client, std::span<const std::byte> bytes) {
  if (is_command(bytes, CommandKind::kRelease)) {
    if (!MemoryLedger::lies_where_it_says(client, bytes)) {
      order_release_where_it_lies(client, bytes);
      return;
    }
  } else if (const char* wrong = MemoryLedger::misplaced(client, bytes); wrong != nullptr) {
    clients_.fault(client, wrong);
    return;
  }
  if (const char* wrong = ledger_.apply(client, bytes, cover_); wrong != nullptr) {
    clients_.fault(client, wrong);
    return;
  }
  if (is_command(bytes, CommandKind::kTask)) return order_task(client, bytes);
  if (is_command(bytes, CommandKind::kBackend)) loops_.forget_composite(bytes);
  grants_.submit(client, bytes, read_record<CommandRecord>(bytes).group, EntryKind::kCommand, 0);
}

/// MEM-7: what hosts keep for the task stays in the ledger when the client releases it.
void AdmissionQueue::order_task(ClientState& client, std::span<const std::byte> bytes) {
  auto record = read_record<CommandRecord>(bytes);
  if (ledger_.holds().count(client.id) >= kMostHolds) {  // FLOW-1
    clients_.fault(client, "it has " + std::to_string(kMostHolds) + " saves and restores of arrays under way");
    return;
  }
  record.hold = ledger_.hold(client, bytes, grants_.hosts_of(record.group));
  std::vector<std::byte> numbered(bytes.begin(), bytes.end());
  std::memcpy(numbered.data(), &record, sizeof record);
  grants_.submit(client, numbered, record.group, EntryKind::kCommand, 0);
}

/// MEM-7: each buffer is released on the hosts that hold it, whatever group the client has named. A correct client
/// names another group when it drops an array while it moves the array's slice.
void AdmissionQueue::order_release_where_it_lies(ClientState& client, std::span<const std::byte> bytes) {
  const auto record = read_record<CommandRecord>(bytes);
  std::map<GroupId, std::vector<uint64_t>> by_group;
  for (size_t at = 0; at + sizeof(uint64_t) <= record.bytes; at += sizeof(uint64_t)) {
    const uint64_t handle = word_at(bytes, sizeof record + at);
    const auto* entry = client.handles.find(Handle{handle});
    by_group[entry != nullptr ? entry->group : record.group].push_back(handle);
  }
  for (const auto& [group, handles] : by_group) {
    for (size_t at = 0; at < handles.size(); at += kMostReleases) {
      const std::span<const uint64_t> piece =
          std::span(handles).subspan(at, std::min(kMostReleases, handles.size() - at));
      order_command(client, release_command(client.id, group, piece));
    }
  }
}

void AdmissionQueue::cancel(ClientState& client, uint64_t tag) {
  if (!loops_.cancel(client, tag, kCancelled) && !grants_.drop_run(client, tag, kCancelled))
    drop_held(client, tag, kCancelled);
}

// ------------------------------------------------------------------------------------------------------------ held

void AdmissionQueue::hold(ClientState& client, std::span<const std::byte> bytes) {
  if (is_command(bytes, CommandKind::kRelease)) {
    release_ahead(client, bytes);
    return;
  }
  if (client.held.lets_pass(bytes)) {
    order(client, bytes);
    return;
  }
  client.held.push(bytes);
  deadlines_.watch(client, bytes);
}

/// A release that comes behind held records takes effect behind the last of them that names the buffer, not behind all
/// of them: the other held records may wait for that very memory.
void AdmissionQueue::release_ahead(ClientState& client, std::span<const std::byte> bytes) {
  const auto record = read_record<CommandRecord>(bytes);
  for (size_t at = 0; at + sizeof(uint64_t) <= record.bytes; at += sizeof(uint64_t)) {
    client.held.release(word_at(bytes, sizeof record + at), record.group);
  }
  order_releases(client);
}

void AdmissionQueue::order_releases(ClientState& client) {
  if (client.loop != 0) return;  // CLI-1: its runs may read what is released
  const auto due = client.held.take_due_releases();
  std::vector<uint64_t> handles;
  for (size_t i = 0; i < due.size();) {
    const GroupId group = due[i].first;
    handles.clear();
    for (; i < due.size() && due[i].first == group && handles.size() < kMostReleases; ++i) {
      handles.push_back(due[i].second);
    }
    order(client, release_command(client.id, group, handles));
  }
}

uint64_t AdmissionQueue::held() const {
  uint64_t count = 0;
  for (const ClientState* client : holding_) count += client->held.size();
  return count;
}

void AdmissionQueue::retry() {
  bool is_due = false;
  for (const ClientState* client : holding_) {
    is_due = is_due || (client->held_since != 0 && !client->is_suspended) ||
             (client->is_paced && !client->credits.is_behind());
  }
  if (version_ == ledger_.admission().version() && !is_due) return;
  ledger_.clear_claims();
  first_held_ = nullptr;
  for (size_t i = 0; i < holding_.size();) {
    if (holding_[i]->is_suspended) {
      holding_[i++]->not_kept_out();
    } else if (retry(*holding_[i])) {
      holding_.erase(holding_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  version_ = ledger_.admission().version();
}

void AdmissionQueue::retry_picked(ClientState& client) {
  if (client.held.empty()) return;
  // All of them, in their line: the claims of those before it count.
  retry_soon();
  retry();
}

/// Orders the held records of a client that fit now. True when the client holds none any more.
bool AdmissionQueue::retry(ClientState& client) {
  HeldRecords& held = client.held;
  client.is_paced = false;
  while (!held.empty()) {
    if (!client.fault.empty() || client.loop != 0) return false;  // it is about to be evicted, or CLI-1
    if (client.credits.is_behind()) {                             // FLOW-1
      if (grants_.trace().is_on()) grants_.trace().waits(client.id, kWaitsForCredits);
      client.is_paced = true;
      client.not_kept_out();
      return false;
    }
    if (!held.front().dropped.empty()) {
      shares_.withdraw(client.id);
      const HeldRecords::Held dropped = held.take_front();
      fail_on_hosts(client, dropped.record, dropped.dropped);
      first_held_is_over(client, dropped.record);
      continue;
    }
    if (is_run(held.front().record) && grants_.is_stranded(read_record<RunRecord>(held.front().record).group)) {
      if (grants_.trace().is_on()) grants_.trace().waits(client.id, kWaitsForHosts);
      return false;  // ERR-2
    }
    std::vector<std::byte> bytes = held.take_front().record;
    if (is_run(bytes) && ledger_.check(client.id, bytes).fits() &&
        !shares_.may_enter(client.id, read_record<RunRecord>(bytes).plan)) {
      if (grants_.trace().is_on()) grants_.trace().waits(client.id, kWaitsForTurn);
      client.not_kept_out();
      held.put_back(std::move(bytes));
      return false;
    }
    const Judgement judgement = admit(client, bytes);
    if (judgement.fits()) {
      first_held_is_over(client, bytes);
      continue;
    }
    if (!may_wait(client, bytes, judgement)) {
      refuse(client, bytes, judgement);
      first_held_is_over(client, bytes);
      // A failure at the client's own quota, or of what can never fit, has nothing to do with others (MEM-5).
      if (!judgement.is_quota && judgement.verdict != Verdict::kNever) renew_graces(client);
      continue;
    }
    if (grants_.trace().is_on()) grants_.trace().waits(client.id, kWaitsForMemory);
    held.put_back(std::move(bytes));
    return false;
  }
  return true;
}

/// The client's first held record, which was taken out, was ordered or has failed: what was known of its wait is over,
/// and the releases that waited for it are ordered.
void AdmissionQueue::first_held_is_over(ClientState& client, std::span<const std::byte> bytes) {
  client.held.forget(bytes);
  client.not_kept_out();
  client.is_room_refused = false;
  client.renewals = 0;
  order_releases(client);
}

/// A client may release buffers because a record of it has failed. So every other client that waits gets a new grace.
/// A record gets so many at most: else a client whose records fail one after the other could keep a record that never
/// fits from its error for ever (MEM-3).
void AdmissionQueue::renew_graces(const ClientState& failed) {
  const int64_t now = options_.clock();
  for (ClientState* other : holding_) {
    if (other == &failed || other->held_since == 0 || other->renewals == kMostRenewals) continue;
    ++other->renewals;
    other->held_since = now;
  }
}

/// Whether a record that does not fit now may wait on; else it fails.
bool AdmissionQueue::may_wait(ClientState& client, std::span<const std::byte> bytes, const Judgement& judgement) {
  const bool is_held = judgement.verdict == Verdict::kHeld;
  if (judgement.verdict == Verdict::kNever) return false;
  // Its tasks end, and no turn makes them end sooner; but no task in line may have to come before that.
  if (is_held && ledger_.holds().count(client.id) != 0 && !client.held.has_tasks()) {
    client.is_its_turn = false;
    client.not_kept_out();
    return true;
  }
  if (!judgement.is_quota) {
    if (is_held) return may_wait_for_blocks(client, bytes, judgement.worst);
    client.not_kept_out();
    ledger_.claim(bytes);
    return true;
  }
  // MEM-5
  client.is_its_turn = false;
  if (!is_held || client.at_quota == AtQuota::kWait) {
    client.not_kept_out();
    return true;
  }
  const int64_t now = options_.clock();
  if (client.held_since == 0) client.held_since = client.turn_since = now;
  return now - client.held_since < options_.grace.count();
}

/// Whether a record that only live buffers keep out may wait on. Other clients may have to run before they release
/// buffers, but their runs may make new buffers just as fast, for ever. So the first client in the line gets turns
/// (MEM-2). A turn lasts one grace: nobody else is admitted to the record's memory spaces, and memory that others need
/// only for their runs under way becomes free. Between two turns the others run freely, each time for longer, so that a
/// client whose turns do not help costs them little. Returns false when the client had no turn for one grace, and in
/// that time no other busy client held any of the memory (MEM-3).
bool AdmissionQueue::may_wait_for_blocks(ClientState& client, std::span<const std::byte> bytes, SpaceId worst) {
  const int64_t now = options_.clock(), grace = options_.grace.count();
  if (client.held_since == 0) {
    client.held_since = client.turn_since = now;
    client.is_its_turn = false;
    client.turns = 0;
  }
  if (options_.asks_for_room && !client.is_room_refused) {  // SUSP-2
    if (client.room_since == 0) client.room_since = now;
    if (now - client.room_since >= grace) client.asks_for_room = worst;
  }
  if (first_held_ == nullptr) first_held_ = &client;
  if (first_held_ != &client && first_held_->is_its_turn) {  // so the holders of the memory cannot run
    client.held_since = now;
    return true;
  }
  if (client.is_its_turn) {
    client.held_since = now;
    if (now - client.turn_since < grace) {
      ledger_.claim(bytes);
      return true;
    }
    client.is_its_turn = false;
    client.turn_since = now;
  }
  if (is_held_by_busy(client, worst) || client.asks_for_room) client.held_since = now;
  if (now - client.held_since >= grace) return false;
  if (first_held_ == &client && now - client.turn_since >= grace << std::min(client.turns, kMostPatience)) {
    client.is_its_turn = true;
    client.turn_since = client.held_since = now;
    ++client.turns;
    ledger_.claim(bytes);
  }
  return true;
}

/// Whether another client that has runs, saves or restores under way, or that is gone, holds memory on a space: it may
/// become free.
bool AdmissionQueue::is_held_by_busy(const ClientState& client, SpaceId space) const {
  const auto holders = ledger_.admission().clients_on(space);
  return std::any_of(holders.begin(), holders.end(), [&](uint32_t holder) {
    if (holder == client.id) return false;
    const ClientState* other = clients_.find(holder);
    return other == nullptr ||  // it is gone; its last tasks will be over
           (ledger_.holds().count(holder) != 0 || other->credits.in_flight() != 0 || other->credits.is_behind() ||
            shares_.is_waiting(other->id));
  });
}

std::vector<RoomRequest> AdmissionQueue::room_requests() const {
  std::vector<RoomRequest> found;
  for (const ClientState* client : holding_) {
    if (client->is_suspended || !client->asks_for_room) continue;
    const auto holders = ledger_.admission().clients_on(*client->asks_for_room);
    found.push_back({client->id, false, {holders.begin(), holders.end()}});
  }
  return found;
}

void AdmissionQueue::refuse_room(ClientState& client) {
  if (!client.asks_for_room) return;
  client.asks_for_room.reset();
  client.is_room_refused = true;
  retry_soon();
}

bool AdmissionQueue::drop_held(ClientState& client, uint64_t tag, std::string_view text, uint16_t detail) {
  HeldRecords::Held* const held = client.held.find_run(tag);
  if (held == nullptr) return false;
  held->dropped = text;
  retry_soon();  // perhaps all held records can be ordered now
  ++stats_.dropped;
  clients_.run_over(client);
  clients_.tell_results(client, held->record, text, detail);
  return true;
}

void AdmissionQueue::validate() const {
  size_t with_held = 0;
  for (const auto& client : clients_.all()) with_held += client->held.empty() ? 0U : 1U;
  PW_CHECK(with_held == holding_.size());
  for (const ClientState* client : holding_) {
    PW_CHECK(!client->held.empty());
    PW_CHECK(std::count(holding_.begin(), holding_.end(), client) == 1);
  }
}

}  // namespace pathways
