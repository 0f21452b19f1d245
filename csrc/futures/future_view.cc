#include "futures/future_view.h"

#include <cstdint>
#include <string>

#include "base/cacheline.h"
#include "base/copy_once.h"
#include "base/status.h"
#include "futures/future_table.h"

namespace pathways {

FutureView::FutureView(void* memory, std::size_t room) {
  if (memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % kCacheLine != 0 || room < sizeof(FutureTable)) {
    throw Error(Status::kInvalid, "future table: expected one in " + std::to_string(room) + " bytes of memory");
  }
  FutureTable* table = FutureTable::attach(memory);
  const auto capacity = copied_once(table->capacity_);
  if (FutureTable::bytes_for(capacity) > room) {
    throw Error(Status::kInvalid, "future table: one of " + std::to_string(capacity) + " futures does not fit into " +
                                      std::to_string(room) + " bytes");
  }
  arrays_ = {table->arrays().words, capacity};
  doorbell_ = &table->doorbell_;
  if (table->is_owner()) owned_ = table;
}

Completion FutureView::fail(Handle handle, std::uint32_t error) const noexcept {
  const std::uint32_t code = error - 1U < kMaxError ? error : 1;
  Atomic<std::uint64_t>& word = arrays_.word_at(handle);
  std::uint64_t seen = word.load(std::memory_order_relaxed);
  do {
    if (!FutureWord::is_pending(seen, handle)) return Completion::kStale;
    // SYNC future/publish: pairs with future/consume.
  } while (!word.compare_exchange_weak(seen, FutureWord::finished(seen, FutureState::kFailed, code),
                                       std::memory_order_acq_rel, std::memory_order_relaxed));
  if ((seen & FutureWord::kNotify) != 0) notify(handle, seen, FutureState::kFailed);
  return Completion::kReady;
}

void FutureView::notify(Handle handle, std::uint64_t word, FutureState state) const noexcept {
  bool ring = (word & FutureWord::kWaited) != 0;
  if ((word & FutureWord::kListed) != 0) {
    if (owned_ != nullptr && owned_->is_owner()) {
      // Wake the sleepers first, because a waiter may take long.
      if (ring) doorbell_->ring();
      ring = false;
      owned_->drain(arrays_.slot_of(handle), handle, state);
    } else {
      const std::uint32_t slot = arrays_.slot_of(handle);
      const std::uint32_t at = slot / 64;
      // SYNC future/notify: pairs with future/collect.
      arrays_.notify_bits()[at].fetch_or(std::uint64_t{1} << (slot % 64), std::memory_order_acq_rel);
      arrays_.notify_summary()[at / 64].fetch_or(std::uint64_t{1} << (at % 64), std::memory_order_acq_rel);
      ring = true;
    }
  }
  if (ring) doorbell_->ring();
}

}  // namespace pathways
