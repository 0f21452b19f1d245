// FutexLock: a 4-byte mutex in any memory. Use it for cold paths of structures in shared segments. Zero-initialised
// memory is an unlocked mutex. Threading: any thread of the processes that map it. A process that is killed while it
// holds the lock leaves it locked, so lock it only in the process whose death ends the structure.
//
// State: kFree -> kHeld -> kFree, or kHeld -> kContended -> kFree (then one sleeper is woken).
// Source: U. Drepper, "Futexes are tricky", mutex 2.
#pragma once

#include <cstdint>

#include "sync/atomic.h"

namespace pathways {

class FutexLock {
 public:
  void lock() noexcept {
    std::uint32_t seen = kFree;
    // SYNC futex_lock/lock: pairs with futex_lock/unlock.
    if (word_.compare_exchange(seen, kHeld, std::memory_order_acquire, std::memory_order_relaxed)) return;
    while (word_.exchange(kContended, std::memory_order_acquire) != kFree) {
      static_cast<void>(futex_wait(word_, kContended, kNoDeadline));
    }
  }
  void unlock() noexcept {
    // SYNC futex_lock/unlock: pairs with futex_lock/lock.
    if (word_.exchange(kFree, std::memory_order_release) == kContended) futex_wake(word_, 1);
  }

 private:
  static constexpr std::uint32_t kFree = 0;
  static constexpr std::uint32_t kHeld = 1;
  static constexpr std::uint32_t kContended = 2;

  Atomic<std::uint32_t> word_;
};

}  // namespace pathways
