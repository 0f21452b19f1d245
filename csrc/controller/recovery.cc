#include "controller/recovery.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_set>

#include "base/status.h"
#include "ledger/client_records.h"
#include "messages/records.h"

namespace pathways {

// ------------------------------------------------------------------------------------------------------------ lost

uint64_t Recovery::lose(const std::vector<uint32_t>& hosts, std::string_view text) {
  for (const uint32_t h : hosts) {
    if (h >= hosts_.count() || hosts_.is_lost(h)) {
      throw Error(Status::kInvalid, "host " + std::to_string(h) + " is not there, or lost already");
    }
  }
  ++losses_;
  for (const uint32_t h : hosts) grants_.close(h);  // first, so that its last records grant it nothing
  for (const uint32_t h : hosts) hear_last_words(h);
  hosts_.lose(hosts);
  for (const auto& client : clients_.all()) {
    for (const uint32_t h : hosts) client->credits.host_lost(h);
  }
  for (const uint32_t h : hosts) reclaim(h);
  tell_survivors(hosts, text);
  loops_.hosts_lost(text);  // first, so that no run of theirs waits any more
  const auto why = std::make_shared<const std::string>(text);
  Lost lost = fail_futures(hosts, why);
  for (const uint32_t h : hosts) grants_.complete_in_place_of(h);
  fail_waiting(std::move(lost), why);
  queue_.retry_soon();  // memory that held records wait for may be free now
  return losses_;
}

/// Reads what the lost host has published. Its records are whole (RING-1), whenever it was killed.
void Recovery::hear_last_words(uint32_t h) {
  try {
    while (inbox_.drain_host(h) != 0) {
    }
  } catch (const Error&) {  // its last record was invalid; the host is gone and sends no more
  }
}

/// OWN-1: each client takes back the memory that it leased to a lost host in commands that were sent there. Commands
/// that still wait in the order are for the successor. A client that leased nothing hears of the loss, too.
void Recovery::reclaim(uint32_t h) {
  for (const auto& client : clients_.all()) clients_.tell_host_lost(*client, h, client->sent.take_lease(h));
}

void Recovery::tell_survivors(const std::vector<uint32_t>& hosts, std::string_view text) {
  const auto count = static_cast<uint32_t>(hosts.size());
  const uint32_t before = static_cast<uint32_t>(sizeof(HostLostRecord)) + padded(count * 4);
  const uint32_t most = hosts_.max_record();
  if (before >= most) throw Error(Status::kInvalid, "the numbers of lost hosts do not fit a ring");
  text = text.substr(0, std::min(kMostText, (most - before) & ~7u));
  const auto bytes = static_cast<uint32_t>(text.size());
  for (uint32_t h = 0; h < hosts_.count(); ++h) {
    if (hosts_.is_lost(h)) continue;
    hosts_.outbox_of(h).send(before + padded(bytes), [&](std::byte* out) {
      const HostLostRecord record{{RecordKind::kHostLost, 0, 0}, losses_, count, bytes};
      std::memcpy(out, &record, sizeof record);
      std::memcpy(out + sizeof record, hosts.data(), hosts.size() * sizeof(uint32_t));
      std::memcpy(out + before, text.data(), bytes);
    });
  }
}

/// All that waits in the order, by client, the oldest first.
Recovery::Lines Recovery::lines() const {
  Lines found;
  grants_.for_each_waiting([&](EntryId id, const Entry& entry, std::span<const std::byte> bytes) {
    const bool is_run = entry.kind == EntryKind::kRun;
    found[entry.client].push_back({id, &entry, bytes, is_run && grants_.is_stranded(entry.group)});
  });
  for (auto& each : found) std::ranges::sort(each.second, {}, [](const Waiting& one) { return one.entry->order; });
  return found;
}

/// Fails each pending future with a part on a lost host, except those that waiting entries make: the host's successor
/// makes these. Releases the memory of all buffers there, except of those that waiting entries make or rename. Returns
/// the buffers that are lost, as they are named before all that waits. What a name means before a rename that waits is
/// not known: runs that name it before are not among those that fail now. They fail when the successor has them.
Recovery::Lost Recovery::fail_futures(const std::vector<uint32_t>& hosts, const LossText& text) {
  std::vector<bool> is_lost_now(hosts_.count());
  for (const uint32_t h : hosts) is_lost_now[h] = true;
  const auto concerns = [&](GroupId group) {
    const auto members = grants_.hosts_of(group);
    return std::any_of(members.begin(), members.end(), [&](uint32_t h) { return is_lost_now[h]; });
  };
  Lines waiting = lines();
  std::unordered_set<uint64_t> holds;  // of tasks that no host was granted
  for (const auto& one : waiting) {
    for (const Waiting& each : one.second) holds.insert(hold_of(each.bytes));
  }
  for (const uint32_t h : hosts) ledger_.holds().host_lost(h, holds);
  Lost lost;
  for (const auto& client : clients_.all()) {
    LostBuffers& newly = lost[client->id];
    client->lost.prune([&](Handle handle) {
      const auto* entry = client->handles.occupant(handle);
      return entry != nullptr && entry->generation > handle.generation();
    });
    // The handle table is true behind all that waits.
    client->handles.for_each([&](Handle handle, HandleTable::Entry& entry) {
      if (concerns(entry.group)) newly.add(handle, text);
    });
    std::unordered_set<uint64_t> made, renamed;
    std::vector<Waiting>& line = waiting[client->id];
    for (auto at = line.rbegin(); at != line.rend(); ++at) {
      const Waiting& each = *at;
      std::vector<uint64_t> gone;  // what the table has forgotten, of buffers on a lost host
      if (const PlanMemory* memory = ledger_.memory_of_entry(each.id)) {  // a client's run
        for (const uint32_t position : memory->donated) {
          if (position >= read_record<RunRecord>(each.bytes).arguments) continue;
          if (concerns(memory->takers_of(position, each.entry->group))) {
            gone.push_back(argument_of(each.bytes, position));
          }
        }
      } else if (is_command(each.bytes, CommandKind::kRelease) && concerns(each.entry->group)) {
        gone = handles_of(each.bytes);
      }
      if (!each.is_stranded) {  // else it is about to be dropped
        newly.take_back(each.bytes);
        const std::vector<uint64_t> results =
            is_run(each.bytes) ? results_of(each.bytes) : std::vector{made_by(each.bytes)};
        made.insert(results.begin(), results.end());
      }
      for (const uint64_t handle : gone) newly.add(Handle{handle}, text);
      if (!is_command(each.bytes, CommandKind::kRename)) continue;
      const std::vector<uint64_t> pairs = handles_of(each.bytes);
      for (size_t i = 0; i + 2 <= pairs.size(); i += 2) renamed.insert(pairs[i]);
    }
    client->handles.for_each([&](Handle handle, HandleTable::Entry& entry) {
      if (!concerns(entry.group) || made.contains(handle.raw)) return;
      // MEM-7: surviving hosts keep their parts until the client releases the buffer. What is renamed by what waits
      // means an older buffer until then.
      if (!grants_.is_stranded(entry.group) && !renamed.contains(handle.raw)) ledger_.release(entry);
      if (client->may_be_pending(handle)) clients_.tell(*client, handle, *text);
    });
  }
  return lost;
}

/// Drops the runs in the order that need both lost hosts and surviving hosts, or have a lost buffer as an argument, and
/// fails the tokens of the commands that read one. `lost`: the buffers that this loss has cost, as they were named
/// before all that waits.
void Recovery::fail_waiting(Lost lost, const LossText& text) {
  Lines waiting = lines();
  std::vector<std::pair<EntryId, std::string>> runs;
  for (const auto& client : clients_.all()) {
    LostBuffers& newly = lost[client->id];
    for (const Waiting& each : waiting[client->id]) {
      if (each.entry->state != EntryState::kWaiting || each.entry->tag == kElementTag) continue;  // or it is of a loop
      LossText why = newly.named_by(each.bytes);
      if (why == nullptr && each.is_stranded) why = text;
      newly.follow(each.bytes, why);
      if (why == nullptr) continue;
      if (is_run(each.bytes)) {
        newly.donated(donated_by(each.bytes, ledger_.memory_of_entry(each.id)));
        runs.emplace_back(each.id, *why);
      } else {
        clients_.tell(*client, Handle{made_by(each.bytes)}, *why);
      }
    }
    fail_held(*client, newly);
    client->lost.merge(std::move(newly));
  }
  grants_.drop_all(std::move(runs));
}

/// The same for the records that the client's first record keeps out of the order.
void Recovery::fail_held(ClientState& client, LostBuffers& lost) {
  std::vector<std::pair<uint64_t, LossText>> runs;  // tags
  client.held.for_each([&](std::span<const std::byte> bytes) {
    const LossText why = lost.named_by(bytes);
    lost.follow(bytes, why);
    if (why == nullptr) return;
    if (is_run(bytes)) {
      runs.emplace_back(read_record<RunRecord>(bytes).tag, why);
    } else {
      clients_.tell(client, Handle{made_by(bytes)}, *why);
    }
  });
  for (const auto& [tag, why] : runs) queue_.drop_held(client, tag, *why);
}

// ------------------------------------------------------------------------------------------------------- successor

void Recovery::restore(uint32_t host, const HostView& block, std::span<const uint32_t> gone) {
  if (host >= hosts_.count() || !hosts_.is_lost(host)) {
    throw Error(Status::kInvalid, "host " + std::to_string(host) + " is not there, or not lost");
  }
  hosts_.restore(host, block);
  inbox_.look_at(host);
  for (const uint32_t client : gone) grants_.announce_gone(client, host);
  for (const auto& client : clients_.all()) describe_again(*client, host);
  grants_.open(host);
  queue_.retry_soon();  // a record that waited for the host may be held
}

/// Sends the successor what the client has described, in front of everything that it is granted.
void Recovery::describe_again(ClientState& client, uint32_t host) {
  for (const auto& definition : client.sent.definitions()) {
    const std::vector<std::byte>& command = definition.second;
    auto record = read_record<CommandRecord>(command);
    record.header.client = client.id;
    const auto members = grants_.hosts_of(record.group);
    if (std::find(members.begin(), members.end(), host) == members.end()) continue;
    client.credits.command_sent(host, command.size());
    hosts_.outbox_of(host).send(static_cast<uint32_t>(command.size()), [&](std::byte* out) {
      std::memcpy(out, command.data(), command.size());
      std::memcpy(out, &record.header, sizeof record.header);
    });
  }
}

}  // namespace pathways
