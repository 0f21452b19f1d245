// Exchanges on modelled hosts, whose records come late and in any order, and the dense reference that they are compared
// with. All decisions are the core's; memory and records are modelled. The cluster checks itself at each step.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "exchange/coordinator.h"
#include "exchange/exchange_progress.h"
#include "exchange/host_exchange.h"

namespace pathways::test {

using Kind = ExchangeFault::Kind;
using Over = ExchangeProgress::Over;
using Random = std::mt19937_64;
using Stage = ExchangeProgress::Stage;

struct Case {
  ExchangeShape shape;
  std::vector<std::vector<int32_t>> destinations;  ///< per source shard; all have as many rows
  std::optional<uint32_t> failed_host = {};
  std::vector<std::vector<int32_t>> origins = {};  ///< known routes, per target shard; then destinations are slots

  uint64_t number(uint32_t source, uint32_t row) const { return source * destinations[0].size() + row; }
};

/// What each target shard gets, from the definition.
struct Dense {
  ExchangeFault fault;
  std::vector<std::vector<uint64_t>> kept;  ///< per target shard: numbers of rows
  std::vector<uint64_t> offered;
  std::vector<std::vector<int64_t>> slots;    ///< per source shard and row
  std::vector<std::vector<uint64_t>> memory;  ///< per target shard and slot: the number of the row, or UINT64_MAX

  explicit Dense(const Case& of)
      : kept(of.shape.targets.shards()),
        offered(of.shape.targets.shards()),
        memory(of.shape.targets.shards(), std::vector<uint64_t>(of.shape.capacity, UINT64_MAX)) {
    find(of);
    if (fault.is_there()) {
      memory.assign(memory.size(), std::vector<uint64_t>(of.shape.capacity, UINT64_MAX));
    } else if (of.shape.routes == Routes::kChosen) {
      for (size_t target = 0; target < kept.size(); ++target) {
        std::copy(kept[target].begin(), kept[target].end(), memory[target].begin());
      }
    }
  }

  void find(const Case& of) {
    const ExchangeShape& shape = of.shape;
    if (of.failed_host.has_value()) {
      fault = {Kind::kSourceFailed, 0, 0, 0, "host " + std::to_string(*of.failed_host) + " has no value"};
      return;
    }
    for (uint32_t source = 0; source < of.destinations.size(); ++source) {
      slots.emplace_back(of.destinations[source].size(), -1);
      for (uint32_t row = 0; row < of.destinations[source].size(); ++row) {
        const int32_t to = of.destinations[source][row];
        if (shape.routes == Routes::kKnown && to == -1) continue;
        if (shape.routes == Routes::kKnown) {
          const auto at = static_cast<uint32_t>(to);
          slots[source][row] = to;
          ++offered[at / shape.capacity];
          kept[at / shape.capacity].push_back(of.number(source, row));
          memory[at / shape.capacity][at % shape.capacity] = of.number(source, row);
          continue;
        }
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
        if (run.of.shape.routes == Routes::kKnown) {
          for (const Room& room : rooms) host.part.expect(room.target, run.of.origins[room.target]);
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
        const std::vector<int32_t>& rows = run.of.destinations[source];
        host.part.add_source(shape.routes == Routes::kKnown
                                 ? ShardRouting::along(source, rows, shape.targets.shards(), shape.capacity)
                                 : ShardRouting(source, rows, shape.targets.shards(), shape.unsent));
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
      ASSERT_EQ(run.numbers[target], run.dense.memory[target]);
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
      if (run.of.shape.routes == Routes::kKnown) continue;
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

inline ShardHosts any_hosts(Random& random, uint32_t shards) {
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

inline Case any_case(Random& random) {
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

/// Rows of a target shard of `of`, or with `is_back` their results, along the routes that `of` has made.
inline Case along(const Case& of, bool is_back) {
  const Dense dense(of);
  const auto rows = static_cast<uint32_t>(of.destinations[0].size());
  std::vector<std::vector<int32_t>> slots, numbers;
  for (const auto& shard : dense.slots) slots.emplace_back(shard.begin(), shard.end());
  for (const auto& shard : dense.memory) {
    auto& row = numbers.emplace_back();
    for (const uint64_t number : shard) row.push_back(number == UINT64_MAX ? -1 : static_cast<int32_t>(number));
  }
  ExchangeShape shape = of.shape;
  shape.unsent.reset();
  shape.routes = Routes::kKnown;
  shape.source_rows = is_back ? of.shape.capacity : rows;
  if (!is_back) return {shape, slots, {}, numbers};
  std::swap(shape.sources, shape.targets);
  shape.capacity = rows;
  return {shape, numbers, {}, slots};
}

}  // namespace pathways::test
