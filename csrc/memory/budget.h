// Budget: one ledger of bytes, for one device or for host memory (MEM-1). It counts what the accelerator's runtime
// allocates; it allocates nothing itself.
//
// Threading: every call from any thread, lock-free; may live in shared memory (zero limit until set).
//
// Invariants
//   MEM-1 (accounted)  in_use() is the sum of all reservations not yet released, and never exceeds limit() through
//                      try_reserve(); releasing more than is reserved aborts.
#pragma once

#include <cstdint>

#include "base/check.h"
#include "base/status.h"
#include "sync/atomic.h"

namespace pathways {

class Budget {
 public:
  explicit Budget(std::uint64_t limit_bytes) noexcept : limit_(limit_bytes) {}

  /// Returns kOk; kNoMemory when `bytes` do not fit beside what is reserved now; kInvalid when they can never fit.
  Status try_reserve(std::uint64_t bytes) noexcept {
    const std::uint64_t limit = limit_.load(std::memory_order_relaxed);
    if (bytes > limit) return Status::kInvalid;
    std::uint64_t used = in_use_.load(std::memory_order_relaxed);
    do {
      if (used > limit - bytes) return Status::kNoMemory;
      // SYNC budget/reserve: pairs with budget/release; the freed memory's last use came before.
    } while (!in_use_.compare_exchange_weak(used, used + bytes, std::memory_order_acquire, std::memory_order_relaxed));
    raise_high_water(used + bytes);
    return Status::kOk;
  }

  /// Releases part or all of what was reserved.
  void release(std::uint64_t bytes) noexcept {
    // SYNC budget/release: pairs with budget/reserve.
    const std::uint64_t before = in_use_.fetch_sub(bytes, std::memory_order_release);
    PW_CHECK(before >= bytes);
  }

  [[nodiscard]] std::uint64_t in_use() const noexcept { return in_use_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t high_water() const noexcept { return high_water_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t limit() const noexcept { return limit_.load(std::memory_order_relaxed); }
  /// A limit below in_use() takes nothing back; it only refuses new reservations.
  void set_limit(std::uint64_t limit_bytes) noexcept { limit_.store(limit_bytes, std::memory_order_relaxed); }

 private:
  void raise_high_water(std::uint64_t used) noexcept {
    std::uint64_t high = high_water_.load(std::memory_order_relaxed);
    while (high < used &&
           !high_water_.compare_exchange_weak(high, used, std::memory_order_relaxed, std::memory_order_relaxed)) {
    }
  }

  Atomic<std::uint64_t> limit_;
  Atomic<std::uint64_t> in_use_;
  Atomic<std::uint64_t> high_water_;
};

}  // namespace pathways
