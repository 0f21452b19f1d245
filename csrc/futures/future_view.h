// FutureView: what a process needs of a future table to complete its futures, in its own process or in another's.
//
// Threading: every call is lock-free and may come from any thread of any process that maps the table.
//
// Invariants (of the table; future_table.h says what the owner adds to them)
//   FUT-1 (once)   a future leaves pending at most once, to ready or to failed. Only the one call of complete() or
//                  fail() that finishes it returns Completion::kReady.
//   FUT-3 (stale)  a handle used after its release is refused.
//   FUT-4 (memory) whoever sees the future ready sees all that was written before each part's complete().
//
// TRUST-1: a view keeps the capacity and the addresses of the arrays privately (FutureArrays). So the view stays inside
// the mapped memory, whatever the owner writes there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/ids.h"
#include "futures/future_layout.h"
#include "sync/atomic.h"
#include "sync/doorbell.h"

namespace pathways {

/// What complete() and fail() did.
enum class [[nodiscard]] Completion : std::uint8_t {
  kPending,  // the parts are counted; more parts are to come
  kReady,    // this call finished the future (complete(): ready; fail(): failed)
  kStale,    // nothing: the future is released or already finished, or `parts` is 0 or more than are missing
};

class FutureTable;

/// A value; the memory must outlive it.
class FutureView {
 public:
  static constexpr std::uint32_t kMaxError = (std::uint32_t{1} << 24) - 1;

  FutureView() = default;
  /// A view of the table at `memory`, of which `room` bytes are mapped. Throws Error(kInvalid) when no table is there,
  /// or when it does not fit into `room` bytes.
  FutureView(void* memory, std::size_t room);

  [[nodiscard]] bool is_there() const noexcept { return arrays_.words != nullptr; }
  [[nodiscard]] std::uint32_t capacity() const noexcept { return arrays_.capacity; }
  [[nodiscard]] DoorbellWord& doorbell() const noexcept { return *doorbell_; }

  /// Counts `parts` more parts as done. FUT-1.
  Completion complete(Handle handle, std::uint32_t parts = 1) const noexcept {
    Atomic<std::uint64_t>& word = arrays_.word_at(handle);
    std::uint64_t seen = word.load(std::memory_order_relaxed);
    for (;;) {
      if (!FutureWord::is_pending(seen, handle)) return Completion::kStale;
      const std::uint32_t remaining = FutureWord::payload_of(seen);
      if (parts - 1U >= remaining) return Completion::kStale;  // 0 parts, or more than expected
      const std::uint64_t next =
          parts == remaining ? FutureWord::finished(seen, FutureState::kReady, 0) : FutureWord::counted(seen, parts);
      // SYNC future/publish: pairs with future/consume; each part continues the release sequence (FUT-4).
      if (!word.compare_exchange_weak(seen, next, std::memory_order_acq_rel, std::memory_order_relaxed)) continue;
      if (parts != remaining) return Completion::kPending;
      if ((seen & FutureWord::kNotify) != 0) notify(handle, seen, FutureState::kReady);
      return Completion::kReady;
    }
  }
  /// Fails the future; `error` (1 to kMaxError) can be read by FutureTable::error_of().
  Completion fail(Handle handle, std::uint32_t error = 1) const noexcept;
  [[nodiscard]] FutureState poll(Handle handle) const noexcept {
    // SYNC future/consume: pairs with future/publish.
    return FutureWord::state_for(arrays_.word_at(handle).load(std::memory_order_acquire), handle);
  }

 private:
  friend class FutureTable;
  FutureView(FutureArrays arrays, DoorbellWord* doorbell, FutureTable* owned) noexcept
      : arrays_(arrays), doorbell_(doorbell), owned_(owned) {}

  /// Wakes and runs what `word`, as it was before the future left pending, says.
  void notify(Handle handle, std::uint64_t word, FutureState state) const noexcept;

  FutureArrays arrays_;
  DoorbellWord* doorbell_ = nullptr;
  FutureTable* owned_ = nullptr;  ///< the table, when the view was made in the owner process
};

}  // namespace pathways
