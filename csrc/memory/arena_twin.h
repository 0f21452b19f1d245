/// ArenaTwin: an arena that repeats blocks of an arena on another machine, at the same offsets.
///
/// The link between the machines mirrors a block here when it brings the block's bytes. Hosts of this machine use the
/// mirrored block like the original: through an ArenaView, with leases that they return. When all of them have returned
/// theirs, `take_returned` says so, and the link returns the leases in the original.
///
///   ARENA-6 (mirrored)  a mirrored block is reported as returned once, after each of its hosts has returned its lease.
///
/// TRUST-1: hosts can write the headers of the blocks. So the twin keeps privately which blocks it has mirrored, and
/// reports each of them at most once.
///
/// Threading: one thread at a time; the hosts' views meanwhile in other processes.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <unordered_map>
#include <vector>

#include "memory/arena.h"

namespace pathways {

class ArenaTwin {
 public:
  ArenaTwin() = default;
  /// `arena`: a fresh one in `bytes` bytes of memory, of which nobody allocates.
  ArenaTwin(Arena* arena, std::uint64_t bytes) : arena_(arena), bytes_(bytes) {}

  /// Makes a block of `bytes` bytes at `offset`, with a lease for each of these hosts; `lease` is the lease's number,
  /// `stamp` its stamp in the arena itself (0: `reclaim` does not find it). False, and nothing happens: it does not lie
  /// in the arena, or it is there already.
  [[nodiscard]] bool mirror(std::uint64_t offset, std::uint64_t bytes, std::span<const std::uint32_t> hosts,
                            std::uint64_t lease, std::uint64_t stamp = 0);
  /// The arena's owner takes back what it leased to this host, which is lost, up to this stamp (ARENA-5).
  void reclaim(std::uint32_t host, std::uint64_t stamp);
  /// Where `bytes` bytes of a mirrored block lie, from `at` on. nullptr: not inside of the block, or it was mirrored
  /// for another lease, or it was taken as returned.
  [[nodiscard]] std::byte* bytes_of(std::uint64_t offset, std::uint64_t lease, std::uint64_t at,
                                    std::uint64_t bytes) const noexcept;

  struct Returned {
    std::uint64_t offset, lease, bytes, stamp;
    std::vector<std::uint32_t> hosts;  ///< to which it was leased, but those of `reclaim`
  };
  /// The blocks that all hosts have returned, each once. A block whose lease `is_busy` stays mirrored, and comes later.
  std::vector<Returned> take_returned(const std::function<bool(const Returned&)>& is_busy);
  [[nodiscard]] bool has_leases() const noexcept { return !leased_.empty(); }

 private:
  [[nodiscard]] bool holds(std::uint64_t offset, std::uint64_t at, std::uint64_t bytes) const noexcept;

  Arena* arena_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::unordered_map<std::uint64_t, Returned> leased_;  ///< by offset: what is mirrored
  std::vector<std::uint64_t> back_;                     ///< offsets of those that all hosts have returned
};

}  // namespace pathways
