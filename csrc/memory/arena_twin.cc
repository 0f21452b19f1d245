#include "memory/arena_twin.h"

#include "memory/arena_block.h"

namespace pathways {

bool ArenaTwin::mirror(std::uint64_t offset, std::uint64_t bytes, std::span<const std::uint32_t> hosts,
                       std::uint64_t lease, std::uint64_t stamp) {
  if (offset < round_up(sizeof(Arena)) + Arena::kHeaderBytes || offset % Arena::kAlignment != 0 ||
      !holds(offset, 0, bytes) || hosts.empty()) {
    return false;
  }
  if (leased_.contains(offset)) return false;
  leased_[offset] = {offset, lease, bytes, stamp, {hosts.begin(), hosts.end()}};
  Arena::Block* block = arena_->block(offset - Arena::kHeaderBytes);
  std::uint64_t borrowers = 0, others = 0;
  for (const std::uint32_t host : hosts) host < Arena::kBorrowers ? borrowers |= bit_of(host) : ++others;
  block->bytes = Arena::kHeaderBytes + round_up(bytes);
  block->references.store(borrowers + others, std::memory_order_relaxed);
  block->become(BlockState::kLive);
  return true;
}

void ArenaTwin::reclaim(std::uint32_t host, std::uint64_t stamp) {
  const ArenaView view(arena_, bytes_);
  for (auto& [offset, block] : leased_) {
    const bool is_meant = block.stamp != 0 && block.stamp <= stamp && host < Arena::kBorrowers;
    if (is_meant && std::erase(block.hosts, host) != 0) (void)view.return_lease(offset, host);
  }
}

bool ArenaTwin::holds(std::uint64_t offset, std::uint64_t at, std::uint64_t bytes) const noexcept {
  return offset <= bytes_ && at <= bytes_ - offset && bytes <= bytes_ - offset - at;
}

std::byte* ArenaTwin::bytes_of(std::uint64_t offset, std::uint64_t lease, std::uint64_t at,
                               std::uint64_t bytes) const noexcept {
  const auto found = leased_.find(offset);
  if (found == leased_.end() || found->second.lease != lease || at > found->second.bytes ||
      bytes > found->second.bytes - at) {
    return nullptr;
  }
  return reinterpret_cast<std::byte*>(arena_) + offset + at;
}

std::vector<ArenaTwin::Returned> ArenaTwin::take_returned(const std::function<bool(const Returned&)>& is_busy) {
  std::vector<Returned> all;
  if (leased_.empty()) return all;
  // SYNC arena/drain: pairs with arena/return; the hosts are done with the payloads.
  std::uint64_t at = arena_->returned_.exchange(0, std::memory_order_acquire);
  for (size_t most = leased_.size(); at != 0 && most != 0; --most) {
    if (!leased_.contains(at + Arena::kHeaderBytes)) break;  // a host has written nonsense (TRUST-1)
    back_.push_back(at + Arena::kHeaderBytes);
    at = *static_cast<const volatile std::uint64_t*>(&arena_->block(at)->next_returned);
  }
  std::erase_if(back_, [&](std::uint64_t offset) {
    const auto found = leased_.find(offset);
    if (found == leased_.end()) return true;  // it was on the list twice (TRUST-1)
    if (is_busy(found->second)) return false;
    all.push_back(std::move(found->second));
    leased_.erase(found);
    return true;
  });
  return all;
}

}  // namespace pathways
