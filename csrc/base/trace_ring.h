/// TraceRing: the newest records of a trace, in memory of fixed size. When it is full, a new record replaces the oldest
/// one, and the ring counts the loss.
///
/// A host has one (executor/run_trace.h), and the controller (controller/order_trace.h). While it is off it has no
/// memory, and whoever would write asks `is_on` first: one branch.
///
///   TRACE-1 (counted)  each record that was added is returned by `take` once, or is counted in `dropped` once.
///
/// Threading: the owner's thread only. Allocation: in `start` and `take` only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
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
    records_.assign(capacity, Record{});
    end_ = count_ = 0;
    dropped_ = 0;
    is_on_ = true;
  }
  /// Takes no more records. What is there stays for `take`.
  void stop() { is_on_ = false; }
  /// Does nothing while the ring is off.
  void add(const Record& record) {
    if (!is_on_) return;
    records_[end_] = record;
    if (++end_ == records_.size()) end_ = 0;
    if (count_ == records_.size()) {  // TRACE-1: it replaced the oldest one
      ++dropped_;
    } else {
      ++count_;
    }
  }
  /// Removes all records. A ring that is off gives its memory back.
  Taken take() {
    Taken taken{{}, std::exchange(dropped_, 0)};
    taken.records.reserve(count_);
    const size_t behind =
        std::min(count_, end_);  // the records that lie before `end_`; the others lie at the ring's end
    const auto at = [&](size_t position) { return records_.begin() + static_cast<std::ptrdiff_t>(position); };
    taken.records.insert(taken.records.end(), at(records_.size() - (count_ - behind)), records_.end());
    taken.records.insert(taken.records.end(), at(end_ - behind), at(end_));
    end_ = count_ = 0;
    if (!is_on_) records_ = {};
    return taken;
  }

 private:
  bool is_on_ = false;
  size_t end_ = 0, count_ = 0;  ///< where the next record lies; records, the newest of which lies before that
  uint64_t dropped_ = 0;
  std::vector<Record> records_;
};

}  // namespace pathways
