/// ClientTwin: memory that stands for that of a client which is on another machine.
///
/// The link mirrors each block here that the client leases, and writes its bytes; the hosts of this machine, or the
/// links to other machines, use it as they would use the client's own. So LINK-3 holds at both ends: see `settle`.
///
/// Threading: one thread at a time (a link's lock); processes that map the segment meanwhile.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "link/frames.h"
#include "memory/arena_twin.h"
#include "memory/segment.h"
#include "messages/shared_segments.h"

namespace pathways {

class ClientTwin {
 public:
  /// `segment` holds a ClientBlock whose arena nobody has used.
  explicit ClientTwin(Segment segment);

  /// Mirrors a block for these hosts. `stamp`: of the lease, by which `reclaim` finds it; 0: it never does. What cannot
  /// be mirrored, because the client wrote nonsense, its hosts refuse.
  void mirror(const LeaseFrame& lease, std::span<const uint32_t> hosts, uint64_t stamp);
  /// Where bytes of a mirrored block lie; nullptr: nowhere.
  std::byte* bytes_of(uint64_t offset, uint64_t lease, uint64_t at, uint64_t bytes) const noexcept {
    return arena_.bytes_of(offset, lease, at, bytes);
  }
  struct Fetched {
    uint64_t offset, bytes, lease;
  };
  bool is_fetching(uint64_t token) const { return fetches_.contains(token); }
  /// A host's part of a fetch is over. When it was the last one: the block, unless the host failed. Its bytes go to the
  /// client before the token's completion does (LINK-3).
  std::optional<Fetched> settle(uint64_t token, bool is_done);
  /// No completion of this token counts any more.
  void fail(uint64_t token) { fetches_.erase(token); }
  /// The host is lost; the client takes back what it leased to it up to this stamp.
  void reclaim(uint32_t host, uint64_t stamp) { arena_.reclaim(host, stamp); }
  /// The blocks that all hosts have returned, each once; not those of a fetch that is not over, nor the lease `sent`,
  /// whose bytes are on their way: the memory may be another's afterwards (LINK-3).
  std::vector<ArenaTwin::Returned> take_returned(std::optional<uint64_t> sent);
  bool has_leases() const { return arena_.has_leases(); }
  const Segment& segment() const { return segment_; }

 private:
  struct Fetch {
    Fetched block;
    size_t left;  ///< hosts that have not answered
  };
  Segment segment_;
  ArenaTwin arena_;
  std::unordered_map<uint64_t, Fetch> fetches_;  ///< by token
};

}  // namespace pathways
