/// What one client may have, and how it shares devices with others. Given when it joins, and changed while it runs
/// (Controller::limit).
///
///   weight, priority   DeviceShares: whose run is next (SHARE-1, SHARE-4)
///   memory             MemoryLedger: bytes of its buffers and runs on each device (MEM-5)
///   at_quota           AdmissionQueue: what becomes of a run or put that only the client's own buffers keep out
///   runs, bytes        ClientCredits: what it has under way (FLOW-1)
///
/// Threading: a value.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "messages/credits.h"
#include "sequencer/memory_account.h"

namespace pathways {

/// What becomes of a run or put that the client's quota of memory has no room for, because of its own live buffers.
enum class AtQuota : uint8_t {
  kRefuse,  ///< it fails after the grace of MEM-3
  kWait,    ///< it keeps its place, and what comes behind it waits too, until the client has released buffers
};

struct ClientLimits {
  /// So that tags stay exact (policy/share_policy.h).
  static constexpr double kLeastWeight = 1e-3, kMostWeight = 1e3;
  /// A host reports done commands when their records have a quarter of the usual bound. A bound must leave room beside
  /// them, or the client would wait for a report that does not come.
  static constexpr uint64_t kLeastBytes = 2 * kCommandBytesDelivered;

  double weight = 1;
  int32_t priority = 0;
  uint64_t memory = kUnlimited;
  AtQuota at_quota = AtQuota::kRefuse;
  uint64_t runs = kMostRuns;           ///< from 1 to kMostRuns
  uint64_t bytes = kMostWaitingBytes;  ///< of records, on the way to the hosts and at each of them; kLeastBytes or more
};

/// Throws Error(kInvalid) for limits that are out of range.
inline void check(const ClientLimits& limits) {
  const auto refuse = [](const char* what) { throw Error(Status::kInvalid, what); };
  if (!(limits.weight >= ClientLimits::kLeastWeight && limits.weight <= ClientLimits::kMostWeight)) {
    refuse("a client's weight must be from 0.001 to 1000");
  }
  if (limits.runs == 0 || limits.runs > kMostRuns) refuse("a client's bound on runs must be from 1 to 16384");
  if (limits.bytes < ClientLimits::kLeastBytes) refuse("a client's bound on bytes must be 2 MiB or more");
}

}  // namespace pathways
