/// How long the devices of a host were busy for what they computed.
///
/// XLA says when a value is ready, and not when its computation began. Launches on one device run one after the other.
/// So a computation began when it was launched, or when its devices had finished what they were noticed to finish last,
/// whichever is later; and it ended when it was noticed to be ready. What the host notices late makes one computation
/// longer and the next one shorter; their sum is right. The controller divides the sum of what was noticed in one look
/// (SHARE-5, controller/device_shares.h).
///
/// Used by Launcher and ValueSettler. Threading: the executor's thread only.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "executor/backend.h"
#include "sync/atomic.h"

namespace pathways {

class DeviceClock {
 public:
  /// What is noticed from now on, is noticed together.
  void begin_look() {
    ++look_;
    now_ns_ = 0;
  }
  uint32_t look() const { return look_; }

  /// A computation that was launched on `devices` (a bit each) at `launched_ns` was noticed to be over. Returns when it
  /// began.
  int64_t began_ns(uint64_t devices, int64_t launched_ns) {
    int64_t began = launched_ns;
    for (uint64_t left = devices; left != 0; left &= left - 1) {
      int64_t& free = free_ns_[std::countr_zero(left)];
      began = std::max(began, free);
      free = now_ns();
    }
    return began;
  }
  /// The time of this look.
  int64_t now_ns() {
    if (now_ns_ == 0) now_ns_ = monotonic_ns();
    return now_ns_;
  }

 private:
  int64_t free_ns_[64] = {};  ///< by device: when it was noticed last that something on it was over
  int64_t now_ns_ = 0;        ///< the time of this look; 0: not read yet
  uint32_t look_ = 0;
};

}  // namespace pathways
