#include "host/pulse.h"

namespace pathways {

Pulse::Pulse(HostBlock* block, std::chrono::nanoseconds every)
    : thread_([this, block, every] {
        std::unique_lock lock(mutex_);
        do {
          // SYNC host/pulse: nothing is published with it; who looks at it looks at the number alone.
          block->pulse.fetch_add(1, std::memory_order_relaxed);
        } while (!ended_.wait_for(lock, every, [this] { return is_over_; }));
      }) {}

Pulse::~Pulse() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  ended_.notify_one();
  thread_.join();
}

}  // namespace pathways
