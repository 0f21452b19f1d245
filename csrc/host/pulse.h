/// Pulse: a thread of a host that counts up a word of the host's block, for as long as the process is not stopped.
///
/// Why: nobody is told when a process is stopped or frozen. Who has started the host on its machine, the controller or
/// the machine's agent, looks at the word, and kills the host when it stays as it is (pathways/process/pulses.py). The
/// thread needs neither Python's
/// lock nor the host's loop, both of which a computation may hold for long.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "messages/shared_segments.h"

namespace pathways {

class Pulse {
 public:
  static constexpr std::chrono::milliseconds kEvery{250};

  /// `block` must stay mapped for as long as the pulse lives.
  explicit Pulse(HostBlock* block, std::chrono::nanoseconds every = kEvery);
  ~Pulse();
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool is_over_ = false;  ///< guarded by mutex_
  std::thread thread_;
};

}  // namespace pathways
