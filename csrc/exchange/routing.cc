#include "exchange/routing.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace pathways {

ShardRouting::ShardRouting(uint32_t source, size_t rows) : source_(source), row_count_(static_cast<uint32_t>(rows)) {
  PW_CHECK(rows <= UINT32_MAX);
}

// What is read here may be memory that somebody still writes: each item is read once (TRUST-1).
ShardRouting::ShardRouting(uint32_t source, std::span<const int32_t> destinations, uint32_t targets,
                           std::optional<int32_t> unsent)
    : ShardRouting(source, destinations.size()) {
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
  for (const uint64_t key : keys) add(static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(key));
}

ShardRouting ShardRouting::along(uint32_t source, std::span<const int32_t> slots, uint32_t targets, uint32_t capacity) {
  ShardRouting routing(source, slots.size());
  std::vector<std::pair<uint64_t, uint32_t>> keys;  // slot, row
  keys.reserve(slots.size());
  for (uint32_t row = 0; row < routing.row_count_; ++row) {
    const int32_t slot = *static_cast<const volatile int32_t*>(&slots[row]);
    if (slot == -1) continue;
    if (slot < 0 || static_cast<uint64_t>(slot) >= uint64_t{targets} * capacity) {
      routing.bad_ = BadDestination{source, row, slot};
      return routing;
    }
    keys.emplace_back(static_cast<uint32_t>(slot), row);
  }
  std::sort(keys.begin(), keys.end());
  for (const auto& key : keys) {
    routing.add(static_cast<uint32_t>(key.first / capacity), key.second);
    routing.slots_.push_back(static_cast<uint32_t>(key.first % capacity));
  }
  for (size_t batch = 0; batch < routing.batches_.size(); ++batch) {
    RouteDigest digest;
    for (uint32_t i = 0; i < routing.batches_[batch].rows; ++i) {
      digest.add(routing.slots_[routing.begins_[batch] + i], routing.rows_[routing.begins_[batch] + i]);
    }
    routing.batches_[batch].digest = digest.value();
  }
  return routing;
}

void ShardRouting::add(uint32_t target, uint32_t row) {
  if (batches_.empty() || batches_.back().target != target) {
    batches_.push_back({source_, target, 0});
    begins_.push_back(static_cast<uint32_t>(rows_.size()));
  }
  ++batches_.back().rows;
  rows_.push_back(row);
}

std::span<const uint32_t> ShardRouting::part_for(uint32_t target, const std::vector<uint32_t>& items) const {
  const auto at = std::lower_bound(batches_.begin(), batches_.end(), target,
                                   [](const Batch& batch, uint32_t wanted) { return batch.target < wanted; });
  if (at == batches_.end() || at->target != target || items.empty()) return {};
  return {items.data() + begins_[static_cast<size_t>(at - batches_.begin())], at->rows};
}

std::span<const uint32_t> ShardRouting::rows_for(uint32_t target) const { return part_for(target, rows_); }
std::span<const uint32_t> ShardRouting::slots_for(uint32_t target) const { return part_for(target, slots_); }

}  // namespace pathways
