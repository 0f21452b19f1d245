/// ReceivedArena: memory for blocks that come from another machine by value, in a segment that hosts here map.
///
/// Hosts use a block as they use a client's own: through an ArenaView, with leases that they return. The memory of a
/// block is free again when its maker has dropped it and all hosts have returned their leases.
///
/// TRUST-1: hosts can write the headers of the blocks. So what is free and what is not is known privately: a host that
/// writes nonsense can end the hosts' use of a block of this client early, and nothing else.
///
/// Threading: one thread at a time; the hosts' views meanwhile in other processes.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "memory/arena.h"

namespace pathways {

class ReceivedArena {
 public:
  ReceivedArena() = default;
  /// `arena`: a fresh one in `bytes` bytes of memory, of which nobody allocates.
  ReceivedArena(Arena* arena, std::uint64_t bytes);

  /// Makes a block of at least `bytes` bytes with a lease for each of these hosts; `stamp`: of the leases, by which
  /// `reclaim` finds them (0: it never does). Returns its offset; 0: there is no room, or no host.
  [[nodiscard]] std::uint64_t make(std::uint64_t bytes, std::span<const std::uint32_t> hosts, std::uint64_t stamp);
  /// Where a block lies.
  [[nodiscard]] std::byte* at(std::uint64_t offset) const noexcept {
    return reinterpret_cast<std::byte*>(arena_) + offset;
  }
  /// The maker uses the block no more. At most once for each block.
  void drop(std::uint64_t offset);
  /// This host is lost: what it got up to this stamp, it returns no more.
  void reclaim(std::uint32_t host, std::uint64_t stamp);
  /// Finds out what is free again. Returns the bytes that are not.
  std::uint64_t collect();
  [[nodiscard]] std::uint64_t bytes_in_use() const noexcept { return in_use_; }
  /// Gives pages of free memory that blocks have used back to the system, a few megabytes per call. False: there are
  /// none left.
  bool trim();
  [[nodiscard]] bool can_trim() const noexcept { return !untrimmed_.empty(); }

 private:
  struct Block {
    std::uint64_t bytes;  ///< with the header
    std::uint64_t stamp;
    std::vector<std::uint32_t> hosts;  ///< those below Arena::kBorrowers that `reclaim` may find
    bool is_held = true;               ///< by its maker
    bool is_returned = false;          ///< by all hosts
  };
  void free_if_over(std::uint64_t offset, const Block& block);
  void find_returned();
  void add_free(std::uint64_t begin, std::uint64_t bytes);
  void remove_free(std::uint64_t begin, std::uint64_t bytes);

  Arena* arena_ = nullptr;
  std::uint64_t bytes_ = 0, in_use_ = 0;
  std::map<std::uint64_t, std::uint64_t> free_;                     ///< begin and bytes; no two are neighbours
  std::set<std::pair<std::uint64_t, std::uint64_t>> free_by_size_;  ///< the same: bytes and begin
  std::map<std::uint64_t, Block> blocks_;                           ///< those in use, by the offset of the payload
  std::map<std::uint64_t, std::uint64_t> untrimmed_;  ///< begin and end of memory that was used since it was trimmed
};

}  // namespace pathways
