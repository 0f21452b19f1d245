// FutureTable: the futures of one client's buffers, in one block of memory, heap or shared. The owner process allocates
// and releases futures; any process that maps the table completes them.
//
// Threading: every call is lock-free and may come from any thread. Call allocate*(), release(), add_waiter(),
// run_waiters() and sweep_waiters() only in the process that called create(); the rest in any process that maps the
// table.
//
// Invariants
//   FUT-1 (once)   a future leaves pending at most once, to ready or to failed. Only the one call of complete() or
//                  fail() that finishes it returns Completion::kReady.
//   FUT-2 (waiter) a waiter added before, during or after completion runs exactly once: with kReady or kFailed, or with
//                  kFree when the future was released before the waiter ran (it may have finished before).
//   FUT-3 (stale)  a handle used after its release is refused. When the 32-bit generation of a slot is used up, the
//                  slot is retired, so no generation ever comes back.
//   FUT-4 (memory) whoever sees the future ready sees all that was written before each part's complete().
//
// Why FUT-2 holds: add_waiter() first pushes the waiter on the slot's list. Then it sets `listed` by compare-exchange
// on the word that completion changes too. If that succeeds, the completion comes later and sees the bit. If it fails,
// the future is no longer pending, and add_waiter() itself empties the list. One exchange empties a list, so exactly
// one thread gets each waiter. A thread that gets a waiter of a later, pending generation adds it again.
//
// When a process is killed after it finished a future and before it rang, sleepers are late by kRecheck at most (wait()
// polls again). Waiters are late until sweep_waiters(), which the owner calls when a peer has died.
//
// TRUST-1: a process that completes another process's futures uses a FutureView (future_view.h).
//
// Block: FutureTable header | arrays (future_layout.h). The free list is a Treiber stack. Its head contains a 32-bit
// count of pushes, so a pop finds the head unchanged only if no slot was pushed meanwhile (no ABA).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/cacheline.h"
#include "base/ids.h"
#include "base/status.h"
#include "futures/future_layout.h"
#include "futures/future_view.h"
#include "sync/atomic.h"
#include "sync/doorbell.h"

namespace pathways {

/// An intrusive node for add_waiter(). The table owns it from add_waiter() until the table calls `run`, which may free
/// it. `run` is called on the thread that finished or released the future, or that added a waiter, or that calls
/// run_waiters() or sweep_waiters(). It may use the table.
struct Waiter {
  void (*run)(Waiter* self, FutureState state) = nullptr;
  Waiter* next = nullptr;  // for the table
  Handle handle{};         // for the table: the future waited for
};

class FutureTable {
 public:
  static constexpr std::uint32_t kMaxCapacity = std::uint32_t{1} << 26;
  static constexpr std::uint32_t kMaxParts = FutureWord::kMaxPayload;
  static constexpr std::uint32_t kMaxError = FutureView::kMaxError;
  static constexpr std::chrono::nanoseconds kRecheck = std::chrono::milliseconds(50);

  /// Bytes of memory for `capacity` futures. Throws Error(kInvalid) unless `capacity` is 1 to 2^26.
  static std::size_t bytes_for(std::uint32_t capacity);
  /// Makes a table in `memory` (64-byte aligned, bytes_for(capacity) bytes), which must outlive its users. The calling
  /// process is the owner. `first_generation` is for tests of FUT-3.
  static FutureTable* create(void* memory, std::uint32_t capacity, std::uint32_t first_generation = 1);
  /// The table that create() made, perhaps in another process. Throws Error(kInvalid) if `memory` holds none.
  static FutureTable* attach(void* memory);

  /// Allocates a pending future of `parts` completions (1 to kMaxParts). Returns kFull when no slot is free, kInvalid
  /// for a wrong `parts`.
  Status allocate(std::uint32_t parts, Handle* out) noexcept;
  /// Allocates one future per element of `parts`, all or none. Returns kInvalid also when the sizes differ.
  Status allocate_many(std::span<const std::uint32_t> parts, std::span<Handle> out) noexcept;
  /// Frees the slot for its next generation, whether the future is pending or not. kStale when already released.
  Status release(Handle handle) noexcept;

  /// Counts `parts` more parts as done. FUT-1.
  Completion complete(Handle handle, std::uint32_t parts = 1) noexcept { return view().complete(handle, parts); }

  /// Fails the future; `error` (1 to kMaxError) can be read by error_of().
  Completion fail(Handle handle, std::uint32_t error = 1) noexcept { return view().fail(handle, error); }
  /// The error code of a failed future, else 0.
  [[nodiscard]] std::uint32_t error_of(Handle handle) const noexcept;

  [[nodiscard]] FutureState poll(Handle handle) const noexcept {
    return const_cast<FutureTable*>(this)->view().poll(handle);
  }

  /// From now on whoever finishes the future rings doorbell(). False when the future is no longer pending.
  bool mark_waited(Handle handle) noexcept { return mark(handle, FutureWord::kWaited); }
  /// Returns the state when it is no longer pending, or kPending after `timeout`. If a ring is lost (the ringer was
  /// killed), the result is late by kRecheck at most.
  FutureState wait(Handle handle, std::chrono::nanoseconds timeout, SpinPolicy spin) noexcept;
  /// Rung when a future with the waited bit is finished or released, and when another process finishes a future that
  /// has waiters.
  DoorbellWord& doorbell() noexcept { return doorbell_; }

  /// FUT-2. The waiter may run before this call returns.
  void add_waiter(Handle handle, Waiter* waiter) noexcept;
  /// Runs the waiters of futures that other processes finished. Call it when the doorbell has rung.
  void run_waiters() noexcept;
  /// Runs the waiters of every finished future, O(capacity). Call it after a peer died, because its ring may be lost.
  void sweep_waiters() noexcept;

  [[nodiscard]] std::uint32_t capacity() const noexcept { return capacity_; }
  /// The number of futures allocated and not released: a snapshot.
  [[nodiscard]] std::uint32_t in_use() const noexcept { return in_use_.load(std::memory_order_relaxed); }
  /// True in the process that called create().
  [[nodiscard]] bool is_owner() const noexcept;
  /// Checks the free list against the words; aborts when broken. Only while nobody uses the table. O(capacity).
  void validate() const noexcept;

  FutureTable(const FutureTable&) = delete;
  FutureTable& operator=(const FutureTable&) = delete;

 private:
  friend class FutureView;                                      // drain(), and what its constructor checks
  static constexpr std::uint64_t kMagic = 0x50574655'54555245;  // "PWFUTURE"
  static constexpr std::uint32_t kVersion = 1;
  static constexpr std::uint32_t kNone = UINT32_MAX;  // end of the free list

  FutureTable(std::uint32_t capacity, std::uint64_t owner) noexcept;

  /// The arrays behind the header. The owner may trust its own capacity; others use a FutureView.
  [[nodiscard]] FutureArrays arrays() const noexcept {
    auto* behind = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(this)) + sizeof(FutureTable);
    return {reinterpret_cast<Atomic<std::uint64_t>*>(behind), capacity_};
  }
  bool mark(Handle handle, std::uint64_t bit) noexcept;
  bool attach_waiter(Waiter* waiter) noexcept;
  void notify(Handle handle, std::uint64_t word, FutureState state) noexcept { view().notify(handle, word, state); }
  [[nodiscard]] FutureView view() noexcept { return {arrays(), &doorbell_, this}; }
  void drain(std::uint32_t index, Handle known, FutureState state) noexcept;
  void push_free(std::uint32_t index) noexcept;

  std::uint64_t magic_;     // immutable after create
  std::uint32_t version_;   // immutable after create
  std::uint32_t capacity_;  // immutable after create
  std::uint64_t owner_;     // immutable after create: process_token() of the owner
  DoorbellWord doorbell_;
  alignas(kCacheLine) Atomic<std::uint64_t> free_head_;  // owner process: count of pushes << 32 | index
  Atomic<std::uint32_t> in_use_;                         // owner process
  Atomic<std::uint32_t> retired_;                        // owner process: slots whose generations are used up
};

}  // namespace pathways
