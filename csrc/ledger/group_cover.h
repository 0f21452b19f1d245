/// Whether the hosts of one group are all among the hosts of another.
///
/// MemoryLedger asks it of each donated argument and of each renamed buffer: does the record go to every host that
/// holds the buffer (MEM-7)? Nearly always the groups are the same one. Else the answer is computed once, in as many
/// steps as the groups have hosts, and kept: a group never changes. The table has a fixed size; an entry replaces
/// another with the same place.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "sequencer/sequencer.h"

namespace pathways {

class GroupCover {
 public:
  /// `sequencer`: knows the hosts of each group, sorted.
  explicit GroupCover(const Sequencer& sequencer) : sequencer_(sequencer) {}

  /// Whether each host of `inner` is one of `outer`. Both groups must be known.
  bool covers(GroupId outer, GroupId inner) const { return outer == inner || look_up(outer, inner); }

 private:
  static constexpr size_t kKnown = 256;  ///< a power of two
  struct Known {
    GroupId outer = 0, inner = 0;  ///< equal: the place is empty, because equal groups are never looked up
    bool is_covered = false;
  };

  bool look_up(GroupId outer, GroupId inner) const {
    const uint64_t mixed = (uint64_t{outer} << 32 | inner) * uint64_t{0x9e3779b97f4a7c15};
    Known& known = known_[static_cast<size_t>(mixed >> 56) % kKnown];
    if (known.outer != outer || known.inner != inner) {
      const auto all = sequencer_.hosts_of(outer), some = sequencer_.hosts_of(inner);
      known = {outer, inner, std::includes(all.begin(), all.end(), some.begin(), some.end())};
    }
    return known.is_covered;
  }

  const Sequencer& sequencer_;
  mutable std::array<Known, kKnown> known_{};
};

}  // namespace pathways
