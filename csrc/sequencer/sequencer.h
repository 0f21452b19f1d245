/// The order: every run of every client gets a place in one total order, and each host sees a projection of it.
///
/// Pure: no thread, no clock, no I/O. The controller passes entries and completions in, and reads what is granted.
///
/// An entry concerns a group of hosts. It waits in the FIFO of each of these hosts. It is granted when it heads all
/// these FIFOs and each host has room in its window; then it leaves all the FIFOs at once. So
///   ORD-1  a host is granted its entries in the order of their submission: one FIFO per host, which nothing overtakes.
///   ORD-2  the order is total: one counter gives the submission numbers, and all FIFOs are filled by that counter.
///   GANG-1 an entry is granted to all hosts of its group or to none. A cancel takes effect only before the grant and
///          keeps the entry's place in every FIFO, so all hosts see it at the same point of the order.
///   COST-3 submitting, granting and completing cost O(1) per entry and host of its group; nothing is searched.
/// Disjoint groups never wait for each other.
///
/// ERR-2: the controller closes a lost host. A closed host is granted nothing until it is opened again, and the
/// controller completes in its place what it had been granted (`running_on`). Entries that wait for the host keep their
/// place. A dropped entry needs no host, so it passes a closed host.
///
/// Progress: the oldest entry not yet granted heads all its FIFOs, because everything before it has been granted. So it
/// waits only for closed hosts (ERR-2) and for room in windows, which granted entries free when they complete.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace pathways {

using EntryId = uint32_t;  ///< index of a live entry; reused after retirement
using GroupId = uint32_t;

/// A group with this bit is one host; the other bits are its number. Such groups need no registration.
inline constexpr GroupId kOneHost = 1u << 31;

/// kWaiting -> kGranted | kDropped; kGranted -> retired; kDropped -> retired, without a grant.
enum class EntryState : uint8_t { kFree, kWaiting, kGranted, kDropped };

/// What an entry asks for. A run occupies one place in the window of each of its hosts until that host has completed
/// it. A command (a buffer put, a read, a release) occupies none: it only has its place in the order.
enum class EntryKind : uint8_t { kRun, kCommand };

struct Entry {
  uint64_t order = 0;
  uint64_t tag = 0;  ///< the submitter's own number
  uint32_t client = 0;
  GroupId group = 0;
  uint32_t blocked = 0;    ///< hosts where it does not head the FIFO, or finds no room
  uint32_t remaining = 0;  ///< hosts that have not completed it
  bool counted = false;    ///< some host has reported whether it launched the run's gangs
  bool ganged = false;     ///< what that host reported
  uint64_t known = 0;      ///< predicates of the run that some host has reported, by their bits
  uint64_t chosen = 0;     ///< those of them that hold
  EntryKind kind = EntryKind::kRun;
  EntryState state = EntryState::kFree;
};

class Sequencer {
 public:
  /// `window`: how many runs a host may have been granted and not completed.
  Sequencer(uint32_t hosts, uint32_t window);

  /// Registers a group. Throws Error(kInvalid) for an empty group, an unknown or a repeated host, or a known id.
  void add_group(GroupId group, std::vector<uint32_t> hosts);
  bool has_group(GroupId group) const { return group < groups_.size() && !groups_[group].empty(); }
  std::span<const uint32_t> hosts_of(GroupId group) const {
    return (group & kOneHost) != 0 ? std::span(&numbers_[group & ~kOneHost], 1) : std::span(groups_[group]);
  }

  /// Appends an entry to the order. Entries that became grantable are in `granted()`; the caller drains it before the
  /// next call.
  EntryId submit(uint32_t client, GroupId group, EntryKind kind, uint64_t tag);
  /// One host has finished a granted run. True when it was the last host: the entry is then retired and may be reused.
  bool complete(EntryId entry, uint32_t host);
  /// Drops a run that was not granted yet. The run stays in the order, takes no room, and comes out of `granted()` as
  /// kDropped. False when it was granted already: then it runs (GANG-1).
  bool cancel(EntryId entry);

  /// ERR-2: the host is granted nothing from now on. Closing a closed host does nothing; nor does opening an open one.
  void close(uint32_t host);
  /// Entries that waited for the host may be granted. The host must have completed everything, itself or through the
  /// controller.
  void open(uint32_t host);
  /// Runs that the host was granted and has not completed, in any order. O(entries).
  std::vector<EntryId> running_on(uint32_t host) const;
  bool is_running_on(EntryId id, uint32_t host) const {
    const auto& running = hosts_[host].running;
    return id / 64 < running.size() && (running[id / 64] >> (id % 64) & 1) != 0;
  }

  /// Entries that were granted or dropped since the last call, in order. The caller acts on each and then calls
  /// `settle` for it, which retires commands and dropped entries.
  std::vector<EntryId>& granted() { return granted_; }
  void settle(EntryId entry);

  Entry& entry(EntryId id) { return entries_[id]; }
  const Entry& entry(EntryId id) const { return entries_[id]; }
  /// Whether the entry is a run that was granted and that some host has not completed.
  bool is_running(EntryId id) const {
    return id < entries_.size() && entries_[id].state == EntryState::kGranted && entries_[id].kind == EntryKind::kRun;
  }
  uint64_t next_order() const { return next_order_; }
  uint32_t live() const { return live_; }
  /// Checks every invariant above that the state shows; for tests and debug builds.
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
  std::vector<uint32_t> numbers_;  ///< all hosts' numbers; a group of one host points at its element
  std::vector<std::vector<uint32_t>> groups_;
  std::vector<Entry> entries_;
  std::vector<EntryId> free_;
  std::vector<EntryId> granted_;
  std::vector<EntryId> grantable_;
  uint64_t next_order_ = 1;
  uint32_t live_ = 0;
};

}  // namespace pathways
