/// What the controller knows of one client's live handles: who holds the buffer, and what it takes.
///
/// Filled from the client's records as they are taken (results of runs, puts, tokens of fetches), emptied by its
/// releases. So at any moment it is true for the order up to the last record taken: it says whose futures fail when
/// hosts are lost, and which memory a release gives back. By handle index; nothing is hashed.
///
/// A token is given back without a word to the controller. Its entry then stays until its index is used again; who
/// reads it speaks of a handle that is over, which the client's table refuses (FUT-3).
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
    uint32_t generation = 0;    ///< 0: nothing is known of this index
    GroupId group = 0;          ///< hosts that hold a part, or answer
    uint32_t block = kNoBlock;  ///< what it takes: see Admission
  };

  /// `capacity`: futures that the client can have.
  explicit HandleTable(uint32_t capacity = 0) : capacity_(capacity) {}

  /// A handle that a record named for the first time. What the index meant before is over, and its block was given back
  /// (`occupant`). nullptr when the client cannot have such a handle: its hosts refuse it.
  Entry* announce(Handle handle, GroupId group) {
    const uint32_t index = handle.index();
    if (index >= capacity_) return nullptr;
    if (index >= entries_.size()) entries_.resize(std::max<size_t>(size_t{index} + 1, entries_.size() * 2));
    entries_[index] = {handle.generation(), group, kNoBlock};
    return &entries_[index];
  }

  /// What is known of a handle's index, whichever of its handles it is; nullptr: nothing.
  Entry* occupant(Handle handle) {
    if (handle.index() >= entries_.size()) return nullptr;
    Entry& entry = entries_[handle.index()];
    return entry.generation != 0 ? &entry : nullptr;
  }

  /// nullptr when the handle is not, or no longer, known.
  Entry* find(Handle handle) {
    if (handle.index() >= entries_.size()) return nullptr;
    Entry& entry = entries_[handle.index()];
    return entry.generation != 0 && entry.generation == handle.generation() ? &entry : nullptr;
  }

  void forget(Entry& entry) { entry = Entry{}; }

  /// f(Handle, Entry&) for each live handle.
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
