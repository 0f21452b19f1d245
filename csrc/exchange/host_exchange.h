/// HostExchange: one host's part in one exchange: what it reports, and where its rows go when the decision is there.
///
/// The owner routes each source shard of the host, and takes memory for each target shard. When both are there it sends
/// report() to the coordinator. When the decision comes, it writes each of moves() and tells each of
/// target_hosts() so, once, when all rows for that host are written.
///
///   EXCH-3 (bounds)  a decision is taken only if it moves rows that this host has reported, each once, to slots below
///                    the capacity of shards whose memory it names. So whatever another process writes, moves() stays
///                    inside the source shards and the target shards (TRUST-1).
///                    Along known routes, both ends mean the same rows and slots: the coordinator compares counts and
///                    digests (RouteDigest), and a target takes only a decision that brings what it expects.
///   EXCH-4 (whole)   the host moves nothing if the exchange fails.
///
/// Pure. Threading: one owner.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "exchange/messages.h"
#include "exchange/routing.h"
#include "exchange/shape.h"

namespace pathways {

class HostExchange {
 public:
  /// A row of a source shard, and the slot that it goes to.
  struct Move {
    uint32_t source, row, target, slot;
    bool operator==(const Move&) const = default;
  };

  /// `shape` must outlive this object.
  HostExchange(const ExchangeShape& shape, uint32_t host);

  /// The next source shard of the host is routed; ascending by shard.
  void add_source(ShardRouting routing);
  /// The host's source value failed.
  void fail_source(std::string text);
  /// The host's target shards have memory; ascending by shard.
  void add_rooms(std::vector<Room> rooms);
  /// Known routes: what the next target shard of the host expects; ascending by shard. `origins`: for each of its slots
  /// the number of the row, source shard * rows of a shard + row, or -1.
  void expect(uint32_t target, std::span<const int32_t> origins);
  /// All that the report needs is there. A failed value needs nothing more: the exchange fails.
  bool can_report() const;
  /// Call it once.
  HostReport report() const;

  /// Throws Error(kInvalid) if the decision is none for this host (EXCH-3).
  void decide(HostDecision decision);
  const std::optional<HostDecision>& decision() const { return decision_; }
  /// The hosts that this one writes rows to, itself perhaps among them; ascending.
  std::span<const uint32_t> target_hosts() const { return target_hosts_; }
  /// All moves to one host; by source shard, target shard, and slot.
  std::vector<Move> moves(uint32_t target_host) const;
  /// Routes that were chosen: where each row of a source shard of the host goes: target * capacity + slot, or -1 if it
  /// goes nowhere.
  std::vector<int64_t> slots_of(uint32_t source) const;

 private:
  const ShardRouting* routing_of(uint32_t source) const;
  void bad_route(uint32_t shard, const std::string& what);
  void check(const HostDecision& decision) const;
  bool is_expected(const HostDecision& decision) const;

  const ExchangeShape& shape_;
  const uint32_t host_;
  uint32_t source_shards_ = 0, target_shards_ = 0;  ///< on this host
  std::vector<ShardRouting> routings_;
  std::optional<ExchangeFault> fault_;
  std::vector<Room> rooms_;
  std::vector<Batch> expected_;
  uint32_t expecting_ = 0;  ///< target shards of expect()
  std::optional<HostDecision> decision_;
  std::vector<uint32_t> target_hosts_;
};

}  // namespace pathways
