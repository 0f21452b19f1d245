/// ERR-2 in the controller: lost hosts leave the order, and their successors enter it.
///
/// A loss is a point in the order. Before that point, for each lost host: whole records that the host sent count; what
/// the host had been granted and has not completed is over. Behind that point: entries that waited for the host wait
/// for its successor. Surviving hosts get the loss in their rings, behind everything that they were granted together
/// with the lost hosts. So each surviving host knows for certain what will never come (Executor::on_hosts_lost).
#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

#include "base/status.h"
#include "controller/controller.h"

namespace pathways {
namespace {

constexpr uint32_t kMostText = 4096;

std::vector<uint64_t> results_of(const std::vector<std::byte>& run) {
  const auto record = read_record<RunRecord>(run);
  std::vector<uint64_t> results(record.results);
  std::memcpy(results.data(), run.data() + sizeof record + size_t{record.arguments} * sizeof(uint64_t),
              results.size() * sizeof(uint64_t));
  return results;
}

}  // namespace

uint64_t Controller::lose_hosts(std::vector<uint32_t> hosts, std::string text) {
  uint64_t number = 0;
  run_mail([&] {
    for (const uint32_t h : hosts) {
      if (h >= hosts_.size() || hosts_[h].is_lost) {
        throw Error(Status::kInvalid, "host " + std::to_string(h) + " is not there, or lost already");
      }
    }
    lose(hosts, text);
    number = losses_;
  });
  return number;
}

void Controller::restore_host(uint32_t host, const HostView& block) {
  run_mail([&] {
    if (host >= hosts_.size() || !hosts_[host].is_lost) {
      throw Error(Status::kInvalid, "host " + std::to_string(host) + " is not there, or not lost");
    }
    restore(host, block);
  });
}

void Controller::lose(const std::vector<uint32_t>& hosts, std::string_view text) {
  ++losses_;
  for (const uint32_t h : hosts) sequencer_.close(h);  // first, so that its last records grant it nothing
  for (const uint32_t h : hosts) hear_last_words(h);
  for (const uint32_t h : hosts) {
    Host& host = hosts_[h];
    host.is_lost = true;
    host.is_dirty = false;
    host.inbox = ByteRing::Consumer();
    host.outbox = Outbox();
    ++lost_;
    for (auto& client : clients_) {  // the successor begins with no commands
      if (client->on_host.empty()) continue;
      Load& load = client->on_host[h];
      if (load.is_above(kMostCommands, kMostCommandBytes)) --client->full_hosts;
      load = {};
    }
  }
  std::erase_if(dirty_, [&](uint32_t h) { return hosts_[h].is_lost; });
  for (const uint32_t h : hosts) reclaim(h);
  tell_survivors(hosts, text);
  fail_futures(hosts, text);
  for (const uint32_t h : hosts) {
    for (const EntryId id : sequencer_.running_on(h)) {
      // GANG-1: nobody knows whether the lost host launched its gangs; its successor begins to count at 0.
      const uint32_t client = sequencer_.entry(id).client;
      if (stepper_) stepper_->host_done(id, h);
      if (sequencer_.complete(id, h)) retire(id, client);
    }
  }
  // The youngest first, so that dropping an older run grants none of these.
  std::vector<EntryId> dropped = stranded();
  std::sort(dropped.begin(), dropped.end(),
            [&](EntryId a, EntryId b) { return sequencer_.entry(a).order > sequencer_.entry(b).order; });
  for (const EntryId id : dropped) drop(id, text);  // this also fails the results that would lie on survivors
  if (stepper_) step_on();
  admission_version_ = UINT64_MAX;  // memory that held records wait for may be free now
}

/// Reads what the lost host has published. Its records are whole (RING-1), whenever it was killed.
void Controller::hear_last_words(uint32_t h) {
  try {
    while (drain_host(h) != 0) {
    }
  } catch (const Error&) {  // its last record was invalid; the host is gone and sends no more
  }
}

/// OWN-1: each client takes back the memory that it leased to a lost host in commands that were sent there. Commands
/// that still wait in the order are for the successor.
void Controller::reclaim(uint32_t h) {
  if (h >= Arena::kBorrowers) return;
  for (auto& client : clients_) {
    const uint64_t stamp = std::exchange(client->lease_stamp[h], 0);
    if (stamp == 0) continue;
    say(*client, sizeof(ReclaimRecord), [&](std::byte* out) {
      const ReclaimRecord record{{RecordKind::kReclaim, 0, client->id}, h, 0, stamp};
      std::memcpy(out, &record, sizeof record);
    });
  }
}

void Controller::tell_survivors(const std::vector<uint32_t>& hosts, std::string_view text) {
  const auto count = static_cast<uint32_t>(hosts.size());
  const uint32_t before = static_cast<uint32_t>(sizeof(HostLostRecord)) + padded(count * 4);
  if (before >= max_record_) throw Error(Status::kInvalid, "the numbers of lost hosts do not fit a ring");
  text = text.substr(0, std::min(kMostText, (max_record_ - before) & ~7u));
  const auto bytes = static_cast<uint32_t>(text.size());
  for (uint32_t h = 0; h < hosts_.size(); ++h) {
    if (hosts_[h].is_lost) continue;
    outbox_of(h).send(before + padded(bytes), [&](std::byte* out) {
      const HostLostRecord record{{RecordKind::kHostLost, 0, 0}, losses_, count, bytes};
      std::memcpy(out, &record, sizeof record);
      std::memcpy(out + sizeof record, hosts.data(), hosts.size() * sizeof(uint32_t));
      std::memcpy(out + before, text.data(), bytes);
    });
  }
}

/// Fails each pending future with a part on a lost host, except those of entries that wait for the host's successor.
/// Releases the memory of all buffers there.
void Controller::fail_futures(const std::vector<uint32_t>& hosts, std::string_view text) {
  std::vector<bool> is_lost_now(hosts_.size());
  for (const uint32_t h : hosts) is_lost_now[h] = true;
  const auto concerns = [&](GroupId group) {
    const auto members = sequencer_.hosts_of(group);
    return std::any_of(members.begin(), members.end(), [&](uint32_t h) { return is_lost_now[h]; });
  };
  std::unordered_map<uint32_t, std::unordered_set<uint64_t>> spared;  // by client
  for (EntryId id = 0; id < kept_.size(); ++id) {
    if (kept_[id].empty()) continue;
    const Entry& entry = sequencer_.entry(id);
    if (entry.kind == EntryKind::kRun && is_stranded(entry.group)) continue;  // it is about to be dropped
    auto& handles = spared[entry.client];
    if (entry.kind == EntryKind::kRun) {
      const std::vector<uint64_t> results = results_of(kept_[id]);
      handles.insert(results.begin(), results.end());
    } else if (kept_[id].size() >= sizeof(CommandRecord)) {
      const auto record = read_record<CommandRecord>(kept_[id]);
      handles.insert(record.token != 0 ? record.token : record.handle);
    }
  }
  for (auto& client : clients_) {
    const auto& exempt = spared[client->id];
    client->handles.for_each([&](Handle handle, HandleTable::Entry& entry) {
      if (!concerns(entry.group) || exempt.contains(handle.raw)) return;
      release_bytes(entry);
      if (client->view.futures().poll(handle) == FutureState::kPending) tell(*client, handle, text);
    });
  }
}

/// Sends what the hosts of a dropped run get in the run's place.
void Controller::forward_instead(EntryId id) {
  const auto found = instead_.find(id);
  if (found == instead_.end()) return;
  for (const std::vector<std::byte>& command : found->second) {
    const auto record = read_record<CommandRecord>(command);
    Client* client = client_of(record.header.client);
    for (const uint32_t h : sequencer_.hosts_of(record.group)) {
      if (hosts_[h].is_lost) continue;  // its successor has none of these buffers
      if (client != nullptr) give(client, h, command.size());
      outbox_of(h).send(static_cast<uint32_t>(command.size()),
                        [&](std::byte* out) { std::memcpy(out, command.data(), command.size()); });
    }
  }
  instead_.erase(found);
}

/// Waiting runs that need both lost hosts and surviving hosts.
std::vector<EntryId> Controller::stranded() const {
  std::vector<EntryId> found;
  for (EntryId id = 0; id < kept_.size(); ++id) {
    if (kept_[id].empty()) continue;
    const Entry& entry = sequencer_.entry(id);
    if (entry.kind == EntryKind::kRun && entry.state == EntryState::kWaiting && is_stranded(entry.group)) {
      found.push_back(id);
    }
  }
  return found;
}

bool Controller::is_stranded(GroupId group) const {
  bool has_lost = false, has_others = false;
  for (const uint32_t h : sequencer_.hosts_of(group)) (hosts_[h].is_lost ? has_lost : has_others) = true;
  return has_lost && has_others;
}

void Controller::restore(uint32_t h, const HostView& block) {
  Host& host = hosts_[h];
  host.inbox = block.from_host();
  host.outbox = Outbox(block.to_host(), block.doorbell());
  host.gangs = 0;
  host.is_lost = false;
  --lost_;
  max_record_ = std::min(max_record_, host.outbox.max_record());
  ready_bitmap_.push_back(h);
  for (const auto& client : clients_) {
    for (const auto& definition : client->definitions) {
      const std::vector<std::byte>& command = definition.second;
      auto record = read_record<CommandRecord>(command);
      record.header.client = client->id;
      const auto members = sequencer_.hosts_of(record.group);
      if (std::find(members.begin(), members.end(), h) == members.end()) continue;
      give(client.get(), h, command.size());
      outbox_of(h).send(static_cast<uint32_t>(command.size()), [&](std::byte* out) {
        std::memcpy(out, command.data(), command.size());
        std::memcpy(out, &record.header, sizeof record.header);
      });
    }
  }
  sequencer_.open(h);
  settle_granted();
  admission_version_ = UINT64_MAX;  // a record that waited for the host may be held
}

}  // namespace pathways
