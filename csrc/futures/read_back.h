/// ReadBackArea: where hosts leave small results for the client that asked for them, beside its future table.
///
/// Each future has a slot. A host writes its share of the value into the slot of the result's future and only then
/// completes its part; so who sees the future ready (FUT-4) finds the whole value there, without another message.
/// Values of up to kSmallBytes have a slot for every future; longer ones, up to kLargeBytes, only for the first
/// kLargeSlots, so that a client which keeps many futures does not keep a page for each.
///
///   READ-1 (whole)  a slot of a future that is ready holds what the hosts wrote for that future and nothing else.
///
/// A host may be late: its client has released the handle, and the index is in use again. Why READ-1 holds even so: a
/// writer counts itself in before it looks whether its future is still pending, and the client opens a slot for a new
/// use after the release of the old one. Both change the slot's count by read-modify-write; so either the writer comes
/// later, and sees that its handle is stale, or the client sees the count, and does without the slot for this use. A
/// host that dies while it writes leaves the count behind: that slot is never opened again.
///
/// Threading: `try_open` by the client's submitting thread; `begin_write` and `end_write` by any process that maps the
/// area; reading a slot by the client, between seeing its future ready and releasing it.
///
/// TRUST-1: a host has a ReadBackView, which keeps the number of futures privately and stays inside what is mapped.
///
/// Block: header | counts, one per future | small slots | large slots (pages; only what is touched costs memory).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/ids.h"
#include "futures/future_table.h"
#include "sync/atomic.h"

namespace pathways {

/// The two slots of one future. A writer picks by the size of the whole value, as the reader does.
struct ReadBackSlot {
  std::byte* small = nullptr;
  std::byte* large = nullptr;  ///< nullptr: none for this future
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

  /// The client may ask for a value of `bytes` bytes in the slot of the future that it has just allocated.
  bool try_open(Handle future, size_t bytes) noexcept;
  /// The slot of a future for values of `bytes` bytes; nullptr: there is none.
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

/// The area as a writer has it. A value; the memory must outlive it.
class ReadBackView {
 public:
  ReadBackView() = default;
  /// The area at `memory`, of which `room` bytes are mapped. Throws Error(kInvalid) when none is there, or it does not
  /// fit.
  ReadBackView(void* memory, size_t room);

  bool is_there() const noexcept { return block_ != nullptr; }
  /// Counts a writer in. False: nobody will read it, and nothing may be written. True: `end_write` must follow.
  bool begin_write(const FutureView& table, Handle future, ReadBackSlot* slot) const noexcept;
  void end_write(Handle future) const noexcept;

 private:
  std::byte* block_ = nullptr;
  uint32_t futures_ = 0;
};

}  // namespace pathways
