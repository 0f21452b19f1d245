#include "sequencer/admission.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/status.h"

namespace pathways {

Admission::Admission(std::vector<uint64_t> budgets, uint32_t devices)
    : spaces_(budgets.begin(), budgets.end()),
      clients_(static_cast<uint32_t>(budgets.size()), devices),
      is_claimed_(budgets.size()) {}

SpaceSetId Admission::add_set(std::vector<SpaceId> spaces) {
  std::sort(spaces.begin(), spaces.end());
  if (!spaces.empty() && spaces.back() >= spaces_.size()) {
    throw Error(Status::kInvalid,
                "a set names memory space " + std::to_string(spaces.back()) + " of " + std::to_string(spaces_.size()));
  }
  if (std::adjacent_find(spaces.begin(), spaces.end()) != spaces.end()) {
    throw Error(Status::kInvalid, "a set names a memory space twice");
  }
  sets_.push_back(std::move(spaces));
  return static_cast<SpaceSetId>(sets_.size() - 1);
}

Verdict Admission::check(std::span<const SpaceNeed> needs, SpaceId* worst) const {
  Verdict verdict = Verdict::kFits;
  for (const SpaceNeed& need : needs) {
    const Verdict here = spaces_[need.space].judge(need.peak, need.eager, is_claimed(need.space));
    if (here <= verdict) continue;
    verdict = here;
    if (worst != nullptr) *worst = need.space;
  }
  return verdict;
}

uint64_t Admission::enter(std::span<const SpaceNeed> needs, uint32_t client) {
  const uint64_t number = next_number_++;
  for (const SpaceNeed& need : needs) spaces_[need.space].enter(need, number);
  clients_.enter(client, needs, number);
  return number;
}

void Admission::leave(std::span<const SpaceNeed> needs, uint64_t number, uint32_t client) {
  ++version_;
  for (const SpaceNeed& need : needs) spaces_[need.space].leave(need, number);
  clients_.leave(client, needs, number);
}

Verdict Admission::check_block(SpaceSetId set, uint64_t bytes, SpaceId* worst) const {
  Verdict verdict = Verdict::kFits;
  for (const SpaceId id : sets_[set]) {
    const Verdict here = spaces_[id].judge_early(bytes, is_claimed(id));
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
  for (const SpaceId space : sets_[set]) spaces_[space].add(bytes, is_early);
  clients_.add(client, sets_[set], bytes, is_early);
  return id;
}

bool Admission::release(BlockId id) {
  Block& block = blocks_[id];
  PW_CHECK(block.references > 0);
  if (--block.references != 0) return false;
  if (!block.is_offloaded) {
    for (const SpaceId space : sets_[block.set]) spaces_[space].remove(block.bytes);
    clients_.remove(block.client, sets_[block.set], block.bytes);
  }
  free_blocks_.push_back(id);
  ++version_;
  return true;
}

BlockId Admission::separate(BlockId id) {
  const Block block = blocks_[id];
  PW_CHECK(block.is_offloaded);
  const BlockId separated = add_block(block.client, block.plan, block.set, block.bytes, true);
  release(id);
  return separated;
}

void Admission::offload(uint32_t client) {
  for (Block& block : blocks_) {
    if (block.references == 0 || block.client != client || block.is_offloaded) continue;
    block.is_offloaded = true;
    for (const SpaceId space : sets_[block.set]) spaces_[space].remove(block.bytes);
    clients_.remove(client, sets_[block.set], block.bytes);
  }
  ++version_;
}

std::vector<uint64_t> Admission::offloaded(uint32_t client) const {
  std::vector<uint64_t> bytes(spaces_.size());
  for (const Block& block : blocks_) {
    if (block.references == 0 || block.client != client || !block.is_offloaded) continue;
    for (const SpaceId space : sets_[block.set]) bytes[space] += block.bytes;
  }
  return bytes;
}

std::optional<SpaceId> Admission::lacks_room(uint32_t client) const {
  const std::vector<uint64_t> more = offloaded(client);
  for (SpaceId id = 0; id < spaces_.size(); ++id) {
    // A claim keeps new work off, not what was here before.
    if (more[id] != 0 && spaces_[id].judge_early(more[id]) != Verdict::kFits) return id;
  }
  return std::nullopt;
}

bool Admission::restore(uint32_t client, SpaceId* worst) {
  if (const std::optional<SpaceId> space = lacks_room(client)) {
    *worst = *space;
    return false;
  }
  const std::vector<uint64_t> more = offloaded(client);
  for (SpaceId id = 0; id < spaces_.size(); ++id) spaces_[id].add(more[id], true);
  for (Block& block : blocks_) {
    if (block.references == 0 || block.client != client || !block.is_offloaded) continue;
    block.is_offloaded = false;
    clients_.add(client, sets_[block.set], block.bytes, true);
  }
  return true;
}

void Admission::claim(std::span<const SpaceNeed> needs) {
  for (const SpaceNeed& need : needs) {
    if (is_claimed(need.space)) continue;
    is_claimed_[need.space] = 1;
    claimed_.push_back(need.space);
  }
}

void Admission::claim_set(SpaceSetId set) {
  for (const SpaceId space : sets_[set]) {
    const SpaceNeed need{space, 0, 0};
    claim({&need, 1});
  }
}

/// What waits for this client's own buffers may have become admissible.
void Admission::set_quota(uint32_t client, uint64_t bytes) {
  clients_.set_quota(client, bytes, next_number_);
  ++version_;
}

void Admission::clear_claims() {
  for (const SpaceId space : claimed_) is_claimed_[space] = 0;
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
    PW_CHECK(spaces_[i].live() == live[i]);  // MEM-1
    spaces_[i].validate();
  }
  clients_.validate();
  for (SpaceId space = 0; space < spaces_.size(); ++space) {
    uint64_t sum = 0;
    for (const uint32_t client : clients_.holders(space)) sum += clients_.held(client, space);
    PW_CHECK(sum == live[space]);
  }
}

}  // namespace pathways
