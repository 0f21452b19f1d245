/// ReadBackArea: slots beside a client's future table, into which hosts write small results that the client asked for.
///
/// Each future has a slot. A host first writes its share of the value into the slot of the result's future, and then
/// completes its part. So a client that sees the future ready (FUT-4) finds the whole value there, without another
/// message. Every future has a slot for values of up to kSmallBytes. Only the first kLargeSlots futures have a slot for
/// longer values, up to kLargeBytes, so that a client with many futures does not need a page for each.
///
///   READ-1 (whole)  when a future is ready, its slot holds what the hosts wrote for that future and nothing else.
///
/// A host may be late: the client has released the handle, and a new future uses the same index. Why READ-1 holds then:
/// a writer first adds itself to the slot's count of writers, then checks that its future is still pending. The client
/// opens the slot for the new future after it released the old one. Both use a read-modify-write of the count. If the
/// writer's comes later, the writer sees that its handle is stale. If it comes earlier, the client sees the count, and
/// does not use the slot for this future. A host that dies while it writes never takes its count away: that slot is
/// never opened again.
///
/// Threading: the client's submitting thread calls `try_open`. Any process that maps the area calls `begin_write` and
/// `end_write`. The client reads a slot after it saw the future ready and before it releases the future.
///
/// TRUST-1: a host has a ReadBackView, which keeps the number of futures privately and stays inside the mapped memory.
///
/// Block: header | counts, one per future | small slots | large slots (pages; only what is touched costs memory).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "futures/future_table.h"
#include "sync/atomic.h"

namespace pathways {

/// A piece of a value.
struct ValueRun {
  uint32_t offset, bytes;
};

/// A piece of a block of the client's memory.
struct BlockPiece {
  uint64_t at, bytes;
};

/// Which bytes of which slot were written.
struct WrittenRuns {
  bool is_large = false;
  std::vector<ValueRun> runs = {};
};

class ReadBackArea {
 public:
  static constexpr size_t kSmallBytes = 64;
  static constexpr size_t kLargeBytes = 4096;
  static constexpr uint32_t kLargeSlots = 8192;

  static size_t bytes_for(uint32_t futures) { return large_at(futures) + size_t{large_slots(futures)} * kLargeBytes; }
  /// Makes an area in zeroed `memory` (page aligned, bytes_for(futures) bytes), which must outlive its users.
  static ReadBackArea* create(void* memory, uint32_t futures);
  /// Throws Error(kInvalid) if `memory` holds none.
  static ReadBackArea* attach(void* memory);

  /// Call it for a future that was just allocated. True: the client may ask for a value of `bytes` bytes in its slot.
  bool try_open(Handle future, size_t bytes) noexcept;
  /// The slot of a future for values of `bytes` bytes, or nullptr when the future has none.
  std::byte* slot(Handle future, size_t bytes) noexcept { return slot_in(block(), futures_, future, bytes); }

 private:
  friend class ReadBackView;
  static constexpr uint64_t kMagic = 0x5057524541444241ULL;
  static constexpr size_t kHeader = 64;
  explicit ReadBackArea(uint32_t futures) : magic_(kMagic), futures_(futures) {}
  static uint32_t large_slots(uint32_t futures) { return std::min(futures, kLargeSlots); }
  static size_t small_at(uint32_t futures) { return (kHeader + futures * sizeof(uint32_t) + 63) / 64 * 64; }
  static size_t large_at(uint32_t futures) {
    return (small_at(futures) + futures * kSmallBytes + kLargeBytes - 1) / kLargeBytes * kLargeBytes;
  }
  static std::byte* slot_in(std::byte* block, uint32_t futures, Handle future, size_t bytes) noexcept;
  static Atomic<uint32_t>& writers_in(std::byte* block, Handle future) noexcept {
    return reinterpret_cast<Atomic<uint32_t>*>(block + kHeader)[future.index()];
  }
  std::byte* block() noexcept { return reinterpret_cast<std::byte*>(this); }

  uint64_t magic_;    // immutable after create
  uint32_t futures_;  // immutable after create
};

/// The two slots of one future. Writer and reader both choose the slot by the size of the whole value.
struct ReadBackSlot {
  std::byte* small = nullptr;
  std::byte* large = nullptr;      ///< nullptr: none for this future
  WrittenRuns* written = nullptr;  ///< if there, it learns what is written

  /// The memory for a value of `whole` bytes, of which the caller writes what it tells `wrote`. nullptr: the value fits
  /// neither slot.
  std::byte* of(size_t whole) const {
    return whole <= ReadBackArea::kSmallBytes ? small : whole <= ReadBackArea::kLargeBytes ? large : nullptr;
  }
  /// The caller writes these bytes of the value.
  void wrote(size_t whole, size_t offset, size_t bytes) const {
    if (written == nullptr || bytes == 0) return;
    written->is_large = whole > ReadBackArea::kSmallBytes;
    written->runs.push_back({static_cast<uint32_t>(offset), static_cast<uint32_t>(bytes)});
  }
};

/// ReadBackView: the area as a writer uses it. A value; the memory must outlive it.
class ReadBackView {
 public:
  ReadBackView() = default;
  /// A view of the area at `memory`, of which `room` bytes are mapped. Throws Error(kInvalid) when no area is there, or
  /// when it does not fit into `room` bytes.
  ReadBackView(void* memory, size_t room);

  bool is_there() const noexcept { return block_ != nullptr; }
  /// Adds a writer to the slot's count. True: the caller writes, then calls `end_write`. False: the future is no longer
  /// pending, so the caller must not write.
  bool begin_write(const FutureView& table, Handle future, ReadBackSlot* slot) const noexcept;
  void end_write(Handle future) const noexcept;

 private:
  std::byte* block_ = nullptr;
  uint32_t futures_ = 0;
};

}  // namespace pathways
