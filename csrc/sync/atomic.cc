#include "sync/atomic.h"

#if !defined(PATHWAYS_MODEL)

#include <linux/futex.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <ctime>

namespace pathways {

void thread_yield() noexcept { ::sched_yield(); }

std::int64_t monotonic_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

std::int64_t deadline_after(std::chrono::nanoseconds wait) noexcept {
  const std::int64_t now = monotonic_ns();
  const std::int64_t wait_ns = wait.count() > 0 ? wait.count() : 0;
  return wait_ns < kNoDeadline - now ? now + wait_ns : kNoDeadline;
}

std::chrono::nanoseconds time_left(std::int64_t deadline_ns) noexcept {
  return std::chrono::nanoseconds(deadline_ns - monotonic_ns());
}

FutexResult futex_wait(const Atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t deadline_ns) noexcept {
  timespec until{};
  if (deadline_ns != kNoDeadline) {
    until.tv_sec = static_cast<time_t>(deadline_ns / 1'000'000'000);
    until.tv_nsec = static_cast<long>(deadline_ns % 1'000'000'000);
  }
  // FUTEX_WAIT_BITSET takes an absolute CLOCK_MONOTONIC time, so a retry after an interrupt uses the same time.
  const long rc = ::syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected,
                            deadline_ns == kNoDeadline ? nullptr : &until, nullptr, FUTEX_BITSET_MATCH_ANY);
  if (rc == 0) return FutexResult::kWoken;
  switch (errno) {
    case ETIMEDOUT:
      return FutexResult::kTimeout;
    case EAGAIN:
      return FutexResult::kChanged;
    default:  // EINTR: treated as a spurious wake
      return FutexResult::kWoken;
  }
}

void futex_wake(const Atomic<std::uint32_t>& word, std::uint32_t count) noexcept {
  const auto most = count > INT32_MAX ? INT32_MAX : static_cast<int>(count);
  ::syscall(SYS_futex, &word, FUTEX_WAKE, most, nullptr, nullptr, 0);
}

namespace {

// As in linux/futex.h of 5.16; older headers lack both.
constexpr long kFutexWaitv = 449;
struct FutexWaitv {
  std::uint64_t val, uaddr;
  std::uint32_t flags, reserved;
};
constexpr std::uint32_t kSize32 = 2;
constexpr std::size_t kMostWords = 128;

}  // namespace

FutexResult futex_wait_any(std::span<const FutexWait> waits, std::int64_t deadline_ns) noexcept {
  FutexWaitv words[kMostWords];
  for (std::size_t i = 0; i < waits.size(); ++i) {
    words[i] = {waits[i].expected, reinterpret_cast<std::uintptr_t>(waits[i].word), kSize32, 0};
  }
  timespec until{};
  if (deadline_ns != kNoDeadline) {
    until.tv_sec = static_cast<time_t>(deadline_ns / 1'000'000'000);
    until.tv_nsec = static_cast<long>(deadline_ns % 1'000'000'000);
  }
  const long rc =
      ::syscall(kFutexWaitv, words, waits.size(), 0, deadline_ns == kNoDeadline ? nullptr : &until, CLOCK_MONOTONIC);
  if (rc >= 0) return FutexResult::kWoken;
  if (errno == ETIMEDOUT) return FutexResult::kTimeout;
  return errno == EAGAIN ? FutexResult::kChanged : FutexResult::kWoken;
}

bool has_futex_waitv() noexcept {
  static const bool has_it = ::syscall(kFutexWaitv, nullptr, 0, 0, nullptr, 0) < 0 && errno == EINVAL;
  return has_it;
}

void precise_timers() noexcept {
  thread_local const int done = ::prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  (void)done;
}

}  // namespace pathways

#endif
