/// The exchanges of rows in a host's plan: where the shards of both ends are, and how many rows a target shard takes.
///
/// A node kExchange sends each row to the shard that the program computes for it; kPermute sends rows along known
/// routes. Inputs, where the host has source shards: the values, and their destinations (kPermute: their slots). Where
/// it has target shards: of kPermute, the numbers of the rows that come. Outputs, where the host has target shards: the
/// rows; of kExchange, also their numbers, how many there are, and how many were sent. Of kExchange, where it has
/// source shards, last: the slots.
///
/// `Exchanges` is the part of a `Plan` that knows the shapes. A plan without exchanges has an empty one.
///
/// Threading: immutable after the plan was parsed; any thread reads.
///
/// Invariant; `Plan::parse` refuses a violation:
///   PLAN-6  exchanges: node number k of these kinds has record k, and no record is left over. The host has a part in
///           it: as many devices at each end as shards, and the values above. Each slot and each number of a row is an
///           int32. An exchange has no predicate: all of its hosts take part in it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "exchange/shape.h"

namespace pathways {

class Plan;

/// An ExchangeShape. All hosts of the exchange have the same, but for the places of the words.
struct ExchangeRecord {
  uint32_t capacity;     ///< rows of a target shard
  uint32_t source_rows;  ///< rows of a source shard
  uint32_t source_shards, target_shards;
  uint32_t source_begin, source_count;  ///< words of the source's ranges: first shard, host, first shard, ...
  uint32_t target_begin, target_count;  ///< the same of the target's
  uint32_t overflow;                    ///< an Overflow; kPermute: kError
  uint32_t has_unsent;                  ///< 1: `unsent` is the destination of rows that go nowhere. kPermute: 0
  int32_t unsent;                       ///< 0 without has_unsent
  uint32_t padding;                     ///< 0
};
static_assert(sizeof(ExchangeRecord) == 48);

class Exchanges {
 public:
  bool empty() const { return records_.empty(); }
  std::span<const ExchangeRecord> records() const { return records_; }
  /// The shape of a node of these kinds: `index` is its `computation`.
  const ExchangeShape& shape(uint32_t index) const { return shapes_[index]; }

 private:
  friend class Plan;
  void set(std::span<const ExchangeRecord> records) { records_ = records; }
  /// Makes the shapes. Throws Error(kInvalid) with what is wrong and where. The plan is valid otherwise.
  void parse(const Plan& plan);
  void check_node(const Plan& plan, uint32_t node) const;

  std::span<const ExchangeRecord> records_;
  std::vector<ExchangeShape> shapes_;
};

}  // namespace pathways
