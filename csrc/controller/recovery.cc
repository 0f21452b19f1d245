#include "controller/recovery.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>
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
  struct Spared {
    std::unordered_set<uint64_t> made;
    std::unordered_map<uint64_t, uint64_t> renamed;  ///< by name: the fresh buffer that it will mean
    std::vector<uint64_t> released;  ///< or donated, and lay on a lost host; the handle table has forgotten them
  };
  std::unordered_map<uint32_t, Spared> spared;  // by client
  std::unordered_set<uint64_t> waiting;         // holds of tasks that no host was granted
  grants_.for_each_waiting([&](EntryId id, const Entry& entry, std::span<const std::byte> bytes) {
    auto& [made, renamed, released] = spared[entry.client];
    if (const PlanMemory* memory = ledger_.memory_of_entry(id)) {  // a client's run
      for (const uint32_t position : memory->donated) {
        if (position >= read_record<RunRecord>(bytes).arguments) continue;
        if (concerns(memory->takers_of(position, entry.group))) released.push_back(argument_of(bytes, position));
      }
    }
    if (entry.kind == EntryKind::kRun && grants_.is_stranded(entry.group)) return;  // it is about to be dropped
    if (entry.kind == EntryKind::kRun) {
      const std::vector<uint64_t> results = results_of(bytes);
      made.insert(results.begin(), results.end());
    } else if (bytes.size() >= sizeof(CommandRecord)) {
      const auto record = read_record<CommandRecord>(bytes);
      made.insert(made_by(bytes));
      waiting.insert(hold_of(bytes));
      const auto word = [&](uint64_t at) { return word_at(bytes, sizeof record + at * sizeof(uint64_t)); };
      const uint64_t words = record.bytes / sizeof(uint64_t);
      if (is_command(bytes, CommandKind::kRename)) {
        for (uint64_t at = 0; at + 2 <= words; at += 2) renamed[word(at)] = word(at + 1);
      } else if (is_command(bytes, CommandKind::kRelease) && concerns(entry.group)) {
        for (uint64_t at = 0; at < words; ++at) released.push_back(word(at));
      }
    }
  });
  for (const uint32_t h : hosts) ledger_.holds().host_lost(h, waiting);
  Lost lost;
  for (const auto& client : clients_.all()) {
    const Spared& exempt = spared[client->id];
    LostBuffers& newly = lost[client->id];
    client->lost.prune([&](Handle handle) {
      const auto* entry = client->handles.occupant(handle);
      return entry != nullptr && entry->generation > handle.generation();
    });
    for (const uint64_t handle : exempt.released) {  // waiting runs before the release may name it
      const auto renamed = exempt.renamed.find(handle);
      const uint64_t buffer = renamed == exempt.renamed.end() ? handle : renamed->second;
      if (!exempt.made.contains(buffer)) newly.add(Handle{buffer}, text);
    }
    client->handles.for_each([&](Handle handle, HandleTable::Entry& entry) {
      if (!concerns(entry.group)) return;
      const auto renamed = exempt.renamed.find(handle.raw);
      const bool is_renamed = renamed != exempt.renamed.end();  // until the rename's turn it means an older buffer
      const uint64_t buffer = is_renamed ? renamed->second : handle.raw;
      if (!exempt.made.contains(buffer)) newly.add(Handle{buffer}, text);
      if (exempt.made.contains(handle.raw)) return;
      // MEM-7: surviving hosts keep their parts until the client releases the buffer.
      if (!grants_.is_stranded(entry.group) && !is_renamed) ledger_.release(entry);
      if (client->may_be_pending(handle)) clients_.tell(*client, handle, *text);
    });
  }
  return lost;
}

/// Drops the runs in the order that need both lost hosts and surviving hosts, or have a lost buffer as an argument, and
/// fails the tokens of the commands that read one. `lost`: the buffers that this loss has cost, as they were named
/// before all that waits.
void Recovery::fail_waiting(Lost lost, const LossText& text) {
  struct Waiting {
    uint64_t order;
    EntryId id;
    bool is_stranded;
    std::span<const std::byte> bytes;
  };
  std::unordered_map<uint32_t, std::vector<Waiting>> waiting;  // by client
  grants_.for_each_waiting([&](EntryId id, const Entry& entry, std::span<const std::byte> bytes) {
    if (entry.state != EntryState::kWaiting) return;
    const bool is_clients = entry.kind == EntryKind::kRun ? entry.tag != kElementTag  // else it is of a loop
                                                          : bytes.size() >= sizeof(CommandRecord);
    const bool is_stranded = entry.kind == EntryKind::kRun && grants_.is_stranded(entry.group);
    if (is_clients) waiting[entry.client].push_back({entry.order, id, is_stranded, bytes});
  });
  std::vector<std::pair<EntryId, std::string>> runs;
  for (const auto& client : clients_.all()) {
    auto& line = waiting[client->id];
    LostBuffers& newly = lost[client->id];
    std::ranges::sort(line, {}, &Waiting::order);
    for (const Waiting& each : line) {
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

void Recovery::restore(uint32_t host, const HostView& block) {
  if (host >= hosts_.count() || !hosts_.is_lost(host)) {
    throw Error(Status::kInvalid, "host " + std::to_string(host) + " is not there, or not lost");
  }
  hosts_.restore(host, block);
  inbox_.look_at(host);
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
