/// Counts the records of one exchange of rows between two slices of modelled hosts, each of which sends to a few
/// shards.
///
/// All hosts are in one process; reports and decisions are encoded and parsed as between processes. What each host does
/// is the core's (HostExchange, ExchangeCoordinator). A host sends itself no record, and one to each other host that it
/// writes rows to.
///
/// Used by `python -m benchmarks.mpmd` (csrc/bind/simulate.cc). Threading: the calling thread.
#pragma once

#include <cstdint>

namespace pathways {

struct ExchangeCountOptions {
  uint32_t shards = 4;  ///< of each of the two slices: a multiple of `shards_per_host`
  uint32_t shards_per_host = 1;
  uint32_t rows = 2;  ///< of each source shard, at most 64; each goes to a shard that is drawn
  uint64_t seed = 1;
};

struct ExchangeCount {
  uint64_t hosts = 0;    ///< of both slices
  uint64_t pairs = 0;    ///< of hosts that exchange rows
  uint64_t records = 0;  ///< reports, decisions, and notices that rows are written
  uint64_t words = 0;    ///< of 8 bytes, in reports and decisions
};

/// Throws Error(kInvalid) for options out of range.
ExchangeCount count_exchange(const ExchangeCountOptions& options);

}  // namespace pathways
