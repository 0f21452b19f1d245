#include "sync/doorbell.h"

#include <sched.h>

namespace pathways {

unsigned usable_cores() noexcept {
  static const unsigned cores = [] {
    cpu_set_t set;
    if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1U;
    const int count = CPU_COUNT(&set);
    return count > 0 ? static_cast<unsigned>(count) : 1U;
  }();
  return cores;
}

SpinPolicy SpinPolicy::adaptive() noexcept {
  // A pause takes 10 to 140 cycles (Skylake and later: 140); a sched_yield about 0.3 us when no other thread can run.
  return usable_cores() > 1 ? SpinPolicy{40, 6} : SpinPolicy{0, 1};
}

SpinPolicy SpinPolicy::await_answer() noexcept {
  return usable_cores() > 1 ? SpinPolicy{40, 400, 120'000} : SpinPolicy{0, 4};
}

SpinPolicy SpinPolicy::serve_stream() noexcept {
  return usable_cores() > 1 ? SpinPolicy{40, 64, 30'000} : SpinPolicy{0, 1};
}

SpinPolicy TurnSpin::policy() const noexcept {
  if (!is_short_ || usable_cores() == 1) return SpinPolicy::serve_stream();
  return {40, 1'000, static_cast<std::uint32_t>(kTurn.count())};
}

Status DoorbellWord::wait(std::uint32_t ticket, std::chrono::nanoseconds timeout, SpinPolicy spin) noexcept {
  // SYNC doorbell/wait: every load below pairs with doorbell/ring.
  const auto rung = [&] { return (word.load(std::memory_order_acquire) & ~kParked) != ticket; };
  for (std::uint32_t i = 0; i < spin.spins; ++i) {
    if (rung()) return Status::kOk;
    cpu_relax();
  }
  const std::int64_t yields_end =
      spin.yield_ns == 0 ? kNoDeadline : deadline_after(std::chrono::nanoseconds(spin.yield_ns));
  for (std::uint32_t i = 0; i < spin.yields; ++i) {
    if (rung()) return Status::kOk;
    thread_yield();
    if (spin.yield_ns != 0 && time_left(yields_end).count() <= 0) break;
  }
  if (rung()) return Status::kOk;
  if (timeout.count() <= 0) return Status::kTimeout;
  const std::int64_t deadline = deadline_after(timeout);
  for (;;) {
    std::uint32_t seen = word.load(std::memory_order_acquire);
    if ((seen & ~kParked) != ticket) return Status::kOk;
    if ((seen & kParked) == 0 &&
        !word.compare_exchange(seen, seen | kParked, std::memory_order_acq_rel, std::memory_order_acquire)) {
      continue;  // rung, or another waiter set the bit
    }
    if (futex_wait(word, ticket | kParked, deadline) == FutexResult::kTimeout) {
      return rung() ? Status::kOk : Status::kTimeout;
    }
  }
}

}  // namespace pathways
