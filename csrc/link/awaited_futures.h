/// AwaitedFutures: in which futures of clients one host of another machine has a part that is not over.
///
/// The head knows it from what the host is sent: the results of runs, what is put, the tokens of fetches and tasks. So
/// a host completes its own part of a future, once, and no other host's (LINK-2).
///
/// A client that has left a future may use its index again before the host answers. Then the answer concerns nobody,
/// but for that of a fetch, with which a lease ends: so fetches are known by their whole handles (LINK-3).
///
/// Memory: an entry until the host answers, the client is gone, or the index is used again; a fetch until one of the
/// first two.
/// Threading: one thread at a time (a link's lock).
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>

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
  struct Client {
    std::unordered_map<uint32_t, uint32_t> generations;  ///< by index
    std::unordered_set<uint64_t> fetches;
  };
  void add(uint32_t client, Handle future) {
    if (future.valid() && !future.is_hidden()) clients_[client].generations[future.index()] = future.generation();
  }

  std::unordered_map<uint32_t, Client> clients_;
};

}  // namespace pathways
