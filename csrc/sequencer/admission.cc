#include "sequencer/admission.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/status.h"

namespace pathways {

namespace {

std::vector<uint64_t> limited(std::vector<uint64_t> budgets) {
  for (uint64_t& bytes : budgets) bytes = std::min(bytes, kUnlimited);
  return budgets;
}

void check_sorted(std::span<const SpaceId> spaces, uint32_t count, const std::string& what) {
  if (!spaces.empty() && spaces.back() >= count) {
    throw Error(Status::kInvalid,
                what + " names memory space " + std::to_string(spaces.back()) + " of " + std::to_string(count));
  }
  if (std::adjacent_find(spaces.begin(), spaces.end()) != spaces.end()) {
    throw Error(Status::kInvalid, what + " names a memory space twice");
  }
}

}  // namespace

Admission::Admission(std::vector<uint64_t> budgets, uint32_t devices)
    : classes_(limited(std::move(budgets)), devices) {}

// --------------------------------------------------------------------------------------------------------- classes

/// MEM-8: a new class has the counts of the class that it was split off, in each place that counts by class.
void Admission::refine(std::span<const SpaceId> spaces) {
  for (const auto [from, to] : classes_.refine(spaces)) {
    const SpaceId first = classes_.first(to);
    PW_DCHECK(to == accounts_.size());
    accounts_.push_back(from == kNoClass ? MemoryAccount(classes_.budget(first)) : MemoryAccount(accounts_[from]));
    clients_.add_class(from, classes_.is_device(first));
    is_claimed_.push_back(0);
    if (from != kNoClass && is_claimed(from)) claim_class(to);
  }
}

SpaceSetId Admission::add_set(std::vector<SpaceId> spaces) {
  std::sort(spaces.begin(), spaces.end());
  check_sorted(spaces, space_count(), "a set");
  refine(spaces);
  std::vector<ClassPart> parts;
  for (const SpaceId space : spaces) {
    const ClassId id = classes_.class_of(space);
    if (classes_.first(id) == space) parts.push_back({id});
  }
  sets_.emplace_back(std::move(parts), classes_);
  return static_cast<SpaceSetId>(sets_.size() - 1);
}

bool Admission::is_in(SpaceSetId set, SpaceId space) const {
  if (!is_booked(space)) return false;
  const ClassId id = classes_.class_of(space);
  const auto& parts = classes_of(set);
  const auto at = std::lower_bound(parts.begin(), parts.end(), classes_.first(id),
                                   [&](ClassPart part, SpaceId first) { return classes_.first(part.id) < first; });
  return at != parts.end() && at->id == id;
}

RunNeeds Admission::by_class(std::vector<SpaceNeed> needs) {
  std::sort(needs.begin(), needs.end(), [](const SpaceNeed& a, const SpaceNeed& b) { return a.space < b.space; });
  std::vector<SpaceId> spaces;
  std::map<std::pair<uint64_t, uint64_t>, std::vector<SpaceId>> alike;  // by peak and eager bytes
  for (const auto& [space, peak, eager] : needs) {
    spaces.push_back(space);
    alike[{peak, eager}].push_back(space);
  }
  check_sorted(spaces, space_count(), "a plan");
  for (const auto& each : alike) refine(each.second);
  std::vector<ClassNeed> found;
  for (const auto& [space, peak, eager] : needs) {
    const ClassId id = classes_.class_of(space);
    if (classes_.first(id) == space) found.push_back({id, peak, eager});
  }
  return {std::move(found), classes_};
}

void Admission::set_budget(std::vector<SpaceId> spaces, uint64_t bytes) {
  bytes = std::min(bytes, kUnlimited);
  ++version_;
  std::sort(spaces.begin(), spaces.end());
  check_sorted(spaces, space_count(), "a budget");
  std::erase_if(spaces, [&](SpaceId space) { return budget(space) == bytes; });
  std::vector<SpaceId> booked;
  std::copy_if(spaces.begin(), spaces.end(), std::back_inserter(booked), [&](SpaceId each) { return is_booked(each); });
  refine(booked);
  classes_.set_budget(spaces, bytes);
  for (const SpaceId space : booked) accounts_[classes_.class_of(space)].set_budget(bytes);
}

// ----------------------------------------------------------------------------------------------------- runs, blocks

Verdict Admission::check(const RunNeeds& needs, SpaceId* worst) const {
  Verdict verdict = Verdict::kFits;
  for (const ClassNeed& need : needs.at(classes_)) {
    const Verdict here = accounts_[need.id].judge(need.peak, need.eager, is_claimed(need.id));
    if (here <= verdict) continue;
    verdict = here;
    if (worst != nullptr) *worst = classes_.first(need.id);
  }
  return verdict;
}

uint64_t Admission::enter(const RunNeeds& needs, uint32_t client) {
  const uint64_t number = next_number_++;
  const auto& now = needs.at(classes_);
  for (const ClassNeed& need : now) accounts_[need.id].enter(need.peak, need.eager, number);
  if (clients_.has_quotas()) clients_.enter(client, now, number);
  return number;
}

void Admission::leave(const RunNeeds& needs, uint64_t number, uint32_t client) {
  ++version_;
  const auto& now = needs.at(classes_);
  for (const ClassNeed& need : now) accounts_[need.id].leave(need.eager, number);
  if (clients_.has_quotas()) clients_.leave(client, now, number);
}

Verdict Admission::check_block(SpaceSetId set, uint64_t bytes, SpaceId* worst) const {
  Verdict verdict = Verdict::kFits;
  for (const auto [id] : classes_of(set)) {
    const Verdict here = accounts_[id].judge_early(bytes, is_claimed(id));
    if (here <= verdict) continue;
    verdict = here;
    if (worst != nullptr) *worst = classes_.first(id);
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
  const auto& parts = classes_of(set);
  for (const auto [part] : parts) accounts_[part].add(bytes, is_early);
  clients_.add(client, parts, bytes, is_early);
  return id;
}

bool Admission::release(BlockId id) {
  Block& block = blocks_[id];
  PW_CHECK(block.references > 0);
  if (--block.references != 0) return false;
  if (!block.is_offloaded) {
    const auto& parts = classes_of(block.set);
    for (const auto [part] : parts) accounts_[part].remove(block.bytes);
    clients_.remove(block.client, parts, block.bytes);
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
    const auto& parts = classes_of(block.set);
    for (const auto [part] : parts) accounts_[part].remove(block.bytes);
    clients_.remove(client, parts, block.bytes);
  }
  ++version_;
}

/// Bytes on each space of each class.
std::vector<uint64_t> Admission::offloaded(uint32_t client) const {
  std::vector<uint64_t> bytes(accounts_.size());
  for (const Block& block : blocks_) {
    if (block.references == 0 || block.client != client || !block.is_offloaded) continue;
    for (const auto [id] : classes_of(block.set)) bytes[id] += block.bytes;
  }
  return bytes;
}

std::optional<SpaceId> Admission::lacks_room(uint32_t client) const {
  const std::vector<uint64_t> more = offloaded(client);
  std::optional<SpaceId> found;
  for (ClassId id = 0; id < more.size(); ++id) {
    // A claim keeps new work off, not what was here before.
    if (more[id] == 0 || accounts_[id].judge_early(more[id]) == Verdict::kFits) continue;
    found = std::min(found.value_or(classes_.first(id)), classes_.first(id));
  }
  return found;
}

bool Admission::restore(uint32_t client, SpaceId* worst) {
  if (const std::optional<SpaceId> space = lacks_room(client)) {
    *worst = *space;
    return false;
  }
  const std::vector<uint64_t> more = offloaded(client);
  for (ClassId id = 0; id < more.size(); ++id) accounts_[id].add(more[id], true);
  for (Block& block : blocks_) {
    if (block.references == 0 || block.client != client || !block.is_offloaded) continue;
    block.is_offloaded = false;
    clients_.add(client, classes_of(block.set), block.bytes, true);
  }
  return true;
}

void Admission::claim(const RunNeeds& needs) {
  for (const ClassNeed& need : needs.at(classes_)) claim_class(need.id);
}

void Admission::claim_set(SpaceSetId set) {
  for (const auto [id] : classes_of(set)) claim_class(id);
}

void Admission::claim_class(ClassId id) {
  if (is_claimed(id)) return;
  is_claimed_[id] = 1;
  claimed_.push_back(id);
}

/// What waits for this client's own buffers may have become admissible.
void Admission::set_quota(uint32_t client, uint64_t bytes) {
  clients_.set_quota(client, bytes, next_number_);
  ++version_;
}

void Admission::clear_claims() {
  for (const ClassId id : claimed_) is_claimed_[id] = 0;
  claimed_.clear();
}

std::vector<Admission::Holder> Admission::holders(SpaceId space, size_t count) const {
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> sums;
  for (const Block& block : blocks_) {
    if (block.references == 0 || block.bytes == 0 || block.is_offloaded) continue;
    if (!is_in(block.set, space)) continue;
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
  classes_.validate();
  std::vector<uint64_t> live(accounts_.size());
  PW_CHECK(classes_.count() == accounts_.size() && is_claimed_.size() == accounts_.size());
  for (const Block& block : blocks_) {
    if (block.references == 0 || block.is_offloaded) continue;
    for (const auto [id] : classes_of(block.set)) live[id] += block.bytes;
  }
  clients_.validate();
  for (ClassId id = 0; id < accounts_.size(); ++id) {
    PW_CHECK(accounts_[id].live() == live[id]);                               // MEM-1
    PW_CHECK(accounts_[id].budget() == classes_.budget(classes_.first(id)));  // MEM-8
    accounts_[id].validate();
    uint64_t sum = 0;
    for (const uint32_t client : clients_.holders(id)) sum += clients_.held(client, id);
    PW_CHECK(sum == live[id]);
  }
}

}  // namespace pathways
