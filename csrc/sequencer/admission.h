/// Which runs may enter the order: the ledger of memory as the order sees it.
///
/// Pure: no thread, no clock, no I/O. A *place* is one budget: a device, or the memory of one host into which transfers
/// land. The ledger goes by position in the order, not by the clock: a memory space runs what is ordered on it in that
/// order, and what a run takes there and does not leave behind is given back in that order too. So a run needs room
/// beside what is alive where it stands in the order, and runs may be admitted long before the memory of those before
/// them is free.
///
///   live     bytes of the blocks alive after everything admitted so far, those of suspended clients left out
///   eager    bytes that admitted runs not yet over may take ahead of their position: copies between devices of a host
///   height   the most that any admitted run not yet over reaches, its own eager bytes left out
///
///   MEM-1  live is the sum of the blocks on the place.
///   MEM-2  a run is admitted when on each memory space that it needs max(height, live + peak) + eager + its own eager
///   fits the
///          budget. Then whatever moment is looked at, with any set of admitted runs begun and any of their eager bytes
///          taken, the space holds no more than its budget; so no admitted run waits for memory that one that was not
///          admitted holds, and none of two admitted runs waits for the other. Whoever waits for runs keeps those that
///          come later off its spaces (`claim`), so that it is not overtaken for ever; runs end, so it ends. Whoever
///          waits for blocks that others hold does so for a turn at a time: those may have to run before they let go.
///   MEM-3  what does not fit an empty memory space is refused at once (kNever); what only blocks keep out is told so
///          (kHeld), and the caller decides how long to wait.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace pathways {

using SpaceId = uint32_t;
using SpaceSetId = uint32_t;
using BlockId = uint32_t;

inline constexpr uint64_t kUnlimited = uint64_t{1} << 62;  ///< a budget that nothing reaches

/// What a run needs on one memory space, in bytes beside its arguments.
struct SpaceNeed {
  SpaceId space = 0;
  uint64_t peak = 0;   ///< most at any position of the run, results included, eager bytes left out
  uint64_t eager = 0;  ///< taken at any time from its admission to its end
};

enum class Verdict : uint8_t {
  kFits,   ///< now
  kBusy,   ///< when runs before it are over
  kHeld,   ///< only when blocks are released
  kNever,  ///< not even on an empty memory space
};

class Admission {
 public:
  struct Holder {
    uint32_t client = 0;
    uint32_t plan = 0;  ///< whose results they are; kPut for what the client put there
    uint64_t bytes = 0;
  };
  static constexpr uint32_t kPut = 0xffffffffu;

  /// `budgets`: bytes, by memory space.
  explicit Admission(std::vector<uint64_t> budgets);

  /// Places that hold buffers together, each as many bytes. Throws Error(kInvalid) for an unknown or a repeated place.
  SpaceSetId add_set(std::vector<SpaceId> spaces);
  bool has_set(SpaceSetId set) const { return set < sets_.size(); }
  std::span<const SpaceId> spaces_of(SpaceSetId set) const { return sets_[set]; }
  uint32_t space_count() const { return static_cast<uint32_t>(spaces_.size()); }

  /// Whether a run fits; `worst`, if given, becomes the first space where it does not.
  Verdict check(std::span<const SpaceNeed> needs, SpaceId* worst = nullptr) const;
  /// Admits a run that fits. The caller adds the blocks of its results and releases those that it takes over, before
  /// anything else. Returns the number to leave with.
  uint64_t enter(std::span<const SpaceNeed> needs);
  void leave(std::span<const SpaceNeed> needs, uint64_t number);

  /// Whether `bytes` fit on each memory space of a set ahead of everything admitted: what a put takes.
  Verdict check_block(SpaceSetId set, uint64_t bytes, SpaceId* worst = nullptr) const;
  /// A block with one reference. `is_early`: it is made at once, ahead of runs admitted before.
  BlockId add_block(uint32_t client, uint32_t plan, SpaceSetId set, uint64_t bytes, bool is_early);
  void share(BlockId block) { ++blocks_[block].references; }
  /// True when it was the last reference.
  bool release(BlockId block);

  /// The client's blocks take nothing on their spaces until `restore`: they are elsewhere, and it has no run under way.
  void offload(uint32_t client);
  /// They come back, at once, where they fit beside everything else on all their spaces. False: nothing happened, and
  /// `worst` is the first space where they do not.
  bool restore(uint32_t client, SpaceId* worst);

  /// Keeps everybody else off the spaces of a run that waits, until `clear_claims`.
  void claim(std::span<const SpaceNeed> needs);
  void claim_set(SpaceSetId set);
  void clear_claims();
  bool has_claims() const { return !claimed_.empty(); }

  uint64_t budget(SpaceId space) const { return spaces_[space].budget; }
  /// A smaller budget takes nothing back; it keeps others out.
  void set_budget(SpaceId space, uint64_t bytes) {
    spaces_[space].budget = bytes < kUnlimited ? bytes : kUnlimited;
    ++version_;
  }
  uint64_t live(SpaceId space) const { return spaces_[space].live; }
  /// The most that was admitted at any time, reaches and eager bytes included: never above the budget.
  uint64_t high_water(SpaceId space) const { return spaces_[space].high_water; }
  /// Who holds most on a memory space, the biggest first, at most `count`.
  std::vector<Holder> holders(SpaceId space, size_t count) const;
  /// Changes with everything that may let a waiting run in.
  uint64_t version() const { return version_; }
  void validate() const;

 private:
  /// A run not yet over, and how high it reaches. Runs may end out of their order: on other spaces they do more.
  struct PeakReservation {
    uint64_t number;
    int64_t height;  ///< less Place::raised at that time
  };
  struct Space {
    uint64_t budget = 0;
    uint64_t live = 0;
    uint64_t eager = 0;
    int64_t raised = 0;  ///< early blocks so far: they stand under every run that is not over
    uint64_t high_water = 0;
    std::deque<PeakReservation> peaks;  ///< by number
    int64_t top = 0;                    ///< the greatest height among them
    bool is_claimed = false;
    uint64_t height() const { return peaks.empty() ? live : static_cast<uint64_t>(top + raised); }
    void look() { high_water = std::max(high_water, std::max(height(), live) + eager); }
  };
  struct Block {
    uint32_t client = 0;
    uint32_t plan = 0;
    SpaceSetId set = 0;
    uint32_t references = 0;
    uint64_t bytes = 0;
    bool is_offloaded = false;
  };
  static Verdict judge(const Space& space, uint64_t peak, uint64_t eager);

  std::vector<Space> spaces_;
  std::vector<std::vector<SpaceId>> sets_;
  std::vector<Block> blocks_;
  std::vector<BlockId> free_blocks_;
  std::vector<SpaceId> claimed_;
  uint64_t next_number_ = 1;
  uint64_t version_ = 0;
};

}  // namespace pathways
