/// RecordCredit: how many bytes of records one end of a client's link may send before the other end's ring has taken
/// them. So records that nobody reads stay in the ring of their writer, which then waits (FLOW-1), and not in a link.
///
/// The writer's end asks `may_send` and says `sent`. The reader's end says `taken`, and sends what `to_tell` returns.
///
/// Threading: one thread at a time.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "link/frames.h"

namespace pathways {

class RecordCredit {
 public:
  /// More than the longest record and what the other end need not tell, so that every record may be sent sometime.
  static constexpr uint64_t kWindow = uint64_t{2} << 20;
  static_assert(kWindow > kMostFrame + kWindow / 8);

  // The writer's end.
  bool may_send(uint64_t bytes) const { return sent_ - credited_ + bytes <= kWindow; }
  void sent(uint64_t bytes) { sent_ += bytes; }
  /// Throws Error(kInvalid) when the other end has taken more than it got.
  void credit(uint64_t bytes) {
    if (bytes < credited_ || bytes > sent_) throw Error(Status::kInvalid, "a link brought a credit for nothing");
    credited_ = bytes;
  }

  // The reader's end.
  void received(uint64_t bytes) { received_ += bytes; }
  /// Whether the other end should hear that all but `waiting` bytes of what came are in the ring.
  bool should_tell(uint64_t waiting) const { return received_ - waiting - told_ >= kWindow / 8; }
  /// What it should hear.
  uint64_t tell(uint64_t waiting) { return told_ = received_ - waiting; }

 private:
  uint64_t sent_ = 0, credited_ = 0;
  uint64_t received_ = 0, told_ = 0;
};

}  // namespace pathways
