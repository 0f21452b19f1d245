#include "exchange/routing.h"

#include <algorithm>

#include "base/check.h"

namespace pathways {

ShardRouting::ShardRouting(uint32_t source, std::span<const int32_t> destinations, uint32_t targets,
                           std::optional<int32_t> unsent)
    : source_(source), row_count_(static_cast<uint32_t>(destinations.size())) {
  PW_CHECK(destinations.size() <= UINT32_MAX);
  // `destinations` may be memory that somebody still writes: each is read once (TRUST-1).
  std::vector<uint64_t> keys;  // target, then row: sorting them keeps the rows of a target in order
  keys.reserve(destinations.size());
  for (uint32_t row = 0; row < row_count_; ++row) {
    const int32_t destination = *static_cast<const volatile int32_t*>(&destinations[row]);
    if (unsent == destination) continue;
    if (destination < 0 || static_cast<uint32_t>(destination) >= targets) {
      bad_ = BadDestination{source, row, destination};
      return;
    }
    keys.push_back(uint64_t{static_cast<uint32_t>(destination)} << 32 | row);
  }
  std::sort(keys.begin(), keys.end());
  rows_.reserve(keys.size());
  for (const uint64_t key : keys) {
    const auto target = static_cast<uint32_t>(key >> 32);
    if (batches_.empty() || batches_.back().target != target) {
      batches_.push_back({source, target, 0});
      begins_.push_back(static_cast<uint32_t>(rows_.size()));
    }
    ++batches_.back().rows;
    rows_.push_back(static_cast<uint32_t>(key));
  }
}

std::span<const uint32_t> ShardRouting::rows_for(uint32_t target) const {
  const auto at = std::lower_bound(batches_.begin(), batches_.end(), target,
                                   [](const Batch& batch, uint32_t wanted) { return batch.target < wanted; });
  if (at == batches_.end() || at->target != target) return {};
  return {rows_.data() + begins_[static_cast<size_t>(at - batches_.begin())], at->rows};
}

}  // namespace pathways
