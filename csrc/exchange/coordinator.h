/// ExchangeCoordinator: turns the reports of all hosts of one exchange into one decision for each.
///
/// One host of the exchange has it. It sees numbers of rows only, no rows. The work and memory are those of the pairs
/// of shards that have rows, and of the hosts.
///
///   EXCH-2 (slots)  the slots that the decisions give to a target shard's rows follow each other from 0, in the order
///                   of the source shards; the order of the reports changes nothing.
///   EXCH-4 (whole)  the exchange fails on all hosts or on none. Of several faults, the first of this list is told: a
///                   failed value, at the lowest host; a bad destination, in the lowest shard; routes that do not
///                   agree; an overflow, of the lowest shard.
///
/// Pure. Threading: one owner.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "exchange/messages.h"
#include "exchange/shape.h"

namespace pathways {

class ExchangeCoordinator {
 public:
  /// `shape` must outlive this object.
  explicit ExchangeCoordinator(const ExchangeShape& shape);

  /// Throws Error(kInvalid), and takes nothing, if the host has no part in the exchange or has reported before, or the
  /// report names a shard that is not the host's, or a shard without memory (TRUST-1).
  void take(HostReport report);
  /// Call it once, when each host has reported. One decision per host, ascending.
  std::vector<std::pair<uint32_t, HostDecision>> decide();

 private:
  size_t index_of(uint32_t host) const;
  void check(const HostReport& report) const;
  ExchangeFault first_fault() const;
  ExchangeFault difference(std::vector<Batch> sent) const;
  bool give_slots(std::vector<std::pair<uint32_t, HostDecision>>& decisions, ExchangeFault* fault);

  const ExchangeShape& shape_;
  const std::vector<uint32_t> hosts_;    // ascending
  std::vector<uint32_t> target_shards_;  // per host: how many it has
  std::vector<bool> has_reported_;       // per host
  std::vector<HostReport> reports_;
};

}  // namespace pathways
