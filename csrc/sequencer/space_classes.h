/// Which memory spaces are one entry of the ledger: the classes of spaces that were alike so far. A part of Admission.
///
/// A program over thousands of devices needs the same on nearly all of them, and its results lie on all of them. So
/// everything that the ledger counts by space would be the same number thousands of times. It counts by class instead:
/// an admission takes a step for each class of the run, and a plan keeps an entry for each class.
///
///   MEM-8 (alike)  All spaces of a class have the same budget, and quotas count all of them or none. Each set of
///                  spaces and each run's needs have all spaces of a class, with the same numbers, or none of them. So
///                  whatever was booked on one space of a class was booked at the same moments on each of them, and one
///                  account holds for all: MEM-1, MEM-2, MEM-3 and MEM-5 say of each space what they say of its class.
///
/// Proof. What is registered comes to `refine` first, which splits each class of which only a part is named. The new
/// class begins with a copy of the counts of the old one, which were right for each of its spaces. What was registered
/// earlier had all spaces of the old class, so it has all of both; `ByClass` (sequencer/by_class.h) adds the new class
/// beside the old one. Spaces that get another budget are split off before. A space that nothing has named is in no
/// class: nothing was ever booked there.
///
/// Classes do not merge. Sets are never forgotten, and two classes that a set divides cannot be one. In the worst case
/// each space is a class, and the ledger counts by space.
///
/// Method: partition refinement (Paige and Tarjan, 1987). Cost: O(spaces that are named), not O(spaces of the classes).
///
/// Invariants: the spaces of a class are a circular list in ascending order that begins at `first`. Classes are
/// numbered in the order in which they were made, and a class is never empty.
///
/// Pure: no thread, no clock, no I/O. Threading: one thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace pathways {

using SpaceId = uint32_t;
using ClassId = uint32_t;

inline constexpr ClassId kNoClass = UINT32_MAX;

class SpaceClasses {
 public:
  /// Some spaces of class `from` are class `to` from now on. kNoClass: they were in no class.
  struct Split {
    ClassId from, to;
  };

  /// `budgets`: bytes, by space. `devices`: the first so many are devices, which quotas count.
  SpaceClasses(const std::vector<uint64_t>& budgets, uint32_t devices);

  uint32_t space_count() const { return static_cast<uint32_t>(spaces_.size()); }
  /// Classes so far. While it stays the same, no class has changed.
  uint32_t count() const { return static_cast<uint32_t>(classes_.size()); }

  ClassId class_of(SpaceId space) const { return spaces_[space].in; }
  SpaceId first(ClassId id) const { return classes_[id].first; }
  uint32_t size(ClassId id) const { return classes_[id].size; }
  bool is_device(SpaceId space) const { return space < devices_; }
  uint64_t budget(SpaceId space) const { return spaces_[space].budget; }

  /// Splits classes until these spaces, sorted and each once, are whole classes. The new classes have the next numbers.
  std::vector<Split> refine(std::span<const SpaceId> spaces);
  /// The spaces must be in no class, or one whole class.
  void set_budget(std::span<const SpaceId> spaces, uint64_t bytes) {
    for (const SpaceId space : spaces) spaces_[space].budget = bytes;
  }

  /// Calls f(id) for each class that was split off a class when there were `count` classes or more. The classes that
  /// were split off these in turn are not among them.
  template <typename F>
  void for_each_part(ClassId id, uint32_t count, F&& f) const {
    for (ClassId part = classes_[id].last_part; part != kNoClass && part >= count; part = classes_[part].part_before) {
      f(part);
    }
  }

  void validate() const;

 private:
  struct Space {
    uint64_t budget = 0;
    ClassId in = kNoClass;
    SpaceId next = 0, previous = 0;  ///< in its class; the last one's next is the first one
  };
  struct Class {
    SpaceId first = 0;
    uint32_t size = 0;
    ClassId last_part = kNoClass;    ///< the last one that was split off it
    ClassId part_before = kNoClass;  ///< what was split off the same class before this one
  };

  ClassId make(ClassId from);
  void append(SpaceId space, ClassId to);
  void unlink(SpaceId space);

  std::vector<Space> spaces_;
  std::vector<Class> classes_;
  const uint32_t devices_;
};

}  // namespace pathways
