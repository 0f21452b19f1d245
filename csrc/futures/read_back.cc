#include "futures/read_back.h"

#include <new>

#include "base/status.h"

namespace pathways {

ReadBackArea* ReadBackArea::create(void* memory, uint32_t futures) { return new (memory) ReadBackArea(futures); }

ReadBackArea* ReadBackArea::attach(void* memory) {
  auto* area = static_cast<ReadBackArea*>(memory);
  if (area->magic_ != kMagic) throw Error(Status::kInvalid, "not a read-back area");
  return area;
}

std::byte* ReadBackArea::slot(Handle future, size_t bytes) noexcept {
  const uint32_t index = future.index();
  if (index >= futures_ || bytes > kLargeBytes) return nullptr;
  if (bytes <= kSmallBytes) return block() + small_at(futures_) + index * kSmallBytes;
  if (index >= large_slots(futures_)) return nullptr;
  return block() + large_at(futures_) + index * kLargeBytes;
}

bool ReadBackArea::try_open(Handle future, size_t bytes) noexcept {
  if (slot(future, bytes) == nullptr) return false;
  // SYNC read_back/open: pairs with begin_write() and end_write(); a read-modify-write, so that one sees the other.
  return writers(future).fetch_add(0, std::memory_order_acq_rel) == 0;
}

bool ReadBackArea::begin_write(const FutureTable& table, Handle future, ReadBackPlace* place) noexcept {
  if (future.index() >= futures_) return false;
  // SYNC read_back/open: pairs with try_open(): when that came before, the release of the old handle is seen below.
  (void)writers(future).fetch_add(1, std::memory_order_acq_rel);
  if (table.poll(future) != FutureState::kPending) {
    end_write(future);
    return false;
  }
  place->small = slot(future, kSmallBytes);
  place->large = slot(future, kLargeBytes);
  return true;
}

void ReadBackArea::end_write(Handle future) noexcept {
  // SYNC read_back/open: pairs with try_open(): who finds no writer finds the last one's bytes written.
  (void)writers(future).fetch_sub(1, std::memory_order_acq_rel);
}

}  // namespace pathways
