// FutureWord and FutureArrays: the words and the arrays of a future table, as they lie in the block.
//
// Use them only in FutureTable (the owner) and FutureView (who completes futures). Both change a word only by
// compare-exchange, once the slot is handed out.
//
// Threading: FutureWord is pure. FutureArrays is a value that never changes; the arrays themselves are shared.
//
// Layout of a slot's word:
//   63........32   31........4   3        2        1..0
//   generation     payload       listed   waited   state
//   payload: pending: the parts still to come; failed: the error code; else 0.
//   waited:  a thread sleeps, or will sleep, at the table's doorbell. Whoever finishes the future rings the doorbell.
//   listed:  the slot may have Waiters. If the owner process finishes the future, it runs them. Any other process sets
//            the slot's notify bit and rings the doorbell, and the owner runs them in FutureTable::run_waiters().
//
// Layout of the arrays: words | waiter lists (owner's addresses, opaque to others) | notify bits | their summary (a bit
// per word of notify bits) | free links. Words and lists have one slot more than the capacity. Every index out of range
// is mapped to that last slot, which stays {generation 0, kFree} and so refuses every handle (FUT-3).
//
// TRUST-1: a FutureArrays keeps the address and the capacity privately. So it stays inside the mapped memory, whatever
// another process writes into the block.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/ids.h"
#include "sync/atomic.h"

namespace pathways {

/// kFree -> kPending (allocate) -> kReady | kFailed (complete, fail) -> kFree (release); kPending -> kFree (release).
/// From poll(), kFree says that the handle is stale.
enum class FutureState : std::uint8_t { kFree, kPending, kReady, kFailed };

/// Reads and makes a slot's word.
struct FutureWord {
  static constexpr std::uint64_t kWaited = 4;
  static constexpr std::uint64_t kListed = 8;
  static constexpr std::uint64_t kNotify = kWaited | kListed;
  static constexpr std::uint32_t kMaxPayload = (std::uint32_t{1} << 28) - 1;

  static constexpr std::uint64_t of(std::uint32_t generation, FutureState state, std::uint32_t payload) noexcept {
    return (std::uint64_t{generation} << kGenerationShift) | (std::uint64_t{payload} << kPayloadShift) |
           static_cast<std::uint64_t>(state);
  }
  /// `word` in another state, with its generation and who is to be notified.
  static constexpr std::uint64_t finished(std::uint64_t word, FutureState state, std::uint32_t payload) noexcept {
    return of(generation_of(word), state, payload) | (word & kNotify);
  }
  /// `word` with `parts` parts less to come; at least one is left.
  static constexpr std::uint64_t counted(std::uint64_t word, std::uint32_t parts) noexcept {
    return word - (std::uint64_t{parts} << kPayloadShift);
  }
  static constexpr std::uint32_t generation_of(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(word >> kGenerationShift);
  }
  static constexpr FutureState state_of(std::uint64_t word) noexcept {
    return static_cast<FutureState>(word & kStateMask);
  }
  static constexpr std::uint32_t payload_of(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(word) >> kPayloadShift;
  }
  static constexpr bool is_pending(std::uint64_t word, Handle handle) noexcept {
    return generation_of(word) == handle.generation() && state_of(word) == FutureState::kPending;
  }
  /// The state of the future `handle`; kFree when the word is of another generation.
  static constexpr FutureState state_for(std::uint64_t word, Handle handle) noexcept {
    return generation_of(word) == handle.generation() ? state_of(word) : FutureState::kFree;
  }

 private:
  static constexpr std::uint64_t kStateMask = 3;
  static constexpr unsigned kPayloadShift = 4;
  static constexpr unsigned kGenerationShift = 32;
};

/// Where the arrays of a table of `capacity` futures lie, the first of which begins at `words`.
struct FutureArrays {
  Atomic<std::uint64_t>* words = nullptr;
  std::uint32_t capacity = 0;

  /// Bytes of all arrays.
  static constexpr std::size_t bytes_for(std::uint32_t capacity) noexcept {
    const std::size_t count = 2 * slots(capacity) + bit_words(capacity) + summary_words(capacity);
    return count * sizeof(std::uint64_t) + std::size_t{capacity} * sizeof(std::uint32_t);
  }
  /// The number of words of notify bits, and of their summary, of a table of `capacity` futures.
  static constexpr std::uint32_t bit_words(std::uint32_t capacity) noexcept { return (capacity + 63) / 64; }
  static constexpr std::uint32_t summary_words(std::uint32_t capacity) noexcept {
    return bit_words(bit_words(capacity));
  }

  [[nodiscard]] std::uint32_t slot_of(Handle handle) const noexcept {
    return handle.index() < capacity ? handle.index() : capacity;
  }
  [[nodiscard]] Atomic<std::uint64_t>& word_at(Handle handle) const noexcept { return words[slot_of(handle)]; }
  [[nodiscard]] Atomic<std::uint64_t>* lists() const noexcept { return words + slots(capacity); }
  [[nodiscard]] Atomic<std::uint64_t>* notify_bits() const noexcept { return words + 2 * slots(capacity); }
  [[nodiscard]] Atomic<std::uint64_t>* notify_summary() const noexcept { return notify_bits() + bit_words(capacity); }
  [[nodiscard]] Atomic<std::uint32_t>* links() const noexcept {
    return reinterpret_cast<Atomic<std::uint32_t>*>(notify_summary() + summary_words(capacity));
  }

 private:
  static constexpr std::size_t slots(std::uint32_t capacity) noexcept { return std::size_t{capacity} + 1; }
};

}  // namespace pathways
