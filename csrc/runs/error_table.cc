#include "runs/error_table.h"

#include <algorithm>

#include "base/check.h"

namespace pathways {

uint32_t ErrorTable::add(std::string text) {
  texts_.push_back(std::move(text));
  if (texts_.size() > kTextsKept) {
    texts_.pop_front();
    ++first_;
  }
  return first_ + static_cast<uint32_t>(texts_.size()) - 1U;
}

std::string_view ErrorTable::text(uint32_t error) const {
  if (error == kDead) return "it belongs to a branch that was not taken";
  if (error < first_) return "the error's text is no longer kept";
  return texts_[error - first_];
}

void ErrorTable::launch_failed(uint64_t age, uint32_t error) {
  launches_.emplace_back(age, error);
  if (launches_.size() > kLaunchesKept) launches_.pop_front();
}

uint32_t ErrorTable::of_launch(uint64_t age) const {
  const auto found =
      std::find_if(launches_.rbegin(), launches_.rend(), [&](const auto& each) { return each.first == age; });
  return found == launches_.rend() ? 0 : found->second;
}

void ErrorTable::validate() const {
  PW_CHECK(first_ >= 1 && texts_.size() <= kTextsKept && launches_.size() <= kLaunchesKept);
  for (const auto& [age, error] : launches_) PW_CHECK(error != 0 && error < first_ + texts_.size());
}

}  // namespace pathways
