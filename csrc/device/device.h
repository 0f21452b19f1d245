/// Device: the seam between the executor and a host's devices: launches, readiness, references.
///
/// Three classes implement it: the JAX backend (pathways/_host_callbacks.pxi, over bulk/sending_backend.h), the
/// modelled device (csrc/simulate), and doubles of tests. A `Value` is the device's own reference to the local shards
/// of one logical array (with JAX, a `jax.Array`). The executor passes values on and never looks inside. It owes one
/// `drop` for each reference that it was given.
///
/// Beside it are Mover (bytes between hosts) and ClientWork (what clients ask beside runs). A host has one of each
/// (device/backend.h). What a class does not override is refused, so a double of a test overrides what its test is
/// about.
///
/// Threading: all calls of the three come from the executor's thread, one at a time.
/// Errors: kFailed means that the operation failed and `last_error()` of the same seam says why. The executor
/// propagates the error to whatever depends on the operation.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"

namespace pathways {

using Value = void*;

inline constexpr std::string_view kRefused = "this host does no such thing";

/// kDeleted: a later launch has taken over the value's memory (donation), so nothing is known about the value any more.
enum class Readiness : uint8_t { kPending, kReady, kFailed, kDeleted };

/// What the devices of a host's platform do differently. The table is pathways/quirks.py.
struct Quirks {
  uint32_t max_in_flight = 0;       ///< launches that may be under way at once, per device; 0: no bound
  bool gangs_block = false;         ///< launching a gang blocks what the host does next (GANG-2, GANG-3)
  bool computes_in_launch = false;  ///< on a host with one device, a launch may compute before it returns
};

/// Which node of which run.
struct NodeContext {
  uint64_t order;
  uint32_t client;
  uint32_t plan;
  uint32_t node;         ///< index in the host's plan
  uint32_t computation;  ///< index of the launchable, or of the host reshard plan
};

class Device {
 public:
  virtual ~Device() = default;

  /// Enqueues one computation on the local devices; `outputs` become new references. Does not wait for values.
  /// kPending: the launch is attended. A thread of the backend makes it, and `Executor::on_launched` is called at its
  /// end. The backend keeps references of its own on `inputs`, and the executor launches nothing else on those devices
  /// meanwhile.
  virtual Status launch(const NodeContext&, std::span<const Value> /*inputs*/, std::span<Value> /*outputs*/) {
    return Status::kFailed;
  }
  /// A value in place of an input that failed, so that every host launches the gang (GANG-1): any value of the input's
  /// type, as a new reference.
  virtual Value placeholder(const NodeContext&, uint32_t /*input*/) { return nullptr; }
  virtual Readiness readiness(Value) { return Readiness::kReady; }
  /// A scalar that decides a branch has been enqueued. Returns the value whose readiness to wait for before it is read,
  /// as a new reference: the scalar itself, or a copy in host memory, which is on its way from now on. So reading it
  /// never waits for a device.
  virtual Value begin_scalar(Value value) { return retain(value); }
  /// The number that a scalar of `begin_scalar`, which is ready, holds (a truth value is 0 or 1): which branch to take.
  virtual Status read_scalar(Value, int64_t* /*out*/) { return Status::kFailed; }
  virtual Value retain(Value value) { return value; }
  virtual void drop(Value) {}
  /// A transfer within this host.
  virtual Status transfer(const NodeContext&, Value /*input*/, Value* /*output*/) { return Status::kFailed; }
  /// A plan was removed, and no run uses it any more. May be called again for the same plan.
  virtual void forget_plan(uint32_t) {}

  virtual std::string_view last_error() const { return kRefused; }
  /// `maker` made the value whose readiness was kFailed last: adds that to last_error() (ERR-1).
  virtual void explain(const NodeContext& /*maker*/) {}
};

}  // namespace pathways
