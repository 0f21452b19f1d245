#include "link/received_arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "memory/arena_block.h"

namespace pathways {
namespace {

constexpr std::uint64_t kMostTrimmed = std::uint64_t{4} << 20;

}  // namespace

ReceivedArena::ReceivedArena(Arena* arena, std::uint64_t bytes) : arena_(arena), bytes_(bytes) {
  const std::uint64_t begin = round_up(sizeof(Arena));
  if (bytes > begin) add_free(begin, (bytes - begin) / kCacheLine * kCacheLine);
}

std::uint64_t ReceivedArena::make(std::uint64_t bytes, std::span<const std::uint32_t> hosts, std::uint64_t stamp) {
  if (bytes > bytes_ || hosts.empty()) return 0;
  const std::uint64_t whole = Arena::kHeaderBytes + round_up(std::max(bytes, std::uint64_t{1}));
  auto found = free_by_size_.lower_bound({whole, 0});
  if (found == free_by_size_.end()) {
    (void)collect();
    found = free_by_size_.lower_bound({whole, 0});
    if (found == free_by_size_.end()) return 0;
  }
  const auto [size, begin] = *found;
  remove_free(begin, size);
  if (size != whole) add_free(begin + whole, size - whole);
  in_use_ += whole;
  const std::uint64_t offset = begin + Arena::kHeaderBytes;
  Block& made = blocks_[offset] = {whole, stamp, {}};
  std::uint64_t references = 0;
  for (const std::uint32_t host : hosts) {
    references += host < Arena::kBorrowers ? bit_of(host) : 1;
    if (host < Arena::kBorrowers) made.hosts.push_back(host);
  }
  Arena::Block* block = arena_->block(begin);
  block->bytes = whole;
  block->references.store(references, std::memory_order_relaxed);
  block->become(BlockState::kLive);
  return offset;
}

void ReceivedArena::drop(std::uint64_t offset) {
  const auto found = blocks_.find(offset);
  if (found == blocks_.end()) return;
  found->second.is_held = false;
  free_if_over(offset, found->second);
}

void ReceivedArena::reclaim(std::uint32_t host, std::uint64_t stamp) {
  const ArenaView view(arena_, bytes_);
  for (auto& [offset, block] : blocks_) {
    const bool is_meant = block.stamp != 0 && block.stamp <= stamp;
    if (is_meant && std::erase(block.hosts, host) != 0) (void)view.return_lease(offset, host);
  }
}

std::uint64_t ReceivedArena::collect() {
  if (blocks_.empty()) return in_use_;
  // SYNC arena/drain: pairs with arena/return; the hosts are done with the payloads.
  std::uint64_t begin = arena_->returned_.exchange(0, std::memory_order_acquire);
  while (begin != 0) {
    const auto found = blocks_.find(begin + Arena::kHeaderBytes);
    if (found == blocks_.end() || std::exchange(found->second.is_returned, true)) {
      find_returned();  // a host has written nonsense (TRUST-1)
      break;
    }
    const std::uint64_t next = *static_cast<const volatile std::uint64_t*>(&arena_->block(begin)->next_returned);
    free_if_over(found->first, found->second);
    begin = next;
  }
  return in_use_;
}

/// Finds what all hosts have returned without the list that they make of it.
void ReceivedArena::find_returned() {
  for (auto at = blocks_.begin(); at != blocks_.end();) {
    auto& [offset, block] = *at++;
    // SYNC arena/drain: as above.
    const auto& references = arena_->block(offset - Arena::kHeaderBytes)->references;
    block.is_returned = block.is_returned || references.load(std::memory_order_acquire) == 0;
    free_if_over(offset, block);
  }
}

void ReceivedArena::free_if_over(std::uint64_t offset, const Block& block) {
  if (block.is_held || !block.is_returned) return;
  std::uint64_t begin = offset - Arena::kHeaderBytes, bytes = block.bytes;
  arena_->block(begin)->become(BlockState::kFree);
  in_use_ -= bytes;
  std::uint64_t& end = untrimmed_[begin];
  end = std::max(end, begin + bytes);
  if (const auto after = free_.find(begin + bytes); after != free_.end()) {
    const std::uint64_t more = after->second;
    remove_free(begin + bytes, more);
    bytes += more;
  }
  if (auto before = free_.lower_bound(begin); before != free_.begin()) {
    --before;
    const auto [first, size] = *before;
    if (first + size == begin) {
      remove_free(first, size);
      begin = first;
      bytes += size;
    }
  }
  add_free(begin, bytes);
  blocks_.erase(offset);
}

void ReceivedArena::add_free(std::uint64_t begin, std::uint64_t bytes) {
  free_[begin] = bytes;
  free_by_size_.emplace(bytes, begin);
}

void ReceivedArena::remove_free(std::uint64_t begin, std::uint64_t bytes) {
  free_.erase(begin);
  free_by_size_.erase({bytes, begin});
}

bool ReceivedArena::trim() {
  static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto base = reinterpret_cast<std::uintptr_t>(arena_);
  while (!untrimmed_.empty()) {
    const auto used = untrimmed_.extract(untrimmed_.begin());
    const auto [begin, end] = std::pair(used.key(), used.mapped());
    auto piece = free_.upper_bound(begin);
    if (piece != free_.begin() && std::prev(piece)->first + std::prev(piece)->second > begin) --piece;
    if (piece == free_.end() || piece->first >= end) continue;  // it is in use again
    const std::uint64_t stop = piece->first + piece->second;
    if (stop < end) untrimmed_[stop] = std::max(untrimmed_[stop], end);
    // The pages of what was used, of those that are free as a whole.
    const std::uintptr_t low = (base + piece->first + page - 1) / page * page, high = (base + stop) / page * page;
    const std::uintptr_t first = std::max(low, (base + begin) / page * page);
    const std::uintptr_t last =
        std::min({high, (base + std::min(end, stop) + page - 1) / page * page, first + kMostTrimmed});
    if (first >= last) continue;
    // MADV_REMOVE frees the pages of shared memory for all processes. Private memory supports MADV_DONTNEED only.
    auto* pages = reinterpret_cast<void*>(first);
    if (::madvise(pages, last - first, MADV_REMOVE) != 0) (void)::madvise(pages, last - first, MADV_DONTNEED);
    if (last - base < std::min(end, stop))
      untrimmed_[last - base] = std::max(untrimmed_[last - base], std::min(end, stop));
    return true;
  }
  return false;
}

}  // namespace pathways
