/// The header of an arena's block, and the word of its references: for arena.cc and received_arena.cc only.
#pragma once

#include <cstdint>

#include "base/cacheline.h"
#include "memory/arena.h"
#include "sync/atomic.h"

namespace pathways {

/// kFree -> kLive (allocate) -> kReturned (last release, any process) -> kFree (drain, owner).
/// kSentinel ends the region and never changes.
enum class BlockState : std::uint32_t {
  kFree = 0x46524545,
  kLive = 0x4c495645,
  kReturned = 0x52455455,
  kSentinel = 0x454e4421
};

/// The word of references: the count of references, and above it one bit per borrower.
inline constexpr unsigned kCountBits = 64 - Arena::kBorrowers;
inline constexpr std::uint64_t kMostReferences = (std::uint64_t{1} << kCountBits) - 1;
constexpr std::uint64_t bit_of(unsigned borrower) noexcept { return std::uint64_t{1} << (kCountBits + borrower); }

constexpr std::uint64_t round_up(std::uint64_t bytes) noexcept {
  return (bytes + kCacheLine - 1) & ~std::uint64_t{kCacheLine - 1};
}

struct alignas(kCacheLine) Arena::Block {
  std::uint64_t bytes;          // with this header; owner, under the lock; constant while live
  std::uint64_t before;         // bytes of the block before, 0 for the first; owner, under the lock
  std::uint64_t next;           // owner, under the lock: in the list of a free size class, or of the leased blocks
  std::uint64_t prev;           // likewise
  std::uint64_t next_returned;  // written by the last releaser, until the owner takes the list
  Atomic<std::uint64_t> references;
  Atomic<std::uint32_t> state;  // a BlockState
  std::uint64_t stamp;          // owner, under the lock: of the lease; 0: not leased out since allocate()

  /// `bytes`, read only once, because another process may write it meanwhile.
  [[nodiscard]] std::uint64_t was_bytes() const noexcept { return *static_cast<const volatile std::uint64_t*>(&bytes); }
  [[nodiscard]] bool is(BlockState wanted) const noexcept {
    return state.load(std::memory_order_relaxed) == static_cast<std::uint32_t>(wanted);
  }
  void become(BlockState next) noexcept { state.store(static_cast<std::uint32_t>(next), std::memory_order_relaxed); }
};

}  // namespace pathways
