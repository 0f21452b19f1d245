/// What each client holds on each memory space, and the quotas that bound it. A part of Admission.
///
///   MEM-5 (quota)  With a quota, a client's runs and puts are admitted only while they fit the quota beside what the
///                  client itself holds and runs, on each space that quotas count. An account per space
///                  (sequencer/memory_account.h) keeps the same sums as for the whole space (MEM-2), for this client
///                  alone. A client's quota depends on nobody else: it keeps nobody out, and nobody keeps it out. A
///                  smaller quota takes nothing away. It only keeps the client from more until it has released enough.
///
/// A client that gets a quota while runs of it are under way gets accounts without these runs: they are not counted
/// until they are over. What needs no memory on a space always fits the quota there.
///
/// Cost: O(1) per space of a block, and for a client with a quota per space of a run. No search over blocks.
///
/// Invariants: `held[space].bytes` is the sum of the client's blocks there that are not offloaded. `holders_[space]`
/// lists exactly the clients for which it is not 0, and `held[space].position` is the client's place in that list.
///
/// Pure: no thread, no clock, no I/O. Threading: one thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "sequencer/memory_account.h"

namespace pathways {

class ClientMemory {
 public:
  /// `spaces`: their number. `counted`: quotas count the first so many, which are devices.
  ClientMemory(uint32_t spaces, uint32_t counted) : holders_(spaces), counted_(std::min(spaces, counted)) {}

  /// kUnlimited: no quota. `next_number`: the number of the next run.
  void set_quota(uint32_t client, uint64_t bytes, uint64_t next_number);
  uint64_t quota(uint32_t client) const;
  /// The client is gone, and holds nothing.
  void forget(uint32_t client);

  void add(uint32_t client, std::span<const SpaceId> spaces, uint64_t bytes, bool is_early);
  void remove(uint32_t client, std::span<const SpaceId> spaces, uint64_t bytes);
  void enter(uint32_t client, std::span<const SpaceNeed> needs, uint64_t number);
  void leave(uint32_t client, std::span<const SpaceNeed> needs, uint64_t number);

  /// Whether a run, or a put of `bytes` bytes on each space, fits the client's quota.
  Verdict check(uint32_t client, std::span<const SpaceNeed> needs, SpaceId* worst) const;
  Verdict check_block(uint32_t client, std::span<const SpaceId> spaces, uint64_t bytes, SpaceId* worst) const;

  uint64_t held(uint32_t client, SpaceId space) const;
  /// The most that the client holds on any one space that quotas count.
  uint64_t most_held(uint32_t client) const;
  /// The clients that hold something on a space, in no order.
  std::span<const uint32_t> holders(SpaceId space) const { return holders_[space]; }

  void validate() const;

 private:
  struct Held {
    uint64_t bytes = 0;
    uint32_t position = 0;  ///< in `holders_`
  };
  struct Client {
    std::vector<Held> held;  ///< by space; empty: nothing anywhere
    uint64_t quota = kUnlimited;
    uint64_t first_number = 0;            ///< runs before it are not in the accounts
    std::vector<MemoryAccount> accounts;  ///< by space that quotas count; empty: no quota
  };
  const Client* with_quota(uint32_t client) const;

  std::vector<std::vector<uint32_t>> holders_;  ///< by space
  const uint32_t counted_;
  std::unordered_map<uint32_t, Client> clients_;
};

}  // namespace pathways
