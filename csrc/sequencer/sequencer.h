/// The order: every run of every client gets a place in one total order, and each host sees a projection of it.
///
/// Pure: no thread, no clock, no I/O. The controller feeds it entries and completions and asks what may be granted.
///
/// An entry concerns a group of hosts. It waits in the FIFO of each of them and is granted when it heads all of them
/// and each has room in its window; then it leaves all of them at once. So
///   ORD-1  the entries that a host is granted come in the order of their submission: a FIFO per host, never overtaken.
///   ORD-2  the order is total: submission numbers are drawn from one counter, and all FIFOs are filled under it.
///   GANG-1 an entry is granted to all hosts of its group or to none; cancelling is decided before the grant, keeps
///          the entry's place in every FIFO, and so is seen at the same point of the order by all.
///   COST-3 submitting, granting and completing cost O(1) per entry and host of its group; nothing is searched.
/// Disjoint groups never wait for each other.
///
/// ERR-2: a host that is lost is closed: it is granted nothing until it is opened again, and whoever lost it completes
/// in its stead what it had been granted (`running_on`). What waits for it keeps its place; what is dropped needs no
/// host, so it passes a closed one.
///
/// Progress: the oldest entry not yet granted heads all its FIFOs (whatever was before it has been granted), so it
/// waits for window room only, which the completions of granted entries give back.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace pathways {

using EntryId = uint32_t;  ///< index of a live entry; reused after retirement
using GroupId = uint32_t;

/// With this bit, a group is the one host whose number the rest is; such groups need no registration.
inline constexpr GroupId kOneHost = 1u << 31;

/// kWaiting -> kGranted | kDropped; kGranted -> retired; kDropped -> retired without ever being granted.
enum class EntryState : uint8_t { kFree, kWaiting, kGranted, kDropped };

/// What an entry asks for. A run takes a place in the window of each host until it is done there; a command (a buffer
/// put, a read, a release) only keeps its place in the order.
enum class EntryKind : uint8_t { kRun, kCommand };

struct Entry {
  uint64_t order = 0;
  uint64_t tag = 0;  ///< the submitter's own number
  uint32_t client = 0;
  GroupId group = 0;
  uint32_t blocked = 0;    ///< hosts where it does not head the FIFO, or finds no room
  uint32_t remaining = 0;  ///< hosts that have not completed it
  bool counted = false;    ///< some host has said whether it launched the run's gangs
  bool ganged = false;     ///< what it said
  EntryKind kind = EntryKind::kRun;
  EntryState state = EntryState::kFree;
};

class Sequencer {
 public:
  /// `window`: runs that a host may have been granted and not completed.
  Sequencer(uint32_t hosts, uint32_t window);

  /// Registers a group. Throws Error(kInvalid) for an empty group, an unknown or a repeated host, or a known id.
  void add_group(GroupId group, std::vector<uint32_t> hosts);
  bool has_group(GroupId group) const { return group < groups_.size() && !groups_[group].empty(); }
  std::span<const uint32_t> hosts_of(GroupId group) const {
    return (group & kOneHost) != 0 ? std::span(&numbers_[group & ~kOneHost], 1) : std::span(groups_[group]);
  }

  /// Appends an entry to the order. What became grantable is in `granted()`; the caller drains it before the next call.
  EntryId submit(uint32_t client, GroupId group, EntryKind kind, uint64_t tag);
  /// One host has finished a granted run. True when it was the last: the entry is then retired and may be reused.
  bool complete(EntryId entry, uint32_t host);
  /// Drops a run that was not granted yet. It stays in the order, costs nothing, and comes out of `granted()` as
  /// kDropped. False when it was granted already (GANG-1: then it runs).
  bool cancel(EntryId entry);

  /// ERR-2: the host is granted nothing from now on. Closing a closed one is nothing, and so for opening.
  void close(uint32_t host);
  /// What waited for the host may be granted. It must have completed everything, itself or by proxy.
  void open(uint32_t host);
  bool is_closed(uint32_t host) const { return hosts_[host].closed; }
  /// Runs that the host was granted and has not completed, in no order. O(entries).
  std::vector<EntryId> running_on(uint32_t host) const;
  bool is_running_on(EntryId id, uint32_t host) const {
    const auto& running = hosts_[host].running;
    return id / 64 < running.size() && (running[id / 64] >> (id % 64) & 1) != 0;
  }

  /// Entries that were granted (or dropped) since the last call, in order. Commands and dropped entries are retired by
  /// `settle`, which the caller calls for each after it has acted on it.
  std::vector<EntryId>& granted() { return granted_; }
  void settle(EntryId entry);

  Entry& entry(EntryId id) { return entries_[id]; }
  const Entry& entry(EntryId id) const { return entries_[id]; }
  /// True for a run that was granted and that some host has not completed.
  bool is_running(EntryId id) const {
    return id < entries_.size() && entries_[id].state == EntryState::kGranted && entries_[id].kind == EntryKind::kRun;
  }
  uint64_t next_order() const { return next_order_; }
  uint32_t live() const { return live_; }
  /// Every invariant above that can be read off the state; for tests and debug builds.
  void validate() const;

 private:
  struct Host {
    std::deque<EntryId> fifo;
    uint32_t room = 0;
    bool closed = false;
    std::vector<uint64_t> running;  ///< bit per entry: granted and not completed
  };
  bool needs_room(const Entry& e) const { return e.kind == EntryKind::kRun && e.state != EntryState::kDropped; }
  bool is_open(const Host& host, const Entry& e) const {
    return e.state == EntryState::kDropped || (!host.closed && (!needs_room(e) || host.room > 0));
  }
  void occupy(Host& host, EntryId id);
  void unblock_head(Host& host);
  void grant(EntryId id);
  void retire(EntryId id);

  uint32_t window_;
  std::vector<Host> hosts_;
  std::vector<uint32_t> numbers_;  ///< of the hosts: what the groups of one host point at
  std::vector<std::vector<uint32_t>> groups_;
  std::vector<Entry> entries_;
  std::vector<EntryId> free_;
  std::vector<EntryId> granted_;
  std::vector<EntryId> grantable_;
  uint64_t next_order_ = 1;
  uint32_t live_ = 0;
};

}  // namespace pathways
