// Exchanges of several hosts in one process, whose records and copies are late in any order, against a dense reference.
// The seed is printed.
//
//   EXCH-1  AnyExchanges: all end, and a host that has finished has all of its rows
//   EXCH-3  RefusesRecords
//   EXCH-4  AnyExchanges, Cancelled: all hosts fail with one text or all finish
//   ERR-2   LostHosts: all others end; who finishes has the right rows; nothing is written to memory that is free
#include "movement/exchange_manager.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "exchange/exchange_model.h"
#include "support.h"

namespace pathways::test::test_exchanges {
namespace {

using test::along;
using test::any_case;
using test::Case;
using test::Dense;
using test::Random;

constexpr const char* kLost = "host is lost";
constexpr const char* kCancelled = "cancelled";

/// All hosts and the links between them. A link keeps its order; all else happens in any order.
class World {
 public:
  World(const std::vector<Case>& cases, Random& random) : random_(random) {
    for (const Case& of : cases) runs_.push_back(std::make_unique<Run>(of));
    for (size_t i = 0; i < runs_.size(); ++i) {
      for (const uint32_t host : runs_[i]->of.shape.hosts()) {
        if (!hosts_.contains(host)) hosts_.emplace(host, std::make_unique<Host>(*this, host));
        actions_.push_back([this, i, host] { prepare(i, host); });
      }
    }
  }

  /// At a random time: `disturb` = 1 cancels a run on a host, 2 loses a host.
  void play(int disturb) {
    size_t until = random_() % 40;
    while (step()) {
      if (disturb == 0 || until-- != 0) continue;
      const size_t run = random_() % runs_.size();
      const std::vector<uint32_t> hosts = runs_[run]->of.shape.hosts();
      const uint32_t host = hosts[random_() % hosts.size()];
      if (disturb == 1 && runs_[run]->prepared.contains(host)) {
        hosts_.at(host)->manager.fail(run, kCancelled);
        hosts_.at(host)->manager.poll();
        cancelled_.insert(run);
      } else if (disturb == 2) {
        lose(host);
      }
      disturb = 0;
      if (testing::Test::HasFailure()) return;
    }
    for (const auto& host : hosts_) {
      if (dead_.contains(host.first)) continue;
      EXPECT_EQ(host.second->manager.count(), 0u) << "host " << host.first;
    }
    for (size_t i = 0; i < runs_.size(); ++i) check(i);
  }
  size_t finished = 0, failed = 0, kept = 0;

 private:
  struct Run {
    explicit Run(const Case& which) : of(which), dense(which) {
      memory.assign(of.shape.targets.shards(), std::vector<uint64_t>(of.shape.capacity, UINT64_MAX));
    }
    const Case& of;
    const Dense dense;
    std::vector<std::vector<uint64_t>> memory;
    std::set<uint32_t> prepared, done, freed;
    std::map<uint32_t, std::string> errors;
  };

  struct Host final : ExchangePlane {
    Host(World& of, uint32_t number) : world(of), host(number), manager(number, *this) {}
    void send_report(uint32_t to, uint64_t exchange, std::vector<uint64_t> words) override {
      send(to, exchange,
           [this, exchange, words](ExchangeManager& there) { return there.on_report(exchange, host, words); });
    }
    void send_decision(uint32_t to, uint64_t exchange, std::vector<uint64_t> words) override {
      send(to, exchange,
           [this, exchange, words](ExchangeManager& there) { return there.on_decision(exchange, host, words); });
    }
    void send_written(uint32_t to, uint64_t exchange, std::string_view error) override {
      send(to, exchange, [this, exchange, text = std::string(error)](ExchangeManager& there) {
        return there.on_written(exchange, host, text);
      });
    }
    void write_rows(uint64_t exchange, uint32_t to, std::vector<HostExchange::Move> moves,
                    std::vector<Room> rooms) override {
      for (const Room& room : rooms) EXPECT_EQ(room.rows, room.target * 10u);
      world.actions_.push_back([this, exchange, to, moves] {
        if (world.dead_.contains(host)) return;
        Run& run = *world.runs_[exchange];
        for (const HostExchange::Move& move : moves) {
          if (world.dead_.contains(to)) break;
          ASSERT_FALSE(run.freed.contains(to)) << "written to memory that is free";
          run.memory.at(move.target).at(move.slot) = run.of.number(move.source, move.row);
        }
        manager.rows_written(exchange, to, "");
        manager.poll();
      });
    }
    void finished(uint64_t exchange, const HostExchange& part) override {
      Run& run = *world.runs_[exchange];
      ASSERT_TRUE(run.done.insert(host).second);
      run.freed.insert(host);
      ++world.finished;
      const ExchangeShape& shape = run.of.shape;
      for (uint32_t target = 0; target < shape.targets.shards(); ++target) {
        if (shape.targets.host_of(target) != host) continue;
        ASSERT_EQ(run.memory[target], run.dense.memory[target]);
      }
      for (uint32_t source = 0; source < shape.sources.shards() && shape.routes == Routes::kChosen; ++source) {
        if (shape.sources.host_of(source) != host) continue;
        ASSERT_EQ(part.slots_of(source), run.dense.slots[source]);
      }
    }
    void failed(uint64_t exchange, std::string_view text, Memory memory) override {
      Run& run = *world.runs_[exchange];
      ASSERT_TRUE(run.done.insert(host).second);
      run.errors.emplace(host, text);
      if (memory == Memory::kFree) run.freed.insert(host);
      ++world.failed;
      world.kept += memory == Memory::kMayBeWritten ? 1 : 0;
    }
    bool is_dead(uint32_t of, uint64_t) const override { return dead.contains(of); }
    template <typename Record>
    void send(uint32_t to, uint64_t exchange, Record record) {
      world.links_[{host, to}].push_back([this, to, exchange, record] {
        const auto take = [this, to, record] {
          ExchangeManager& there = world.hosts_.at(to)->manager;
          ASSERT_EQ(record(there), Status::kOk);
          there.poll();
        };
        if (world.runs_[exchange]->prepared.contains(to)) return take();
        world.early_[{exchange, to}].push_back(take);  // as PeerBook keeps it
      });
    }
    World& world;
    const uint32_t host;
    std::set<uint32_t> dead;  ///< whose end it has heard of
    ExchangeManager manager;
  };

  void prepare(size_t i, uint32_t host) {
    if (dead_.contains(host) || runs_[i]->prepared.contains(host)) return;
    Run& run = *runs_[i];
    const ExchangeShape& shape = run.of.shape;
    ExchangeManager& manager = hosts_.at(host)->manager;
    run.prepared.insert(host);
    manager.prepare(i, shape, static_cast<uint32_t>(i));
    for (const auto& record : early_[{i, host}]) record();
    manager.poll();
    const auto later = [&](auto action) {
      actions_.push_back([this, host, &manager, action] {
        if (dead_.contains(host)) return;
        action(manager);
        manager.poll();
      });
    };
    later([i, host, &run](ExchangeManager& here) {
      const ExchangeShape& of = run.of.shape;
      if (run.of.failed_host == host) return here.fail(i, "host " + std::to_string(host) + " has no value");
      for (uint32_t source = 0; source < of.sources.shards(); ++source) {
        const std::vector<int32_t>& rows = run.of.destinations[source];
        if (of.sources.host_of(source) != host) continue;
        here.add_source(i, of.routes == Routes::kKnown
                               ? ShardRouting::along(source, rows, of.targets.shards(), of.capacity)
                               : ShardRouting(source, rows, of.targets.shards(), of.unsent));
      }
    });
    later([i, host, &run](ExchangeManager& here) {
      std::vector<Room> rooms;
      for (uint32_t target = 0; target < run.of.shape.targets.shards(); ++target) {
        if (run.of.shape.targets.host_of(target) != host) continue;
        rooms.push_back({target, target * 10u, target * 10u + 1});
        if (run.of.shape.routes == Routes::kKnown) here.expect(i, target, run.of.origins[target]);
      }
      here.add_rooms(i, std::move(rooms));
    });
  }

  /// What the host has sent still comes; then the others hear of its end, which is after they prepared its runs.
  void lose(uint32_t host) {
    for (size_t i = 0; i < runs_.size(); ++i) {
      for (const uint32_t each : runs_[i]->of.shape.hosts()) {
        if (!runs_[i]->prepared.contains(each) && each != host) prepare(i, each);
      }
    }
    dead_.insert(host);
    for (const auto& other : hosts_) {
      if (other.first == host) continue;
      links_[{host, other.first}].push_back([this, &there = *other.second, host] {
        there.dead.insert(host);
        for (size_t i = 0; i < runs_.size(); ++i) there.manager.lose(i, host, kLost);
        there.manager.poll();
      });
    }
  }

  bool step() {
    std::vector<std::pair<uint32_t, uint32_t>> ready;
    for (const auto& link : links_) {
      if (!link.second.empty()) ready.push_back(link.first);
    }
    if (ready.empty() && actions_.empty()) return false;
    const size_t which = random_() % (ready.size() + actions_.size());
    if (which < ready.size()) {
      auto& link = links_[ready[which]];
      const auto record = std::move(link.front());
      link.erase(link.begin());
      if (!dead_.contains(ready[which].second)) record();
    } else {
      const auto action = std::move(actions_[which - ready.size()]);
      actions_.erase(actions_.begin() + static_cast<std::ptrdiff_t>(which - ready.size()));
      action();
    }
    return !testing::Test::HasFailure();
  }

  void check(size_t i) const {
    const Run& run = *runs_[i];
    std::set<std::string> texts;
    for (const auto& error : run.errors) texts.insert(error.second);
    for (const uint32_t host : run.of.shape.hosts()) {
      EXPECT_TRUE(dead_.contains(host) || run.done.contains(host));
    }
    if (!dead_.empty()) return;
    EXPECT_LE(texts.size(), 1u);  // EXCH-4
    EXPECT_TRUE(run.errors.empty() || run.errors.size() == run.of.shape.hosts().size());
    const std::string expected = run.dense.fault.describe(run.of.shape.targets.shards());
    if (!cancelled_.contains(i)) {
      EXPECT_EQ(texts.empty() ? "" : *texts.begin(), expected);
    } else if (!texts.empty()) {
      EXPECT_TRUE(*texts.begin() == kCancelled || *texts.begin() == expected) << *texts.begin();
    }
  }

  Random& random_;
  std::vector<std::unique_ptr<Run>> runs_;
  std::map<uint32_t, std::unique_ptr<Host>> hosts_;
  std::map<std::pair<uint32_t, uint32_t>, std::vector<std::function<void()>>> links_;
  std::map<std::pair<uint64_t, uint32_t>, std::vector<std::function<void()>>> early_;  ///< by exchange and host
  std::vector<std::function<void()>> actions_;
  std::set<uint32_t> dead_;
  std::set<size_t> cancelled_;
};

void play_many(int rounds, int disturb) {
  Random random(test::seed() + static_cast<uint64_t>(disturb));
  size_t finished = 0, failed = 0, kept = 0;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    std::vector<Case> cases;
    while (cases.size() < 1 + random() % 3) {
      cases.push_back(any_case(random));
      const Case& made = cases.back();
      if (random() % 2 == 0 || made.shape.capacity == 0 || made.destinations[0].empty()) continue;
      if (Dense(made).fault.is_there()) continue;
      Case back = along(made, random() % 2 == 0);
      cases.push_back(std::move(back));
    }
    World world(cases, random);
    world.play(disturb);
    if (testing::Test::HasFailure()) return;
    finished += world.finished;
    failed += world.failed;
    kept += world.kept;
  }
  std::printf("%lu finished, %lu failed, %lu of them with memory that is kept\n", finished, failed, kept);
  EXPECT_GT(finished, 100u);
  EXPECT_GT(failed, 100u);
  EXPECT_EQ(kept != 0, disturb == 2);
}

/// What a host has sent, where a test gives the answers.
struct Counted final : ExchangePlane {
  void send_report(uint32_t, uint64_t, std::vector<uint64_t>) override { ++reports; }
  void send_decision(uint32_t, uint64_t, std::vector<uint64_t>) override { ++decisions; }
  void send_written(uint32_t, uint64_t, std::string_view) override { ++writtens; }
  void write_rows(uint64_t, uint32_t, std::vector<HostExchange::Move>, std::vector<Room>) override { ++writes; }
  void finished(uint64_t, const HostExchange&) override { ++ends; }
  void failed(uint64_t, std::string_view text, Memory) override { error = text; }
  bool is_dead(uint32_t, uint64_t) const override { return false; }
  int reports = 0, decisions = 0, writtens = 0, writes = 0, ends = 0;
  std::string error;
};

/// Records that are none of their exchange change nothing, and the exchange ends as it should.
TEST(Exchanges, RefusesRecords) {
  // Sources on hosts 0 and 1, the target on host 2. Node 5 is coordinated by host 2, node 3 by host 0.
  const ExchangeShape shape{{2, {{0, 0}, {1, 1}}}, {1, {{0, 2}}}, 4, Overflow::kError};
  const auto report = [](uint32_t host, std::vector<Batch> batches) {
    return encode(HostReport{host, {}, std::move(batches), {}, {}});
  };
  Counted plane;
  ExchangeManager target(2, plane);
  EXPECT_EQ(target.on_report(7, 1, report(1, {{1, 0, 3}})), Status::kInvalid);  // not prepared: the owner keeps it
  target.prepare(7, shape, 5);
  ASSERT_EQ(target.on_report(7, 1, report(1, {{1, 0, 3}})), Status::kOk);
  EXPECT_EQ(target.on_report(7, 1, report(1, {})), Status::kInvalid);           // again
  EXPECT_EQ(target.on_report(7, 0, report(1, {})), Status::kInvalid);           // in another's name
  EXPECT_EQ(target.on_report(7, 0, report(0, {{1, 0, 1}})), Status::kInvalid);  // another's rows
  EXPECT_EQ(target.on_report(7, 9, report(9, {})), Status::kInvalid);           // no part in it
  EXPECT_EQ(target.on_report(7, 0, std::vector<uint64_t>{0, 1}), Status::kInvalid);
  EXPECT_EQ(target.on_decision(7, 1, encode(HostDecision{})), Status::kInvalid);  // it decides itself
  EXPECT_EQ(target.on_written(7, 1, ""), Status::kInvalid);                       // before the report
  EXPECT_TRUE(target.owes(7));
  target.add_rooms(7, {{0, 1, 2}});
  target.poll();
  ASSERT_EQ(target.on_report(7, 0, report(0, {})), Status::kOk);
  target.poll();
  EXPECT_EQ(plane.decisions, 2);
  EXPECT_FALSE(target.owes(7));
  EXPECT_EQ(target.on_written(7, 0, ""), Status::kInvalid);  // it has no rows
  EXPECT_EQ(target.on_written(7, 1, ""), Status::kOk);
  EXPECT_EQ(target.on_written(7, 1, ""), Status::kInvalid);
  target.poll();
  EXPECT_TRUE(plane.ends == 1 && plane.error.empty() && target.count() == 0);

  target.prepare(8, shape, 3);
  HostDecision decision{{}, {}, {}, {0, 1}, {{0, 2, 2}}};
  EXPECT_EQ(target.on_decision(8, 0, encode(decision)), Status::kInvalid);  // it has not reported
  EXPECT_EQ(target.on_report(8, 1, report(1, {})), Status::kInvalid);       // to the wrong host
  target.add_rooms(8, {{0, 1, 2}});
  target.poll();
  EXPECT_EQ(plane.reports, 1);
  ASSERT_EQ(target.on_written(8, 0, ""), Status::kOk);                      // before the decision
  EXPECT_EQ(target.on_written(8, 9, "gone"), Status::kInvalid);             // it has no part in it
  ASSERT_EQ(target.on_written(8, 1, "the disk is gone"), Status::kOk);      // it gave up
  EXPECT_EQ(target.on_decision(8, 1, encode(decision)), Status::kInvalid);  // not the coordinator
  decision.writers = {1};
  EXPECT_EQ(target.on_decision(8, 0, encode(decision)), Status::kInvalid);  // without a host that has written
  decision.writers = {0, 1};
  ASSERT_EQ(target.on_decision(8, 0, encode(decision)), Status::kOk);
  EXPECT_EQ(target.on_decision(8, 0, encode(decision)), Status::kInvalid);
  target.poll();
  target.poll();
  EXPECT_TRUE(plane.error == "the disk is gone" && plane.ends == 1 && target.count() == 0);
}

TEST(Exchanges, AnyExchanges) { play_many(600, 0); }
TEST(Exchanges, Cancelled) { play_many(600, 1); }
TEST(Exchanges, LostHosts) { play_many(1500, 2); }

}  // namespace
}  // namespace pathways::test::test_exchanges
