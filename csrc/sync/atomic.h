// The one interface to atomics: Atomic<T>, cpu_relax(), thread_yield(), futex_wait(), futex_wake().
//
// Every operation names its memory order; there are no defaults and no bare fences (publish with a release store:
// ThreadSanitizer of g++ 12 does not understand fences). Normally Atomic<T> is std::atomic<T> and the rest are
// instructions and system calls. Under PATHWAYS_MODEL the same names come from tests/model, whose scheduler explores
// every interleaving. There model_read/model_write report accesses to plain memory that an atomic protects; otherwise
// they cost nothing.
//
// Threading: any thread may call everything here. Any process that maps an Atomic or a futex word may use it: they are
// lock-free (checked below), hence address-free, and the futexes are not PRIVATE.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>

namespace pathways {

/// Why futex_wait returned. kWoken may be spurious, so the caller must check again.
enum class FutexResult : std::uint8_t { kWoken, kChanged, kTimeout };

/// "No deadline" for futex_wait.
inline constexpr std::int64_t kNoDeadline = INT64_MAX;

/// Where a part of the core reads the time, in nanoseconds: monotonic_ns, or a time of a test. Who makes the part hands
/// it in; only sync/atomic.cc reads the machine's clock. What sleeps (deadline_after) sleeps by the machine's clock.
using Clock = std::int64_t (*)();

}  // namespace pathways

#if defined(PATHWAYS_MODEL)

#include "model_atomic.h"  // tests/model: the same names, under the scheduler

#else

namespace pathways {

template <class T>
class Atomic {
  static_assert(std::atomic<T>::is_always_lock_free, "shared memory needs lock-free (address-free) atomics");

 public:
  constexpr Atomic() noexcept : value_() {}
  constexpr explicit Atomic(T value) noexcept : value_(value) {}
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;

  T load(std::memory_order order) const noexcept { return value_.load(order); }
  void store(T value, std::memory_order order) noexcept { value_.store(value, order); }
  T exchange(T value, std::memory_order order) noexcept { return value_.exchange(value, order); }
  T fetch_add(T value, std::memory_order order) noexcept { return value_.fetch_add(value, order); }
  T fetch_sub(T value, std::memory_order order) noexcept { return value_.fetch_sub(value, order); }
  T fetch_or(T value, std::memory_order order) noexcept { return value_.fetch_or(value, order); }
  T fetch_and(T value, std::memory_order order) noexcept { return value_.fetch_and(value, order); }
  /// On failure `expected` holds what was found.
  bool compare_exchange(T& expected, T desired, std::memory_order success, std::memory_order failure) noexcept {
    return value_.compare_exchange_strong(expected, desired, success, failure);
  }
  /// May fail spuriously: only in loops.
  bool compare_exchange_weak(T& expected, T desired, std::memory_order success, std::memory_order failure) noexcept {
    return value_.compare_exchange_weak(expected, desired, success, failure);
  }

 private:
  std::atomic<T> value_;
};

/// One turn of a spin loop.
inline void cpu_relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

/// Lets another thread of this core run.
void thread_yield() noexcept;

/// Sleeps while *word == expected, at most until `deadline_ns` (monotonic_ns() clock). Works across processes.
FutexResult futex_wait(const Atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t deadline_ns) noexcept;

/// Wakes up to `count` sleepers of the word.
void futex_wake(const Atomic<std::uint32_t>& word, std::uint32_t count) noexcept;

/// A word, and the value that it must hold for the thread to sleep.
struct FutexWait {
  const Atomic<std::uint32_t>* word;
  std::uint32_t expected;
};

/// Sleeps while each of up to 128 words holds its expected value, at most until `deadline_ns`.
FutexResult futex_wait_any(std::span<const FutexWait> waits, std::int64_t deadline_ns) noexcept;

/// Whether the kernel supports futex_wait_any(): Linux 5.16 and later.
bool has_futex_waitv() noexcept;

/// Nanoseconds of CLOCK_MONOTONIC, the same in every process of the machine.
std::int64_t monotonic_ns() noexcept;

/// The moment in `wait` from now; kNoDeadline: never.
std::int64_t deadline_after(std::chrono::nanoseconds wait) noexcept;

/// How long it is until the deadline; zero or less: it has passed.
std::chrono::nanoseconds time_left(std::int64_t deadline_ns) noexcept;

/// Makes the calling thread's timed waits end on time; by default the kernel may add 50 us. For measurement.
void precise_timers() noexcept;

/// Tell the model checker that plain memory at `where` is read / written. They do nothing outside PATHWAYS_MODEL.
inline void model_read(const void* /*where*/) noexcept {}
inline void model_write(const void* /*where*/) noexcept {}

}  // namespace pathways

#endif

namespace pathways {

static_assert(sizeof(Atomic<std::uint32_t>) == 4 && sizeof(Atomic<std::uint64_t>) == 8,
              "an atomic in shared memory is its value");

}  // namespace pathways
