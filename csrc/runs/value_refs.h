/// ValueRefs: a reference to a value is counted in the backend and in the ledger; this counts it in both.
///
/// All parts of the executor take and drop their references here. A value that the ledger does not know costs it a
/// lookup (MEM-1). Threading: the executor's thread only.
#pragma once

#include "device/device.h"
#include "runs/ledger.h"

namespace pathways {

class ValueRefs {
 public:
  ValueRefs(Device& device, Ledger& ledger) : device_(device), ledger_(ledger) {}

  Value retain(Value value) {
    ledger_.retain(value);
    return device_.retain(value);
  }
  /// Device::begin_scalar: one more reference to the scalar, or the only one to its copy, which the ledger does not
  /// know.
  Value begin_scalar(Value value) {
    const Value scalar = device_.begin_scalar(value);
    ledger_.retain(scalar);
    return scalar;
  }
  void drop(Value value) {
    ledger_.drop(value);
    device_.drop(value);
  }
  /// Drops the value that `value` names, if it names one. Then it names none.
  void reset(Value& value) {
    if (value != nullptr) drop(value);
    value = nullptr;
  }

 private:
  Device& device_;
  Ledger& ledger_;
};

}  // namespace pathways
