#include "futures/future_table.h"

#include <bit>
#include <new>
#include <string>

#include "base/check.h"
#include "base/copy_once.h"
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
  const std::size_t words = 2 * (std::size_t{capacity} + 1) + bit_words(capacity) + bit_words(bit_words(capacity));
  return sizeof(FutureTable) + words * 8 + std::size_t{capacity} * 4;
}

FutureTable::FutureTable(std::uint32_t capacity, std::uint64_t owner) noexcept
    : magic_(kMagic), version_(kVersion), capacity_(capacity), owner_(owner), doorbell_{} {}

FutureTable* FutureTable::create(void* memory, std::uint32_t capacity, std::uint32_t first_generation) {
  check_capacity(capacity);
  if (memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % kCacheLine != 0 || first_generation == 0) {
    throw Error(Status::kInvalid, "future table: expected 64-byte aligned memory and a generation above 0");
  }
  auto* table = new (memory) FutureTable(capacity, process_token());
  for (std::uint32_t i = 0; i < capacity; ++i) {
    new (&table->words()[i]) Atomic<std::uint64_t>(word_of(first_generation, FutureState::kFree, 0));
    new (&table->lists()[i]) Atomic<std::uint64_t>(0);
    new (&table->links()[i]) Atomic<std::uint32_t>(i + 1 < capacity ? i + 1 : kNone);
  }
  // The slot to which every index out of range is mapped.
  new (&table->words()[capacity]) Atomic<std::uint64_t>(word_of(0, FutureState::kFree, 0));
  new (&table->lists()[capacity]) Atomic<std::uint64_t>(0);
  for (std::uint32_t i = 0; i < bit_words(capacity) + bit_words(bit_words(capacity)); ++i) {
    new (&table->notify_bits()[i]) Atomic<std::uint64_t>(0);
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
      index = links()[index].load(std::memory_order_acquire);
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
    Atomic<std::uint64_t>& word = words()[out[i].index()];
    const std::uint32_t generation = generation_of(word.load(std::memory_order_relaxed));
    out[i] = Handle::make(out[i].index(), generation);
    // SYNC future/open: pairs with future/consume.
    word.store(word_of(generation, FutureState::kPending, parts[i]), std::memory_order_release);
  }
  in_use_.fetch_add(static_cast<std::uint32_t>(out.size()), std::memory_order_relaxed);
  return Status::kOk;
}

Status FutureTable::release(Handle handle) noexcept {
  Atomic<std::uint64_t>& word = word_at(handle);
  std::uint64_t seen = word.load(std::memory_order_relaxed);
  const std::uint32_t next_generation = handle.generation() + 1;
  do {
    if (generation_of(seen) != handle.generation() || state_of(seen) == FutureState::kFree) return Status::kStale;
    // SYNC future/close: pairs with future/publish; what the completers did comes before the release.
  } while (!word.compare_exchange_weak(seen, word_of(next_generation, FutureState::kFree, 0), std::memory_order_acq_rel,
                                       std::memory_order_relaxed));
  in_use_.fetch_sub(1, std::memory_order_relaxed);
  const FutureState last = state_of(seen) == FutureState::kPending ? FutureState::kFree : state_of(seen);
  if ((seen & kNotify) != 0) notify(handle, seen, last);
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
    links()[index].store(static_cast<std::uint32_t>(head), std::memory_order_relaxed);
    next = (((head >> 32) + 1) << 32) | index;
    // SYNC future/push: pairs with future/pop.
  } while (!free_head_.compare_exchange_weak(head, next, std::memory_order_release, std::memory_order_relaxed));
}

// ---- completion

FutureView::FutureView(void* memory, std::size_t room) {
  using Table = FutureTable;
  if (memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % kCacheLine != 0 || room < sizeof(Table)) {
    throw Error(Status::kInvalid, "future table: expected one in " + std::to_string(room) + " bytes of memory");
  }
  Table* table = Table::attach(memory);
  capacity_ = copied_once(table->capacity_);
  if (Table::bytes_for(capacity_) > room) {
    throw Error(Status::kInvalid, "future table: one of " + std::to_string(capacity_) + " futures does not fit into " +
                                      std::to_string(room) + " bytes");
  }
  words_ = table->words();
  doorbell_ = &table->doorbell_;
  if (table->is_owner()) owned_ = table;
}

Completion FutureView::fail(Handle handle, std::uint32_t error) const noexcept {
  using Table = FutureTable;
  const std::uint32_t code = error - 1U < Table::kMaxError ? error : 1;
  Atomic<std::uint64_t>& word = word_at(handle);
  std::uint64_t seen = word.load(std::memory_order_relaxed);
  do {
    if (!Table::is_pending(seen, handle)) return Completion::kStale;
    // SYNC future/publish: pairs with future/consume.
  } while (!word.compare_exchange_weak(seen, Table::finished(seen, FutureState::kFailed, code),
                                       std::memory_order_acq_rel, std::memory_order_relaxed));
  if ((seen & Table::kNotify) != 0) notify(handle, seen, FutureState::kFailed);
  return Completion::kReady;
}

std::uint32_t FutureTable::error_of(Handle handle) const noexcept {
  const std::uint64_t seen = word_at(handle).load(std::memory_order_acquire);
  const bool failed = generation_of(seen) == handle.generation() && state_of(seen) == FutureState::kFailed;
  return failed ? payload_of(seen) : 0;
}

void FutureView::notify(Handle handle, std::uint64_t word, FutureState state) const noexcept {
  using Table = FutureTable;
  bool ring = (word & Table::kWaited) != 0;
  if ((word & Table::kListed) != 0) {
    if (owned_ != nullptr && owned_->is_owner()) {
      // Wake the sleepers first, because a waiter may take long.
      if (ring) doorbell_->ring();
      ring = false;
      owned_->drain(slot_of(handle), handle, state);
    } else {
      const std::uint32_t at = slot_of(handle) / 64;
      Atomic<std::uint64_t>* const bits = Table::notify_bits_behind(words_, capacity_);
      // SYNC future/notify: pairs with future/collect.
      bits[at].fetch_or(std::uint64_t{1} << (handle.index() % 64), std::memory_order_acq_rel);
      bits[Table::bit_words(capacity_) + at / 64].fetch_or(std::uint64_t{1} << (at % 64), std::memory_order_acq_rel);
      ring = true;
    }
  }
  if (ring) doorbell_->ring();
}

// ---- waiting

bool FutureTable::mark(Handle handle, std::uint64_t bit) noexcept {
  Atomic<std::uint64_t>& word = word_at(handle);
  std::uint64_t seen = word.load(std::memory_order_relaxed);
  // Exchange also when the bit is set already: this orders what the caller did before (pushed a waiter, took a ticket)
  // against the completion.
  do {
    if (!is_pending(seen, handle)) return false;
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
  const std::int64_t start = monotonic_ns();
  for (;;) {
    const std::uint32_t ticket = doorbell_.ticket();
    if (!mark_waited(handle)) return poll(handle);
    const auto left = timeout - std::chrono::nanoseconds(monotonic_ns() - start);
    const Status rung = doorbell_.wait(ticket, left < kRecheck ? left : kRecheck, SpinPolicy::sleep_at_once());
    state = poll(handle);
    if (state != FutureState::kPending) return state;
    if (rung == Status::kTimeout && left <= kRecheck) return state;
  }
}

// ---- waiters (FUT-2)

bool FutureTable::attach_waiter(Waiter* waiter) noexcept {
  const Handle handle = waiter->handle;  // once pushed, another thread may run the waiter and free it
  Atomic<std::uint64_t>& list = lists()[slot_of(handle)];
  std::uint64_t head = list.load(std::memory_order_relaxed);
  do {
    model_write(waiter);
    waiter->next = waiter_of(head);
    // SYNC future/list: pairs with future/drain.
  } while (!list.compare_exchange_weak(head, bits_of(waiter), std::memory_order_release, std::memory_order_relaxed));
  return mark(handle, kListed);
}

void FutureTable::add_waiter(Handle handle, Waiter* waiter) noexcept {
  PW_DCHECK(is_owner() && waiter->run != nullptr);
  waiter->handle = handle;
  if (!attach_waiter(waiter)) drain(slot_of(handle), Handle{}, FutureState::kFree);
}

void FutureTable::drain(std::uint32_t index, Handle known, FutureState state) noexcept {
  for (bool again = true; again;) {
    again = false;
    // SYNC future/drain: pairs with future/list.
    Waiter* waiter = waiter_of(lists()[index].exchange(0, std::memory_order_acq_rel));
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
  for (std::uint32_t s = 0; s < bit_words(bit_words(capacity_)); ++s) {
    if (notify_summary()[s].load(std::memory_order_relaxed) == 0) continue;
    // SYNC future/collect: pairs with future/notify.
    std::uint64_t summary = notify_summary()[s].exchange(0, std::memory_order_acq_rel);
    for (; summary != 0; summary &= summary - 1) {
      const std::uint32_t at = s * 64 + static_cast<std::uint32_t>(std::countr_zero(summary));
      std::uint64_t bits = notify_bits()[at].exchange(0, std::memory_order_acq_rel);
      for (; bits != 0; bits &= bits - 1) {
        drain(at * 64 + static_cast<std::uint32_t>(std::countr_zero(bits)), Handle{}, FutureState::kFree);
      }
    }
  }
}

void FutureTable::sweep_waiters() noexcept {
  for (std::uint32_t i = 0; i < capacity_; ++i) {
    if (lists()[i].load(std::memory_order_relaxed) != 0) drain(i, Handle{}, FutureState::kFree);
  }
}

void FutureTable::validate() const noexcept {
  std::uint32_t free_slots = 0;
  for (auto i = static_cast<std::uint32_t>(free_head_.load(std::memory_order_acquire)); i != kNone;
       i = links()[i].load(std::memory_order_relaxed)) {
    PW_CHECK(i < capacity_ && free_slots++ < capacity_);
    PW_CHECK(state_of(words()[i].load(std::memory_order_acquire)) == FutureState::kFree);
  }
  const std::uint32_t retired = retired_.load(std::memory_order_relaxed);
  PW_CHECK(free_slots + retired + in_use() == capacity_);
  std::uint32_t used = 0;
  for (std::uint32_t i = 0; i < capacity_; ++i) {
    const std::uint64_t word = words()[i].load(std::memory_order_acquire);
    used += state_of(word) != FutureState::kFree ? 1U : 0U;
    PW_CHECK(state_of(word) != FutureState::kPending || payload_of(word) != 0);
  }
  PW_CHECK(used == in_use());
}

}  // namespace pathways
