/// Which devices share their time: the pools of the policy (policy/share_policy.h).
///
/// Pure: no thread, no clock, no I/O. Two devices are in one pool as long as every footprint that has one of them has
/// the other, too. So clients on disjoint devices do not compete, clients on the same devices compete on one pool,
/// whatever the number of devices, and slices that overlap in part get a pool for each part. The method is partition
/// refinement: a new footprint splits each pool of which it has some devices, but not all.
///
/// Threading: one thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policy/share_policy.h"

namespace pathways {

class PoolMap {
 public:
  /// Some devices of pool `from` are pool `to` from now on.
  struct Split {
    PoolId from, to;
  };

  /// Takes a new footprint into account: the devices that a plan uses, each once. O(devices).
  std::vector<Split> add_footprint(std::span<const uint32_t> devices);
  /// The pool of a device of a footprint.
  PoolId pool_of(uint32_t device) const { return pools_[device]; }
  uint32_t pool_count() const { return static_cast<uint32_t>(sizes_.size()); }
  void validate() const;

 private:
  static constexpr PoolId kNone = UINT32_MAX;  ///< of devices that are in no footprint yet

  std::vector<PoolId> pools_;    ///< by device
  std::vector<uint32_t> sizes_;  ///< by pool: its devices
};

}  // namespace pathways
