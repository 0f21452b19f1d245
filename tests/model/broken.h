// Wrong variants of the core's structures, each with one mistake that somebody could make. The model tests show that
// the checker finds each; a checker that cannot fail proves nothing.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/status.h"
#include "sync/atomic.h"
#include "sync/doorbell.h"

namespace pathways::model::broken {

/// Mistake: "somebody sleeps" is a flag of its own, which ring() clears in a second step.
struct FlagDoorbell {
  std::uint32_t ticket() const noexcept { return sequence.load(std::memory_order_acquire); }
  void ring() noexcept {
    sequence.fetch_add(1, std::memory_order_acq_rel);
    if (parked.exchange(0, std::memory_order_acq_rel) != 0) futex_wake(sequence, UINT32_MAX);
  }
  Status wait(std::uint32_t ticket, std::chrono::nanoseconds, SpinPolicy) noexcept {
    while (sequence.load(std::memory_order_acquire) == ticket) {
      parked.exchange(1, std::memory_order_acq_rel);
      futex_wait(sequence, ticket, kNoDeadline);
    }
    return Status::kOk;
  }
  Atomic<std::uint32_t> sequence;
  Atomic<std::uint32_t> parked;
};

/// Mistake: plain stores and loads of two words, which the machine may exchange (Dekker without a fence).
struct UnorderedDoorbell {
  std::uint32_t ticket() const noexcept { return sequence.load(std::memory_order_acquire); }
  void ring() noexcept {
    sequence.store(1, std::memory_order_release);
    if (parked.load(std::memory_order_acquire) != 0) futex_wake(sequence, UINT32_MAX);
  }
  Status wait(std::uint32_t ticket, std::chrono::nanoseconds, SpinPolicy) noexcept {
    while (sequence.load(std::memory_order_acquire) == ticket) {
      parked.store(1, std::memory_order_release);
      futex_wait(sequence, ticket, kNoDeadline);
    }
    return Status::kOk;
  }
  Atomic<std::uint32_t> sequence;
  Atomic<std::uint32_t> parked;
};

/// Mistake: a ring that publishes nothing.
struct RelaxedDoorbell {
  std::uint32_t ticket() const noexcept { return word.load(std::memory_order_acquire); }
  void ring() noexcept { word.fetch_add(1, std::memory_order_relaxed); }
  Atomic<std::uint32_t> word;
};

/// Mistake: who had to wait takes the lock as if nobody else waited.
struct ForgetfulLock {
  void lock() noexcept {
    std::uint32_t seen = 0;
    while (!word.compare_exchange(seen, 1, std::memory_order_acquire, std::memory_order_relaxed)) {
      std::uint32_t held = 1;
      if (seen == 2 || word.compare_exchange(held, 2, std::memory_order_relaxed, std::memory_order_relaxed)) {
        futex_wait(word, 2, kNoDeadline);
      }
      seen = 0;
    }
  }
  void unlock() noexcept {
    if (word.exchange(0, std::memory_order_release) == 2) futex_wake(word, 1);
  }
  Atomic<std::uint32_t> word;
};

/// Mistake, by `kind`: see each.
enum class RingMistake { kPublishesFirst, kRelaxedPublish, kFreesBeforeReading, kRelaxedFree, kSharedClaim };

/// A bounded ring of ints, right but for one mistake. Two cells.
template <RingMistake kMistake>
struct Ring {
  bool try_push(int value) noexcept {
    const std::uint64_t at = tail.load(std::memory_order_relaxed);
    if (at - head.load(std::memory_order_acquire) == 2) return false;
    // With several producers, kSharedClaim: load, then store, so two may take one cell.
    if constexpr (kMistake == RingMistake::kSharedClaim) tail.store(at + 1, std::memory_order_relaxed);
    if constexpr (kMistake == RingMistake::kPublishesFirst) tail.store(at + 1, std::memory_order_release);
    model_write(&cells[at % 2]);
    cells[at % 2] = value;
    if constexpr (kMistake == RingMistake::kRelaxedPublish) {
      tail.store(at + 1, std::memory_order_relaxed);
    } else if constexpr (kMistake != RingMistake::kPublishesFirst && kMistake != RingMistake::kSharedClaim) {
      tail.store(at + 1, std::memory_order_release);
    }
    return true;
  }
  bool try_pop(int& value) noexcept {
    const std::uint64_t at = head.load(std::memory_order_relaxed);
    if (tail.load(std::memory_order_acquire) == at) return false;
    if constexpr (kMistake == RingMistake::kFreesBeforeReading) head.store(at + 1, std::memory_order_release);
    model_read(&cells[at % 2]);
    value = cells[at % 2];
    if constexpr (kMistake == RingMistake::kRelaxedFree) {
      head.store(at + 1, std::memory_order_relaxed);
    } else if constexpr (kMistake != RingMistake::kFreesBeforeReading) {
      head.store(at + 1, std::memory_order_release);
    }
    return true;
  }
  Atomic<std::uint64_t> tail;
  Atomic<std::uint64_t> head;
  int cells[2] = {0, 0};
};

enum class FutureMistake { kNone, kLoadThenStore, kNoGeneration, kNoLookAfterPush, kMarksFirst, kRelaxedPublish };

/// One future slot: generation << 8 | listed << 4 | state (1 pending, 2 ready), and one waiter at most.
template <FutureMistake kMistake>
struct Slot {
  static constexpr std::uint64_t kPending = 1;
  static constexpr std::uint64_t kReady = 2;
  static constexpr std::uint64_t kListed = 16;

  bool complete(std::uint64_t generation) noexcept {
    constexpr auto kOrder =
        kMistake == FutureMistake::kRelaxedPublish ? std::memory_order_relaxed : std::memory_order_acq_rel;
    std::uint64_t seen = word.load(std::memory_order_relaxed);
    for (;;) {
      if (kMistake != FutureMistake::kNoGeneration && seen >> 8 != generation) return false;
      if ((seen & 3) != kPending) return false;
      if constexpr (kMistake == FutureMistake::kLoadThenStore) {
        word.store(seen + 1, std::memory_order_release);
        break;
      }
      if (word.compare_exchange(seen, seen + 1, kOrder, std::memory_order_relaxed)) break;
    }
    if ((seen & kListed) != 0) run_waiter();
    return true;
  }
  void reopen() noexcept {  // release and allocate: the next generation
    std::uint64_t seen = word.load(std::memory_order_relaxed);
    while (!word.compare_exchange(seen, ((seen >> 8) + 1) << 8 | kPending, std::memory_order_acq_rel,
                                  std::memory_order_relaxed)) {
    }
  }
  void add_waiter() noexcept {
    if constexpr (kMistake == FutureMistake::kMarksFirst) {
      if (!mark()) return ran();
      waiter.store(1, std::memory_order_release);
      return;
    }
    if (kMistake == FutureMistake::kNoLookAfterPush && (word.load(std::memory_order_acquire) & 3) != kPending) {
      return ran();
    }
    waiter.store(1, std::memory_order_release);
    if (!mark() && kMistake != FutureMistake::kNoLookAfterPush) run_waiter();
  }
  bool mark() noexcept {
    std::uint64_t seen = word.load(std::memory_order_relaxed);
    do {
      if ((seen & 3) != kPending) return false;
    } while (!word.compare_exchange(seen, seen | kListed, std::memory_order_acq_rel, std::memory_order_relaxed));
    return true;
  }
  void run_waiter() noexcept {
    if (waiter.exchange(0, std::memory_order_acq_rel) != 0) ran();
  }
  void ran() noexcept { runs.fetch_add(1, std::memory_order_relaxed); }

  Atomic<std::uint64_t> word{1 << 8 | kPending};
  Atomic<std::uint32_t> waiter;
  Atomic<std::uint32_t> runs;
};

/// Mistake: a free list without a count of changes, so a pop can succeed on a list that was changed and changed back.
struct UncountedStack {
  std::uint32_t pop() noexcept {
    std::uint32_t seen = head.load(std::memory_order_acquire);
    while (seen != 0) {
      const std::uint32_t next = links[seen].load(std::memory_order_relaxed);
      if (head.compare_exchange(seen, next, std::memory_order_acquire, std::memory_order_acquire)) break;
    }
    return seen;
  }
  void push(std::uint32_t item) noexcept {
    std::uint32_t seen = head.load(std::memory_order_relaxed);
    do {
      links[item].store(seen, std::memory_order_relaxed);
    } while (!head.compare_exchange(seen, item, std::memory_order_release, std::memory_order_relaxed));
  }
  Atomic<std::uint32_t> head;
  Atomic<std::uint32_t> links[4];
};

}  // namespace pathways::model::broken
