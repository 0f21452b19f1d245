// DoorbellWord: "something was published, look again", for any number of waiters and ringers, in any process that
// maps the word. Use it beside a ring or a table; it carries no data.
//
//   consumer:  t = bell.ticket();  if (nothing to do) bell.wait(t, timeout, spin);      // and look again
//   producer:  publish work;  bell.ring();
//
// Invariant PARK-1 (no lost wake-up): a ring() that starts after ticket() returned makes every wait() on that ticket
// return. Why: the sequence and the "somebody may sleep" bit are ONE word. A waiter sleeps only if the kernel finds
// the word equal to (its ticket | offloaded); ring() changes the sequence and clears the bit in one step, and wakes all
// if the bit was set. So a waiter either sees another sequence, or has its bit in the very value that the next ring()
// replaces. A separate flag would not do: a ringer delayed between its two steps could clear the bit of a waiter that
// came later (tests/model keeps that variant and shows that it hangs). A killed waiter leaves at most one set bit,
// which costs one needless wake.
//
// Layout:   31........1  0
//           sequence     offloaded        The sequence wraps after 2^31 rings between one ticket() and its wait().
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

/// How long to look before sleeping: `spins` looks with a pause between, then `yields` looks with a sched_yield
/// between.
struct SpinPolicy {
  std::uint32_t spins = 0;
  std::uint32_t yields = 0;
  std::uint32_t yield_ns = 0;  ///< an end to the yields by time, for when others take the core each time; 0: none

  /// Sleep at once.
  static constexpr SpinPolicy yield_briefly() noexcept { return {0, 0}; }
  /// About 2-5 us in all where this process may use more than one core; on one core a single yield.
  static SpinPolicy adaptive() noexcept;
  /// For a loop that serves a stream: some tens of us of giving the core away between looks, so that work which comes
  /// at such distances is taken in batches and costs nobody a futex; where others want the core, they have it.
  static SpinPolicy yield_long() noexcept;
  /// For who waits for one answer: some hundred us of that, so that no other wait on its way makes this one sleep too.
  static SpinPolicy answer() noexcept;
  /// One look, for a loop that has something else to look at between two.
  static constexpr SpinPolicy check_once() noexcept { return {0, 1}; }
};

/// The number of cores that this process may run on (its affinity mask when first asked).
unsigned usable_cores() noexcept;

struct alignas(kCacheLine) DoorbellWord {
  static constexpr std::uint32_t kParked = 1;
  static constexpr std::uint32_t kStep = 2;

  /// Read it BEFORE looking for work.
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

  /// For who sleeps on several doorbells (BellSet): says that somebody may sleep on `ticket`. False: it was rung since.
  bool try_park(std::uint32_t ticket) noexcept {
    std::uint32_t seen = ticket;
    return word.compare_exchange(seen, ticket | kParked, std::memory_order_acq_rel, std::memory_order_acquire) ||
           seen == (ticket | kParked);
  }
  /// Takes that back, unless it was rung since.
  void restore(std::uint32_t ticket) noexcept {
    std::uint32_t seen = ticket | kParked;
    word.compare_exchange(seen, ticket, std::memory_order_relaxed, std::memory_order_relaxed);
  }

  /// True when a waiter sleeps or slept since the last ring: a stale snapshot, for tests and statistics.
  [[nodiscard]] bool was_parked() const noexcept { return (word.load(std::memory_order_relaxed) & kParked) != 0; }

  Atomic<std::uint32_t> word;  // any thread of any process
};

static_assert(sizeof(DoorbellWord) == kCacheLine);

}  // namespace pathways
