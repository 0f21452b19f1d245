#include "futures/read_back.h"

#include <new>
#include <string>

#include "base/copy_once.h"
#include "base/status.h"

namespace pathways {

ReadBackArea* ReadBackArea::create(void* memory, uint32_t futures) { return new (memory) ReadBackArea(futures); }

ReadBackArea* ReadBackArea::attach(void* memory) {
  auto* area = static_cast<ReadBackArea*>(memory);
  if (area->magic_ != kMagic) throw Error(Status::kInvalid, "not a read-back area");
  return area;
}

std::byte* ReadBackArea::slot_in(std::byte* block, uint32_t futures, Handle future, size_t bytes) noexcept {
  const uint32_t index = future.index();
  if (index >= futures || bytes > kLargeBytes) return nullptr;
  if (bytes <= kSmallBytes) return block + small_at(futures) + index * kSmallBytes;
  if (index >= large_slots(futures)) return nullptr;
  return block + large_at(futures) + index * kLargeBytes;
}

bool ReadBackArea::try_open(Handle future, size_t bytes) noexcept {
  if (slot(future, bytes) == nullptr) return false;
  // SYNC read_back/open: pairs with begin_write() and end_write(). A read-modify-write, so that one of the two sides
  // sees the other.
  return writers_in(block(), future).fetch_add(0, std::memory_order_acq_rel) == 0;
}

ReadBackView::ReadBackView(void* memory, size_t room) {
  if (memory == nullptr || reinterpret_cast<uintptr_t>(memory) % ReadBackArea::kHeader != 0 ||
      room < ReadBackArea::kHeader) {
    throw Error(Status::kInvalid, "read-back area: expected one in " + std::to_string(room) + " bytes of memory");
  }
  const ReadBackArea* area = ReadBackArea::attach(memory);
  futures_ = copied_once(area->futures_);
  if (futures_ > FutureTable::kMaxCapacity || ReadBackArea::bytes_for(futures_) > room) {
    throw Error(Status::kInvalid, "read-back area: one for " + std::to_string(futures_) +
                                      " futures does not fit into " + std::to_string(room) + " bytes");
  }
  block_ = static_cast<std::byte*>(memory);
}

bool ReadBackView::begin_write(const FutureView& table, Handle future, ReadBackSlot* slot) const noexcept {
  if (future.index() >= futures_) return false;
  // SYNC read_back/open: pairs with try_open(). If try_open() came first, poll() below sees that the old handle was
  // released.
  (void)ReadBackArea::writers_in(block_, future).fetch_add(1, std::memory_order_acq_rel);
  if (table.poll(future) != FutureState::kPending) {
    end_write(future);
    return false;
  }
  slot->small = ReadBackArea::slot_in(block_, futures_, future, ReadBackArea::kSmallBytes);
  slot->large = ReadBackArea::slot_in(block_, futures_, future, ReadBackArea::kLargeBytes);
  return true;
}

void ReadBackView::end_write(Handle future) const noexcept {
  // SYNC read_back/open: pairs with try_open(). A client that finds no writer sees the last writer's bytes.
  (void)ReadBackArea::writers_in(block_, future).fetch_sub(1, std::memory_order_acq_rel);
}

}  // namespace pathways
