// Exchanges on modelled hosts, whose records come late and in any order, against a dense reference.
//
//   EXCH-1  AnyExchange: when a host goes on, everything is there; and the records are counted. Records: the same count
//           from 4 to 4,096 shards
//   EXCH-2  AnyExchange: slots, numbers of rows and counts are the dense reference's; the seed is printed
//   EXCH-4  AnyExchange: all hosts fail with one text and nothing is written, or all succeed; FirstFault
#include "exchange/coordinator.h"
#include "exchange/exchange_progress.h"
#include "exchange/host_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "support.h"

namespace pathways {
namespace {

using Kind = ExchangeFault::Kind;
using Over = ExchangeProgress::Over;
using Random = std::mt19937_64;
using Stage = ExchangeProgress::Stage;

struct Case {
  ExchangeShape shape;
  std::vector<std::vector<int32_t>> destinations;  ///< per source shard; all have as many rows
  std::optional<uint32_t> failed_host = {};

  uint64_t number(uint32_t source, uint32_t row) const { return source * destinations[0].size() + row; }
};

/// What each target shard gets, from the definition.
struct Dense {
  ExchangeFault fault;
  std::vector<std::vector<uint64_t>> kept;  ///< per target shard: numbers of rows
  std::vector<uint64_t> offered;
  std::vector<std::vector<int64_t>> slots;  ///< per source shard and row

  explicit Dense(const Case& of) : kept(of.shape.targets.shards()), offered(of.shape.targets.shards()) {
    const ExchangeShape& shape = of.shape;
    if (of.failed_host.has_value()) {
      fault = {Kind::kSourceFailed, 0, 0, 0, "host " + std::to_string(*of.failed_host) + " has no value"};
      return;
    }
    for (uint32_t source = 0; source < of.destinations.size(); ++source) {
      slots.emplace_back(of.destinations[source].size(), -1);
      for (uint32_t row = 0; row < of.destinations[source].size(); ++row) {
        const int32_t to = of.destinations[source][row];
        if (to == shape.unsent) continue;
        if (to < 0 || to >= static_cast<int32_t>(kept.size())) {
          fault = {Kind::kBadDestination, source, row, to};
          return;
        }
        const auto target = static_cast<uint32_t>(to);
        if (offered[target]++ >= shape.capacity) continue;
        slots[source][row] = int64_t{target} * shape.capacity + static_cast<int64_t>(kept[target].size());
        kept[target].push_back(of.number(source, row));
      }
    }
    for (uint32_t target = 0; target < kept.size(); ++target) {
      if (shape.overflow == Overflow::kError && offered[target] > shape.capacity) {
        fault = {Kind::kOverflow, target, offered[target], shape.capacity};
        return;
      }
    }
  }
};

/// One exchange on all of its hosts. Memory and records are modelled; all decisions are the core's.
struct Run {
  struct Host {
    HostExchange part;
    uint32_t next_source = 0;  ///< of the case's sources: where to look for the next one of this host
    bool has_rooms = false, has_reported = false, is_over = false;
  };
  const Case& of;
  const Dense dense;
  const uint64_t key;
  const uint32_t coordinating;
  ExchangeCoordinator coordinator;
  std::map<uint32_t, Host> hosts;
  std::vector<std::vector<uint64_t>> numbers;  ///< per target shard: the memory that is written
  size_t reports = 0, decisions = 0, pairs = 0, self = 0;

  Run(const Case& which, uint64_t number)
      : of(which),
        dense(which),
        key(number),
        coordinating(of.shape.hosts()[number % of.shape.hosts().size()]),
        coordinator(of.shape) {
    for (const uint32_t host : of.shape.hosts()) hosts.emplace(host, Host{HostExchange(of.shape, host)});
    numbers.assign(of.shape.targets.shards(), std::vector<uint64_t>(of.shape.capacity, UINT64_MAX));
  }
};

/// Something that will happen, at any time from now on.
struct Event {
  enum class Kind : uint8_t { kRoute, kRoom, kReport, kDecision, kWrite, kWritten } kind;
  size_t run;
  uint32_t from = 0, to = 0;
  std::vector<uint64_t> words{};
};

class Cluster {
 public:
  Cluster(const std::vector<Case>& cases, Random& random) : random_(random) {
    for (size_t i = 0; i < cases.size(); ++i) {
      runs_.push_back(std::make_unique<Run>(cases[i], 100 + i));
      Run& run = *runs_.back();
      const auto all = static_cast<uint32_t>(run.hosts.size());
      for (const auto& host : run.hosts) {
        progress_[host.first].begin(run.key, host.first == run.coordinating ? all : 0);
        events_.push_back({Event::Kind::kRoute, i, host.first, host.first});
        events_.push_back({Event::Kind::kRoom, i, host.first, host.first});
      }
    }
  }

  void play() {
    while (!events_.empty()) {
      const size_t which = random_() % events_.size();
      const Event event = std::move(events_[which]);
      events_[which] = std::move(events_.back());
      events_.pop_back();
      happen(event);
      if (testing::Test::HasFailure()) return;
      if (random_() % 2 == 0 || events_.empty()) settle();
      if (testing::Test::HasFailure()) return;
    }
    for (const auto& run : runs_) check_end(*run);
    for (const auto& progress : progress_) EXPECT_EQ(progress.second.size(), 0u);
  }
  const Run& run(size_t which) const { return *runs_[which]; }

 private:
  void happen(const Event& event) {
    Run& run = *runs_[event.run];
    Run::Host& host = run.hosts.at(event.to);
    switch (event.kind) {
      case Event::Kind::kRoute:
        route(event, run, host);
        break;
      case Event::Kind::kRoom: {
        std::vector<Room> rooms;
        for (uint32_t target = 0; target < run.of.shape.targets.shards(); ++target) {
          if (run.of.shape.targets.host_of(target) == event.to)
            rooms.push_back({target, target * 10u, target * 10u + 1});
        }
        host.part.add_rooms(std::move(rooms));
        report(event, run, host);
        break;
      }
      case Event::Kind::kReport:
        run.coordinator.take(parse_report(event.words));
        progress_.at(event.to).reported(run.key);
        break;
      case Event::Kind::kDecision:
        host.part.decide(parse_decision(event.words));
        progress_.at(event.to).decided(run.key, static_cast<uint32_t>(host.part.decision()->writers.size()));
        for (const uint32_t target : host.part.target_hosts()) {
          events_.push_back({Event::Kind::kWrite, event.run, event.to, target});
        }
        break;
      case Event::Kind::kWrite: {
        const HostExchange& writer = run.hosts.at(event.from).part;
        for (const HostExchange::Move& move : writer.moves(event.to)) {
          ASSERT_FALSE(host.is_over);
          uint64_t& place = run.numbers.at(move.target).at(move.slot);
          ASSERT_EQ(place, UINT64_MAX);
          place = run.of.number(move.source, move.row);
        }
        ++(event.from == event.to ? run.self : run.pairs);
        events_.push_back({Event::Kind::kWritten, event.run, event.from, event.to});
        break;
      }
      case Event::Kind::kWritten:
        progress_.at(event.to).written(run.key);
        break;
    }
  }

  void route(const Event& event, Run& run, Run::Host& host) {
    const ExchangeShape& shape = run.of.shape;
    if (run.of.failed_host == event.to) {
      host.part.fail_source("host " + std::to_string(event.to) + " has no value");
    } else {
      while (host.next_source < shape.sources.shards() && shape.sources.host_of(host.next_source) != event.to) {
        ++host.next_source;
      }
      if (host.next_source < shape.sources.shards()) {
        const uint32_t source = host.next_source++;
        host.part.add_source({source, run.of.destinations[source], shape.targets.shards(), shape.unsent});
        events_.push_back(event);  // the next one, or none
        return report(event, run, host);
      }
    }
    report(event, run, host);
  }

  void report(const Event& event, Run& run, Run::Host& host) {
    if (host.has_reported || !host.part.can_report()) return;
    host.has_reported = true;
    run.reports += event.to == run.coordinating ? 0 : 1;
    events_.push_back({Event::Kind::kReport, event.run, event.to, run.coordinating, encode(host.part.report())});
  }

  /// Each host looks at what has changed.
  void settle() {
    for (auto& progress : progress_) {
      over_.clear();
      progress.second.propagate(&over_);
      for (const Over& over : over_) {
        const size_t index = over.exchange - 100;
        Run& run = *runs_[index];
        if (over.stage == Stage::kReports) {
          ASSERT_EQ(progress.first, run.coordinating);
          for (const auto& decision : run.coordinator.decide()) {
            run.decisions += decision.first == run.coordinating ? 0 : 1;
            events_.push_back(
                {Event::Kind::kDecision, index, run.coordinating, decision.first, encode(decision.second)});
          }
        } else if (over.stage == Stage::kRows) {
          run.hosts.at(progress.first).is_over = true;
          check_host(run, progress.first);
        }
      }
    }
  }

  /// EXCH-1: all that will ever come to a host is there.
  void check_host(const Run& run, uint32_t host) const {
    const HostDecision& decision = *run.hosts.at(host).part.decision();
    ASSERT_EQ(decision.fault, run.dense.fault);
    std::map<uint32_t, Arrivals> arrivals;
    for (const Arrivals& each : decision.arrivals) arrivals.emplace(each.target, each);
    for (uint32_t target = 0; target < run.numbers.size(); ++target) {
      if (run.of.shape.targets.host_of(target) != host) continue;
      std::vector<uint64_t> expected = run.dense.fault.is_there() ? std::vector<uint64_t>() : run.dense.kept[target];
      ASSERT_EQ(arrivals.contains(target),
                !expected.empty() || (!run.dense.fault.is_there() && run.dense.offered[target] != 0));
      if (arrivals.contains(target)) {
        ASSERT_EQ(arrivals.at(target).kept, expected.size());
        ASSERT_EQ(arrivals.at(target).offered, run.dense.offered[target]);
      }
      expected.resize(run.of.shape.capacity, UINT64_MAX);
      ASSERT_EQ(run.numbers[target], expected);
    }
  }

  void check_end(const Run& run) const {
    const size_t others = run.hosts.size() - 1;
    EXPECT_EQ(run.reports, others);
    EXPECT_EQ(run.decisions, others);
    EXPECT_LE(run.reports + run.decisions + run.pairs, 2 * (run.pairs + run.hosts.size()));
    std::set<std::pair<uint32_t, uint32_t>> pairs;
    for (uint32_t source = 0; source < run.dense.slots.size() && !run.dense.fault.is_there(); ++source) {
      const uint32_t host = run.of.shape.sources.host_of(source);
      for (const int64_t slot : run.dense.slots[source]) {
        if (slot < 0) continue;
        pairs.emplace(host, run.of.shape.targets.host_of(static_cast<uint32_t>(slot / run.of.shape.capacity)));
      }
      ASSERT_EQ(run.hosts.at(host).part.slots_of(source), run.dense.slots[source]);
    }
    EXPECT_EQ(run.pairs + run.self, pairs.size());  // a pair without rows costs nothing
    for (const auto& host : run.hosts) ASSERT_TRUE(host.second.is_over);
  }

  Random& random_;
  std::vector<std::unique_ptr<Run>> runs_;
  std::map<uint32_t, ExchangeProgress> progress_;
  std::vector<Event> events_;
  std::vector<Over> over_;
};

ShardHosts any_hosts(Random& random, uint32_t shards) {
  std::vector<ShardHosts::Range> ranges;
  const auto base = static_cast<uint32_t>(random() % 4);
  uint32_t host = base;
  for (uint32_t shard = 0; shard < shards; ++shard) {
    if (shard != 0 && random() % 2 == 0) continue;
    ranges.push_back({shard, host});
    host = base + static_cast<uint32_t>(random() % 4);
  }
  return {shards, std::move(ranges)};
}

Case any_case(Random& random) {
  const auto sources = static_cast<uint32_t>(1 + random() % 5), targets = static_cast<uint32_t>(1 + random() % 6);
  const auto rows = static_cast<uint32_t>(random() % 9);
  const uint32_t most = sources * rows;
  const auto capacity = static_cast<uint32_t>(random() % 3 == 0 ? random() % (most + 2) : most + 1);
  Case made{{any_hosts(random, sources), any_hosts(random, targets), capacity,
             random() % 2 == 0 ? Overflow::kError : Overflow::kDrop},
            {}};
  if (random() % 3 == 0) made.shape.unsent = random() % 2 == 0 ? -1 : static_cast<int32_t>(targets) - 1;
  const auto style = random() % 4;
  const auto favourite = static_cast<int32_t>(random() % targets);
  for (uint32_t source = 0; source < sources; ++source) {
    auto& row = made.destinations.emplace_back();
    while (row.size() < rows) {
      const auto any = static_cast<int32_t>(random() % targets);
      row.push_back(style == 0 ? favourite : style == 1 ? any / 2 : any);
      if (style == 2 && made.shape.unsent.has_value() && random() % 2 == 0) row.back() = *made.shape.unsent;
    }
  }
  if (rows != 0 && random() % 8 == 0) {
    const int32_t wrong[] = {-1, -7, static_cast<int32_t>(targets), INT32_MAX, INT32_MIN};
    made.destinations[random() % sources][random() % rows] = wrong[random() % 5];
  }
  if (random() % 16 == 0) made.failed_host = made.shape.sources.host_of(static_cast<uint32_t>(random() % sources));
  return made;
}

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

Case modelled(uint32_t shards, uint32_t per_host, uint32_t rows, Random& random) {
  std::vector<ShardHosts::Range> from, to;
  for (uint32_t shard = 0; shard < shards; shard += per_host) {
    from.push_back({shard, shard / per_host});
    to.push_back({shard, (shards + shard) / per_host});
  }
  Case made{{{shards, from}, {shards, to}, shards * rows, Overflow::kError}, {}};
  for (uint32_t source = 0; source < shards; ++source) {
    auto& row = made.destinations.emplace_back();
    while (row.size() < rows) row.push_back(static_cast<int32_t>(random() % shards));
  }
  return made;
}

/// The records of one exchange between two slices of so many shards, with two rows for chosen shards in each shard.
TEST(Exchange, Records) {
  Random random(test::seed() + 2);
  std::printf("shards  per host  hosts  pairs that send  records  2 * (pairs + hosts)  shards^2\n");
  for (const uint32_t per_host : {1u, 8u}) {
    for (uint32_t shards = 4 * per_host; shards <= 4096; shards *= 4) {
      const Case made = modelled(shards, per_host, 2, random);
      ExchangeCoordinator coordinator(made.shape);
      std::map<uint32_t, HostExchange> parts;
      for (const uint32_t host : made.shape.hosts()) parts.emplace(host, HostExchange(made.shape, host));
      for (uint32_t source = 0; source < shards; ++source) {
        parts.at(made.shape.sources.host_of(source)).add_source({source, made.destinations[source], shards});
      }
      uint64_t words = 0, pairs = 0, records = 0;
      for (auto& part : parts) {
        std::vector<Room> rooms;
        const uint32_t first = (part.first - shards / per_host) * per_host;
        for (uint32_t n = 0; n < made.shape.targets.count_on(part.first); ++n) rooms.push_back({first + n, 0, 0});
        part.second.add_rooms(rooms);
        const std::vector<uint64_t> report = encode(part.second.report());
        words += report.size();
        records += part.first == 0 ? 0 : 1;
        coordinator.take(parse_report(report));
      }
      for (const auto& decision : coordinator.decide()) {
        const std::vector<uint64_t> encoded = encode(decision.second);
        words += encoded.size();
        records += decision.first == 0 ? 0 : 1;
        HostExchange& part = parts.at(decision.first);
        part.decide(parse_decision(encoded));
        pairs += part.target_hosts().size();
      }
      records += pairs;
      const uint64_t hosts = parts.size();
      std::printf("%6u  %8u  %5lu  %15lu  %7lu  %19lu  %8lu\n", shards, per_host, hosts, pairs, records,
                  2 * (pairs + hosts), uint64_t{shards} * shards);
      EXPECT_EQ(records, pairs + 2 * (hosts - 1));
      EXPECT_LE(pairs, uint64_t{2} * shards);
      // What is said grows with the rows and the hosts, not with the pairs of shards.
      EXPECT_LE(words, 20 * hosts + 2 * shards * 12 + 8 * shards);
    }
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
  const uint32_t expected[] = {3, 3, 1, 1, 1, 3};
  for (uint32_t shard = 0; shard < 6; ++shard) EXPECT_EQ(hosts.host_of(shard), expected[shard]);
  EXPECT_EQ(hosts.count_on(3), 3u);
  EXPECT_EQ(hosts.count_on(2), 0u);
  for (const Ranges& ranges : {Ranges{}, Ranges{{1, 0}}, Ranges{{0, 0}, {0, 1}}, Ranges{{0, 0}, {6, 1}}}) {
    EXPECT_THROW(ShardHosts(6, ranges), Error);
  }
}

}  // namespace
}  // namespace pathways
