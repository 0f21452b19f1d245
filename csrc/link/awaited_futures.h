/// AwaitedFutures: in which futures of clients one host of another machine has a part that is not over.
///
/// The head knows it from what the host is sent: the results of runs, what is put, the tokens of fetches and tasks. So
/// a host completes its own part of a future, once, and no other host's (LINK-2).
///
/// Memory: an entry until the host answers, the client is gone, or the client's handle is used again.
/// Threading: one thread at a time (a link's lock).
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>

#include "base/ids.h"
#include "messages/records.h"

namespace pathways {

class AwaitedFutures {
 public:
  /// The host is sent this record of the controller.
  void sent(std::span<const std::byte> record);
  /// The host says that its part is over. False: it has none.
  bool take(uint32_t client, Handle future);

 private:
  void add(uint32_t client, Handle future) {
    if (future.valid() && !future.is_hidden()) clients_[client][future.index()] = future.generation();
  }

  std::unordered_map<uint32_t, std::unordered_map<uint32_t, uint32_t>> clients_;  ///< generation by index
};

}  // namespace pathways
