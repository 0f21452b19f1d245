/// What the controller knows of one client's live handles: the hosts that hold the buffer, and the memory that the
/// buffer takes.
///
/// The controller enters handles as it takes the client's records (results of runs, puts, tokens of fetches), and
/// removes them at the client's releases, and when a run donates them. So at any moment the table is true for the order
/// up to the last record taken. It says which futures fail when hosts are lost, and which memory a release frees. It is
/// indexed by the handle's index; nothing is hashed.
///
/// A client releases a token without notifying the controller. The token's entry then stays until its index is used
/// again. It then names a handle that is over, and the client's future table refuses that handle (FUT-3).
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "sequencer/sequencer.h"

namespace pathways {

class HandleTable {
 public:
  static constexpr uint32_t kNoBlock = 0xffffffffu;

  struct Entry {
    uint32_t generation = 0;    ///< 0: this index has no entry
    GroupId group = 0;          ///< hosts that hold a part of the buffer, or that answer the fetch
    uint32_t block = kNoBlock;  ///< the memory that the buffer takes: see Admission
    uint32_t newest = 0;        ///< generation that a record has named at this index
  };

  /// `capacity`: how many futures the client can have.
  explicit HandleTable(uint32_t capacity = 0) : capacity_(capacity) {}

  /// Whether it can be a handle of the client's futures.
  bool can_name(Handle handle) const { return handle.generation() != 0 && handle.index() < capacity_; }

  /// Enters a handle that a record named for the first time. What the index meant before is over; the caller has
  /// released its block (`occupant`). nullptr when the client cannot have such a handle: its hosts refuse it.
  Entry* announce(Handle handle, GroupId group) {
    const uint32_t index = handle.index();
    if (!can_name(handle)) return nullptr;
    if (index >= entries_.size()) entries_.resize(std::max<size_t>(size_t{index} + 1, entries_.size() * 2));
    entries_[index] = {handle.generation(), group, kNoBlock, std::max(entries_[index].newest, handle.generation())};
    return &entries_[index];
  }

  /// The entry of a handle's index, whatever the generation; nullptr: none.
  Entry* occupant(Handle handle) {
    if (handle.index() >= entries_.size()) return nullptr;
    Entry& entry = entries_[handle.index()];
    return entry.generation != 0 ? &entry : nullptr;
  }

  /// The entry of exactly this handle; nullptr: none, or no longer.
  Entry* find(Handle handle) {
    if (handle.index() >= entries_.size()) return nullptr;
    Entry& entry = entries_[handle.index()];
    return entry.generation != 0 && entry.generation == handle.generation() ? &entry : nullptr;
  }

  /// Whether the handle was named, and its client names it no more.
  bool is_over(Handle handle) const {
    if (handle.index() >= entries_.size()) return false;
    const Entry& entry = entries_[handle.index()];
    return handle.generation() <= entry.newest && handle.generation() != entry.generation;
  }

  /// Whether the handle's index has an entry with a block, whatever the generation.
  bool has_block_at(Handle handle) const {
    return handle.index() < entries_.size() && entries_[handle.index()].block != kNoBlock;
  }

  void forget(Entry& entry) { entry = {0, 0, kNoBlock, entry.newest}; }

  /// Calls f(Handle, Entry&) for each live handle.
  template <typename F>
  void for_each(F&& f) {
    for (uint32_t index = 0; index < entries_.size(); ++index) {
      if (entries_[index].generation != 0) f(Handle::make(index, entries_[index].generation), entries_[index]);
    }
  }

 private:
  uint32_t capacity_;
  std::vector<Entry> entries_;
};

}  // namespace pathways
