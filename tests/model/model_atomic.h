// The seam of sync/atomic.h under PATHWAYS_MODEL: every atomic operation and futex call becomes a step that the
// scheduler of model.h chooses. Only sync/atomic.h includes this file.
//
// An Atomic is still its bare value (shared layouts stay what they are); clocks and store buffers live beside, in
// model.cc, keyed by address.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace pathways::model {

/// A load of `bytes` bytes at `where`; gives what this thread sees there, which may be its own buffered store.
std::uint64_t on_load(const void* where, std::size_t bytes, std::memory_order order) noexcept;
void on_store(void* where, std::size_t bytes, std::uint64_t value, std::memory_order order) noexcept;
/// Around a read-modify-write: between the two, the memory is this thread's and up to date. `wrote` is false for a
/// failed compare-exchange, then `order` is its failure order.
void begin_update(void* where, std::memory_order order) noexcept;
void end_update(void* where, std::memory_order order, bool wrote) noexcept;
void on_relax() noexcept;
void on_read(const void* where) noexcept;
void on_write(const void* where) noexcept;
/// True when woken, false when the word was something else.
bool on_futex_wait(const void* where, std::uint32_t expected) noexcept;
void on_futex_wake(const void* where, std::uint32_t count) noexcept;

}  // namespace pathways::model

namespace pathways {

template <class T>
class Atomic {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);

 public:
  constexpr Atomic() noexcept : value_() {}
  constexpr explicit Atomic(T value) noexcept : value_(value) {}
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;

  T load(std::memory_order order) const noexcept { return unpack(model::on_load(&value_, sizeof(T), order)); }
  void store(T value, std::memory_order order) noexcept { model::on_store(&value_, sizeof(T), pack(value), order); }
  T exchange(T value, std::memory_order order) noexcept {
    return update([value](T) { return value; }, order);
  }
  T fetch_add(T value, std::memory_order order) noexcept {
    return update([value](T old) { return static_cast<T>(old + value); }, order);
  }
  T fetch_sub(T value, std::memory_order order) noexcept {
    return update([value](T old) { return static_cast<T>(old - value); }, order);
  }
  T fetch_or(T value, std::memory_order order) noexcept {
    return update([value](T old) { return static_cast<T>(old | value); }, order);
  }
  T fetch_and(T value, std::memory_order order) noexcept {
    return update([value](T old) { return static_cast<T>(old & value); }, order);
  }
  bool compare_exchange(T& expected, T desired, std::memory_order success, std::memory_order failure) noexcept {
    model::begin_update(&value_, success);
    const bool same = value_ == expected;
    if (same) {
      value_ = desired;
    } else {
      expected = value_;
    }
    model::end_update(&value_, same ? success : failure, same);
    return same;
  }
  /// Never fails spuriously here: a retry alone shows nothing new.
  bool compare_exchange_weak(T& expected, T desired, std::memory_order success, std::memory_order failure) noexcept {
    return compare_exchange(expected, desired, success, failure);
  }

 private:
  template <class F>
  T update(F next, std::memory_order order) noexcept {
    model::begin_update(&value_, order);
    const T old = value_;
    value_ = next(old);
    model::end_update(&value_, order, true);
    return old;
  }
  static std::uint64_t pack(T value) noexcept {
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
  }
  static T unpack(std::uint64_t bits) noexcept {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  T value_;
};

inline void cpu_relax() noexcept { model::on_relax(); }
inline void thread_yield() noexcept { model::on_relax(); }
inline void model_read(const void* where) noexcept { model::on_read(where); }
inline void model_write(const void* where) noexcept { model::on_write(where); }

/// Time stands still: a wait that only time would end is a lost wake-up, and reported as one.
inline std::int64_t monotonic_ns() noexcept { return 0; }
inline std::int64_t deadline_after(std::chrono::nanoseconds wait) noexcept { return wait.count(); }
inline std::chrono::nanoseconds time_left(std::int64_t deadline_ns) noexcept {
  return std::chrono::nanoseconds(deadline_ns);
}
inline FutexResult futex_wait(const Atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t) noexcept {
  return model::on_futex_wait(&word, expected) ? FutexResult::kWoken : FutexResult::kChanged;
}
inline void futex_wake(const Atomic<std::uint32_t>& word, std::uint32_t count) noexcept {
  model::on_futex_wake(&word, count);
}

}  // namespace pathways
