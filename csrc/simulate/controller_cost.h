/// Measures what the controller does for a run, per host: the policy's choice, admission, the order, messages out and
/// back. Modelled hosts play their part; their time does not count (COST-3).
///
/// Each client has a program of one call over all devices, with memory in the ledger, and the policy knows its devices.
/// With two clients or more, the policies `share` and `priority` choose; with one, no policy does.
///
/// Used by `python -m benchmarks.scale` (csrc/bind/simulate.cc). Threading: the calling thread.
#pragma once

#include <cstdint>

#include "policy/share_policy.h"

namespace pathways {

struct ControllerCostOptions {
  uint32_t hosts = 1;
  uint32_t devices = 4;  ///< per host, at most 64
  uint32_t clients = 2;
  PolicyKind policy = PolicyKind::kShare;
  uint32_t runs = 16;    ///< of each client, under way together; at most 48 of all clients
  uint32_t repeats = 0;  ///< timed batches; 0: as many as take about a second
};

struct ControllerCost {
  double ns = 0;         ///< per host and run: the median over the batches
  uint64_t runs = 0;     ///< timed
  uint64_t charged = 0;  ///< runs that the policy chose and charged; 0: no policy chose
  uint32_t repeats = 0;
};

/// Only passes that do something count: a controller that waits for a turn sleeps. Throws Error(kInvalid) for options
/// out of range.
ControllerCost measure_controller(const ControllerCostOptions& options);

}  // namespace pathways
