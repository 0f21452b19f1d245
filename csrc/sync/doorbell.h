// DoorbellWord: "something was published, look again", for any number of waiters and ringers, in any process that
// maps the word. Use it beside a ring or a table; it carries no data.
//
//   consumer:  t = bell.ticket();  if (nothing to do) bell.wait(t, timeout, spin);      // and look again
//   producer:  publish work;  bell.ring();
//
// Invariant PARK-1 (no lost wake-up): a ring() that starts after ticket() returned makes every wait() on that ticket
// return. Why: the sequence and the "somebody may sleep" bit are ONE word. A waiter sleeps only if the kernel finds
// the word equal to (its ticket | parked); ring() changes the sequence and clears the bit in one step, and wakes all
// if the bit was set. So a waiter either sees another sequence, or has its bit in the very value that the next ring()
// replaces. A separate flag would not do: a ringer delayed between its two steps could clear the bit of a waiter that
// came later (tests/model keeps that variant and shows that it hangs). A killed waiter leaves at most one set bit,
// which costs one needless wake.
//
// Layout:   31........1  0
//           sequence     parked           The sequence wraps after 2^31 rings between one ticket() and its wait().
//
// Zero-initialised memory is a valid, never rung doorbell.
// Source: the event count of folly and Vyukov, reduced to one futex word.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/cacheline.h"
#include "base/status.h"
#include "sync/atomic.h"

namespace pathways {

/// The poll limit before sleeping: `spins` polls with a pause after each, then `yields` polls with a sched_yield after
/// each.
struct SpinPolicy {
  std::uint32_t spins = 0;
  std::uint32_t yields = 0;
  std::uint32_t yield_ns = 0;  ///< time limit of the yields, as each may let other threads use the core; 0: none

  /// Sleeps without polling.
  static constexpr SpinPolicy sleep_at_once() noexcept { return {0, 0}; }
  /// Polls for about 2-5 us in all if this process may use more than one core; on one core yields once.
  static SpinPolicy adaptive() noexcept;
  /// For a loop that serves a stream of work. Polls for some tens of us and yields the core between polls. So work that
  /// comes at such intervals is taken in batches and needs no futex call, and other threads still get the core.
  static SpinPolicy serve_stream() noexcept;
  /// For a thread that waits for one answer. Polls so for some hundred us, so that this thread does not sleep as well
  /// when another process on the answer's path has to wake up first.
  static SpinPolicy await_answer() noexcept;
  /// One poll and one yield, for a loop that polls something else in between.
  static constexpr SpinPolicy check_once() noexcept { return {0, 1}; }
};

/// For a loop that serves a stream of work: how its next wait polls, from how long its last wait took.
///
/// Two processes that take turns wait as long as the other one's turn takes, which is often longer than serve_stream()
/// polls. Then each of them would sleep, and be woken, in every turn. So after a wait of at most kTurn, the next wait
/// polls for as long, and yields the core between polls. After a longer wait it polls as serve_stream() does: rare work
/// costs one longer poll, when it begins to be rare.
class TurnSpin {
 public:
  static constexpr std::chrono::nanoseconds kTurn = std::chrono::microseconds(150);

  [[nodiscard]] SpinPolicy policy() const noexcept;
  void waited(std::chrono::nanoseconds time) noexcept { is_short_ = time <= kTurn; }

 private:
  bool is_short_ = false;
};

/// The number of cores that this process may run on (its affinity mask when first asked).
unsigned usable_cores() noexcept;

struct alignas(kCacheLine) DoorbellWord {
  static constexpr std::uint32_t kParked = 1;
  static constexpr std::uint32_t kStep = 2;

  /// Call it BEFORE looking for work.
  [[nodiscard]] std::uint32_t ticket() const noexcept {
    // SYNC doorbell/ticket: pairs with doorbell/ring; what was published before that ring is visible after this load.
    return word.load(std::memory_order_acquire) & ~kParked;
  }

  /// Call it AFTER publishing work.
  void ring() noexcept {
    std::uint32_t seen = word.load(std::memory_order_relaxed);
    // SYNC doorbell/ring: pairs with doorbell/ticket and doorbell/wait.
    while (!word.compare_exchange_weak(seen, (seen + kStep) & ~kParked, std::memory_order_acq_rel,
                                       std::memory_order_relaxed)) {
    }
    if ((seen & kParked) != 0) futex_wake(word, UINT32_MAX);
  }

  /// kOk when rung since `ticket`, kTimeout otherwise. A negative timeout is 0; nanoseconds::max() is forever.
  Status wait(std::uint32_t ticket, std::chrono::nanoseconds timeout, SpinPolicy spin) noexcept;

  /// For a sleeper on several doorbells (BellSet): sets the bit "somebody may sleep". False: rung since `ticket`.
  bool try_park(std::uint32_t ticket) noexcept {
    std::uint32_t seen = ticket;
    return word.compare_exchange(seen, ticket | kParked, std::memory_order_acq_rel, std::memory_order_acquire) ||
           seen == (ticket | kParked);
  }
  /// Clears that bit, unless the doorbell was rung since.
  void unpark(std::uint32_t ticket) noexcept {
    std::uint32_t seen = ticket | kParked;
    word.compare_exchange(seen, ticket, std::memory_order_relaxed, std::memory_order_relaxed);
  }

  /// True when a waiter sleeps or slept since the last ring: a stale snapshot, for tests and statistics.
  [[nodiscard]] bool was_parked() const noexcept { return (word.load(std::memory_order_relaxed) & kParked) != 0; }

  Atomic<std::uint32_t> word;  // any thread of any process
};

static_assert(sizeof(DoorbellWord) == kCacheLine);

}  // namespace pathways
