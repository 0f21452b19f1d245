#include "futures/future_table.h"

#include <bit>
#include <new>
#include <string>

#include "base/check.h"
#include "base/process.h"

namespace pathways {

static_assert(sizeof(FutureTable) % kCacheLine == 0);

namespace {

void check_capacity(std::uint32_t capacity) {
  if (capacity == 0 || capacity > FutureTable::kMaxCapacity) {
    throw Error(Status::kInvalid, "future table: expected a capacity of 1 to 2^26, got " + std::to_string(capacity));
  }
}

Waiter* waiter_of(std::uint64_t bits) noexcept { return reinterpret_cast<Waiter*>(static_cast<std::uintptr_t>(bits)); }
std::uint64_t bits_of(Waiter* waiter) noexcept { return reinterpret_cast<std::uintptr_t>(waiter); }

}  // namespace

std::size_t FutureTable::bytes_for(std::uint32_t capacity) {
  check_capacity(capacity);
  return sizeof(FutureTable) + FutureArrays::bytes_for(capacity);
}

FutureTable::FutureTable(std::uint32_t capacity, std::uint64_t owner) noexcept
    : magic_(kMagic), version_(kVersion), capacity_(capacity), owner_(owner), doorbell_{} {}

FutureTable* FutureTable::create(void* memory, std::uint32_t capacity, std::uint32_t first_generation) {
  check_capacity(capacity);
  if (memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % kCacheLine != 0 || first_generation == 0) {
    throw Error(Status::kInvalid, "future table: expected 64-byte aligned memory and a generation above 0");
  }
  auto* table = new (memory) FutureTable(capacity, process_token());
  const FutureArrays arrays = table->arrays();
  for (std::uint32_t i = 0; i < capacity; ++i) {
    new (&arrays.words[i]) Atomic<std::uint64_t>(FutureWord::of(first_generation, FutureState::kFree, 0));
    new (&arrays.lists()[i]) Atomic<std::uint64_t>(0);
    new (&arrays.links()[i]) Atomic<std::uint32_t>(i + 1 < capacity ? i + 1 : kNone);
  }
  // The slot to which every index out of range is mapped.
  new (&arrays.words[capacity]) Atomic<std::uint64_t>(FutureWord::of(0, FutureState::kFree, 0));
  new (&arrays.lists()[capacity]) Atomic<std::uint64_t>(0);
  for (std::uint32_t i = 0; i < FutureArrays::bit_words(capacity) + FutureArrays::summary_words(capacity); ++i) {
    new (&arrays.notify_bits()[i]) Atomic<std::uint64_t>(0);
  }
  return table;
}

FutureTable* FutureTable::attach(void* memory) {
  auto* table = std::launder(reinterpret_cast<FutureTable*>(memory));
  if (memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % kCacheLine != 0 || table->magic_ != kMagic ||
      table->version_ != kVersion) {
    throw Error(Status::kInvalid,
                "future table: expected memory that FutureTable::create() of this version initialised");
  }
  check_capacity(table->capacity_);
  return table;
}

bool FutureTable::is_owner() const noexcept { return owner_ == process_token(); }

// ---- allocate and release

Status FutureTable::allocate(std::uint32_t parts, Handle* out) noexcept { return allocate_many({&parts, 1}, {out, 1}); }

Status FutureTable::allocate_many(std::span<const std::uint32_t> parts, std::span<Handle> out) noexcept {
  if (parts.size() != out.size()) return Status::kInvalid;
  for (const std::uint32_t p : parts) {
    if (p - 1U >= kMaxParts) return Status::kInvalid;
  }
  if (parts.empty()) return Status::kOk;
  // SYNC future/pop: pairs with future/push; the links and words of free slots are visible.
  std::uint64_t head = free_head_.load(std::memory_order_acquire);
  for (;;) {
    auto index = static_cast<std::uint32_t>(head);
    std::size_t taken = 0;
    for (; taken < out.size() && index != kNone; ++taken) {
      out[taken] = Handle{index};
      // Acquire, so that the second load of the head, below, comes after this load.
      index = arrays().links()[index].load(std::memory_order_acquire);
    }
    if (taken < out.size()) {
      const std::uint64_t again = free_head_.load(std::memory_order_acquire);
      if (again == head) return Status::kFull;  // nothing was popped or pushed meanwhile: too few slots are free
      head = again;
      continue;
    }
    const std::uint64_t next = (head >> 32 << 32) | index;
    if (free_head_.compare_exchange_weak(head, next, std::memory_order_acquire, std::memory_order_acquire)) break;
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    // Nobody else changes the word of a free slot: every handle to it is stale.
    Atomic<std::uint64_t>& word = arrays().words[out[i].index()];
    const std::uint32_t generation = FutureWord::generation_of(word.load(std::memory_order_relaxed));
    out[i] = Handle::make(out[i].index(), generation);
    // SYNC future/open: pairs with future/consume.
    word.store(FutureWord::of(generation, FutureState::kPending, parts[i]), std::memory_order_release);
  }
  in_use_.fetch_add(static_cast<std::uint32_t>(out.size()), std::memory_order_relaxed);
  return Status::kOk;
}

Status FutureTable::release(Handle handle) noexcept {
  Atomic<std::uint64_t>& word = arrays().word_at(handle);
  std::uint64_t seen = word.load(std::memory_order_relaxed);
  const std::uint32_t next_generation = handle.generation() + 1;
  do {
    if (FutureWord::generation_of(seen) != handle.generation() || FutureWord::state_of(seen) == FutureState::kFree)
      return Status::kStale;
    // SYNC future/close: pairs with future/publish; what the completers did comes before the release.
  } while (!word.compare_exchange_weak(seen, FutureWord::of(next_generation, FutureState::kFree, 0),
                                       std::memory_order_acq_rel, std::memory_order_relaxed));
  in_use_.fetch_sub(1, std::memory_order_relaxed);
  const FutureState last =
      FutureWord::state_of(seen) == FutureState::kPending ? FutureState::kFree : FutureWord::state_of(seen);
  if ((seen & FutureWord::kNotify) != 0) notify(handle, seen, last);
  if (next_generation == 0) {
    retired_.fetch_add(1, std::memory_order_relaxed);  // FUT-3: no handle has generation 0, so the slot is retired
  } else {
    push_free(handle.index());
  }
  return Status::kOk;
}

void FutureTable::push_free(std::uint32_t index) noexcept {
  std::uint64_t head = free_head_.load(std::memory_order_relaxed);
  std::uint64_t next = 0;
  do {
    arrays().links()[index].store(static_cast<std::uint32_t>(head), std::memory_order_relaxed);
    next = (((head >> 32) + 1) << 32) | index;
    // SYNC future/push: pairs with future/pop.
  } while (!free_head_.compare_exchange_weak(head, next, std::memory_order_release, std::memory_order_relaxed));
}

std::uint32_t FutureTable::error_of(Handle handle) const noexcept {
  const std::uint64_t seen = arrays().word_at(handle).load(std::memory_order_acquire);
  const bool failed =
      FutureWord::generation_of(seen) == handle.generation() && FutureWord::state_of(seen) == FutureState::kFailed;
  return failed ? FutureWord::payload_of(seen) : 0;
}

// ---- waiting

bool FutureTable::mark(Handle handle, std::uint64_t bit) noexcept {
  Atomic<std::uint64_t>& word = arrays().word_at(handle);
  std::uint64_t seen = word.load(std::memory_order_relaxed);
  // Exchange also when the bit is set already: this orders what the caller did before (pushed a waiter, took a ticket)
  // against the completion.
  do {
    if (!FutureWord::is_pending(seen, handle)) return false;
    // SYNC future/mark: pairs with future/publish.
  } while (!word.compare_exchange_weak(seen, seen | bit, std::memory_order_acq_rel, std::memory_order_relaxed));
  return true;
}

FutureState FutureTable::wait(Handle handle, std::chrono::nanoseconds timeout, SpinPolicy spin) noexcept {
  FutureState state = poll(handle);
  for (std::uint32_t i = 0; state == FutureState::kPending && i < spin.spins + spin.yields; ++i) {
    i < spin.spins ? cpu_relax() : thread_yield();
    state = poll(handle);
  }
  if (state != FutureState::kPending || timeout.count() <= 0) return state;
  const std::int64_t deadline = deadline_after(timeout);
  for (;;) {
    const std::uint32_t ticket = doorbell_.ticket();
    if (!mark_waited(handle)) return poll(handle);
    const auto left = time_left(deadline);
    const Status rung = doorbell_.wait(ticket, left < kRecheck ? left : kRecheck, SpinPolicy::sleep_at_once());
    state = poll(handle);
    if (state != FutureState::kPending) return state;
    if (rung == Status::kTimeout && left <= kRecheck) return state;
  }
}

// ---- waiters (FUT-2)

bool FutureTable::attach_waiter(Waiter* waiter) noexcept {
  const Handle handle = waiter->handle;  // once pushed, another thread may run the waiter and free it
  Atomic<std::uint64_t>& list = arrays().lists()[arrays().slot_of(handle)];
  std::uint64_t head = list.load(std::memory_order_relaxed);
  do {
    model_write(waiter);
    waiter->next = waiter_of(head);
    // SYNC future/list: pairs with future/drain.
  } while (!list.compare_exchange_weak(head, bits_of(waiter), std::memory_order_release, std::memory_order_relaxed));
  return mark(handle, FutureWord::kListed);
}

void FutureTable::add_waiter(Handle handle, Waiter* waiter) noexcept {
  PW_DCHECK(is_owner() && waiter->run != nullptr);
  waiter->handle = handle;
  if (!attach_waiter(waiter)) drain(arrays().slot_of(handle), Handle{}, FutureState::kFree);
}

void FutureTable::drain(std::uint32_t index, Handle known, FutureState state) noexcept {
  for (bool again = true; again;) {
    again = false;
    // SYNC future/drain: pairs with future/list.
    Waiter* waiter = waiter_of(arrays().lists()[index].exchange(0, std::memory_order_acq_rel));
    while (waiter != nullptr) {
      model_read(waiter);
      Waiter* const next = waiter->next;
      // The slot may be released already, so poll() cannot tell how `known` ended; the caller passes that in `state`.
      const FutureState now = waiter->handle == known ? state : poll(waiter->handle);
      if (now != FutureState::kPending) {
        waiter->run(waiter, now);
      } else if (!attach_waiter(waiter)) {
        again = true;
      }
      waiter = next;
    }
  }
}

void FutureTable::run_waiters() noexcept {
  for (std::uint32_t s = 0; s < FutureArrays::summary_words(capacity_); ++s) {
    if (arrays().notify_summary()[s].load(std::memory_order_relaxed) == 0) continue;
    // SYNC future/collect: pairs with future/notify.
    std::uint64_t summary = arrays().notify_summary()[s].exchange(0, std::memory_order_acq_rel);
    for (; summary != 0; summary &= summary - 1) {
      const std::uint32_t at = s * 64 + static_cast<std::uint32_t>(std::countr_zero(summary));
      std::uint64_t bits = arrays().notify_bits()[at].exchange(0, std::memory_order_acq_rel);
      for (; bits != 0; bits &= bits - 1) {
        drain(at * 64 + static_cast<std::uint32_t>(std::countr_zero(bits)), Handle{}, FutureState::kFree);
      }
    }
  }
}

void FutureTable::sweep_waiters() noexcept {
  for (std::uint32_t i = 0; i < capacity_; ++i) {
    if (arrays().lists()[i].load(std::memory_order_relaxed) != 0) drain(i, Handle{}, FutureState::kFree);
  }
}

void FutureTable::validate() const noexcept {
  std::uint32_t free_slots = 0;
  for (auto i = static_cast<std::uint32_t>(free_head_.load(std::memory_order_acquire)); i != kNone;
       i = arrays().links()[i].load(std::memory_order_relaxed)) {
    PW_CHECK(i < capacity_ && free_slots++ < capacity_);
    PW_CHECK(FutureWord::state_of(arrays().words[i].load(std::memory_order_acquire)) == FutureState::kFree);
  }
  const std::uint32_t retired = retired_.load(std::memory_order_relaxed);
  PW_CHECK(free_slots + retired + in_use() == capacity_);
  std::uint32_t used = 0;
  for (std::uint32_t i = 0; i < capacity_; ++i) {
    const std::uint64_t word = arrays().words[i].load(std::memory_order_acquire);
    used += FutureWord::state_of(word) != FutureState::kFree ? 1U : 0U;
    PW_CHECK(FutureWord::state_of(word) != FutureState::kPending || FutureWord::payload_of(word) != 0);
  }
  PW_CHECK(used == in_use());
}

}  // namespace pathways
