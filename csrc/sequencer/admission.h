/// Which runs may enter the order: the ledger of memory as the order sees it.
///
/// Pure: no thread, no clock, no I/O. A *place* is one budget: a device, or the memory of one host into which transfers
/// land. The ledger goes by position in the order, not by the clock: a place runs what is ordered on it in that order,
/// and what a run takes there and does not leave behind is given back in that order too. So a run needs room beside
/// what is alive where it stands in the order, and runs may be admitted long before the memory of those before them is
/// free.
///
///   live     bytes of the blocks alive after everything admitted so far, those of suspended clients left out
///   eager    bytes that admitted runs not yet over may take ahead of their position: copies between devices of a host
///   height   the most that any admitted run not yet over reaches, its own eager bytes left out
///
///   MEM-1  live is the sum of the blocks on the place.
///   MEM-2  a run is admitted when on each place that it needs max(height, live + peak) + eager + its own eager fits
///   the
///          budget. Then whatever moment is looked at, with any set of admitted runs begun and any of their eager bytes
///          taken, the place holds no more than its budget; so no admitted run waits for memory that one that was not
///          admitted holds, and none of two admitted runs waits for the other. Whoever waits for runs keeps those that
///          come later off its places (`claim`), so that it is not overtaken for ever; runs end, so it ends. Whoever
///          waits for blocks that others hold does so for a turn at a time: those may have to run before they let go.
///   MEM-3  what does not fit an empty place is refused at once (kNever); what only blocks keep out is told so
///          (kHeld), and the caller decides how long to wait.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace pathways {

using PlaceId = uint32_t;
using PlaceSetId = uint32_t;
using BlockId = uint32_t;

inline constexpr uint64_t kUnlimited = uint64_t{1} << 62;  ///< a budget that nothing reaches

/// What a run needs on one place, in bytes beside its arguments.
struct PlaceNeed {
  PlaceId place = 0;
  uint64_t peak = 0;   ///< most at any position of the run, results included, eager bytes left out
  uint64_t eager = 0;  ///< taken at any time from its admission to its end
};

enum class Verdict : uint8_t {
  kFits,   ///< now
  kBusy,   ///< when runs before it are over
  kHeld,   ///< only when blocks are released
  kNever,  ///< not even on an empty place
};

class Admission {
 public:
  struct Holder {
    uint32_t client = 0;
    uint32_t plan = 0;  ///< whose results they are; kPut for what the client put there
    uint64_t bytes = 0;
  };
  static constexpr uint32_t kPut = 0xffffffffu;

  /// `budgets`: bytes, by place.
  explicit Admission(std::vector<uint64_t> budgets);

  /// Places that hold buffers together, each as many bytes. Throws Error(kInvalid) for an unknown or a repeated place.
  PlaceSetId add_set(std::vector<PlaceId> places);
  bool has_set(PlaceSetId set) const { return set < sets_.size(); }
  std::span<const PlaceId> places_of(PlaceSetId set) const { return sets_[set]; }
  uint32_t place_count() const { return static_cast<uint32_t>(places_.size()); }

  /// Whether a run fits; `worst`, if given, becomes the first place where it does not.
  Verdict check(std::span<const PlaceNeed> needs, PlaceId* worst = nullptr) const;
  /// Admits a run that fits. The caller adds the blocks of its results and releases those that it takes over, before
  /// anything else. Returns the number to leave with.
  uint64_t enter(std::span<const PlaceNeed> needs);
  void leave(std::span<const PlaceNeed> needs, uint64_t number);

  /// Whether `bytes` fit on each place of a set ahead of everything admitted: what a put takes.
  Verdict check_block(PlaceSetId set, uint64_t bytes, PlaceId* worst = nullptr) const;
  /// A block with one reference. `is_early`: it is made at once, ahead of runs admitted before.
  BlockId add_block(uint32_t client, uint32_t plan, PlaceSetId set, uint64_t bytes, bool is_early);
  void share(BlockId block) { ++blocks_[block].references; }
  /// True when it was the last reference.
  bool release(BlockId block);

  /// The client's blocks take nothing on their places until `unpark`: they are elsewhere, and it has no run under way.
  void park(uint32_t client);
  /// They come back, at once, where they fit beside everything else on all their places. False: nothing happened, and
  /// `worst` is the first place where they do not.
  bool unpark(uint32_t client, PlaceId* worst);

  /// Keeps everybody else off the places of a run that waits, until `clear_claims`.
  void claim(std::span<const PlaceNeed> needs);
  void claim_set(PlaceSetId set);
  void clear_claims();
  bool has_claims() const { return !claimed_.empty(); }

  uint64_t budget(PlaceId place) const { return places_[place].budget; }
  /// A smaller budget takes nothing back; it keeps others out.
  void set_budget(PlaceId place, uint64_t bytes) {
    places_[place].budget = bytes < kUnlimited ? bytes : kUnlimited;
    ++version_;
  }
  uint64_t live(PlaceId place) const { return places_[place].live; }
  /// The most that was admitted at any time, reaches and eager bytes included: never above the budget.
  uint64_t high_water(PlaceId place) const { return places_[place].high_water; }
  /// Who holds most on a place, the biggest first, at most `count`.
  std::vector<Holder> holders(PlaceId place, size_t count) const;
  /// Changes with everything that may let a waiting run in.
  uint64_t version() const { return version_; }
  void validate() const;

 private:
  /// A run not yet over, and how high it reaches. Runs may end out of their order: on other places they do more.
  struct Reach {
    uint64_t number;
    int64_t height;  ///< less Place::raised at that time
  };
  struct Place {
    uint64_t budget = 0;
    uint64_t live = 0;
    uint64_t eager = 0;
    int64_t raised = 0;  ///< early blocks so far: they stand under every run that is not over
    uint64_t high_water = 0;
    std::deque<Reach> reaches;  ///< by number
    int64_t top = 0;            ///< the greatest height among them
    bool is_claimed = false;
    uint64_t height() const { return reaches.empty() ? live : static_cast<uint64_t>(top + raised); }
    void look() { high_water = std::max(high_water, std::max(height(), live) + eager); }
  };
  struct Block {
    uint32_t client = 0;
    uint32_t plan = 0;
    PlaceSetId set = 0;
    uint32_t references = 0;
    uint64_t bytes = 0;
    bool is_parked = false;
  };
  static Verdict judge(const Place& place, uint64_t peak, uint64_t eager);

  std::vector<Place> places_;
  std::vector<std::vector<PlaceId>> sets_;
  std::vector<Block> blocks_;
  std::vector<BlockId> free_blocks_;
  std::vector<PlaceId> claimed_;
  uint64_t next_number_ = 1;
  uint64_t version_ = 0;
};

}  // namespace pathways
