#include "sequencer/sequencer.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>

#include "base/check.h"
#include "base/status.h"

namespace pathways {

Sequencer::Sequencer(uint32_t hosts, uint32_t window) : window_(window), hosts_(hosts), numbers_(hosts) {
  PW_CHECK(window > 0);
  std::iota(numbers_.begin(), numbers_.end(), 0u);
  for (Host& host : hosts_) host.room = window;
}

void Sequencer::add_group(GroupId group, std::vector<uint32_t> hosts) {
  std::sort(hosts.begin(), hosts.end());
  if (hosts.empty()) throw Error(Status::kInvalid, "group " + std::to_string(group) + " has no hosts");
  if (hosts.back() >= hosts_.size()) {
    throw Error(Status::kInvalid, "group " + std::to_string(group) + " names host " + std::to_string(hosts.back()) +
                                      ", the cluster has " + std::to_string(hosts_.size()));
  }
  if (std::adjacent_find(hosts.begin(), hosts.end()) != hosts.end()) {
    throw Error(Status::kInvalid, "group " + std::to_string(group) + " names a host twice");
  }
  if (has_group(group)) throw Error(Status::kInvalid, "group " + std::to_string(group) + " is registered already");
  if (group >= groups_.size()) groups_.resize(group + 1);
  groups_[group] = std::move(hosts);
}

EntryId Sequencer::submit(uint32_t client, GroupId group, EntryKind kind, uint64_t tag) {
  PW_DCHECK(has_group(group) || ((group & kOneHost) != 0 && (group & ~kOneHost) < hosts_.size()));
  EntryId id;
  if (free_.empty()) {
    id = static_cast<EntryId>(entries_.size());
    entries_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
  }
  Entry& e = entries_[id];
  e = Entry{};
  e.order = next_order_++;
  e.tag = tag;
  e.client = client;
  e.group = group;
  e.kind = kind;
  e.state = EntryState::kWaiting;
  ++live_;
  const auto hosts = hosts_of(group);
  for (const uint32_t h : hosts) {
    if (!hosts_[h].fifo.empty() || !is_open(hosts_[h], e)) ++e.blocked;
  }
  if (e.blocked == 0) {  // the FIFOs are empty: it need not stand in them
    e.state = EntryState::kGranted;
    e.remaining = static_cast<uint32_t>(hosts.size());
    granted_.push_back(id);
    for (const uint32_t h : hosts) occupy(hosts_[h], id);
  } else {
    for (const uint32_t h : hosts) hosts_[h].fifo.push_back(id);
  }
  return id;
}

/// The entry is granted to the host: a run takes a place in the host's window.
void Sequencer::occupy(Host& host, EntryId id) {
  if (!needs_room(entries_[id])) return;
  --host.room;
  if (id / 64 >= host.running.size()) host.running.resize(entries_.size() / 64 + 1);
  host.running[id / 64] |= uint64_t{1} << (id % 64);
}

void Sequencer::unblock_head(Host& host) {
  if (host.fifo.empty()) return;
  const EntryId head = host.fifo.front();
  Entry& e = entries_[head];
  if (is_open(host, e) && --e.blocked == 0) grantable_.push_back(head);
}

void Sequencer::grant(EntryId first) {
  // Granting one entry may make the next heads grantable: a worklist keeps the stack flat.
  grantable_.push_back(first);
  for (size_t i = 0; i < grantable_.size(); ++i) {
    const EntryId id = grantable_[i];
    Entry& e = entries_[id];
    if (e.state == EntryState::kWaiting) {
      e.state = EntryState::kGranted;
      e.remaining = static_cast<uint32_t>(hosts_of(e.group).size());
    }
    granted_.push_back(id);
    for (uint32_t h : hosts_of(e.group)) {
      Host& host = hosts_[h];
      PW_DCHECK(host.fifo.front() == id);
      host.fifo.pop_front();
      occupy(host, id);
      unblock_head(host);
    }
  }
  grantable_.clear();
}

bool Sequencer::complete(EntryId id, uint32_t h) {
  Entry& e = entries_[id];
  PW_DCHECK(e.state == EntryState::kGranted && e.kind == EntryKind::kRun && e.remaining > 0);
  PW_DCHECK(is_running_on(id, h));
  Host& host = hosts_[h];
  host.running[id / 64] &= ~(uint64_t{1} << (id % 64));
  if (host.room++ == 0 && !host.closed && !host.fifo.empty()) {
    const EntryId head = host.fifo.front();
    Entry& waiting = entries_[head];
    if (needs_room(waiting) && --waiting.blocked == 0) grant(head);
  }
  if (--entries_[id].remaining > 0) return false;
  retire(id);
  return true;
}

bool Sequencer::cancel(EntryId id) {
  Entry& e = entries_[id];
  if (e.state != EntryState::kWaiting) return false;
  // A dropped entry needs no room and no open host: where it heads the FIFO of a full or closed host, it is blocked no
  // longer.
  uint32_t opened = 0;
  for (uint32_t h : hosts_of(e.group)) {
    if (hosts_[h].fifo.front() == id && !is_open(hosts_[h], e)) ++opened;
  }
  e.state = EntryState::kDropped;
  e.blocked -= opened;
  if (e.blocked == 0) grant(id);
  return true;
}

void Sequencer::close(uint32_t h) {
  Host& host = hosts_[h];
  if (host.closed) return;
  if (!host.fifo.empty()) {
    Entry& head = entries_[host.fifo.front()];
    if (head.state != EntryState::kDropped && is_open(host, head)) ++head.blocked;
  }
  host.closed = true;
}

void Sequencer::open(uint32_t h) {
  Host& host = hosts_[h];
  if (!host.closed) return;
  PW_CHECK(host.room == window_);
  host.closed = false;
  if (host.fifo.empty()) return;
  const EntryId head = host.fifo.front();
  Entry& e = entries_[head];
  if (e.state != EntryState::kDropped && --e.blocked == 0) grant(head);
}

std::vector<EntryId> Sequencer::running_on(uint32_t h) const {
  std::vector<EntryId> found;
  const auto& running = hosts_[h].running;
  for (size_t word = 0; word < running.size(); ++word) {
    for (uint64_t bits = running[word]; bits != 0; bits &= bits - 1) {
      found.push_back(static_cast<EntryId>(word * 64 + static_cast<size_t>(std::countr_zero(bits))));
    }
  }
  return found;
}

void Sequencer::settle(EntryId id) {
  const Entry& e = entries_[id];
  if (e.kind == EntryKind::kCommand || e.state == EntryState::kDropped) retire(id);
}

void Sequencer::retire(EntryId id) {
  entries_[id].state = EntryState::kFree;
  free_.push_back(id);
  --live_;
}

void Sequencer::validate() const {
  for (const Host& host : hosts_) {
    PW_CHECK(host.room <= window_);
    uint32_t running = 0;
    for (const uint64_t bits : host.running) running += static_cast<uint32_t>(std::popcount(bits));
    PW_CHECK(running + host.room == window_);
    uint64_t last = 0;
    for (EntryId id : host.fifo) {
      PW_CHECK(entries_[id].state == EntryState::kWaiting || entries_[id].state == EntryState::kDropped);
      PW_CHECK(entries_[id].order > last);  // ORD-1, ORD-2
      last = entries_[id].order;
    }
  }
  for (EntryId id = 0; id < entries_.size(); ++id) {
    const Entry& e = entries_[id];
    if (e.state != EntryState::kWaiting && e.state != EntryState::kDropped) continue;
    uint32_t blocked = 0;
    bool queued = true;
    for (uint32_t h : hosts_of(e.group)) {
      const Host& host = hosts_[h];
      queued = queued && std::find(host.fifo.begin(), host.fifo.end(), id) != host.fifo.end();
      if (host.fifo.empty() || host.fifo.front() != id || !is_open(host, e)) ++blocked;
    }
    // GANG-1: an entry is in all of its FIFOs or in none, and no entry stays there unblocked.
    if (queued) PW_CHECK(blocked == e.blocked && blocked > 0);
  }
}

}  // namespace pathways
