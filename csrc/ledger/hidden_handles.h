/// The hidden handles of one client (base/ids.h): those that are free, and the next generation of each.
///
/// Invariant: a handle is given out with a generation that none with its index had before. So a host that hears of an
/// old one again finds nothing (FUT-3).
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.h"

namespace pathways {

class HiddenHandles {
 public:
  Handle take() {
    if (free_.empty()) {
      free_.push_back(static_cast<uint32_t>(generations_.size()));
      generations_.push_back(0);
    }
    const uint32_t index = free_.back();
    free_.pop_back();
    if (++generations_[index] == 0) generations_[index] = 1;
    return Handle::make(Handle::kHidden | index, generations_[index]);
  }
  /// The record at which each host gives the buffer up has its place in the order.
  void put_back(Handle handle) { free_.push_back(handle.index() & ~Handle::kHidden); }
  /// How many are given out.
  size_t taken() const { return generations_.size() - free_.size(); }

 private:
  std::vector<uint32_t> generations_;  ///< by index: the last one that was given out
  std::vector<uint32_t> free_;         ///< indices
};

}  // namespace pathways
