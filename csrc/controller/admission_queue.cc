/// The controller's memory half: which records enter the order, wait, or are refused (MEM-2, MEM-3).
///
/// When a client's record is not admitted, the controller holds that record and the client's later records behind it.
/// Held records are tried again, the oldest client first, whenever a run has ended or a block was released.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/status.h"
#include "controller/controller.h"

namespace pathways {
namespace {

constexpr size_t kHoldersNamed = 3;
constexpr size_t kMostReleases = 64;   // in one command
constexpr uint32_t kMostPatience = 6;  // bounds the time between two turns of a held record: 2^6 graces

bool is_run(std::span<const std::byte> bytes) { return read_record<RecordHeader>(bytes).kind == RecordKind::kRun; }

bool is_command(std::span<const std::byte> bytes, CommandKind kind) {
  const auto header = read_record<RecordHeader>(bytes);
  return header.kind == RecordKind::kCommand && static_cast<CommandKind>(header.detail) == kind;
}

/// Whether a record is a command that makes the buffer `handle`.
bool makes_buffer(std::span<const std::byte> bytes) {
  return is_command(bytes, CommandKind::kPut) ||
         (is_command(bytes, CommandKind::kTask) && read_record<CommandRecord>(bytes).token == 0);
}

uint64_t word(std::span<const std::byte> bytes, size_t offset) {
  uint64_t value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

uint64_t argument_of(std::span<const std::byte> run, uint32_t index) {
  return word(run, sizeof(RunRecord) + index * sizeof(uint64_t));
}

uint64_t result_of(std::span<const std::byte> run, uint32_t index) {
  return argument_of(run, read_record<RunRecord>(run).arguments + index);
}

std::vector<std::byte> release_command(uint32_t client, GroupId group, std::span<const uint64_t> handles) {
  CommandRecord command{};
  command.header = {RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kRelease), client};
  command.group = group;
  command.bytes = static_cast<uint32_t>(handles.size_bytes());
  std::vector<std::byte> bytes(sizeof command + command.bytes);
  std::memcpy(bytes.data(), &command, sizeof command);
  if (!handles.empty()) std::memcpy(bytes.data() + sizeof command, handles.data(), command.bytes);
  return bytes;
}

std::string in_bytes(uint64_t count) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  double value = static_cast<double>(count);
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  char text[48];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

}  // namespace

SpaceSetId Controller::add_space_set(std::vector<SpaceId> spaces) {
  SpaceSetId set = 0;
  run_mail([&] { set = admission_.add_set(std::move(spaces)); });
  return set;
}

void Controller::set_budget(SpaceId space, uint64_t bytes) {
  run_mail([&] {
    if (space >= admission_.space_count()) throw Error(Status::kInvalid, "no memory space " + std::to_string(space));
    admission_.set_budget(space, bytes);
  });
}

void Controller::set_plan_memory(uint32_t plan, PlanMemory memory) {
  auto shared = std::make_shared<const PlanMemory>(std::move(memory));
  run_mail([&] {
    for (const SpaceNeed& need : shared->needs) {
      if (need.space >= admission_.space_count())
        throw Error(Status::kInvalid, "a plan needs a memory space that is not there");
    }
    for (const PlanMemory::Result& result : shared->results) {
      if (result.set != kNoSpaceSet && !admission_.has_set(result.set)) {
        throw Error(Status::kInvalid, "a result lies on a space set that nobody made");
      }
    }
    if (plan >= plan_memory_.size()) plan_memory_.resize(plan + 1);
    plan_memory_[plan] = shared;
  });
}

/// Admits a record and puts it into the order. False: the record does not fit now, and `verdict` says why.
bool Controller::admit(Client& client, std::span<const std::byte> bytes, Verdict* verdict, SpaceId* worst) {
  *verdict = Verdict::kFits;
  if (is_run(bytes)) {
    const auto record = read_record<RunRecord>(bytes);
    const PlanMemory* memory = memory_of(record.plan);
    if (memory != nullptr) *verdict = admission_.check(memory->needs, worst);
  } else if (makes_buffer(bytes)) {
    const auto record = read_record<CommandRecord>(bytes);
    if (record.space_set != kNoSpaceSet) {
      *verdict = admission_.check_block(record.space_set, record.space_bytes, worst);
    }
  }
  if (*verdict != Verdict::kFits) return false;
  order(client, bytes);
  return true;
}

/// Gives an admitted record its place in the order, and updates the ledger and the handle table.
void Controller::order(Client& client, std::span<const std::byte> bytes) {
  if (!is_run(bytes)) {
    command_handles(client, bytes);
    submit_record(client, bytes, read_record<CommandRecord>(bytes).group, EntryKind::kCommand, 0);
    return;
  }
  const auto record = read_record<RunRecord>(bytes);
  const PlanMemory* memory = memory_of(record.plan);
  ++client.in_flight;
  if (memory == nullptr || memory->results.size() != record.results) {
    command_handles(client, bytes);
    watch_deadline(client, bytes, submit_record(client, bytes, record.group, EntryKind::kRun, record.tag));
    return;
  }
  const uint64_t number = admission_.enter(memory->needs);
  blocks_.assign(record.results, HandleTable::kNoBlock);
  for (uint32_t i = 0; i < record.results; ++i) {
    const PlanMemory::Result& result = memory->results[i];
    BlockId& block = blocks_[i];
    if (result.same_as >= 0 && static_cast<uint32_t>(result.same_as) < i) {
      block = blocks_[static_cast<uint32_t>(result.same_as)];
      if (block != HandleTable::kNoBlock) admission_.share(block);
    } else if (result.argument >= 0 && static_cast<uint32_t>(result.argument) < record.arguments) {
      const auto* entry = client.handles.find(Handle{argument_of(bytes, static_cast<uint32_t>(result.argument))});
      if (entry != nullptr && entry->block != HandleTable::kNoBlock) {
        block = entry->block;
        admission_.share(block);
      }
    } else if (result.set != kNoSpaceSet) {
      block = admission_.add_block(client.id, record.plan, result.set, result.bytes, false);
    }
    if (auto* entry = announce(client, Handle{result_of(bytes, i)}, result.group)) {
      entry->block = block;
    } else if (block != HandleTable::kNoBlock) {
      admission_.release(block);
    }
  }
  for (const uint32_t position : memory->donated) {  // the run takes them over
    if (position >= record.arguments) continue;
    if (auto* entry = client.handles.find(Handle{argument_of(bytes, position)})) release_bytes(*entry);
  }
  const EntryId id = submit_record(client, bytes, record.group, EntryKind::kRun, record.tag);
  if (id >= admitted_.size()) admitted_.resize(id + 1);
  admitted_[id] = {plan_memory_[record.plan], number};
  watch_deadline(client, bytes, id);
}

/// Updates the handle table: enters the handles that a valid record makes, and removes those that it releases.
void Controller::command_handles(Client& client, std::span<const std::byte> bytes) {
  if (is_run(bytes)) {
    const auto record = read_record<RunRecord>(bytes);
    for (uint32_t i = 0; i < record.results; ++i) {
      (void)announce(client, Handle{result_of(bytes, i)}, record.group);
    }
    return;
  }
  const auto record = read_record<CommandRecord>(bytes);
  switch (static_cast<CommandKind>(record.header.detail)) {
    case CommandKind::kPut:
    case CommandKind::kTask:
      if (!makes_buffer(bytes)) {
        (void)announce(client, Handle{record.token}, record.group);
        return;
      }
      if (auto* entry = announce(client, Handle{record.handle}, record.group);
          entry != nullptr && record.space_set != kNoSpaceSet) {
        entry->block = admission_.add_block(client.id, Admission::kPut, record.space_set, record.space_bytes, true);
      }
      return;
    case CommandKind::kFetch:
      (void)announce(client, Handle{record.token}, record.group);
      return;
    case CommandKind::kRelease:
      for (size_t at = 0; at + sizeof(Handle) <= record.bytes; at += sizeof(Handle)) {
        if (auto* entry = client.handles.find(Handle{word(bytes, sizeof record + at)})) {
          release_bytes(*entry);
          client.handles.forget(*entry);
        }
      }
      return;
    case CommandKind::kBackend:
      if (const uint64_t plan = record.token; plan != 0 && plan < plan_memory_.size() &&
                                              plan_memory_[plan] != nullptr &&
                                              plan_memory_[plan]->client == client.id) {
        plan_memory_[plan].reset();
      }
      return;
    case CommandKind::kRename:
      for (size_t at = 0; at + 2 * sizeof(Handle) <= record.bytes; at += 2 * sizeof(Handle)) {
        rename(client, Handle{word(bytes, sizeof record + at)},
               Handle{word(bytes, sizeof record + at + sizeof(Handle))});
      }
      return;
    default:
      return;
  }
}

/// Enters a handle that a record makes. If the client uses the handle's index again without a release, the old buffer's
/// memory is released first (MEM-1).
HandleTable::Entry* Controller::announce(Client& client, Handle handle, GroupId group) {
  if (auto* old = client.handles.occupant(handle)) release_bytes(*old);
  return client.handles.announce(handle, group);
}

/// MOVE-1: the name now means the fresh buffer; the memory of the buffer that it meant before is released.
void Controller::rename(Client& client, Handle name, Handle fresh) {
  HandleTable::Entry* came = client.handles.find(fresh);
  if (came == nullptr) return;
  const HandleTable::Entry moved = *came;
  client.handles.forget(*came);
  if (auto* entry = announce(client, name, moved.group)) {
    entry->block = moved.block;
  } else if (moved.block != HandleTable::kNoBlock) {
    admission_.release(moved.block);
  }
}

/// A dropped run never takes over its donated arguments, because no host was granted the run. So in the run's place its
/// hosts get a command to release them. The ledger counted them as released when the run was ordered, and later entries
/// rely on that room.
void Controller::release_donated(EntryId id) {
  if (id >= admitted_.size() || admitted_[id].memory == nullptr || admitted_[id].memory->donated.empty()) return;
  const std::vector<std::byte>& run = kept_[id];
  const auto record = read_record<RunRecord>(run);
  std::vector<uint64_t> handles;
  for (const uint32_t position : admitted_[id].memory->donated) {
    if (position < record.arguments) handles.push_back(argument_of(run, position));
  }
  instead_[id].push_back(release_command(sequencer_.entry(id).client, record.group, handles));
}

void Controller::release_bytes(HandleTable::Entry& entry) {
  if (entry.block != HandleTable::kNoBlock) admission_.release(entry.block);
  entry.block = HandleTable::kNoBlock;
}

// ------------------------------------------------------------------------------------------------------------ held

void Controller::hold(Client& client, std::span<const std::byte> bytes) {
  if (is_command(bytes, CommandKind::kRelease)) {
    release_ahead(client, bytes);
    return;
  }
  count_held(client, bytes, true);
  client.holding.add(1, bytes.size());
  client.held.push_back({{bytes.begin(), bytes.end()}, {}});
  watch_deadline(client, bytes);
}

/// Counts how many held records name each handle.
void Controller::count_held(Client& client, std::span<const std::byte> bytes, bool is_added) {
  const auto count = [&](uint64_t handle) {
    if (is_added) {
      ++client.held_handles[handle];
      return;
    }
    const auto at = client.held_handles.find(handle);
    if (at == client.held_handles.end() || --at->second != 0) return;
    client.held_handles.erase(at);
    if (const auto released = client.held_releases.find(handle); released != client.held_releases.end()) {
      client.let_go.emplace_back(released->second, handle);
      client.held_releases.erase(released);
    }
  };
  if (is_run(bytes)) {
    const auto record = read_record<RunRecord>(bytes);
    for (uint32_t i = 0; i < record.arguments + record.results; ++i) count(argument_of(bytes, i));
  } else if (is_command(bytes, CommandKind::kRename)) {
    const auto record = read_record<CommandRecord>(bytes);
    for (size_t at = 0; at + sizeof(Handle) <= record.bytes; at += sizeof(Handle))
      count(word(bytes, sizeof record + at));
  } else {
    count(read_record<CommandRecord>(bytes).handle);
  }
}

/// A release that comes behind held records takes effect behind the last of them that names the buffer, not behind all
/// of them: the other held records may wait for that very memory.
void Controller::release_ahead(Client& client, std::span<const std::byte> bytes) {
  const auto record = read_record<CommandRecord>(bytes);
  for (size_t at = 0; at + sizeof(uint64_t) <= record.bytes; at += sizeof(uint64_t)) {
    const uint64_t handle = word(bytes, sizeof record + at);
    if (client.held_handles.contains(handle)) {
      client.held_releases.emplace(handle, record.group);
    } else {
      client.let_go.emplace_back(record.group, handle);
    }
  }
  order_releases(client);
}

void Controller::order_releases(Client& client) {
  auto let_go = std::exchange(client.let_go, {});
  std::stable_sort(let_go.begin(), let_go.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<uint64_t> handles;
  for (size_t i = 0; i < let_go.size();) {
    const GroupId group = let_go[i].first;
    handles.clear();
    for (; i < let_go.size() && let_go[i].first == group && handles.size() < kMostReleases; ++i) {
      handles.push_back(let_go[i].second);
    }
    order(client, release_command(client.id, group, handles));
  }
}

void Controller::retry_held() {
  bool is_due = false;
  for (const Client* client : holding_) {
    is_due = is_due || (client->held_since != 0 && !client->is_suspended) || (client->is_paced && !is_behind(*client));
  }
  if (admission_version_ == admission_.version() && !is_due) return;
  admission_.clear_claims();
  first_held_ = nullptr;
  for (size_t i = 0; i < holding_.size();) {
    if (holding_[i]->is_suspended) {
      holding_[i++]->held_since = 0;
    } else if (retry_held(*holding_[i])) {
      holding_.erase(holding_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  admission_version_ = admission_.version();
}

/// Orders the held records that fit now. True when the client holds none any more.
bool Controller::retry_held(Client& client) {
  client.is_paced = false;
  while (!client.held.empty()) {
    if (is_behind(client)) {  // FLOW-1
      client.is_paced = true;
      client.held_since = 0;
      return false;
    }
    const Held& front = client.held.front();
    if (!front.dropped.empty()) {
      const Held dropped = std::move(client.held.front());
      client.held.pop_front();
      client.holding.remove(1, dropped.record.size());
      fail_on_hosts(client, dropped.record, dropped.dropped);
      count_held(client, dropped.record, false);
      order_releases(client);
      continue;
    }
    if (lost_ != 0 && is_run(front.record) && is_stranded(read_record<RunRecord>(front.record).group)) {
      return false;  // ERR-2
    }
    std::vector<std::byte> bytes = std::move(client.held.front().record);
    client.held.pop_front();
    client.holding.remove(1, bytes.size());
    Verdict verdict;
    SpaceId worst = 0;
    bool is_over = false;
    if (admit(client, bytes, &verdict, &worst)) {
      count_held(client, bytes, false);
      order_releases(client);
      client.held_since = 0;
      continue;
    }
    if (verdict == Verdict::kBusy) {
      client.held_since = 0;
      claim_spaces(bytes);
    } else if (verdict == Verdict::kHeld) {
      is_over = !may_wait_for_blocks(client, bytes, worst);
    }
    if (is_over || verdict == Verdict::kNever) {
      count_held(client, bytes, false);
      refuse(client, bytes, verdict, worst);
      order_releases(client);
      // The client may release buffers because of the failure, so every client that waits gets a new grace.
      for (Client* other : holding_) other->held_since = 0;
      continue;
    }
    client.holding.add(1, bytes.size());
    client.held.push_front({std::move(bytes), {}});
    return false;
  }
  return true;
}

void Controller::claim_spaces(std::span<const std::byte> bytes) {
  if (is_run(bytes)) {
    admission_.claim(plan_memory_[read_record<RunRecord>(bytes).plan]->needs);
  } else {
    admission_.claim_set(read_record<CommandRecord>(bytes).space_set);
  }
}

/// Whether a record that only live buffers keep out may wait on. Other clients may have to run before they release
/// buffers, but their runs may make new buffers just as fast, for ever. So the first client in the line gets turns
/// (MEM-2). A turn lasts one grace: nobody else is admitted to the record's memory spaces, and memory that others need
/// only for their runs under way becomes free. Between two turns the others run freely, each time for longer, so that a
/// client whose turns do not help costs them little. Returns false when the client had no turn for one grace, and in
/// that time no other busy client held any of the memory (MEM-3).
bool Controller::may_wait_for_blocks(Client& client, std::span<const std::byte> bytes, SpaceId worst) {
  const int64_t now = monotonic_ns(), grace = options_.grace.count();
  if (client.held_since == 0) {
    client.held_since = client.turn_since = now;
    client.is_its_turn = false;
    client.turns = 0;
  }
  if (first_held_ == nullptr) first_held_ = &client;
  if (first_held_ != &client && first_held_->is_its_turn) {  // so the holders of the memory cannot run
    client.held_since = now;
    return true;
  }
  if (client.is_its_turn) {
    client.held_since = now;
    if (now - client.turn_since < grace) {
      claim_spaces(bytes);
      return true;
    }
    client.is_its_turn = false;
    client.turn_since = now;
  }
  if (is_held_by_busy(client, worst)) client.held_since = now;
  if (now - client.held_since >= grace) return false;
  if (first_held_ == &client && now - client.turn_since >= grace << std::min(client.turns, kMostPatience)) {
    client.is_its_turn = true;
    client.turn_since = client.held_since = now;
    ++client.turns;
    claim_spaces(bytes);
  }
  return true;
}

/// Whether another client that has runs in flight holds memory on a space: it may release that memory.
bool Controller::is_held_by_busy(const Client& client, SpaceId space) const {
  const auto holders = admission_.holders(space, SIZE_MAX);
  return std::any_of(holders.begin(), holders.end(), [&](const Admission::Holder& holder) {
    if (holder.client == client.id) return false;
    const Client* other = client_of(holder.client);
    return other != nullptr && (other->in_flight != 0 || is_behind(*other));
  });
}

/// Fails a held run at its client now. The records before the run may still use the old meaning of its results'
/// handles, so the run's hosts get the failure in the run's place.
bool Controller::cancel_held(Client& client, uint64_t tag, std::string_view text, uint16_t detail) {
  const auto at = std::find_if(client.held.begin(), client.held.end(), [&](const Held& held) {
    return held.dropped.empty() && is_run(held.record) && read_record<RunRecord>(held.record).tag == tag;
  });
  if (at == client.held.end()) return false;
  at->dropped = text;
  admission_version_ = UINT64_MAX;  // tries the held records again: perhaps all can be ordered now
  ++stats_.dropped;
  ++client.retired;
  client.has_unsent = true;
  tell_results(client, at->record, text, detail);
  return true;
}

// --------------------------------------------------------------------------------------------------------- refused

/// MEM-3: fails the results of the record; nothing else is disturbed.
void Controller::refuse(Client& client, std::span<const std::byte> bytes, Verdict verdict, SpaceId worst) {
  ++stats_.refused;
  if (is_run(bytes)) {
    const auto record = read_record<RunRecord>(bytes);
    const PlanMemory& memory = *plan_memory_[record.plan];
    uint64_t wanted = 0;
    for (const SpaceNeed& need : memory.needs) {
      if (need.space == worst) wanted = need.peak + need.eager;
    }
    ++client.retired;
    client.has_unsent = true;
    fail_results(client, bytes,
                 refusal(client, "a run of program '" + memory.name + "'", memory.biggest, wanted, verdict, worst));
    return;
  }
  auto record = read_record<CommandRecord>(bytes);
  const std::string text = refusal(client, "a buffer put", {}, record.space_bytes, verdict, worst);
  if (static_cast<CommandKind>(record.header.detail) == CommandKind::kPut) {
    record.is_refused = 1;
    std::vector<std::byte> command(bytes.begin(), bytes.end());
    std::memcpy(command.data(), &record, sizeof record);
    submit_record(client, command, record.group, EntryKind::kCommand, 0);
  }
  fail_results(client, bytes, text);
}

std::string Controller::refusal(const Client& client, const std::string& what, const std::string& biggest,
                                uint64_t wanted, Verdict verdict, SpaceId worst) const {
  const std::string space =
      worst < options_.spaces.size() ? options_.spaces[worst] : "memory space " + std::to_string(worst);
  std::string text = "ResourceExhaustedError: " + what + " needs " + in_bytes(wanted) + " (" + std::to_string(wanted) +
                     " bytes) on " + space + ", whose budget is " + in_bytes(admission_.budget(worst)) + " (" +
                     std::to_string(admission_.budget(worst)) + " bytes)";
  if (!biggest.empty()) text += "; its biggest buffers: " + biggest;
  if (verdict == Verdict::kNever) return text + ". It can never fit: make it smaller, or the budget bigger";
  text += ". " + in_bytes(admission_.live(worst)) + " are held there by live arrays:";
  for (const Admission::Holder& holder : admission_.holders(worst, kHoldersNamed)) {
    std::string name = "put there";
    if (holder.plan != Admission::kPut) {
      const PlanMemory* memory = memory_of(holder.plan);
      name = memory == nullptr ? "results of a program" : "results of program '" + memory->name + "'";
    }
    text += " " + in_bytes(holder.bytes) + " " + name + " by " +
            (holder.client == client.id ? std::string("this client") : "client " + std::to_string(holder.client)) + ";";
  }
  text.back() = '.';
  return text + " Delete arrays, or donate arguments, to make room";
}

std::vector<std::byte> Controller::failure_command(uint32_t client, Handle handle, GroupId group,
                                                   std::string_view text) {
  const auto count = static_cast<uint32_t>(std::min<size_t>(text.size(), 1024));
  const CommandRecord command{{RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kFail), client},
                              handle.raw,
                              0,
                              group,
                              count,
                              0,
                              kNoSpaceSet,
                              0};
  std::vector<std::byte> out(sizeof command + padded(count));
  std::memcpy(out.data(), &command, sizeof command);
  std::memcpy(out.data() + sizeof command, text.data(), count);
  return out;
}

/// Fails the results of a record that gets no place in the order, at the client and on the hosts.
void Controller::fail_results(Client& client, std::span<const std::byte> bytes, std::string_view text,
                              uint16_t detail) {
  tell_results(client, bytes, text, detail);
  fail_on_hosts(client, bytes, text);
}

void Controller::tell_results(Client& client, std::span<const std::byte> bytes, std::string_view text,
                              uint16_t detail) {
  if (!is_run(bytes)) {
    tell(client, Handle{read_record<CommandRecord>(bytes).handle}, text, detail);
    return;
  }
  const uint32_t results = read_record<RunRecord>(bytes).results;
  for (uint32_t i = 0; i < results; ++i) tell(client, Handle{result_of(bytes, i)}, text, detail);
}

/// Fails the results on the hosts that would hold them, so that whatever depends on them fails with the same text
/// (ERR-1).
void Controller::fail_on_hosts(Client& client, std::span<const std::byte> bytes, std::string_view text) {
  const PlanMemory* memory = is_run(bytes) ? memory_of(read_record<RunRecord>(bytes).plan) : nullptr;
  for (const std::vector<std::byte>& command : failure_commands(client.id, bytes, memory, text)) {
    submit_record(client, command, read_record<CommandRecord>(command).group, EntryKind::kCommand, 0);
  }
}

/// One command per result. Empty for a run whose results' hosts are not known.
std::vector<std::vector<std::byte>> Controller::failure_commands(uint32_t client, std::span<const std::byte> bytes,
                                                                 const PlanMemory* memory,
                                                                 std::string_view text) const {
  std::vector<std::vector<std::byte>> commands;
  if (!is_run(bytes)) {
    const auto record = read_record<CommandRecord>(bytes);
    commands.push_back(failure_command(client, Handle{record.handle}, record.group, text));
    return commands;
  }
  const uint32_t results = read_record<RunRecord>(bytes).results;
  if (memory == nullptr || memory->results.size() != results) return commands;
  for (uint32_t i = 0; i < results; ++i) {
    commands.push_back(failure_command(client, Handle{result_of(bytes, i)}, memory->results[i].group, text));
  }
  return commands;
}

}  // namespace pathways
