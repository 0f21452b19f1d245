/// ReadyBell: where the writers of many rings say that a ring has records, and where the one thread sleeps that reads
/// all these rings. Memory of one process.
///
/// The controller uses it in place of the hosts' own doorbells when all hosts are on other machines: then one thread
/// sends what the controller writes for any of them (link/link_pool.h).
#pragma once

#include <cstdint>

#include "messages/ready_bitmap.h"
#include "sync/doorbell.h"

namespace pathways {

struct ReadyBell {
  DoorbellWord doorbell{};
  ReadyBitmap bitmap{};  ///< one bit per ring

  void mark(uint32_t bit) {
    bitmap.mark(bit);
    doorbell.ring();
  }
};

}  // namespace pathways
