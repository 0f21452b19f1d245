#include "sequencer/sequencer.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "base/status.h"

namespace pathways {

Sequencer::Sequencer(uint32_t hosts, uint32_t window) : window_(window), hosts_(hosts) {
  PW_CHECK(window > 0);
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
  PW_DCHECK(has_group(group));
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
  for (uint32_t h : groups_[group]) {
    Host& host = hosts_[h];
    host.fifo.push_back(id);
    if (host.fifo.size() > 1 || !is_open(host, e)) ++e.blocked;
  }
  if (e.blocked == 0) grant(id);
  return id;
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
      e.remaining = static_cast<uint32_t>(groups_[e.group].size());
    }
    granted_.push_back(id);
    const bool room = needs_room(e);
    for (uint32_t h : groups_[e.group]) {
      Host& host = hosts_[h];
      PW_DCHECK(host.fifo.front() == id);
      host.fifo.pop_front();
      if (room) --host.room;
      unblock_head(host);
    }
  }
  grantable_.clear();
}

bool Sequencer::complete(EntryId id, uint32_t h) {
  Entry& e = entries_[id];
  PW_DCHECK(e.state == EntryState::kGranted && e.kind == EntryKind::kRun && e.remaining > 0);
  Host& host = hosts_[h];
  if (host.room++ == 0 && !host.fifo.empty()) {
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
  // It asks for no room any more: where it heads a full host, it is blocked no longer.
  uint32_t opened = 0;
  if (e.kind == EntryKind::kRun) {
    for (uint32_t h : groups_[e.group]) {
      if (hosts_[h].room == 0 && hosts_[h].fifo.front() == id) ++opened;
    }
  }
  e.state = EntryState::kDropped;
  e.blocked -= opened;
  if (e.blocked == 0) grant(id);
  return true;
}

void Sequencer::settle(EntryId id) {
  const Entry& e = entries_[id];
  if (e.kind == EntryKind::kNote || e.state == EntryState::kDropped) retire(id);
}

void Sequencer::retire(EntryId id) {
  entries_[id].state = EntryState::kFree;
  free_.push_back(id);
  --live_;
}

void Sequencer::validate() const {
  for (const Host& host : hosts_) {
    PW_CHECK(host.room <= window_);
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
    for (uint32_t h : groups_[e.group]) {
      const Host& host = hosts_[h];
      queued = queued && std::find(host.fifo.begin(), host.fifo.end(), id) != host.fifo.end();
      if (host.fifo.empty() || host.fifo.front() != id || !is_open(host, e)) ++blocked;
    }
    // GANG-1: in all of its FIFOs or in none, and never left there unblocked.
    if (queued) PW_CHECK(blocked == e.blocked && blocked > 0);
  }
}

}  // namespace pathways
