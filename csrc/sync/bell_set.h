/// BellSet: one thread sleeps on many doorbells. Each ringer has its own doorbell (TRUST-1), so a ringer that writes
/// nonsense into its doorbell does not disturb the others.
///
///   sleeper:  bells.draw();  if (nothing to do) bells.wait(timeout, spin);      // and look again
///
/// PARK-1 holds for each doorbell by itself: the sleeper sets the bit "somebody may sleep" in every word, and the
/// kernel compares every word with (its ticket | parked) before it lets the thread sleep. After a wake-up the sleeper
/// clears the bits that no ring() has cleared, so that a later ring() makes no needless wake call.
///
/// The kernel lets a thread sleep on up to 128 words (futex_waitv, Linux 5.16). Each doorbell beyond that number (on an
/// older kernel, beyond the first) has a relay thread, which sleeps there and rings the first doorbell. A relay wakes
/// up only when its doorbell is rung, and at its end, so ringers that are idle cost no time.
///
/// Threading: one sleeper; only the sleeper's thread calls the methods.
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
  /// `first` is the sleeper's own doorbell. `can_wait_on_many` is for tests.
  explicit BellSet(DoorbellWord* first, bool can_wait_on_many = true);

  /// A doorbell may be added several times. It stays in the set until it was removed as many times.
  void add(DoorbellWord* bell);
  /// After the last removal, the set does not read or write the doorbell any more.
  void remove(DoorbellWord* bell);

  /// Takes a ticket of each doorbell. Call it BEFORE looking for work.
  void draw() noexcept;
  /// kOk when one was rung since draw(), kTimeout otherwise.
  Status wait(std::chrono::nanoseconds timeout, SpinPolicy spin) noexcept;

 private:
  static constexpr size_t kMostAtOnce = 128;
  /// A thread that rings doorbell `to` whenever doorbell `from` is rung.
  class Relay {
   public:
    Relay(DoorbellWord* from, DoorbellWord* to, bool can_wait_on_many);
    ~Relay();

   private:
    void pass_on(DoorbellWord* to, uint32_t ticket);

    DoorbellWord* from_;
    DoorbellWord end_{};             ///< rung at its end: what the ringer writes into `from_` cannot hold that up
    std::unique_ptr<BellSet> both_;  ///< `from_` and `end_`; nullptr: the kernel lets a thread sleep on one word only
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
  bool park() noexcept;
  void unpark() noexcept;
  FutexResult sleep(int64_t deadline_ns) noexcept;

  std::vector<Bell> bells_;
  size_t direct_ = 0;  ///< the number of doorbells without a relay
  const bool can_wait_on_many_;
};

}  // namespace pathways
