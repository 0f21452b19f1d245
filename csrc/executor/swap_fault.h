/// SwapFault: a fault for tests, which the runtime itself never makes: a host that breaks ORD-1.
///
/// It holds back each n-th run until the next run was prepared, unless that run takes a result of the run that is held
/// back. Tests show with it that a wrong order is found. Without the fault, nothing is ever held back.
///
/// Threading: the executor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "messages/records.h"

namespace pathways {

/// Test hooks: faults that the runtime itself never makes.
struct ExecutorFaults {
  /// Breaks ORD-1: this host swaps each n-th pair of neighbouring runs, unless the second run takes a result of the
  /// first.
  uint32_t swap_every = 0;
};

/// The record of a run, and the words behind it.
class HeldRun {
 public:
  void assign(const RunRecord& record, const uint64_t* words);
  bool is_there() const { return !bytes_.empty(); }
  const RunRecord& record() const { return *reinterpret_cast<const RunRecord*>(bytes_.data()); }
  const uint64_t* words() const { return reinterpret_cast<const uint64_t*>(bytes_.data() + sizeof(RunRecord)); }
  void clear() { bytes_.clear(); }

 private:
  std::vector<std::byte> bytes_;
};

class SwapFault {
 public:
  void set(ExecutorFaults faults) { every_ = faults.swap_every; }
  bool is_on() const { return every_ != 0; }
  bool is_holding() const { return held_.is_there(); }
  /// Whether this run is held back. Then a copy of it is kept. No run may be held back now.
  bool hold_back(const RunRecord& record, const uint64_t* words);
  /// Whether this run takes a result of the run that is held back.
  bool needs_held(const RunRecord& record, const uint64_t* words) const;
  /// One more poll has passed: whether the fault stops waiting for a second run. `is_idle`: no run is live.
  bool is_overdue(bool is_idle);
  /// The run that was held back.
  HeldRun take();
  void clear() { held_.clear(); }

 private:
  uint32_t every_ = 0;
  uint64_t counter_ = 0;  ///< runs that could have been held back
  HeldRun held_;
  uint32_t polls_ = 0;  ///< since it is held back
};

}  // namespace pathways
