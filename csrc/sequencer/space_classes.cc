#include "sequencer/space_classes.h"

#include <map>
#include <unordered_map>
#include <utility>

#include "base/check.h"

namespace pathways {

SpaceClasses::SpaceClasses(const std::vector<uint64_t>& budgets, uint32_t devices) : devices_(devices) {
  spaces_.reserve(budgets.size());
  for (const uint64_t bytes : budgets) spaces_.push_back({.budget = bytes});
}

std::vector<SpaceClasses::Split> SpaceClasses::refine(std::span<const SpaceId> spaces) {
  struct Named {
    uint32_t count = 0;
    ClassId to = kNoClass;  ///< of its spaces that are named, when others are not
  };
  std::unordered_map<ClassId, Named> named;
  for (const SpaceId space : spaces) ++named[class_of(space)].count;
  std::vector<Split> splits;
  for (auto& [from, part] : named) {
    if (from == kNoClass || part.count == size(from)) continue;
    part.to = make(from);
    splits.push_back({from, part.to});
  }
  std::map<std::pair<uint64_t, bool>, ClassId> fresh;  // by budget, and whether it is a device
  for (const SpaceId space : spaces) {
    const ClassId from = class_of(space);
    if (from != kNoClass) {
      const ClassId to = named.at(from).to;
      if (to == kNoClass) continue;
      unlink(space);
      append(space, to);
      continue;
    }
    const auto [at, is_first] = fresh.try_emplace({budget(space), is_device(space)}, kNoClass);
    if (is_first) {
      at->second = make(kNoClass);
      splits.push_back({kNoClass, at->second});
    }
    append(space, at->second);
  }
  return splits;
}

ClassId SpaceClasses::make(ClassId from) {
  const ClassId made = count();
  classes_.push_back({});
  if (from != kNoClass) classes_[made].part_before = std::exchange(classes_[from].last_part, made);
  return made;
}

void SpaceClasses::append(SpaceId space, ClassId to) {
  Class& its = classes_[to];
  if (its.size++ == 0) its.first = spaces_[space].previous = space;
  const SpaceId last = spaces_[its.first].previous;
  spaces_[space] = {spaces_[space].budget, to, its.first, last};
  spaces_[last].next = spaces_[its.first].previous = space;
}

void SpaceClasses::unlink(SpaceId space) {
  const Space& it = spaces_[space];
  Class& its = classes_[it.in];
  if (its.first == space) its.first = it.next;
  spaces_[it.previous].next = it.next;
  spaces_[it.next].previous = it.previous;
  --its.size;
}

void SpaceClasses::validate() const {
  size_t in_classes = 0;
  for (ClassId id = 0; id < count(); ++id) {
    const SpaceId begin = first(id);
    SpaceId space = begin;
    for (uint32_t i = 0; i < size(id); ++i) {
      PW_CHECK(class_of(space) == id && budget(space) == budget(begin) && is_device(space) == is_device(begin));
      const SpaceId next = spaces_[space].next;
      PW_CHECK(spaces_[next].previous == space && (next > space || (next == begin && i + 1 == size(id))));
      space = next;
    }
    PW_CHECK(size(id) != 0 && space == begin);
    PW_CHECK(classes_[id].part_before == kNoClass || classes_[id].part_before < id);
    in_classes += size(id);
  }
  for (const Space& space : spaces_) in_classes += space.in == kNoClass ? 1U : 0U;
  PW_CHECK(in_classes == spaces_.size());
}

}  // namespace pathways
