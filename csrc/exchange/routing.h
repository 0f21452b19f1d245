/// ShardRouting: the rows of one source shard, grouped by the target shard that they go to.
///
/// It takes O(rows log rows) time and O(rows) memory, whatever the number of target shards.
///
/// Threading: immutable once it is made.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace pathways {

/// How many rows one source shard has for one target shard.
struct Batch {
  uint32_t source, target, rows;
  uint64_t digest = 0;  ///< known routes: RouteDigest of these rows and their slots. Else 0.
  bool operator==(const Batch&) const = default;
};

/// A digest of some rows of a source shard and their slots in a target shard, added in ascending order of the slots.
/// Two hosts compare it to see that they mean the same rows and slots. Different routes have the same digest with a
/// probability of about 2^-64; then rows still go to slots that are there, but to wrong ones.
class RouteDigest {
 public:
  void add(uint32_t slot, uint32_t row) {
    uint64_t x = (value_ ^ (uint64_t{slot} << 32 | row)) + 0x9e3779b97f4a7c15u;  // the mixer of splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    value_ = x ^ (x >> 31);
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0;
};

/// A row whose destination is no shard.
struct BadDestination {
  uint32_t source, row;
  int32_t destination;
  bool operator==(const BadDestination&) const = default;
};

class ShardRouting {
 public:
  /// `destinations`: one per row; `targets`: how many target shards there are. Rows for `unsent` go nowhere.
  ShardRouting(uint32_t source, std::span<const int32_t> destinations, uint32_t targets,
               std::optional<int32_t> unsent = {});

  /// Known routes. `slots`: one per row: target * capacity + slot, or -1 for a row that goes nowhere. A slot that is
  /// not there is bad.
  static ShardRouting along(uint32_t source, std::span<const int32_t> slots, uint32_t targets, uint32_t capacity);

  uint32_t source() const { return source_; }
  uint32_t row_count() const { return row_count_; }
  /// The first row whose destination is no shard. Then there are no batches.
  const std::optional<BadDestination>& bad() const { return bad_; }
  /// By target, ascending; each has at least one row.
  std::span<const Batch> batches() const { return batches_; }
  /// The rows of the batch for `target`, ascending by row, or by slot if routes are known; none if there is no such
  /// batch.
  std::span<const uint32_t> rows_for(uint32_t target) const;
  /// Of known routes: the slots of these rows. Else none.
  std::span<const uint32_t> slots_for(uint32_t target) const;

 private:
  ShardRouting(uint32_t source, size_t rows);
  void add(uint32_t target, uint32_t row);
  std::span<const uint32_t> part_for(uint32_t target, const std::vector<uint32_t>& items) const;

  uint32_t source_, row_count_;
  std::optional<BadDestination> bad_;
  std::vector<Batch> batches_;
  std::vector<uint32_t> begins_;  ///< per batch: its first place in rows_
  std::vector<uint32_t> rows_;
  std::vector<uint32_t> slots_;  ///< of known routes, per place in rows_
};

}  // namespace pathways
