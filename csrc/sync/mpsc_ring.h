// MpscRing<T>: a bounded ring of fixed-size records with many producers and one consumer, on the heap or in shared
// memory. Use it where several threads or processes report to one consumer (completions, releases). For one producer,
// ByteRing is cheaper and takes records of any length.
//
// Threading: try_push() from any thread of any process that maps the ring; try_pop() from one thread at a time.
//
// Invariants
//   MPSC-1 (once)   a pushed record is popped exactly once, whole.
//   MPSC-2 (order)  records of one producer come out in the order it pushed them.
//   MPSC-3 (full)   try_push() fails only when `capacity` records were pushed and not yet popped (or when the consumer
//                   is still popping the record in that cell).
// When a producer is killed after it took a cell and before it filled it (a few instructions), the consumer never gets
// past that cell. So share a ring only among processes whose death ends the ring.
//
// Layout: header, then `capacity` cells {sequence, record}. For position p, the sequence of its cell is: p: the cell is
// free for the push at p; p + 1: it holds that record; p + capacity: it is free for the push of the next lap.
// Source: D. Vyukov, "Bounded MPMC queue".
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <type_traits>

#include "base/cacheline.h"
#include "base/check.h"
#include "base/status.h"
#include "sync/atomic.h"

namespace pathways {

template <class T>
class MpscRing {
  static_assert(std::is_trivially_copyable_v<T>, "records are copied between processes");
  static_assert(alignof(T) <= kCacheLine);

 public:
  /// Bytes of memory for `capacity` records. Throws Error(kInvalid) unless `capacity` is a power of two in [2, 2^30].
  static std::size_t bytes_for(std::uint32_t capacity) {
    check_capacity(capacity);
    return sizeof(MpscRing) + std::size_t{capacity} * sizeof(Cell);
  }
  /// Makes a ring in `memory` (64-byte aligned, bytes_for(capacity) bytes), which must outlive the ring's users.
  static MpscRing* create(void* memory, std::uint32_t capacity) {
    check_capacity(capacity);
    check_alignment(memory);
    return new (memory) MpscRing(capacity);
  }
  /// The ring that create() made, perhaps in another process. Throws Error(kInvalid) if `memory` holds no ring with
  /// cells of T's size.
  static MpscRing* attach(void* memory) {
    check_alignment(memory);
    auto* ring = std::launder(reinterpret_cast<MpscRing*>(memory));
    if (ring->magic_ != kMagic || ring->cell_bytes_ != sizeof(Cell)) {
      throw Error(Status::kInvalid, "corrupt ring: expected cells of " + std::to_string(sizeof(Cell)) + " bytes, got " +
                                        std::to_string(ring->cell_bytes_));
    }
    check_capacity(ring->capacity_);
    return ring;
  }

  /// False when the ring is full.
  bool try_push(const T& record) noexcept {
    std::uint64_t position = tail_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cell_at(position);
      // SYNC mpsc_ring/take: pairs with mpsc_ring/free; the consumer no longer reads the cell.
      const std::uint64_t sequence = cell.sequence.load(std::memory_order_acquire);
      const auto lap = static_cast<std::int64_t>(sequence - position);
      if (lap == 0) {
        // On failure `position` is the new tail.
        if (tail_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed, std::memory_order_relaxed)) {
          model_write(&cell.record);
          cell.record = record;
          // SYNC mpsc_ring/publish: pairs with mpsc_ring/consume.
          cell.sequence.store(position + 1, std::memory_order_release);
          return true;
        }
      } else if (lap < 0) {
        return false;
      } else {
        position = tail_.load(std::memory_order_relaxed);
      }
    }
  }

  /// False when the next record is not there yet. One consumer at a time.
  bool try_pop(T& record) noexcept {
    const std::uint64_t position = head_.load(std::memory_order_relaxed);
    Cell& cell = cell_at(position);
    // SYNC mpsc_ring/consume: pairs with mpsc_ring/publish; the record is written.
    if (cell.sequence.load(std::memory_order_acquire) != position + 1) return false;
    model_read(&cell.record);
    record = cell.record;
    head_.store(position + 1, std::memory_order_relaxed);
    // SYNC mpsc_ring/free: pairs with mpsc_ring/take.
    cell.sequence.store(position + capacity_, std::memory_order_release);
    return true;
  }

  /// A stale snapshot.
  [[nodiscard]] bool was_empty() const noexcept {
    const std::uint64_t position = head_.load(std::memory_order_relaxed);
    return cell_at(position).sequence.load(std::memory_order_relaxed) != position + 1;
  }
  [[nodiscard]] std::uint32_t capacity() const noexcept { return capacity_; }

  /// Checks that every cell is free or full for the current lap. Only while nobody uses the ring.
  void validate() const {
    const std::uint64_t head = head_.load(std::memory_order_acquire);
    const std::uint64_t tail = tail_.load(std::memory_order_acquire);
    PW_CHECK(tail - head <= capacity_);
    for (std::uint64_t p = head; p != head + capacity_; ++p) {
      PW_CHECK(cell_at(p).sequence.load(std::memory_order_acquire) == (p < tail ? p + 1 : p));
    }
  }

  MpscRing(const MpscRing&) = delete;
  MpscRing& operator=(const MpscRing&) = delete;

 private:
  static constexpr std::uint64_t kMagic = 0x50574d50'53435231;  // "PWMPSCR1"

  struct Cell {
    Atomic<std::uint64_t> sequence;
    T record;
  };

  explicit MpscRing(std::uint32_t capacity) noexcept : magic_(kMagic), cell_bytes_(sizeof(Cell)), capacity_(capacity) {
    for (std::uint64_t i = 0; i < capacity; ++i) {
      new (&cells()[i]) Cell{};
      cells()[i].sequence.store(i, std::memory_order_relaxed);
    }
  }

  static void check_capacity(std::uint32_t capacity) {
    if (capacity < 2 || capacity > (std::uint32_t{1} << 30) || (capacity & (capacity - 1)) != 0) {
      throw Error(Status::kInvalid,
                  "ring capacity: expected a power of two from 2 to 2^30, got " + std::to_string(capacity));
    }
  }
  static void check_alignment(const void* memory) {
    if (memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % kCacheLine != 0) {
      throw Error(Status::kInvalid, "ring memory: expected a 64-byte aligned address");
    }
  }

  [[nodiscard]] Cell* cells() const noexcept {
    auto* bytes = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(this)) + sizeof(MpscRing);
    return reinterpret_cast<Cell*>(bytes);
  }
  [[nodiscard]] Cell& cell_at(std::uint64_t position) const noexcept { return cells()[position & (capacity_ - 1U)]; }

  std::uint64_t magic_;                             // immutable after create
  std::uint32_t cell_bytes_;                        // immutable after create
  std::uint32_t capacity_;                          // immutable after create
  alignas(kCacheLine) Atomic<std::uint64_t> tail_;  // producers
  alignas(kCacheLine) Atomic<std::uint64_t> head_;  // the consumer writes; others may read
};

}  // namespace pathways
