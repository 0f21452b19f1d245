/// SlowCopierForTesting: a copier whose every job, even the smallest, is under way for a given time longer. The double
/// of a slow channel; threading and invariants are those of Copier.
#pragma once

#include <chrono>
#include <functional>
#include <utility>

#include "bulk/copier.h"

namespace pathways {

class SlowCopierForTesting final : public Copier {
 public:
  SlowCopierForTesting(std::function<void()> ring, std::chrono::nanoseconds delay)
      : Copier(std::move(ring)), delay_(delay) {}
  ~SlowCopierForTesting() override { (void)stop(); }

  [[nodiscard]] bool start(Job& job) override {
    enqueue(job);
    return false;
  }

 private:
  bool write(Cursor& cursor, uint64_t most, bool streams) override {
    const bool complete = Copier::write(cursor, most, streams);
    if (complete) wait(delay_);
    return complete;
  }

  const std::chrono::nanoseconds delay_;
};

}  // namespace pathways
