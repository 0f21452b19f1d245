#include "sequencer/admission.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/status.h"

namespace pathways {

Admission::Admission(std::vector<uint64_t> budgets) : spaces_(budgets.size()) {
  for (size_t i = 0; i < budgets.size(); ++i) spaces_[i].budget = std::min(budgets[i], kUnlimited);
}

SpaceSetId Admission::add_set(std::vector<SpaceId> spaces) {
  std::vector<SpaceId> sorted = spaces;
  std::sort(sorted.begin(), sorted.end());
  if (!sorted.empty() && sorted.back() >= spaces_.size()) {
    throw Error(Status::kInvalid,
                "a set names memory space " + std::to_string(sorted.back()) + " of " + std::to_string(spaces_.size()));
  }
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    throw Error(Status::kInvalid, "a set names a memory space twice");
  }
  sets_.push_back(std::move(spaces));
  return static_cast<SpaceSetId>(sets_.size() - 1);
}

Verdict Admission::judge(const Space& space, uint64_t peak, uint64_t eager) {
  // Needs are bounded by what a plan can hold, far below 2^62; sums do not wrap.
  if (peak + eager > space.budget) return Verdict::kNever;
  if (space.live + peak + eager > space.budget) return Verdict::kHeld;
  const uint64_t height = std::max(space.height(), space.live + peak);
  if (space.is_claimed || height + space.eager + eager > space.budget) return Verdict::kBusy;
  return Verdict::kFits;
}

Verdict Admission::check(std::span<const SpaceNeed> needs, SpaceId* worst) const {
  Verdict verdict = Verdict::kFits;
  for (const SpaceNeed& need : needs) {
    const Verdict here = judge(spaces_[need.space], need.peak, need.eager);
    if (here <= verdict) continue;
    verdict = here;
    if (worst != nullptr) *worst = need.space;
  }
  return verdict;
}

uint64_t Admission::enter(std::span<const SpaceNeed> needs) {
  const uint64_t number = next_number_++;
  for (const SpaceNeed& need : needs) {
    Space& space = spaces_[need.space];
    space.eager += need.eager;
    const uint64_t height = space.live + need.peak;
    const int64_t peak = static_cast<int64_t>(height) - space.raised;
    space.top = space.peaks.empty() ? peak : std::max(space.top, peak);
    space.peaks.push_back({number, peak});
    space.look();
  }
  return number;
}

void Admission::leave(std::span<const SpaceNeed> needs, uint64_t number) {
  ++version_;
  for (const SpaceNeed& need : needs) {
    Space& space = spaces_[need.space];
    PW_DCHECK(space.eager >= need.eager);
    space.eager -= need.eager;
    PW_DCHECK(!space.peaks.empty());
    int64_t height = space.peaks.front().height;
    if (space.peaks.front().number == number) {  // the usual case
      space.peaks.pop_front();
    } else {
      const auto at = std::find_if(space.peaks.begin(), space.peaks.end(),
                                   [&](const PeakReservation& peak) { return peak.number == number; });
      PW_DCHECK(at != space.peaks.end());
      height = at->height;
      space.peaks.erase(at);
    }
    if (height < space.top || space.peaks.empty()) continue;
    int64_t top = space.peaks.front().height;
    for (const PeakReservation& peak : space.peaks) {
      top = std::max(top, peak.height);
      if (top == space.top) break;
    }
    space.top = top;
  }
}

Verdict Admission::check_block(SpaceSetId set, uint64_t bytes, SpaceId* worst) const {
  Verdict verdict = Verdict::kFits;
  for (const SpaceId id : sets_[set]) {
    const Space& space = spaces_[id];
    Verdict here = Verdict::kFits;
    if (bytes > space.budget) {
      here = Verdict::kNever;
    } else if (space.live + bytes > space.budget) {
      here = Verdict::kHeld;
    } else if (space.is_claimed || std::max(space.height(), space.live) + space.eager + bytes > space.budget) {
      here = Verdict::kBusy;
    }
    if (here <= verdict) continue;
    verdict = here;
    if (worst != nullptr) *worst = id;
  }
  return verdict;
}

BlockId Admission::add_block(uint32_t client, uint32_t plan, SpaceSetId set, uint64_t bytes, bool is_early) {
  BlockId id;
  if (free_blocks_.empty()) {
    id = static_cast<BlockId>(blocks_.size());
    blocks_.emplace_back();
  } else {
    id = free_blocks_.back();
    free_blocks_.pop_back();
  }
  blocks_[id] = {client, plan, set, 1, bytes, false};
  for (const SpaceId space_id : sets_[set]) {
    Space& space = spaces_[space_id];
    space.live += bytes;
    if (!is_early) continue;  // the run's peak reservation covers the block, less what the run takes over
    space.raised += static_cast<int64_t>(bytes);
    space.look();
  }
  return id;
}

bool Admission::release(BlockId id) {
  Block& block = blocks_[id];
  PW_CHECK(block.references > 0);
  if (--block.references != 0) return false;
  if (!block.is_offloaded) {
    for (const SpaceId space : sets_[block.set]) {
      PW_DCHECK(spaces_[space].live >= block.bytes);
      spaces_[space].live -= block.bytes;
    }
  }
  free_blocks_.push_back(id);
  ++version_;
  return true;
}

void Admission::offload(uint32_t client) {
  for (Block& block : blocks_) {
    if (block.references == 0 || block.client != client || block.is_offloaded) continue;
    block.is_offloaded = true;
    for (const SpaceId space : sets_[block.set]) spaces_[space].live -= block.bytes;
  }
  ++version_;
}

bool Admission::restore(uint32_t client, SpaceId* worst) {
  std::vector<uint64_t> more(spaces_.size());
  for (const Block& block : blocks_) {
    if (block.references == 0 || block.client != client || !block.is_offloaded) continue;
    for (const SpaceId space : sets_[block.set]) more[space] += block.bytes;
  }
  for (SpaceId id = 0; id < spaces_.size(); ++id) {
    const Space& space = spaces_[id];
    if (more[id] == 0 || std::max(space.height(), space.live) + space.eager + more[id] <= space.budget) continue;
    *worst = id;
    return false;
  }
  for (SpaceId id = 0; id < spaces_.size(); ++id) {
    Space& space = spaces_[id];
    space.live += more[id];
    space.raised += static_cast<int64_t>(more[id]);
    space.look();
  }
  for (Block& block : blocks_) {
    if (block.references != 0 && block.client == client) block.is_offloaded = false;
  }
  return true;
}

void Admission::claim(std::span<const SpaceNeed> needs) {
  for (const SpaceNeed& need : needs) {
    if (spaces_[need.space].is_claimed) continue;
    spaces_[need.space].is_claimed = true;
    claimed_.push_back(need.space);
  }
}

void Admission::claim_set(SpaceSetId set) {
  for (const SpaceId space : sets_[set]) {
    const SpaceNeed need{space, 0, 0};
    claim({&need, 1});
  }
}

void Admission::clear_claims() {
  for (const SpaceId space : claimed_) spaces_[space].is_claimed = false;
  claimed_.clear();
}

std::vector<Admission::Holder> Admission::holders(SpaceId space, size_t count) const {
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> sums;
  for (const Block& block : blocks_) {
    if (block.references == 0 || block.bytes == 0 || block.is_offloaded) continue;
    const auto& spaces = sets_[block.set];
    if (std::find(spaces.begin(), spaces.end(), space) == spaces.end()) continue;
    sums[{block.client, block.plan}] += block.bytes;
  }
  std::vector<Holder> found;
  found.reserve(sums.size());
  for (const auto& [who, bytes] : sums) found.push_back({who.first, who.second, bytes});
  std::stable_sort(found.begin(), found.end(), [](const Holder& a, const Holder& b) { return a.bytes > b.bytes; });
  if (found.size() > count) found.resize(count);
  return found;
}

void Admission::validate() const {
  std::vector<uint64_t> live(spaces_.size());
  for (const Block& block : blocks_) {
    if (block.references == 0 || block.is_offloaded) continue;
    for (const SpaceId space : sets_[block.set]) live[space] += block.bytes;
  }
  for (size_t i = 0; i < spaces_.size(); ++i) {
    PW_CHECK(spaces_[i].live == live[i]);  // MEM-1
    const auto& peaks = spaces_[i].peaks;
    for (size_t k = 1; k < peaks.size(); ++k) PW_CHECK(peaks[k - 1].number < peaks[k].number);
    const auto top =
        std::max_element(peaks.begin(), peaks.end(),
                         [](const PeakReservation& a, const PeakReservation& b) { return a.height < b.height; });
    if (top != peaks.end()) PW_CHECK(top->height == spaces_[i].top);
  }
}

}  // namespace pathways
