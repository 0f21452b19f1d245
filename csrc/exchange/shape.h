/// ExchangeShape: what is fixed before an exchange runs: where the shards are, and how many rows a target shard takes.
///
/// An exchange moves rows. Each row of the source shards names the target shard that it goes to, at run time. The
/// result is defined by the order of the rows alone: of the rows that go to a target shard, ordered by source shard and
/// then by row, number n gets slot n; rows beyond the capacity are an overflow. So the hosts' timing changes nothing.
///
/// Rows may also go along known routes, for example back to where they came from. Then each row names its slot, each
/// slot names its row, and both sides must agree.
///
/// Threading: immutable once it is made.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace pathways {

/// The host of each shard, as ranges of shards: its size is that of the number of hosts (COST-2).
class ShardHosts {
 public:
  /// Shards from `first` to the next range's are on `host`.
  struct Range {
    uint32_t first, host;
  };

  /// Throws Error(kInvalid) if the ranges are not ascending from 0, or one of them is empty.
  ShardHosts(uint32_t shards, std::vector<Range> ranges) : shards_(shards), ranges_(std::move(ranges)) {
    uint32_t least = 0;
    for (const Range& range : ranges_) {
      if (range.first >= shards || (least == 0) != (range.first == 0) || range.first < least) {
        throw Error(Status::kInvalid, "shard ranges must ascend from 0 and lie below " + std::to_string(shards) +
                                          "; one begins at " + std::to_string(range.first));
      }
      least = range.first + 1;
    }
    if (ranges_.empty()) throw Error(Status::kInvalid, "a slice has at least one shard");
    std::map<uint32_t, uint32_t> counts;
    for (size_t i = 0; i < ranges_.size(); ++i) {
      counts[ranges_[i].host] += (i + 1 < ranges_.size() ? ranges_[i + 1].first : shards) - ranges_[i].first;
    }
    counts_.assign(counts.begin(), counts.end());
  }

  uint32_t shards() const { return shards_; }
  std::span<const Range> ranges() const { return ranges_; }
  /// How many of the shards are on a host.
  uint32_t count_on(uint32_t host) const {
    const auto at = std::lower_bound(counts_.begin(), counts_.end(), std::pair<uint32_t, uint32_t>{host, 0});
    return at != counts_.end() && at->first == host ? at->second : 0;
  }
  /// The hosts, ascending, and how many shards each has.
  std::span<const std::pair<uint32_t, uint32_t>> counts() const { return counts_; }
  /// `shard`: below shards().
  uint32_t host_of(uint32_t shard) const {
    return std::prev(std::upper_bound(ranges_.begin(), ranges_.end(), shard,
                                      [](uint32_t at, const Range& range) { return at < range.first; }))
        ->host;
  }
  /// Which of its host's shards it is: how many of them are below `shard`, which is below shards().
  uint32_t place_of(uint32_t shard) const {
    const uint32_t host = host_of(shard);
    uint32_t below = 0;
    for (size_t i = 0; i < ranges_.size() && ranges_[i].first < shard; ++i) {
      const uint32_t end = i + 1 < ranges_.size() ? std::min(ranges_[i + 1].first, shard) : shard;
      if (ranges_[i].host == host) below += end - ranges_[i].first;
    }
    return below;
  }

 private:
  uint32_t shards_;
  std::vector<Range> ranges_;
  std::vector<std::pair<uint32_t, uint32_t>> counts_;
};

/// What happens to rows beyond the capacity: they fail the exchange, or they stay where they are.
enum class Overflow : uint8_t { kError, kDrop };

/// kChosen: rows name shards. kKnown: rows name slots, and slots name rows.
enum class Routes : uint8_t { kChosen, kKnown };

struct ExchangeShape {
  ShardHosts sources, targets;
  uint32_t capacity;  ///< rows of a target shard
  Overflow overflow;
  std::optional<int32_t> unsent = {};  ///< the destination of rows that go nowhere
  Routes routes = Routes::kChosen;
  uint32_t source_rows = 0;  ///< rows of each source shard; routing needs it for known routes only

  bool has_part(uint32_t host) const { return sources.count_on(host) + targets.count_on(host) != 0; }
  /// The hosts of both slices, ascending.
  std::vector<uint32_t> hosts() const {
    std::vector<uint32_t> all;
    for (const ShardHosts* side : {&sources, &targets}) {
      for (const auto& count : side->counts()) all.push_back(count.first);
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    return all;
  }
};

}  // namespace pathways
