#include "ledger/memory_ledger.h"

#include <algorithm>
#include <string>

#include "base/status.h"
#include "ledger/client_records.h"

namespace pathways {
namespace {

constexpr const char* kOverLive = "it makes a buffer or a token in the place of a buffer that it has not released";
constexpr const char* kDonatesElsewhere = "a run donates an argument that lies on hosts which do not take it over";
constexpr const char* kRenamesElsewhere = "a rename names a buffer that lies on hosts which do not get the rename";

bool has_block(const HandleTable::Entry* entry) { return entry != nullptr && entry->block != HandleTable::kNoBlock; }

}  // namespace

// ------------------------------------------------------------------------------------------------------ registered

uint64_t MemoryLedger::devices_of(SpaceSetId set, uint32_t host) const {
  if (set == kNoSpaceSet) return 0;
  if (devices_per_host_ == 0) return ~uint64_t{0};
  const SpaceId first = host * devices_per_host_;
  uint64_t mask = 0;
  for (uint32_t i = 0; i < devices_per_host_; ++i) {
    if (admission_.is_in(set, first + i)) mask |= uint64_t{1} << i;
  }
  return mask;
}

void MemoryLedger::set_plan_memory(uint32_t plan, PlanMemory memory) {
  for (const PlanMemory::Result& result : memory.results) {
    if (result.set != kNoSpaceSet && !admission_.has_set(result.set)) {
      throw Error(Status::kInvalid, "a result lies on a space set that nobody made");
    }
  }
  if (!memory.is_composite) memory.by_class = admission_.by_class(std::exchange(memory.needs, {}));
  if (plan >= plan_memory_.size()) plan_memory_.resize(plan + 1);
  plan_memory_[plan] = std::make_shared<const PlanMemory>(std::move(memory));
}

void MemoryLedger::forget_plans_of(uint32_t client) {
  for (auto& memory : plan_memory_) {
    if (memory != nullptr && memory->client == client) memory.reset();
  }
}

// ------------------------------------------------------------------------------------------------------------ runs

/// The quota comes first: what it keeps out waits for nobody else, and must not keep anybody else out.
Judgement MemoryLedger::check(uint32_t client, std::span<const std::byte> bytes) const {
  Judgement found;
  if (is_run(bytes)) {
    const PlanMemory* memory = memory_of(read_record<RunRecord>(bytes).plan);
    if (memory == nullptr) return found;
    found.verdict = admission_.check(memory->by_class, &found.worst);
    if (found.verdict == Verdict::kNever) return found;
    SpaceId worst = 0;
    const Verdict quota = admission_.check_quota(client, memory->by_class, &worst);
    return quota == Verdict::kFits ? found : Judgement{quota, true, worst};
  }
  if (!makes_buffer(bytes)) return found;
  const auto record = read_record<CommandRecord>(bytes);
  if (record.space_set == kNoSpaceSet) return found;
  found.verdict = admission_.check_block(record.space_set, record.space_bytes, &found.worst);
  if (found.verdict == Verdict::kNever) return found;
  SpaceId worst = 0;
  const Verdict quota = admission_.check_block_quota(client, record.space_set, record.space_bytes, &worst);
  return quota == Verdict::kFits ? found : Judgement{quota, true, worst};
}

void MemoryLedger::claim(std::span<const std::byte> bytes) {
  if (is_run(bytes)) {
    admission_.claim(plan_memory_[read_record<RunRecord>(bytes).plan]->by_class);
  } else {
    admission_.claim_set(read_record<CommandRecord>(bytes).space_set);
  }
}

uint64_t MemoryLedger::enter(ClientState& client, std::span<const std::byte> bytes, const PlanMemory& memory) {
  const auto record = read_record<RunRecord>(bytes);
  const uint64_t number = admission_.enter(memory.by_class, client.id);
  blocks_.assign(record.results, HandleTable::kNoBlock);
  for (uint32_t i = 0; i < record.results; ++i) blocks_[i] = block_of_result(client, bytes, memory, i);
  // The run takes its donated arguments over before it makes its results: a client may name a result as it named one of
  // them.
  for (const uint32_t position : memory.donated) {
    if (position >= record.arguments) continue;
    if (auto* entry = client.handles.find(Handle{argument_of(bytes, position)})) {
      release(*entry);
      client.handles.forget(*entry);  // FUT-3: its client sends no release
    }
  }
  for (uint32_t i = 0; i < record.results; ++i) {
    if (auto* entry = announce(client, Handle{result_of(bytes, i)}, memory.results[i].group)) {
      entry->block = blocks_[i];
    } else if (blocks_[i] != HandleTable::kNoBlock) {
      admission_.release(blocks_[i]);
    }
  }
  return number;
}

/// A reference to the block of a run's result: that of an earlier result, that of an argument, or a new one.
BlockId MemoryLedger::block_of_result(ClientState& client, std::span<const std::byte> bytes, const PlanMemory& memory,
                                      uint32_t index) {
  const auto record = read_record<RunRecord>(bytes);
  const PlanMemory::Result& result = memory.results[index];
  BlockId block = HandleTable::kNoBlock;
  if (result.same_as >= 0 && static_cast<uint32_t>(result.same_as) < index) {
    block = blocks_[static_cast<uint32_t>(result.same_as)];
  } else if (result.argument >= 0 && static_cast<uint32_t>(result.argument) < record.arguments) {
    const auto* entry = client.handles.find(Handle{argument_of(bytes, static_cast<uint32_t>(result.argument))});
    if (entry != nullptr) block = entry->block;
  } else if (result.set != kNoSpaceSet) {
    return admission_.add_block(client.id, record.plan, result.set, result.bytes, false);
  }
  if (block != HandleTable::kNoBlock) admission_.share(block);
  return block;
}

void MemoryLedger::entered(EntryId id, const ClientState& client, uint32_t plan, uint64_t number) {
  if (id >= entered_.size()) entered_.resize(id + 1);
  entered_[id] = {plan_memory_[plan], number, client.id};
}

void MemoryLedger::leave(EntryId id) {
  if (id >= entered_.size() || entered_[id].memory == nullptr) return;
  admission_.leave(entered_[id].memory->by_class, entered_[id].number, entered_[id].client);
  entered_[id].memory.reset();
}

// --------------------------------------------------------------------------------------------------------- handles

const char* MemoryLedger::over_live() { return kOverLive; }

const char* MemoryLedger::donates_elsewhere(ClientState& client, const RunRecord& record, const uint64_t* handles,
                                            const PlanMemory& memory, const GroupCover& cover) {
  for (const uint32_t position : memory.donated) {
    if (position >= record.arguments) continue;
    const auto* entry = client.handles.find(Handle{handles[position]});
    if (has_block(entry) && !cover.covers(memory.takers_of(position, record.group), entry->group)) {
      return kDonatesElsewhere;
    }
  }
  return nullptr;
}

const char* MemoryLedger::misplaced(ClientState& client, std::span<const std::byte> command) {
  const uint64_t made = made_by(command);
  return made != 0 && client.handles.has_block_at(Handle{made}) ? kOverLive : nullptr;
}

bool MemoryLedger::lies_where_it_says(ClientState& client, std::span<const std::byte> bytes) {
  const auto record = read_record<CommandRecord>(bytes);
  for (size_t at = 0; at + sizeof(Handle) <= record.bytes; at += sizeof(Handle)) {
    const auto* entry = client.handles.find(Handle{word_at(bytes, sizeof record + at)});
    if (entry != nullptr && entry->group != record.group) return false;
  }
  return true;
}

const char* MemoryLedger::apply(ClientState& client, std::span<const std::byte> bytes, const GroupCover& cover) {
  if (is_run(bytes)) {
    const auto record = read_record<RunRecord>(bytes);
    for (uint32_t i = 0; i < record.results; ++i) {
      (void)announce(client, Handle{result_of(bytes, i)}, record.group);
    }
    return nullptr;
  }
  const auto record = read_record<CommandRecord>(bytes);
  switch (static_cast<CommandKind>(record.header.detail)) {
    case CommandKind::kPut:
    case CommandKind::kTask:
      if (!makes_buffer(bytes)) {
        (void)announce(client, Handle{record.token}, record.group);
        return nullptr;
      }
      if (auto* entry = announce(client, Handle{record.handle}, record.group);
          entry != nullptr && record.space_set != kNoSpaceSet) {
        entry->block = admission_.add_block(client.id, Admission::kPut, record.space_set, record.space_bytes, true);
      }
      return nullptr;
    case CommandKind::kFetch:
      (void)announce(client, Handle{record.token}, record.group);
      return nullptr;
    case CommandKind::kRelease:
      for (size_t at = 0; at + sizeof(Handle) <= record.bytes; at += sizeof(Handle)) {
        if (auto* entry = client.handles.find(Handle{word_at(bytes, sizeof record + at)})) {
          release(*entry);
          client.handles.forget(*entry);
        }
      }
      return nullptr;
    case CommandKind::kBackend:
      if (const uint64_t plan = record.token; plan != 0 && plan < plan_memory_.size() &&
                                              plan_memory_[plan] != nullptr &&
                                              plan_memory_[plan]->client == client.id) {
        plan_memory_[plan].reset();
      }
      return nullptr;
    case CommandKind::kRename:
      for (size_t at = 0; at + 2 * sizeof(Handle) <= record.bytes; at += 2 * sizeof(Handle)) {
        const char* wrong = rename(client, record.group, Handle{word_at(bytes, sizeof record + at)},
                                   Handle{word_at(bytes, sizeof record + at + sizeof(Handle))}, cover);
        if (wrong != nullptr) return wrong;
      }
      return nullptr;
    default:
      return nullptr;
  }
}

uint64_t MemoryLedger::hold(ClientState& client, std::span<const std::byte> task, std::span<const uint32_t> hosts) {
  const auto* entry = client.handles.find(Handle{read_record<CommandRecord>(task).handle});
  return has_block(entry) ? holds_.begin(client.id, entry->block, hosts) : 0;
}

/// Enters a handle that a record makes. If the client uses the handle's index again without a release, the old buffer's
/// memory is released first (MEM-1).
HandleTable::Entry* MemoryLedger::announce(ClientState& client, Handle handle, GroupId group) {
  if (auto* old = client.handles.occupant(handle)) release(*old);
  return client.handles.announce(handle, group);
}

/// MOVE-1: the name now means the fresh buffer; the memory of the buffer that it meant before is released. MEM-7: so
/// the hosts of both must get the rename.
const char* MemoryLedger::rename(ClientState& client, GroupId group, Handle name, Handle fresh,
                                 const GroupCover& cover) {
  HandleTable::Entry* came = client.handles.find(fresh);
  if (came == nullptr) return nullptr;
  if (!cover.covers(group, came->group)) return kRenamesElsewhere;
  if (const auto* old = client.handles.occupant(name); has_block(old)) {
    if (old->generation != name.generation()) return kOverLive;  // a host without the fresh buffer would keep it
    if (!cover.covers(group, old->group)) return kRenamesElsewhere;
  }
  const HandleTable::Entry moved = *came;
  client.handles.forget(*came);
  if (auto* entry = announce(client, name, moved.group)) {
    entry->block = moved.block;
  } else if (moved.block != HandleTable::kNoBlock) {
    admission_.release(moved.block);
  }
  return nullptr;
}

void MemoryLedger::release(HandleTable::Entry& entry) {
  if (entry.block != HandleTable::kNoBlock) admission_.release(entry.block);
  entry.block = HandleTable::kNoBlock;
}

void MemoryLedger::release_all(ClientState& client) {
  client.handles.for_each([&](Handle, HandleTable::Entry& entry) { release(entry); });
  holds_.client_gone(client.id);
}

}  // namespace pathways
