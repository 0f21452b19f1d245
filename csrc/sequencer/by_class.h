/// What is registered for memory spaces, by class of spaces (sequencer/space_classes.h): what a run needs, and sets.
///
/// MEM-8 (alike): a list stays right when a class in it is split. Then the new class gets the same entry as the old
/// one. The list learns of it when it is read the next time, because most of the lists are seldom read.
///
/// Pure: no thread, no clock, no I/O. Threading: one thread; reading may change what is kept.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "sequencer/space_classes.h"

namespace pathways {

/// What a run needs on one memory space: bytes beside those of its arguments.
struct SpaceNeed {
  SpaceId space = 0;
  uint64_t peak = 0;   ///< the most at any position of the run; with results, without eager bytes
  uint64_t eager = 0;  ///< may be taken at any time from the run's admission to its end
};

/// The same on each space of a class.
struct ClassNeed {
  ClassId id = 0;
  uint64_t peak = 0;
  uint64_t eager = 0;
};

/// One class of a set of spaces.
struct ClassPart {
  ClassId id = 0;
};

/// A list with at most one entry for each class. `Entry` has a member `id`.
template <typename Entry>
class ByClass {
 public:
  ByClass() = default;
  /// The entries must be sorted by the first space of their classes.
  ByClass(std::vector<Entry> entries, const SpaceClasses& classes)
      : entries_(std::move(entries)), known_(classes.count()) {}

  /// The entries of now, sorted by the first space of their classes. Valid until the next class is made.
  const std::vector<Entry>& at(const SpaceClasses& classes) const {
    if (known_ != classes.count()) catch_up(classes);
    return entries_;
  }

 private:
  [[gnu::noinline]] void catch_up(const SpaceClasses& classes) const {
    const size_t before = entries_.size();
    for (size_t i = 0; i < entries_.size(); ++i) {  // it grows
      Entry entry = entries_[i];
      classes.for_each_part(entry.id, known_, [&](ClassId part) {
        entry.id = part;
        entries_.push_back(entry);
      });
    }
    known_ = classes.count();
    if (entries_.size() == before) return;
    std::sort(entries_.begin(), entries_.end(),
              [&](const Entry& a, const Entry& b) { return classes.first(a.id) < classes.first(b.id); });
  }

  mutable std::vector<Entry> entries_;
  mutable uint32_t known_ = 0;  ///< classes that there were when the entries were last brought up to date
};

using RunNeeds = ByClass<ClassNeed>;
using ClassSet = ByClass<ClassPart>;

}  // namespace pathways
