/// TraceRing: the newest records of a trace, in memory of fixed size. When it is full, a new record replaces the oldest
/// one, and the ring counts the loss.
///
/// A host has one (runs/run_trace.h), and the controller (dispatch/order_trace.h). While it is off it has no
/// memory, and whoever would write asks `is_on` first: one branch. `start` does not touch the memory: a trace pays for
/// the records that it writes, not for those that it has room for.
///
///   TRACE-1 (counted)  each record that was added is returned by `take` once, or is counted in `dropped` once.
///
/// Threading: the owner's thread only. Allocation: in `start` and `take` only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "base/check.h"

namespace pathways {

template <typename Record>
class TraceRing {
  static_assert(std::is_trivially_copyable_v<Record>);

 public:
  /// What `take` returns: the records, the oldest first, and how many older ones were lost since the last `take`.
  struct Taken {
    std::vector<Record> records;
    uint64_t dropped = 0;
  };

  bool is_on() const { return is_on_; }
  /// Begins an empty trace of at most `capacity` records (1 or more). What an earlier trace left is forgotten.
  void start(size_t capacity) {
    PW_CHECK(capacity != 0);
    records_ = std::make_unique_for_overwrite<Record[]>(capacity);
    capacity_ = capacity;
    forget();
    is_on_ = true;
  }
  /// Takes no more records. What is there stays for `take`.
  void stop() { is_on_ = false; }
  /// Does nothing while the ring is off.
  void add(const Record& record) {
    if (!is_on_) return;
    *next_ = record;
    if (++next_ == records_.get() + capacity_) next_ = records_.get();
    ++added_;
  }
  /// Removes all records. A ring that is off gives its memory back.
  Taken take() {
    Taken taken;
    if (records_ == nullptr) return taken;
    const size_t behind = static_cast<size_t>(next_ - records_.get());
    const bool is_full = added_ >= capacity_;  // TRACE-1: each record beyond replaced the oldest one
    taken.dropped = is_full ? added_ - capacity_ : 0;
    taken.records.reserve(is_full ? capacity_ : behind);
    if (is_full) taken.records.insert(taken.records.end(), next_, records_.get() + capacity_);
    taken.records.insert(taken.records.end(), records_.get(), next_);
    forget();
    if (!is_on_) records_.reset();
    return taken;
  }

 private:
  void forget() {
    next_ = records_.get();
    added_ = 0;
  }

  bool is_on_ = false;
  size_t capacity_ = 0;
  std::unique_ptr<Record[]> records_;  ///< null while the ring is off and nothing is left
  Record* next_ = nullptr;             ///< where the next record lies
  uint64_t added_ = 0;                 ///< since the last `take`
};

}  // namespace pathways
