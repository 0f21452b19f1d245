#include "policy/pool_map.h"

#include <algorithm>
#include <unordered_map>

#include "base/check.h"

namespace pathways {

std::vector<PoolMap::Split> PoolMap::add_footprint(std::span<const uint32_t> devices) {
  std::unordered_map<PoolId, uint32_t> touched;  // devices of the footprint, by the pool that they are in now
  for (const uint32_t device : devices) {
    if (device >= pools_.size()) pools_.resize(device + 1, kNone);
    ++touched[pools_[device]];
  }
  std::vector<Split> splits;
  std::unordered_map<PoolId, PoolId> moves;
  for (const auto& [pool, count] : touched) {
    if (pool != kNone && count == sizes_[pool]) continue;  // all of it
    const auto made = static_cast<PoolId>(sizes_.size());
    sizes_.push_back(count);
    moves[pool] = made;
    if (pool == kNone) continue;
    sizes_[pool] -= count;
    splits.push_back({pool, made});
  }
  for (const uint32_t device : devices) {
    const auto move = moves.find(pools_[device]);
    if (move != moves.end()) pools_[device] = move->second;
  }
  return splits;
}

void PoolMap::validate() const {
  std::vector<uint32_t> sizes(sizes_.size());
  for (const PoolId pool : pools_) {
    if (pool != kNone) ++sizes.at(pool);
  }
  PW_CHECK(sizes == sizes_);
  PW_CHECK(std::find(sizes.begin(), sizes.end(), 0u) == sizes.end());
}

}  // namespace pathways
