/// What the hosts of an exchange say to its coordinator, and what it says to them.
///
/// The size of a message is that of what it says: there is nothing in it for a pair of shards without rows.
///
/// Threading: values. TRUST-1: parse_report() and parse_decision() throw Error(kInvalid) for words that are no message.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "exchange/routing.h"
#include "exchange/shape.h"

namespace pathways {

/// Why an exchange fails. It fails as a whole: on all hosts, and nothing is written (EXCH-4).
struct ExchangeFault {
  enum class Kind : uint8_t { kNone, kSourceFailed, kBadDestination, kBadRoutes, kOverflow } kind = Kind::kNone;
  uint32_t shard = 0;  ///< kBadDestination: the source shard; kOverflow: the target shard
  uint64_t rows = 0;   ///< kBadDestination: the row; kOverflow: how many rows go to the shard
  int64_t limit = 0;   ///< kBadDestination: the destination; kOverflow: the capacity
  std::string text{};  ///< kSourceFailed: the error of the value; kBadRoutes: what does not fit

  bool operator==(const ExchangeFault&) const = default;
  bool is_there() const { return kind != Kind::kNone; }
  /// For people to read. `targets`: how many target shards there are.
  std::string describe(uint32_t targets) const;
};

/// Where the memory of a target shard is, as its host says: a place for its rows, and one for the rows' numbers.
struct Room {
  uint32_t target;
  uint64_t rows, numbers;
  bool operator==(const Room&) const = default;
};

/// What a host tells the coordinator when its source shards are routed and its target shards have memory.
struct HostReport {
  uint32_t host = 0;
  ExchangeFault fault{};
  std::vector<Batch> batches{};   ///< of its source shards; by source, then by target
  std::vector<Room> rooms{};      ///< of its target shards
  std::vector<Batch> expected{};  ///< known routes: what its target shards expect; by target, then by source
  bool operator==(const HostReport&) const = default;
};

/// Some rows of one source shard: the first `rows` of those for the target shard go to the slots from `first` on.
struct SlotRange {
  uint32_t source, target, first, rows;
  bool operator==(const SlotRange&) const = default;
};

/// How many rows of a target shard come, and how many were sent to it.
struct Arrivals {
  uint32_t target;
  uint64_t kept, offered;
  bool operator==(const Arrivals&) const = default;
};

/// What the coordinator tells each host.
struct HostDecision {
  ExchangeFault fault{};
  std::vector<SlotRange> ranges{};   ///< of the host's source shards; by source, then by target
  std::vector<Room> rooms{};         ///< of the targets of `ranges`, ascending
  std::vector<uint32_t> writers{};   ///< hosts that write rows of the host's target shards, ascending
  std::vector<Arrivals> arrivals{};  ///< of the host's target shards that rows go to, ascending
  bool operator==(const HostDecision&) const = default;
};

std::vector<uint64_t> encode(const HostReport& report);
std::vector<uint64_t> encode(const HostDecision& decision);
HostReport parse_report(std::span<const uint64_t> words);
HostDecision parse_decision(std::span<const uint64_t> words);

}  // namespace pathways
