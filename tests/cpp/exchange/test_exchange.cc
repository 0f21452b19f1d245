// Exchanges on modelled hosts, whose records come late and in any order, against a dense reference.
//
//   EXCH-1  AnyExchange: when a host goes on, everything is there; and the records are counted. Records: the same count
//           from 4 to 4,096 shards
//   EXCH-2  AnyExchange: slots, numbers of rows and counts are the dense reference's; the seed is printed
//           KnownRoutes: the same along known routes, forward and back
//   EXCH-4  AnyExchange: all hosts fail with one text and nothing is written, or all succeed; FirstFault; KnownRoutes:
//           routes that do not agree
//   EXCH-3  KnownRoutes: routes with equal counts and other slots
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "exchange/exchange_model.h"
#include "simulate/exchange_count.h"
#include "support.h"

namespace pathways::test::test_exchange {
namespace {

using test::along;
using test::any_case;
using test::Case;
using test::Cluster;
using test::Dense;
using test::Kind;
using test::Random;

TEST(Exchange, AnyExchange) {
  Random random(test::seed());
  std::map<Kind, int> ends;
  size_t dropped = 0, moved = 0;
  for (int round = 0; round < 1500; ++round) {
    std::vector<Case> cases;
    while (cases.size() < 1 + random() % 3) cases.push_back(any_case(random));
    SCOPED_TRACE("round " + std::to_string(round));
    Cluster cluster(cases, random);
    cluster.play();
    if (HasFailure()) return;
    for (size_t i = 0; i < cases.size(); ++i) {
      const Dense& dense = cluster.run(i).dense;
      ++ends[dense.fault.kind];
      if (dense.fault.is_there()) continue;
      for (size_t target = 0; target < dense.kept.size(); ++target) {
        moved += dense.kept[target].size();
        dropped += dense.offered[target] - dense.kept[target].size();
      }
    }
  }
  for (const Kind kind : {Kind::kNone, Kind::kSourceFailed, Kind::kBadDestination, Kind::kOverflow}) {
    EXPECT_GT(ends[kind], 20);
  }
  EXPECT_GT(dropped, 500u);
  EXPECT_GT(moved, 5000u);
}

/// What each host of a case reports, and the fault that the coordinator finds: one for all hosts.
ExchangeFault fault_of(const Case& of) {
  ExchangeCoordinator coordinator(of.shape);
  for (const uint32_t host : of.shape.hosts()) {
    HostExchange part(of.shape, host);
    std::vector<Room> rooms;
    for (uint32_t source = 0; source < of.shape.sources.shards(); ++source) {
      if (of.shape.sources.host_of(source) != host) continue;
      part.add_source(
          ShardRouting::along(source, of.destinations[source], of.shape.targets.shards(), of.shape.capacity));
    }
    for (uint32_t target = 0; target < of.shape.targets.shards(); ++target) {
      if (of.shape.targets.host_of(target) != host) continue;
      part.expect(target, of.origins[target]);
      rooms.push_back({target, 0, 0});
    }
    part.add_rooms(rooms);
    EXPECT_TRUE(part.can_report());
    coordinator.take(parse_report(encode(part.report())));
  }
  const auto decisions = coordinator.decide();
  for (const auto& decision : decisions) {
    EXPECT_EQ(decision.second.fault, decisions.front().second.fault);
    EXPECT_TRUE(decision.second.ranges.empty() || !decision.second.fault.is_there());
  }
  return decisions.front().second.fault;
}

/// Swaps two slots of rows of one source shard in one target shard: all counts stay as they are. False: there are none.
bool swap_slots(std::vector<std::vector<int32_t>>& slots, uint32_t capacity) {
  for (auto& shard : slots) {
    for (size_t a = 0; a < shard.size(); ++a) {
      for (size_t b = a + 1; b < shard.size(); ++b) {
        if (shard[a] < 0 || shard[b] < 0) continue;
        if (static_cast<uint32_t>(shard[a]) / capacity != static_cast<uint32_t>(shard[b]) / capacity) continue;
        std::swap(shard[a], shard[b]);
        return true;
      }
    }
  }
  return false;
}

/// Routes forward and back, as a derivative and its transpose use them.
TEST(Exchange, KnownRoutes) {
  Random random(test::seed() + 5);
  size_t moved = 0, changed = 0, crossings = 0;
  for (int round = 0; round < 600; ++round) {
    const Case made = any_case(random);
    const Dense dense(made);
    if (dense.fault.is_there() || made.shape.capacity == 0 || made.destinations[0].empty()) continue;
    SCOPED_TRACE("round " + std::to_string(round));
    std::vector<Case> cases{along(made, false), along(made, true)};
    Cluster cluster(cases, random);
    cluster.play();
    if (HasFailure()) return;
    for (const auto& shard : dense.kept) moved += shard.size();

    // Two routes are crossed: the counts agree, and the hosts see it all the same.
    Case crossed = cases[random() % 2];
    ASSERT_FALSE(fault_of(crossed).is_there());
    if (swap_slots(crossed.destinations, crossed.shape.capacity)) {
      const ExchangeFault fault = fault_of(crossed);
      ASSERT_EQ(fault.kind, Kind::kBadRoutes);
      ASSERT_NE(fault.text.find("but other rows, or in other slots"), std::string::npos) << fault.text;
      ++crossings;
    }

    // One end of one route is changed: no host waits for ever, and all say the same.
    Case& broken = cases[random() % 2];
    auto& side = random() % 2 == 0 ? broken.destinations : broken.origins;
    auto& shard = side[random() % side.size()];
    int32_t& end = shard[random() % shard.size()];
    const int32_t wrong[] = {-1, -2, INT32_MAX};
    const int32_t other = wrong[random() % 3];
    if (end == other) continue;
    end = other;
    const ExchangeFault fault = fault_of(broken);
    ASSERT_EQ(fault.kind, Kind::kBadRoutes);
    ASSERT_NE(fault.text.find("expected the routes of one exchange, unchanged"), std::string::npos);
    ++changed;
  }
  EXPECT_GT(moved, 1000u);
  EXPECT_GT(changed, 100u);
  EXPECT_GT(crossings, 50u);
}

/// The records of one exchange between two slices of so many shards, with two rows for chosen shards in each shard.
TEST(Exchange, Records) {
  std::printf("shards  per host  hosts  pairs that send  records  2 * (pairs + hosts)  shards^2\n");
  for (const uint32_t per_host : {1u, 8u}) {
    for (uint32_t shards = 4 * per_host; shards <= 4096; shards *= 4) {
      const ExchangeCount count = count_exchange({shards, per_host, 2, test::seed() + 2});
      std::printf("%6u  %8u  %5lu  %15lu  %7lu  %19lu  %8lu\n", shards, per_host, count.hosts, count.pairs,
                  count.records, 2 * (count.pairs + count.hosts), uint64_t{shards} * shards);
      EXPECT_EQ(count.hosts, 2u * shards / per_host);
      EXPECT_GE(count.pairs, 1u);
      EXPECT_EQ(count.records, count.pairs + 2 * (count.hosts - 1));
      EXPECT_LE(count.pairs, uint64_t{2} * shards);
      // What is said grows with the rows and the hosts, not with the pairs of shards.
      EXPECT_LE(count.words, 20 * count.hosts + 2 * shards * 12 + 8 * shards);
    }
  }
  for (const ExchangeCountOptions& bad : {ExchangeCountOptions{0, 1, 2, 1}, ExchangeCountOptions{6, 4, 2, 1},
                                          ExchangeCountOptions{4, 1, 0, 1}, ExchangeCountOptions{4, 0, 2, 1}}) {
    EXPECT_THROW(count_exchange(bad), Error);
  }
}

TEST(Exchange, FirstFault) {
  const ExchangeShape shape{{2, {{0, 0}, {1, 1}}}, {1, {{0, 2}}}, 4, Overflow::kError};
  const auto decided = [&](const HostReport& first, const HostReport& second) {
    ExchangeCoordinator coordinator(shape);
    coordinator.take(second);
    coordinator.take({2, {}, {}, {{0, 0, 0}}});
    coordinator.take(first);
    return coordinator.decide()[1].second.fault;
  };
  const HostReport good{0, {}, {{0, 0, 3}}};
  const HostReport bad{0, {Kind::kBadDestination, 0, 7, -2}};
  EXPECT_EQ(decided(good, {1, {}, {{1, 0, 1}}}), ExchangeFault{});
  EXPECT_EQ(decided(good, {1, {}, {{1, 0, 2}}}).describe(1),
            "pw.exchange: 5 rows go to target shard 0, whose capacity is 4: give a greater capacity, or "
            "overflow=\"drop\"");
  EXPECT_EQ(decided(bad, {1, {Kind::kBadDestination, 1, 0, 9}}).describe(1),
            "pw.exchange: row 7 of source shard 0 has destination -2: expected a target shard from 0 to 0");
  EXPECT_EQ(decided(bad, {1, {Kind::kSourceFailed, 0, 0, 0, "no value"}}).describe(1), "no value");
}

TEST(Exchange, ShardsOfHosts) {
  using Ranges = std::vector<ShardHosts::Range>;
  const ShardHosts hosts(6, {{0, 3}, {2, 1}, {5, 3}});
  for (const auto& [shard, place] :
       std::vector<std::pair<uint32_t, uint32_t>>{{0, 0}, {1, 1}, {2, 0}, {3, 1}, {4, 2}, {5, 2}}) {
    EXPECT_EQ(hosts.place_of(shard), place) << shard;
  }
  const uint32_t expected[] = {3, 3, 1, 1, 1, 3};
  for (uint32_t shard = 0; shard < 6; ++shard) EXPECT_EQ(hosts.host_of(shard), expected[shard]);
  EXPECT_EQ(hosts.count_on(3), 3u);
  EXPECT_EQ(hosts.count_on(2), 0u);
  for (const Ranges& ranges : {Ranges{}, Ranges{{1, 0}}, Ranges{{0, 0}, {0, 1}}, Ranges{{0, 0}, {6, 1}}}) {
    EXPECT_THROW(ShardHosts(6, ranges), Error);
  }
}

}  // namespace
}  // namespace pathways::test::test_exchange
