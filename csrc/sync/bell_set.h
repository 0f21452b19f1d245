/// BellSet: one sleeper on many doorbells, of which each ringer has its own (TRUST-1): what one scribbles on its
/// doorbell costs the others nothing.
///
///   sleeper:  bells.draw();  if (nothing to do) bells.wait(timeout, spin);      // and look again
///
/// PARK-1 holds for each doorbell by itself: the bit "somebody may sleep" is set in every word, and the kernel compares
/// every word with (its ticket | offloaded) before it lets the thread sleep. After a wake-up the bits that were not
/// rung away are taken back, so that who rings meanwhile wakes nobody.
///
/// The kernel sleeps on up to 128 words (futex_waitv, Linux 5.16). Doorbells beyond that, and all but the first on an
/// older kernel, have a thread each, which sleeps there and rings the first one.
///
/// Threading: one sleeper, who alone adds and removes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "sync/doorbell.h"

namespace pathways {

class BellSet {
 public:
  /// `first` is the sleeper's own. `can_wait_on_many` is for tests.
  explicit BellSet(DoorbellWord* first, bool can_wait_on_many = true);

  /// A doorbell may be added several times; it counts until it was removed as often.
  void add(DoorbellWord* bell);
  /// Nothing is read or written there any more.
  void remove(DoorbellWord* bell);

  /// Takes a ticket of each. BEFORE looking for work.
  void draw() noexcept;
  /// kOk when one was rung since draw(), kTimeout otherwise.
  Status wait(std::chrono::nanoseconds timeout, SpinPolicy spin) noexcept;

 private:
  static constexpr size_t kMostAtOnce = 128;
  /// Rings the set's first doorbell whenever its own is rung.
  class Relay {
   public:
    Relay(DoorbellWord* from, DoorbellWord* to);
    ~Relay();

   private:
    DoorbellWord* from_;
    std::atomic<bool> is_over_{false};
    std::thread thread_;
  };
  struct Bell {
    DoorbellWord* word;
    uint32_t ticket = 0;
    uint32_t uses = 1;
    std::unique_ptr<Relay> relay{};  ///< nullptr: the sleeper itself sleeps there
  };

  bool was_rung() const noexcept;
  bool offload() noexcept;
  void restore() noexcept;
  FutexResult sleep(int64_t deadline_ns) noexcept;

  std::vector<Bell> bells_;
  size_t direct_ = 0;  ///< those that have no relay
  const bool can_wait_on_many_;
};

}  // namespace pathways
