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
/// They are the same for all spaces of a class (MEM-8, sequencer/space_classes.h), so there is one MemoryAccount for
/// each class. Spaces that nothing has named are in no class, and hold nothing.
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

#include "sequencer/by_class.h"
#include "sequencer/client_memory.h"
#include "sequencer/memory_account.h"
#include "sequencer/space_classes.h"

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
  /// The classes of a set. Valid until something is registered.
  const std::vector<ClassPart>& classes_of(SpaceSetId set) const { return sets_[set].at(classes_); }
  bool is_in(SpaceSetId set, SpaceId space) const;
  /// What a run needs, by class. Throws Error(kInvalid) for an unknown or a repeated space.
  RunNeeds by_class(std::vector<SpaceNeed> needs);
  /// Which spaces are one entry here.
  const SpaceClasses& classes() const { return classes_; }
  uint32_t space_count() const { return classes_.space_count(); }

  /// Whether a run fits. `worst`, if given, is set to the first space with the worst verdict.
  Verdict check(const RunNeeds& needs, SpaceId* worst = nullptr) const;
  /// Admits a run that fits. Before anything else, the caller must add the blocks of its results and release the blocks
  /// that it takes over. Returns the number to pass to `leave`.
  uint64_t enter(const RunNeeds& needs, uint32_t client = kNobody);
  void leave(const RunNeeds& needs, uint64_t number, uint32_t client = kNobody);

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
  /// A waiting record is to be judged again, although no memory became free.
  void touch() { ++version_; }
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
  Verdict check_quota(uint32_t client, const RunNeeds& needs, SpaceId* worst) const {
    return clients_.has_quotas() ? first_of(worst, clients_.check(client, needs.at(classes_))) : Verdict::kFits;
  }
  Verdict check_block_quota(uint32_t client, SpaceSetId set, uint64_t bytes, SpaceId* worst) const {
    return clients_.has_quotas() ? first_of(worst, clients_.check_block(client, classes_of(set), bytes))
                                 : Verdict::kFits;
  }
  /// The client is gone, and all its blocks were released.
  void forget(uint32_t client) { clients_.forget(client); }
  /// Quotas, and what each client holds by class.
  const ClientMemory& clients() const { return clients_; }
  uint64_t held(uint32_t client, SpaceId space) const {
    return is_booked(space) ? clients_.held(client, classes_.class_of(space)) : 0;
  }
  /// The clients that hold something on a space, in no order.
  std::span<const uint32_t> clients_on(SpaceId space) const {
    return is_booked(space) ? clients_.holders(classes_.class_of(space)) : std::span<const uint32_t>();
  }

  /// Keeps everybody else off the spaces of a waiting run, until `clear_claims`.
  void claim(const RunNeeds& needs);
  void claim_set(SpaceSetId set);
  void clear_claims();

  uint64_t budget(SpaceId space) const { return classes_.budget(space); }
  /// A smaller budget takes no memory away; it only keeps new runs and puts from being admitted.
  void set_budget(std::vector<SpaceId> spaces, uint64_t bytes);
  uint64_t live(SpaceId space) const { return is_booked(space) ? account_of(space).live() : 0; }
  /// The most that was admitted at any time, with peak reservations and eager bytes. A new admission never takes it
  /// above the budget.
  uint64_t high_water(SpaceId space) const { return is_booked(space) ? account_of(space).high_water() : 0; }
  /// The biggest holders of a memory space, the biggest first, at most `count`. For errors: it looks at every block.
  std::vector<Holder> holders(SpaceId space, size_t count) const;
  /// Changes whenever a waiting run may have become admissible.
  uint64_t version() const { return version_; }
  void validate() const;

 private:
  struct Block {
    uint32_t client = 0;
    uint32_t plan = 0;
    SpaceSetId set = 0;
    uint32_t references = 0;
    uint64_t bytes = 0;
    bool is_offloaded = false;
  };

  void refine(std::span<const SpaceId> spaces);
  Verdict first_of(SpaceId* worst, const ClientMemory::WorstOf& found) const {
    if (found.verdict != Verdict::kFits) *worst = classes_.first(found.id);
    return found.verdict;
  }
  std::vector<uint64_t> offloaded(uint32_t client) const;
  bool is_booked(SpaceId space) const { return classes_.class_of(space) != kNoClass; }
  const MemoryAccount& account_of(SpaceId space) const { return accounts_[classes_.class_of(space)]; }
  bool is_claimed(ClassId id) const { return is_claimed_[id] != 0; }
  void claim_class(ClassId id);

  SpaceClasses classes_;
  std::vector<MemoryAccount> accounts_;  ///< by class
  ClientMemory clients_;
  std::vector<ClassSet> sets_;
  std::vector<Block> blocks_;
  std::vector<BlockId> free_blocks_;
  std::vector<ClassId> claimed_;
  std::vector<uint8_t> is_claimed_;  ///< by class
  uint64_t next_number_ = 1;
  uint64_t version_ = 0;
};

}  // namespace pathways
