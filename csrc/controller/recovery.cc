#include "controller/recovery.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "base/status.h"
#include "controller/client_records.h"
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
  grants_.end_sequential();
  hosts_.lose(hosts);
  for (const auto& client : clients_.all()) {
    for (const uint32_t h : hosts) client->credits.host_lost(h);
  }
  for (const uint32_t h : hosts) reclaim(h);
  tell_survivors(hosts, text);
  loops_.hosts_lost(text);  // first, so that no run of theirs waits any more
  fail_futures(hosts, text);
  for (const uint32_t h : hosts) grants_.complete_in_place_of(h);
  grants_.drop_stranded(text);
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
/// makes these. Releases the memory of all buffers there, except of those that waiting entries make or rename.
void Recovery::fail_futures(const std::vector<uint32_t>& hosts, std::string_view text) {
  std::vector<bool> is_lost_now(hosts_.count());
  for (const uint32_t h : hosts) is_lost_now[h] = true;
  const auto concerns = [&](GroupId group) {
    const auto members = grants_.hosts_of(group);
    return std::any_of(members.begin(), members.end(), [&](uint32_t h) { return is_lost_now[h]; });
  };
  struct Spared {
    std::unordered_set<uint64_t> made, renamed;  ///< handles
  };
  std::unordered_map<uint32_t, Spared> spared;  // by client
  std::unordered_set<uint64_t> waiting;         // holds of tasks that no host was granted
  grants_.for_each_waiting([&](EntryId, const Entry& entry, std::span<const std::byte> bytes) {
    if (entry.kind == EntryKind::kRun && grants_.is_stranded(entry.group)) return;  // it is about to be dropped
    auto& [made, renamed] = spared[entry.client];
    if (entry.kind == EntryKind::kRun) {
      const std::vector<uint64_t> results = results_of(bytes);
      made.insert(results.begin(), results.end());
    } else if (bytes.size() >= sizeof(CommandRecord)) {
      const auto record = read_record<CommandRecord>(bytes);
      made.insert(made_by(bytes));
      waiting.insert(hold_of(bytes));
      if (is_command(bytes, CommandKind::kRename)) {
        for (size_t at = 0; at + sizeof(uint64_t) <= record.bytes; at += sizeof(uint64_t)) {
          renamed.insert(word_at(bytes, sizeof record + at));
        }
      }
    }
  });
  for (const uint32_t h : hosts) ledger_.holds().host_lost(h, waiting);
  for (const auto& client : clients_.all()) {
    const Spared& exempt = spared[client->id];
    client->handles.for_each([&](Handle handle, HandleTable::Entry& entry) {
      if (!concerns(entry.group) || exempt.made.contains(handle.raw)) return;
      // MEM-7: surviving hosts keep their parts until the client releases the buffer.
      if (!grants_.is_stranded(entry.group) && !exempt.renamed.contains(handle.raw)) ledger_.release(entry);
      if (client->may_be_pending(handle)) clients_.tell(*client, handle, text);
    });
  }
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
