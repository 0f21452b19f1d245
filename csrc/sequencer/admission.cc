#include "sequencer/admission.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/status.h"

namespace pathways {

Admission::Admission(std::vector<uint64_t> budgets) : places_(budgets.size()) {
  for (size_t i = 0; i < budgets.size(); ++i) places_[i].budget = std::min(budgets[i], kUnlimited);
}

PlaceSetId Admission::add_set(std::vector<PlaceId> places) {
  std::vector<PlaceId> sorted = places;
  std::sort(sorted.begin(), sorted.end());
  if (!sorted.empty() && sorted.back() >= places_.size()) {
    throw Error(Status::kInvalid,
                "a set names place " + std::to_string(sorted.back()) + " of " + std::to_string(places_.size()));
  }
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    throw Error(Status::kInvalid, "a set names a place twice");
  }
  sets_.push_back(std::move(places));
  return static_cast<PlaceSetId>(sets_.size() - 1);
}

Verdict Admission::judge(const Place& place, uint64_t peak, uint64_t eager) {
  // Needs are bounded by what a plan can hold, far below 2^62; sums do not wrap.
  if (peak + eager > place.budget) return Verdict::kNever;
  if (place.live + peak + eager > place.budget) return Verdict::kHeld;
  const uint64_t height = std::max(place.height(), place.live + peak);
  if (place.is_claimed || height + place.eager + eager > place.budget) return Verdict::kBusy;
  return Verdict::kFits;
}

Verdict Admission::check(std::span<const PlaceNeed> needs, PlaceId* worst) const {
  Verdict verdict = Verdict::kFits;
  for (const PlaceNeed& need : needs) {
    const Verdict here = judge(places_[need.place], need.peak, need.eager);
    if (here <= verdict) continue;
    verdict = here;
    if (worst != nullptr) *worst = need.place;
  }
  return verdict;
}

uint64_t Admission::enter(std::span<const PlaceNeed> needs) {
  const uint64_t number = next_number_++;
  for (const PlaceNeed& need : needs) {
    Place& place = places_[need.place];
    place.eager += need.eager;
    const uint64_t height = place.live + need.peak;
    const int64_t reach = static_cast<int64_t>(height) - place.raised;
    place.top = place.reaches.empty() ? reach : std::max(place.top, reach);
    place.reaches.push_back({number, reach});
    place.look();
  }
  return number;
}

void Admission::leave(std::span<const PlaceNeed> needs, uint64_t number) {
  ++version_;
  for (const PlaceNeed& need : needs) {
    Place& place = places_[need.place];
    PW_DCHECK(place.eager >= need.eager);
    place.eager -= need.eager;
    PW_DCHECK(!place.reaches.empty());
    int64_t height = place.reaches.front().height;
    if (place.reaches.front().number == number) {  // as a rule
      place.reaches.pop_front();
    } else {
      const auto at = std::find_if(place.reaches.begin(), place.reaches.end(),
                                   [&](const Reach& reach) { return reach.number == number; });
      PW_DCHECK(at != place.reaches.end());
      height = at->height;
      place.reaches.erase(at);
    }
    if (height < place.top || place.reaches.empty()) continue;
    int64_t top = place.reaches.front().height;
    for (const Reach& reach : place.reaches) {
      top = std::max(top, reach.height);
      if (top == place.top) break;
    }
    place.top = top;
  }
}

Verdict Admission::check_block(PlaceSetId set, uint64_t bytes, PlaceId* worst) const {
  Verdict verdict = Verdict::kFits;
  for (const PlaceId id : sets_[set]) {
    const Place& place = places_[id];
    Verdict here = Verdict::kFits;
    if (bytes > place.budget) {
      here = Verdict::kNever;
    } else if (place.live + bytes > place.budget) {
      here = Verdict::kHeld;
    } else if (place.is_claimed || std::max(place.height(), place.live) + place.eager + bytes > place.budget) {
      here = Verdict::kBusy;
    }
    if (here <= verdict) continue;
    verdict = here;
    if (worst != nullptr) *worst = id;
  }
  return verdict;
}

BlockId Admission::add_block(uint32_t client, uint32_t plan, PlaceSetId set, uint64_t bytes, bool is_early) {
  BlockId id;
  if (free_blocks_.empty()) {
    id = static_cast<BlockId>(blocks_.size());
    blocks_.emplace_back();
  } else {
    id = free_blocks_.back();
    free_blocks_.pop_back();
  }
  blocks_[id] = {client, plan, set, 1, bytes, false};
  for (const PlaceId place_id : sets_[set]) {
    Place& place = places_[place_id];
    place.live += bytes;
    if (!is_early) continue;  // the reach of the run that makes it has it, less what the run takes over
    place.raised += static_cast<int64_t>(bytes);
    place.look();
  }
  return id;
}

bool Admission::release(BlockId id) {
  Block& block = blocks_[id];
  PW_CHECK(block.references > 0);
  if (--block.references != 0) return false;
  if (!block.is_parked) {
    for (const PlaceId place : sets_[block.set]) {
      PW_DCHECK(places_[place].live >= block.bytes);
      places_[place].live -= block.bytes;
    }
  }
  free_blocks_.push_back(id);
  ++version_;
  return true;
}

void Admission::park(uint32_t client) {
  for (Block& block : blocks_) {
    if (block.references == 0 || block.client != client || block.is_parked) continue;
    block.is_parked = true;
    for (const PlaceId place : sets_[block.set]) places_[place].live -= block.bytes;
  }
  ++version_;
}

bool Admission::unpark(uint32_t client, PlaceId* worst) {
  std::vector<uint64_t> more(places_.size());
  for (const Block& block : blocks_) {
    if (block.references == 0 || block.client != client || !block.is_parked) continue;
    for (const PlaceId place : sets_[block.set]) more[place] += block.bytes;
  }
  for (PlaceId id = 0; id < places_.size(); ++id) {
    const Place& place = places_[id];
    if (more[id] == 0 || std::max(place.height(), place.live) + place.eager + more[id] <= place.budget) continue;
    *worst = id;
    return false;
  }
  for (PlaceId id = 0; id < places_.size(); ++id) {
    Place& place = places_[id];
    place.live += more[id];
    place.raised += static_cast<int64_t>(more[id]);
    place.look();
  }
  for (Block& block : blocks_) {
    if (block.references != 0 && block.client == client) block.is_parked = false;
  }
  return true;
}

void Admission::claim(std::span<const PlaceNeed> needs) {
  for (const PlaceNeed& need : needs) {
    if (places_[need.place].is_claimed) continue;
    places_[need.place].is_claimed = true;
    claimed_.push_back(need.place);
  }
}

void Admission::claim_set(PlaceSetId set) {
  for (const PlaceId place : sets_[set]) {
    const PlaceNeed need{place, 0, 0};
    claim({&need, 1});
  }
}

void Admission::clear_claims() {
  for (const PlaceId place : claimed_) places_[place].is_claimed = false;
  claimed_.clear();
}

std::vector<Admission::Holder> Admission::holders(PlaceId place, size_t count) const {
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> sums;
  for (const Block& block : blocks_) {
    if (block.references == 0 || block.bytes == 0 || block.is_parked) continue;
    const auto& places = sets_[block.set];
    if (std::find(places.begin(), places.end(), place) == places.end()) continue;
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
  std::vector<uint64_t> live(places_.size());
  for (const Block& block : blocks_) {
    if (block.references == 0 || block.is_parked) continue;
    for (const PlaceId place : sets_[block.set]) live[place] += block.bytes;
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    PW_CHECK(places_[i].live == live[i]);  // MEM-1
    const auto& reaches = places_[i].reaches;
    for (size_t k = 1; k < reaches.size(); ++k) PW_CHECK(reaches[k - 1].number < reaches[k].number);
    const auto top = std::max_element(reaches.begin(), reaches.end(),
                                      [](const Reach& a, const Reach& b) { return a.height < b.height; });
    if (top != reaches.end()) PW_CHECK(top->height == places_[i].top);
  }
}

}  // namespace pathways
