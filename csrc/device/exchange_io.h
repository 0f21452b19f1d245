/// What the executor gives its backend and its link for an exchange of rows (movement/row_exchanges.h).
///
/// Threading: values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "exchange/host_exchange.h"

namespace pathways {

/// Rows to copy to the target shards of one host.
struct RowWrite {
  struct Shard {
    uint32_t number;  ///< of the source shard
    std::span<const std::byte> rows;
  };
  uint64_t key;
  uint32_t host;
  void* keep;                 ///< what keeps the rows there
  std::vector<Shard> shards;  ///< of this host, ascending
  uint32_t source_rows;       ///< of each of them
  uint32_t capacity;          ///< of each target shard
  std::vector<HostExchange::Move> moves;
  std::vector<Room> rooms;  ///< of the targets of `moves`, ascending
  /// Of each of `rooms`: which of the host's target shards it is. And how many target shards the host has.
  std::vector<uint32_t> places;
  uint32_t targets;
};

/// What an exchange gave this host beside rows: per target shard, how many rows came and how many were sent to it; per
/// source shard, the slot of each row, or -1. Shards in their order.
struct RowResults {
  std::vector<int32_t> kept, offered;
  std::vector<std::vector<int32_t>> slots;
};

/// Messages of an exchange that are words (exchange/messages.h).
enum class ExchangeWords : uint8_t { kReport, kDecision };

}  // namespace pathways
