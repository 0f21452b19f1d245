/// Pace: how long the sender of a link waits for more before it sends again.
///
/// Each message of an encrypted connection costs both ends some 10 us, for few bytes as for many. So a sender with a
/// stream of records sends at most one message per kGather, with all that has come meanwhile. The first messages after
/// a silence go at once. So does the next one of a caller that waits for each answer, because no answer comes within
/// kGather.
///
/// Threading: one thread.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pathways {

class Pace {
 public:
  static constexpr int64_t kGatherNs = 50'000;
  static constexpr int64_t kStreamNs = 4 * kGatherNs;  ///< between two messages of a stream
  static constexpr uint32_t kAtOnce = 4;               ///< messages of a stream that are not held up

  void sent(int64_t now_ns) {
    streak_ = now_ns - last_ns_ <= kStreamNs ? std::min(streak_ + 1, kAtOnce) : 0;
    last_ns_ = now_ns;
  }
  /// How long the next message must wait; 0: not at all.
  int64_t pause_ns(int64_t now_ns) const {
    return streak_ < kAtOnce ? 0 : std::clamp<int64_t>(last_ns_ + kGatherNs - now_ns, 0, kGatherNs);
  }

 private:
  int64_t last_ns_ = -kStreamNs - 1;
  uint32_t streak_ = 0;
};

}  // namespace pathways
