/// Which runs may enter the order: the ledger of memory, by position in the order.
///
/// Pure: no thread, no clock, no I/O. A memory space is one budget: a device, or the memory in which one host receives
/// transfers. The ledger counts by position in the order, not by time: the runs on a memory space execute in the order,
/// and the memory that a run takes and does not leave behind becomes free in that order too. So a run needs room beside
/// the blocks that are alive at its position in the order, and it may be admitted long before the memory of earlier
/// runs is free.
///
///   live     bytes of the blocks alive after everything admitted so far, without blocks of suspended clients
///   eager    bytes that admitted runs not yet over may take before their position: copies between devices of a host
///   height   the greatest peak reservation of the admitted runs not yet over, without their own eager bytes
/// The sums of one space are a MemoryAccount.
///
///   MEM-1  live is the sum of the blocks on the memory space.
///   MEM-2  a run is admitted when, on each memory space that it needs, max(height, live + peak) + eager + its own
///          eager bytes fit the budget. Then the space never holds more than its budget, whichever admitted runs have
///          begun, and whichever of their eager bytes are taken. So no admitted run waits for memory that a run which
///          is not admitted holds, and no two admitted runs wait for each other. A run that waits for earlier runs
///          claims its spaces (`claim`), so that later runs do not overtake it for ever; runs end, so its wait ends. A
///          run that waits for blocks of other clients claims its spaces for a turn at a time only, because those
///          clients may have to run before they release blocks.
///   MEM-3  what does not fit an empty memory space is refused at once (kNever). For what only blocks keep out, the
///          verdict is kHeld, and the caller decides how long to wait.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sequencer/client_memory.h"
#include "sequencer/memory_account.h"

namespace pathways {

using SpaceSetId = uint32_t;
using BlockId = uint32_t;

class Admission {
 public:
  struct Holder {
    uint32_t client = 0;
    uint32_t plan = 0;  ///< the plan whose results they are; kPut: the client put them there
    uint64_t bytes = 0;
  };
  static constexpr uint32_t kPut = 0xffffffffu;
  static constexpr uint32_t kNobody = 0xffffffffu;  ///< a client without a quota

  /// `budgets`: bytes, by memory space. `devices`: the first so many are devices, which clients' quotas count.
  explicit Admission(std::vector<uint64_t> budgets, uint32_t devices = UINT32_MAX);

  /// Memory spaces that hold buffers together, each the same number of bytes. Throws Error(kInvalid) for an unknown or
  /// a repeated space.
  SpaceSetId add_set(std::vector<SpaceId> spaces);
  bool has_set(SpaceSetId set) const { return set < sets_.size(); }
  /// The spaces of a set, sorted.
  std::span<const SpaceId> spaces_of(SpaceSetId set) const { return sets_[set]; }
  uint32_t space_count() const { return static_cast<uint32_t>(spaces_.size()); }

  /// Whether a run fits. `worst`, if given, is set to the first space with the worst verdict.
  Verdict check(std::span<const SpaceNeed> needs, SpaceId* worst = nullptr) const;
  /// Admits a run that fits. Before anything else, the caller must add the blocks of its results and release the blocks
  /// that it takes over. Returns the number to pass to `leave`.
  uint64_t enter(std::span<const SpaceNeed> needs, uint32_t client = kNobody);
  void leave(std::span<const SpaceNeed> needs, uint64_t number, uint32_t client = kNobody);

  /// Whether a put of `bytes` bytes on each memory space of a set fits before everything admitted.
  Verdict check_block(SpaceSetId set, uint64_t bytes, SpaceId* worst = nullptr) const;
  /// Adds a block with one reference. `is_early`: the block is made at once, before runs that were admitted earlier.
  BlockId add_block(uint32_t client, uint32_t plan, SpaceSetId set, uint64_t bytes, bool is_early);
  void share(BlockId block) { ++blocks_[block].references; }
  /// Drops one reference. True when it was the last.
  bool release(BlockId block);
  /// Turns one reference of an offloaded block into a reference to a new block of the same size, which is on the
  /// devices: somebody keeps a copy there.
  BlockId separate(BlockId block);
  bool is_offloaded(BlockId block) const { return blocks_[block].is_offloaded; }

  /// The client's blocks do not count on their spaces until `restore`: they are elsewhere, and the client has no run
  /// under way.
  void offload(uint32_t client);
  /// The client's blocks come back at once, if they fit beside everything else on all their spaces. False: nothing
  /// happened, and `worst` is the first space where they do not fit.
  bool restore(uint32_t client, SpaceId* worst);
  /// The first space where the client's blocks would not fit if they came back now.
  std::optional<SpaceId> lacks_room(uint32_t client) const;

  /// MEM-5: bytes on each device; kUnlimited: no quota.
  void set_quota(uint32_t client, uint64_t bytes);
  /// Whether a run, or a put, of the client fits its quota; `check` says nothing of quotas.
  Verdict check_quota(uint32_t client, std::span<const SpaceNeed> needs, SpaceId* worst) const {
    return clients_.check(client, needs, worst);
  }
  Verdict check_block_quota(uint32_t client, SpaceSetId set, uint64_t bytes, SpaceId* worst) const {
    return clients_.check_block(client, sets_[set], bytes, worst);
  }
  /// The client is gone, and all its blocks were released.
  void forget(uint32_t client) { clients_.forget(client); }
  /// What each client holds.
  const ClientMemory& clients() const { return clients_; }

  /// Keeps everybody else off the spaces of a waiting run, until `clear_claims`.
  void claim(std::span<const SpaceNeed> needs);
  void claim_set(SpaceSetId set);
  void clear_claims();

  uint64_t budget(SpaceId space) const { return spaces_[space].budget(); }
  /// A smaller budget takes no memory away; it only keeps new runs and puts from being admitted.
  void set_budget(SpaceId space, uint64_t bytes) {
    spaces_[space].set_budget(bytes);
    ++version_;
  }
  uint64_t live(SpaceId space) const { return spaces_[space].live(); }
  /// The most that was admitted at any time, with peak reservations and eager bytes. A new admission never takes it
  /// above the budget.
  uint64_t high_water(SpaceId space) const { return spaces_[space].high_water(); }
  /// The biggest holders of a memory space, the biggest first, at most `count`. For errors: it looks at every block.
  std::vector<Holder> holders(SpaceId space, size_t count) const;
  /// Changes whenever a waiting run may have become admissible.
  uint64_t version() const { return version_; }
  void validate() const;

 private:
  std::vector<uint64_t> offloaded(uint32_t client) const;

  struct Block {
    uint32_t client = 0;
    uint32_t plan = 0;
    SpaceSetId set = 0;
    uint32_t references = 0;
    uint64_t bytes = 0;
    bool is_offloaded = false;
  };
  bool is_claimed(SpaceId space) const { return is_claimed_[space] != 0; }

  std::vector<MemoryAccount> spaces_;
  ClientMemory clients_;
  std::vector<std::vector<SpaceId>> sets_;
  std::vector<Block> blocks_;
  std::vector<BlockId> free_blocks_;
  std::vector<SpaceId> claimed_;
  std::vector<uint8_t> is_claimed_;  ///< by space
  uint64_t next_number_ = 1;
  uint64_t version_ = 0;
};

}  // namespace pathways
