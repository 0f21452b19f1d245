// Every interleaving of small cases: entries submitted in one order, completions and cancels at any point. After each
// action the sequencer is compared with a plain reading of its promise (what must be granted by now), and validated.
//
//   ORD-1   each host is granted its entries in the order of their submission       explore: `last_order`
//   ORD-2   one counter numbers them all                                            explore: orders ascend
//   GANG-1  granted to all hosts or to none, once; a cancel after the grant fails    explore: `outcome`, `cancel`
//   ERR-2   a closed host is granted nothing; what it had is completed for it    explore_losses
//   COST-3  an entry leaves its queues when it is granted: nothing is looked at twice   (the counters in validate())
//   progress: when all granted runs are completed, nothing waits                    explore: the end of each path
#include "sequencer/sequencer.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <unordered_set>

#include "base/status.h"

namespace pathways::test::test_sequencer {
namespace {

#if defined(PATHWAYS_SANITIZED)
constexpr size_t kFewer = 1;  // nothing here has threads: the sanitizers see enough with one entry less
#else
constexpr size_t kFewer = 0;
#endif

struct Item {
  GroupId group;
  EntryKind kind;
};

struct Script {
  uint32_t hosts;
  uint32_t window;
  std::vector<std::vector<uint32_t>> groups;
  std::vector<Item> items;
  uint32_t losses = 0;  ///< how often some host is closed and, at any later point, opened again
};

enum class Fate : uint8_t { kUnborn, kWaiting, kCancelled, kGranted, kDropped, kDone };

/// A sequencer, and what a reader of its header would expect of it.
struct World {
  Sequencer sequencer;
  std::vector<Fate> fate;
  std::vector<EntryId> id;
  std::vector<std::set<uint32_t>> open;  ///< hosts that have not completed a granted run
  std::vector<size_t> last;              ///< per host: the last item it was granted, plus one
  size_t submitted = 0;
  std::set<uint32_t> closed;
  uint32_t losses = 0;

  explicit World(const Script& script)
      : sequencer(script.hosts, script.window),
        fate(script.items.size(), Fate::kUnborn),
        id(script.items.size(), 0),
        open(script.items.size()),
        last(script.hosts, 0) {
    for (GroupId g = 0; g < script.groups.size(); ++g) sequencer.add_group(g, script.groups[g]);
  }
  std::string key() const {
    std::string key(1, static_cast<char>(submitted));
    key += static_cast<char>(losses);
    for (const uint32_t h : closed) key += static_cast<char>('a' + h);
    key += '|';
    for (size_t i = 0; i < fate.size(); ++i) {
      key += static_cast<char>(fate[i]);
      for (const uint32_t h : open[i]) key += static_cast<char>('a' + h);
      key += '|';
    }
    return key;
  }
};

class Explorer {
 public:
  explicit Explorer(const Script& script) : script_(script) {}
  size_t run() {
    explore(World(script_));
    return seen_.size();
  }

 private:
  void explore(World world) {
    if (::testing::Test::HasFailure() || !seen_.insert(world.key()).second) return;
    bool moved = false;
    if (world.submitted < script_.items.size()) {
      World next = world;
      const size_t i = next.submitted++;
      const uint64_t order = next.sequencer.next_order();
      next.id[i] = next.sequencer.submit(7, script_.items[i].group, script_.items[i].kind, i);
      EXPECT_EQ(order, i + 1);  // ORD-2
      next.fate[i] = Fate::kWaiting;
      settle(next);
      explore(std::move(next));
      moved = true;
    }
    for (size_t i = 0; i < world.submitted; ++i) {
      for (const uint32_t h : world.open[i]) {
        World next = world;
        next.open[i].erase(h);
        const bool was_last = next.sequencer.complete(next.id[i], h);
        EXPECT_EQ(was_last, next.open[i].empty());
        if (was_last) next.fate[i] = Fate::kDone;
        settle(next);
        explore(std::move(next));
        moved = true;
      }
      if (world.fate[i] == Fate::kWaiting) {
        World next = world;
        EXPECT_TRUE(next.sequencer.cancel(next.id[i]));
        next.fate[i] = Fate::kCancelled;
        settle(next);
        explore(std::move(next));
      } else if (world.fate[i] == Fate::kGranted || world.fate[i] == Fate::kCancelled) {
        World next = world;
        EXPECT_FALSE(next.sequencer.cancel(next.id[i]));  // GANG-1: too late, or done already
        EXPECT_TRUE(next.sequencer.granted().empty());
      }
    }
    moved = explore_losses(world) || moved;
    if (!moved) {  // progress
      EXPECT_EQ(world.sequencer.live(), 0u);
      for (const Fate fate : world.fate) EXPECT_TRUE(fate == Fate::kDone || fate == Fate::kDropped);
    }
  }

  /// ERR-2: each host is lost, or comes back. What was lost with it is what it was granted and had not completed.
  bool explore_losses(const World& world) {
    bool moved = false;
    for (uint32_t h = 0; h < script_.hosts; ++h) {
      World next = world;
      if (world.closed.contains(h)) {
        next.closed.erase(h);
        next.sequencer.open(h);
      } else if (world.losses < script_.losses) {
        ++next.losses;
        next.closed.insert(h);
        next.sequencer.close(h);
        size_t lost = 0;
        for (const EntryId id : next.sequencer.running_on(h)) {
          const size_t i = next.sequencer.entry(id).tag;
          EXPECT_EQ(next.open[i].erase(h), 1u);
          const bool was_last = next.sequencer.complete(id, h);
          EXPECT_EQ(was_last, next.open[i].empty());
          if (was_last) next.fate[i] = Fate::kDone;
          ++lost;
        }
        EXPECT_EQ(lost, running(world, h));
        EXPECT_TRUE(next.sequencer.granted().empty());  // a closed host has room for nobody
      } else {
        continue;
      }
      settle(next);
      explore(std::move(next));
      moved = true;
    }
    return moved;
  }

  bool shares(size_t a, size_t b) const {
    for (const uint32_t h : script_.groups[script_.items[a].group]) {
      for (const uint32_t g : script_.groups[script_.items[b].group]) {
        if (h == g) return true;
      }
    }
    return false;
  }

  uint32_t running(const World& world, uint32_t host) const {
    uint32_t runs = 0;
    for (const auto& hosts : world.open) runs += static_cast<uint32_t>(hosts.count(host));
    return runs;
  }

  /// The first item that must have been granted by now, or the number of items.
  size_t next_grant(const World& world) const {
    for (size_t i = 0; i < world.submitted; ++i) {
      if (world.fate[i] != Fate::kWaiting && world.fate[i] != Fate::kCancelled) continue;
      bool heads = true;
      for (size_t before = 0; before < i; ++before) {
        const bool queued = world.fate[before] == Fate::kWaiting || world.fate[before] == Fate::kCancelled;
        heads = heads && !(queued && shares(before, i));
      }
      bool room = true;
      if (world.fate[i] == Fate::kWaiting) {
        for (const uint32_t h : script_.groups[script_.items[i].group]) {
          room = room && !world.closed.contains(h) &&
                 (script_.items[i].kind == EntryKind::kCommand || running(world, h) < script_.window);
        }
      }
      if (heads && room) return i;
    }
    return script_.items.size();
  }

  void settle(World& world) {
    for (const EntryId granted : world.sequencer.granted()) {
      const Entry entry = world.sequencer.entry(granted);
      const size_t i = entry.tag;
      ASSERT_LT(i, world.submitted);
      EXPECT_EQ(world.id[i], granted);
      const bool is_cancelled = world.fate[i] == Fate::kCancelled;
      ASSERT_TRUE(is_cancelled || world.fate[i] == Fate::kWaiting) << "granted twice";
      EXPECT_EQ(entry.state, is_cancelled ? EntryState::kDropped : EntryState::kGranted);
      for (const uint32_t h : script_.groups[script_.items[i].group]) {
        EXPECT_GT(i + 1, world.last[h]);  // ORD-1
        EXPECT_TRUE(is_cancelled || !world.closed.contains(h));
        world.last[h] = i + 1;
        if (!is_cancelled && script_.items[i].kind == EntryKind::kRun) world.open[i].insert(h);
      }
      world.fate[i] = is_cancelled ? Fate::kDropped : world.open[i].empty() ? Fate::kDone : Fate::kGranted;
      EXPECT_EQ(world.sequencer.is_running(granted), !world.open[i].empty());
      world.sequencer.settle(granted);
    }
    world.sequencer.granted().clear();
    EXPECT_EQ(next_grant(world), script_.items.size()) << "something waits for nothing";
    for (uint32_t h = 0; h < script_.hosts; ++h) EXPECT_LE(running(world, h), script_.window);
    world.sequencer.validate();
  }

  const Script& script_;
  std::unordered_set<std::string> seen_;
};

/// All sequences of `length` items out of `choices`.
void explore_all(uint32_t hosts, const std::vector<std::vector<uint32_t>>& groups, const std::vector<Item>& choices,
                 size_t length, uint32_t losses = 0) {
  size_t states = 0;
  for (uint32_t window = 1; window <= 2; ++window) {
    std::vector<size_t> digits(length, 0);
    while (!::testing::Test::HasFailure()) {
      Script script{hosts, window, groups, {}, losses};
      for (const size_t digit : digits) script.items.push_back(choices[digit]);
      states += Explorer(script).run();
      size_t at = 0;
      while (at < length && ++digits[at] == choices.size()) digits[at++] = 0;
      if (at == length) break;
    }
  }
  std::printf("%zu states\n", states);
}

std::vector<Item> runs_and_commands(GroupId groups) {
  std::vector<Item> choices;
  for (GroupId g = 0; g < groups; ++g) {
    for (const EntryKind kind : {EntryKind::kRun, EntryKind::kCommand}) choices.push_back({g, kind});
  }
  return choices;
}

TEST(Sequencer, TwoHosts) { explore_all(2, {{0}, {1}, {0, 1}}, runs_and_commands(3), 4 - kFewer); }

TEST(Sequencer, TwoHostsFiveRuns) {
  explore_all(2, {{0}, {1}, {0, 1}}, {{0, EntryKind::kRun}, {1, EntryKind::kRun}, {2, EntryKind::kRun}}, 5 - kFewer);
}

TEST(Sequencer, ThreeHosts) {
  explore_all(3, {{0, 1}, {1, 2}, {0, 2}}, {{0, EntryKind::kRun}, {1, EntryKind::kRun}, {2, EntryKind::kRun}},
              4 - kFewer);
  explore_all(3, {{0, 1}, {1, 2}, {0, 1, 2}}, runs_and_commands(3), 3);
}

TEST(Sequencer, HostsAreLost) {
  explore_all(2, {{0}, {1}, {0, 1}}, runs_and_commands(3), 3 - kFewer, 2);
  explore_all(2, {{0}, {0, 1}}, {{0, EntryKind::kRun}, {1, EntryKind::kRun}}, 5 - kFewer, 2);
  explore_all(3, {{0, 1}, {1, 2}, {0, 2}}, {{0, EntryKind::kRun}, {1, EntryKind::kRun}, {2, EntryKind::kRun}}, 3, 2);
}

TEST(Sequencer, GroupsOfOneHost) {
  Sequencer sequencer(2, 1);
  sequencer.add_group(0, {0, 1});
  EXPECT_FALSE(sequencer.has_group(kOneHost | 1));  // nobody may name it in a record
  sequencer.close(1);
  (void)sequencer.submit(7, 0, EntryKind::kRun, 0);
  const EntryId id = sequencer.submit(7, kOneHost | 1, EntryKind::kCommand, 1);
  EXPECT_TRUE(sequencer.granted().empty());
  sequencer.open(1);
  ASSERT_EQ(sequencer.granted().size(), 2u);
  EXPECT_EQ(sequencer.granted()[1], id);
  EXPECT_EQ(sequencer.hosts_of(sequencer.entry(id).group)[0], 1u);
  sequencer.validate();
}

TEST(Sequencer, RefusesGroups) {
  Sequencer sequencer(3, 1);
  sequencer.add_group(5, {2, 0});
  EXPECT_EQ(sequencer.hosts_of(5)[0], 0u);
  EXPECT_THROW(sequencer.add_group(5, {1}), Error);
  EXPECT_THROW(sequencer.add_group(6, {}), Error);
  EXPECT_THROW(sequencer.add_group(6, {3}), Error);
  EXPECT_THROW(sequencer.add_group(6, {1, 1}), Error);
  EXPECT_FALSE(sequencer.has_group(6));
  EXPECT_FALSE(sequencer.is_running(17));
}

}  // namespace
}  // namespace pathways::test::test_sequencer
