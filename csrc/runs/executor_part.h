/// ExecutorPart: what most classes of which an executor consists use. The executor makes one, and each class copies it.
///
/// Dispatcher is the way back: what the executor does for its parts, when their work makes something else possible.
///
/// Threading: the executor's thread only.
#pragma once

#include <cstdint>

#include "device/backend.h"
#include "plan/plan.h"
#include "runs/device_clock.h"
#include "runs/error_table.h"
#include "runs/host_link.h"
#include "runs/launch_queues.h"
#include "runs/ledger.h"
#include "runs/object_store.h"
#include "runs/readiness_tracker.h"
#include "runs/run_table.h"
#include "runs/run_trace.h"
#include "runs/value_refs.h"

namespace pathways {

class Dispatcher {
 public:
  /// Launches and starts what is ready. Within a launch or a start of a transfer it does nothing: that goes on to the
  /// next ready node itself.
  virtual void drain() = 0;
  /// `object` is defined or has failed, and `waiter` goes on.
  virtual void wake(const ObjectWaiter& waiter, const Object& object) = 0;
  /// A value of a run of a plan with choices exists on `devices`, or has failed (`ref` is nullptr).
  virtual void value_there(uint32_t slot, uint32_t value, Value ref, uint64_t devices) = 0;

 protected:
  ~Dispatcher() = default;
};

struct ExecutorPart {
  const uint32_t host_;
  const Clock now_ns_;
  Device& device_;
  Mover& mover_;
  ClientWork& work_;
  HostLink& link_;
  Dispatcher& dispatcher_;
  Ledger& ledger_;
  ValueRefs& refs_;
  ErrorTable& errors_;
  RunTable& runs_;
  LaunchQueues& queues_;
  ReadinessTracker& tracker_;
  DeviceClock& clock_;
  RunTrace& trace_;
};

}  // namespace pathways
