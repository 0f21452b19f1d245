/// LaunchMemory: what a launch needs of the devices' memory, and what is booked for it.
///
///   MEM-1  the ledger counts the bytes of a value from its first reference to its last. A call whose memory does not
///          fit waits until work under way frees some. What a launch or a transfer makes is booked on its plan's
///          account; what a launch takes over is no longer counted.
///
/// Used by whatever launches or receives. Threading: the executor's thread only.
#pragma once

#include <cstdint>
#include <span>

#include "runs/ledger.h"
#include "runs/run_table.h"

namespace pathways {

class LaunchMemory {
 public:
  /// `device_bytes`: memory of each device; 0: no bound.
  LaunchMemory(Ledger& ledger, uint64_t device_bytes) : ledger_(ledger), is_bounded_(device_bytes != 0) {
    if (is_bounded_) ledger.set_limit(device_bytes);
  }

  /// Whether the memory that a call, or a transfer within the host, needs is free now.
  bool has_room(const PlanEntry& entry, const NodeRecord& node) const {
    if (entry.room.empty() || !is_bounded_ || may_overfill_) return true;
    const uint64_t room = entry.room[static_cast<size_t>(&node - entry.plan.nodes().data())];
    const bool may_take = (node.devices & kept_free_) == 0 || room == 0 || node.kind != NodeKind::kCall;
    return may_take && ledger_.fits(node.devices, room);
  }
  /// Whether `bytes` are free now on each device of a mask.
  bool fits(uint64_t devices, uint64_t bytes) const {
    return !is_bounded_ || ledger_.fits(devices & ledger_.all_devices(), bytes);
  }
  /// No call that takes more memory of these devices is launched, until `keep_free_only` leaves them out. Transfers
  /// go on: the order counted their memory beside everything else.
  void keep_free(uint64_t devices) { kept_free_ |= devices; }
  void keep_free_only(uint64_t devices) { kept_free_ = devices; }
  uint64_t kept_free() const { return kept_free_; }
  /// While it is set, there is room for everything.
  void set_overfill(bool may_overfill) { may_overfill_ = may_overfill; }

  /// A call was launched and made `outputs`; nullptr: it did not make that one.
  void book_launch(const Run& run, const NodeRecord& node, std::span<const Value> outputs);
  /// Output number `output` of the plan was received, or moved to `devices`, and is `value`.
  void book(const Run& run, uint64_t devices, uint32_t output, Value value);

 private:
  Ledger& ledger_;
  const bool is_bounded_;
  bool may_overfill_ = false;
  uint64_t kept_free_ = 0;  ///< devices whose free memory a put waits for
};

}  // namespace pathways
