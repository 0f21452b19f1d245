// Memory spaces that are one entry of the ledger: SpaceClasses, ByClass, and Admission beside a ledger by space.
//
//   MEM-8 (alike)  SpaceClasses.*: which spaces are one class; ByClass.*: lists follow the splits
//                  Classes.AnyOrder: random work on the ledger, and on a plain one that counts by space. The seed is
//                  printed. Each answer is the same for each space, whatever was split before.
#include "sequencer/space_classes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "sequencer/admission.h"
#include "support.h"

namespace pathways::test::test_space_classes {
namespace {

std::vector<SpaceId> range(SpaceId begin, SpaceId end) {
  std::vector<SpaceId> found(end - begin);
  std::iota(found.begin(), found.end(), begin);
  return found;
}

// ---------------------------------------------------------------------------------------------------------- classes

TEST(SpaceClasses, WhatIsNamedTogetherIsOneClass) {
  SpaceClasses classes(std::vector<uint64_t>(65536, 100), 65536);
  EXPECT_EQ(classes.count(), 0u);
  EXPECT_EQ(classes.refine(range(0, 65536)).size(), 1u);
  EXPECT_TRUE(classes.refine(range(0, 65536)).empty());
  EXPECT_EQ(classes.count(), 1u);
  EXPECT_EQ(classes.size(0), 65536u);
  const auto splits = classes.refine(range(0, 4));
  ASSERT_EQ(splits.size(), 1u);
  EXPECT_EQ(splits[0].from, 0u);
  EXPECT_EQ(splits[0].to, 1u);
  EXPECT_EQ(classes.first(0), 4u);
  EXPECT_EQ(classes.first(1), 0u);
  EXPECT_EQ(classes.refine(range(2, 6)).size(), 2u);
  EXPECT_EQ(classes.count(), 4u);
  classes.validate();
}

TEST(SpaceClasses, OneClassHasOneBudgetAndOneKind) {
  SpaceClasses classes({100, 100, 50, 100, 100}, 4);  // the last one is no device
  EXPECT_EQ(classes.refine(range(0, 5)).size(), 3u);
  EXPECT_EQ(classes.class_of(0), classes.class_of(3));
  EXPECT_NE(classes.class_of(0), classes.class_of(2));
  EXPECT_NE(classes.class_of(0), classes.class_of(4));
  classes.validate();
}

TEST(ByClass, AListFollowsEachSplit) {
  SpaceClasses classes(std::vector<uint64_t>(8, 100), 8);
  (void)classes.refine(range(0, 6));
  const ClassSet set({{0}}, classes);
  (void)classes.refine(range(6, 8));  // not of the set
  (void)classes.refine(range(0, 4));
  (void)classes.refine(range(2, 5));  // splits both parts
  std::vector<SpaceId> firsts;
  for (const auto [id] : set.at(classes)) firsts.push_back(classes.first(id));
  EXPECT_EQ(firsts, (std::vector<SpaceId>{0, 2, 4, 5}));
  (void)classes.refine(range(1, 2));
  EXPECT_EQ(set.at(classes).size(), 5u);
  EXPECT_EQ(set.at(classes).size(), 5u);
}

TEST(Admission, ARunUnderWayLeavesBothParts) {
  Admission ledger({100, 100, 100});
  const RunNeeds all = ledger.by_class({{0, 60, 5}, {1, 60, 5}, {2, 60, 5}});
  const uint64_t run = ledger.enter(all);
  EXPECT_EQ(ledger.classes().count(), 1u);
  const SpaceSetId second = ledger.add_set({1});
  EXPECT_EQ(ledger.classes().count(), 2u);
  EXPECT_EQ(ledger.high_water(1), 65u);
  EXPECT_EQ(ledger.check_block(second, 40), Verdict::kBusy);
  ledger.leave(all, run);
  EXPECT_EQ(ledger.check_block(second, 40), Verdict::kFits);
  ledger.validate();
}

TEST(Admission, AnotherBudgetForAPart) {
  Admission ledger({100, 100, 100, 100});
  const RunNeeds all = ledger.by_class({{0, 60, 0}, {1, 60, 0}, {2, 60, 0}});
  ledger.set_budget({0, 1, 2, 3}, 100);  // as it is
  EXPECT_EQ(ledger.classes().count(), 1u);
  ledger.set_budget({2, 3}, 50);
  EXPECT_EQ(ledger.classes().count(), 2u);  // nothing has named the last one
  SpaceId worst = 0;
  EXPECT_EQ(ledger.check(all, &worst), Verdict::kNever);
  EXPECT_EQ(worst, 2u);
  EXPECT_EQ(ledger.budget(3), 50u);
  ledger.set_budget({2}, 60);
  EXPECT_EQ(ledger.check(all), Verdict::kFits);
  ledger.validate();
}

// ------------------------------------------------------------------------------------------- beside a plain ledger

/// The same ledger by space: what Admission must answer for each of them.
struct Plain {
  struct Block {
    uint32_t client = 0;
    std::vector<SpaceId> spaces;
    uint64_t bytes = 0;
    uint32_t references = 1;
    bool is_offloaded = false;
  };
  struct Quota {
    std::map<SpaceId, MemoryAccount> accounts;
    uint64_t first_number = 0;
  };
  std::vector<MemoryAccount> spaces;
  uint32_t devices = 0;
  std::set<SpaceId> claimed;
  std::map<BlockId, Block> blocks;
  std::map<uint32_t, Quota> quotas;

  std::pair<Verdict, SpaceId> worst_of(const std::vector<std::pair<SpaceId, Verdict>>& each) const {
    std::pair<Verdict, SpaceId> found{Verdict::kFits, 0};
    for (const auto& [space, verdict] : each) {
      if (verdict > found.first) found = {verdict, space};
    }
    return found;
  }
  std::pair<Verdict, SpaceId> check(const std::vector<SpaceNeed>& needs) const {
    std::vector<std::pair<SpaceId, Verdict>> each;
    for (const auto& [space, peak, eager] : needs) {
      each.emplace_back(space, spaces[space].judge(peak, eager, claimed.contains(space)));
    }
    return worst_of(each);
  }
  std::pair<Verdict, SpaceId> check_block(const std::vector<SpaceId>& set, uint64_t bytes) const {
    std::vector<std::pair<SpaceId, Verdict>> each;
    for (const SpaceId space : set) {
      each.emplace_back(space, spaces[space].judge_early(bytes, claimed.contains(space)));
    }
    return worst_of(each);
  }
  std::pair<Verdict, SpaceId> check_quota(uint32_t client, const std::vector<SpaceNeed>& needs) const {
    std::vector<std::pair<SpaceId, Verdict>> each;
    const auto quota = quotas.find(client);
    for (const auto& [space, peak, eager] : needs) {
      if (quota == quotas.end() || space >= devices || peak + eager == 0) continue;
      each.emplace_back(space, quota->second.accounts.at(space).judge(peak, eager));
    }
    return worst_of(each);
  }
  std::pair<Verdict, SpaceId> check_block_quota(uint32_t client, const std::vector<SpaceId>& set,
                                                uint64_t bytes) const {
    std::vector<std::pair<SpaceId, Verdict>> each;
    const auto quota = quotas.find(client);
    for (const SpaceId space : set) {
      if (quota == quotas.end() || space >= devices || bytes == 0) continue;
      each.emplace_back(space, quota->second.accounts.at(space).judge_early(bytes));
    }
    return worst_of(each);
  }
  void enter(uint32_t client, const std::vector<SpaceNeed>& needs, uint64_t number) {
    for (const auto& [space, peak, eager] : needs) {
      spaces[space].enter(peak, eager, number);
      if (quotas.contains(client) && space < devices) quotas[client].accounts[space].enter(peak, eager, number);
    }
  }
  void leave(uint32_t client, const std::vector<SpaceNeed>& needs, uint64_t number) {
    const bool is_counted = quotas.contains(client) && number >= quotas[client].first_number;
    for (const auto& [space, peak, eager] : needs) {
      spaces[space].leave(eager, number);
      if (is_counted && space < devices) quotas[client].accounts[space].leave(eager, number);
    }
  }
  void count(const Block& block, bool is_there, bool is_early) {
    for (const SpaceId space : block.spaces) {
      std::vector<MemoryAccount*> accounts{&spaces[space]};
      const auto quota = quotas.find(block.client);
      if (quota != quotas.end() && space < devices) accounts.push_back(&quota->second.accounts.at(space));
      for (MemoryAccount* account : accounts) {
        if (is_there) {
          account->add(block.bytes, is_early);
        } else {
          account->remove(block.bytes);
        }
      }
    }
  }
  void set_quota(uint32_t client, uint64_t bytes, uint64_t next_number) {
    if (bytes >= kUnlimited) {
      quotas.erase(client);
      return;
    }
    const bool is_new = !quotas.contains(client);
    Quota& quota = quotas[client];
    if (is_new) quota.first_number = next_number;
    for (SpaceId space = 0; space < devices; ++space) {
      MemoryAccount& account = quota.accounts[space];
      account.set_budget(bytes);
      if (is_new) account.add(held(client, space), true);
    }
  }
  uint64_t held(uint32_t client, SpaceId space, bool is_offloaded = false) const {
    uint64_t sum = 0;
    for (const auto& [id, block] : blocks) {
      const bool is_here = std::binary_search(block.spaces.begin(), block.spaces.end(), space);
      if (block.client == client && is_here && block.is_offloaded == is_offloaded) sum += block.bytes;
    }
    return sum;
  }
  std::optional<SpaceId> lacks_room(uint32_t client) const {
    for (SpaceId space = 0; space < spaces.size(); ++space) {
      const uint64_t more = held(client, space, true);
      if (more != 0 && spaces[space].judge_early(more) != Verdict::kFits) return space;
    }
    return std::nullopt;
  }
};

struct Classes : ::testing::Test {
  static constexpr uint32_t kDevices = 10, kSpaces = 13, kClients = 3;
  struct Plan {
    std::vector<SpaceNeed> plain;
    RunNeeds needs;
  };
  struct Run {
    size_t plan;
    uint32_t client;
    uint64_t number;
  };

  uint64_t draw(uint64_t most) { return random_() % (most + 1); }
  /// Usually spaces in a row, as slices have them, and often all.
  std::vector<SpaceId> some_spaces() {
    if (draw(3) == 0) return range(0, draw(1) == 0 ? kDevices : kSpaces);
    const auto begin = static_cast<SpaceId>(draw(kSpaces - 1));
    std::vector<SpaceId> found = range(begin, begin + 1 + static_cast<SpaceId>(draw(kSpaces - 1 - begin)));
    if (draw(2) == 0) std::erase_if(found, [&](SpaceId) { return draw(1) == 0; });
    return found;
  }
  void register_something() {
    std::vector<SpaceId> spaces = some_spaces();
    if (draw(1) == 0) {
      sets.push_back(spaces);
      std::shuffle(spaces.begin(), spaces.end(), random_);
      EXPECT_EQ(ledger->add_set(spaces), sets.size() - 1);
      return;
    }
    Plan plan;
    uint64_t peak = draw(50), eager = draw(10);
    for (const SpaceId space : spaces) {
      if (draw(5) == 0) peak = draw(50), eager = draw(10);
      plan.plain.push_back({space, peak, eager});
    }
    std::vector<SpaceNeed> shuffled = plan.plain;
    std::shuffle(shuffled.begin(), shuffled.end(), random_);
    plan.needs = ledger->by_class(shuffled);
    plans.push_back(std::move(plan));
  }
  void run() {
    if (plans.empty()) return;
    const size_t at = draw(plans.size() - 1);
    const uint32_t client = a_client();
    SpaceId worst = 0;
    const auto answer = plain.check(plans[at].plain);
    ASSERT_EQ(ledger->check(plans[at].needs, &worst), answer.first);
    if (answer.first != Verdict::kFits) {
      EXPECT_EQ(worst, answer.second);
    }
    const auto quota = plain.check_quota(client, plans[at].plain);
    ASSERT_EQ(ledger->check_quota(client, plans[at].needs, &worst), quota.first);
    if (quota.first != Verdict::kFits) {
      EXPECT_EQ(worst, quota.second);
    }
    if (answer.first == Verdict::kBusy && draw(3) == 0) {
      ledger->claim(plans[at].needs);
      for (const SpaceNeed& need : plans[at].plain) plain.claimed.insert(need.space);
    }
    if (answer.first != Verdict::kFits || quota.first != Verdict::kFits) return;
    const uint64_t number = ledger->enter(plans[at].needs, client);
    plain.enter(client, plans[at].plain, number);
    next_number = number + 1;
    runs.push_back({at, client, number});
    const auto fits = [&](const SpaceNeed& need) { return need.peak >= 4; };
    if (sets.empty() || !std::all_of(plans[at].plain.begin(), plans[at].plain.end(), fits)) return;
    const auto set = static_cast<SpaceSetId>(draw(sets.size() - 1));  // the peak covers a result there
    const auto has = [&](SpaceId space) {
      return std::any_of(plans[at].plain.begin(), plans[at].plain.end(),
                         [&](const auto& n) { return n.space == space; });
    };
    if (std::all_of(sets[set].begin(), sets[set].end(), has)) add(client, set, 4, false);
  }
  void add(uint32_t client, SpaceSetId set, uint64_t bytes, bool is_early) {
    Plain::Block block{client, sets[set], bytes};
    plain.count(block, true, is_early);
    plain.blocks[ledger->add_block(client, 7, set, bytes, is_early)] = std::move(block);
  }
  void put() {
    if (sets.empty()) return;
    const auto set = static_cast<SpaceSetId>(draw(sets.size() - 1));
    const uint64_t bytes = draw(30);
    const uint32_t client = a_client();
    SpaceId worst = 0;
    const auto answer = plain.check_block(sets[set], bytes);
    ASSERT_EQ(ledger->check_block(set, bytes, &worst), answer.first);
    if (answer.first != Verdict::kFits) {
      EXPECT_EQ(worst, answer.second);
    }
    const auto quota = plain.check_block_quota(client, sets[set], bytes);
    ASSERT_EQ(ledger->check_block_quota(client, set, bytes, &worst), quota.first);
    if (quota.first != Verdict::kFits) {
      EXPECT_EQ(worst, quota.second);
    }
    if (answer.first == Verdict::kBusy && draw(5) == 0) {
      ledger->claim_set(set);
      plain.claimed.insert(sets[set].begin(), sets[set].end());
    }
    if (answer.first == Verdict::kFits && quota.first == Verdict::kFits) add(client, set, bytes, true);
  }
  void end_run() {
    if (runs.empty()) return;
    const size_t at = draw(2) == 0 ? draw(runs.size() - 1) : 0;
    const auto [plan, client, number] = runs[at];
    ledger->leave(plans[plan].needs, number, client);
    plain.leave(client, plans[plan].plain, number);
    runs.erase(runs.begin() + static_cast<std::ptrdiff_t>(at));
  }
  void release() {
    if (plain.blocks.empty()) return;
    const auto at = std::next(plain.blocks.begin(), static_cast<std::ptrdiff_t>(draw(plain.blocks.size() - 1)));
    auto& [id, block] = *at;
    if (draw(7) == 0) {
      ledger->share(id);
      ++block.references;
    } else if (block.is_offloaded && draw(3) == 0) {
      Plain::Block separated{block.client, block.spaces, block.bytes};
      plain.count(separated, true, true);
      const BlockId fresh = ledger->separate(id);
      if (--block.references == 0) plain.blocks.erase(at);
      plain.blocks[fresh] = std::move(separated);
    } else {
      EXPECT_EQ(ledger->release(id), --block.references == 0);
      if (block.references != 0) return;
      if (!block.is_offloaded) plain.count(block, false, false);
      plain.blocks.erase(at);
    }
  }
  void change() {
    const uint32_t client = a_client();
    switch (draw(4)) {
      case 0: {
        const uint64_t bytes = draw(1) == 0 ? kUnlimited : 20 + draw(80);
        plain.set_quota(client, bytes, next_number);
        ledger->set_quota(client, bytes);
        return;
      }
      case 1: {
        const std::vector<SpaceId> spaces = draw(2) == 0 ? range(0, kSpaces) : some_spaces();
        const uint64_t bytes = draw(3) == 0 ? 50 + draw(100) : 100;
        for (const SpaceId space : spaces) plain.spaces[space].set_budget(bytes);
        ledger->set_budget(spaces, bytes);
        return;
      }
      case 2:
        for (auto& [id, block] : plain.blocks) {
          if (block.client != client || std::exchange(block.is_offloaded, true)) continue;
          plain.count(block, false, false);
        }
        ledger->offload(client);
        return;
      case 3: {
        SpaceId worst = 0;
        const auto lacking = plain.lacks_room(client);
        ASSERT_EQ(ledger->lacks_room(client), lacking);
        ASSERT_EQ(ledger->restore(client, &worst), !lacking.has_value());
        if (lacking) {
          EXPECT_EQ(worst, *lacking);
          return;
        }
        for (auto& [id, block] : plain.blocks) {
          if (block.client == client && std::exchange(block.is_offloaded, false)) plain.count(block, true, true);
        }
        return;
      }
      default:
        ledger->clear_claims();
        plain.claimed.clear();
    }
  }
  void compare() {
    ledger->validate();
    for (SpaceId space = 0; space < kSpaces; ++space) {
      ASSERT_EQ(ledger->live(space), plain.spaces[space].live()) << "space " << space;
      ASSERT_EQ(ledger->high_water(space), plain.spaces[space].high_water()) << "space " << space;
      ASSERT_EQ(ledger->budget(space), plain.spaces[space].budget()) << "space " << space;
      std::set<uint32_t> holders;
      for (uint32_t client = 0; client < kClients; ++client) {
        const uint64_t held = plain.held(client, space);
        ASSERT_EQ(ledger->held(client, space), held);
        if (held != 0) holders.insert(client);
      }
      const auto found = ledger->clients_on(space);
      ASSERT_EQ(std::set<uint32_t>(found.begin(), found.end()), holders);
      ASSERT_EQ(found.size(), holders.size());
    }
    for (SpaceSetId set = 0; set < sets.size(); ++set) {
      for (SpaceId space = 0; space < kSpaces; ++space) {
        ASSERT_EQ(ledger->is_in(set, space), std::binary_search(sets[set].begin(), sets[set].end(), space));
      }
    }
  }
  uint32_t a_client() { return static_cast<uint32_t>(draw(kClients - 1)); }

  void start() {
    ledger.emplace(std::vector<uint64_t>(kSpaces, 100), kDevices);
    plain = {};
    plain.spaces.assign(kSpaces, MemoryAccount(100));
    plain.devices = kDevices;
    sets.clear();
    plans.clear();
    runs.clear();
    next_number = 1;
  }

  std::mt19937_64 random_{test::seed()};
  std::optional<Admission> ledger;
  Plain plain;
  std::vector<std::vector<SpaceId>> sets;
  std::vector<Plan> plans;
  std::vector<Run> runs;
  uint64_t next_number = 1;
};

TEST_F(Classes, AnyOrder) {
  uint64_t splits = 0, grouped = 0;
  for (int round = 0; round < 100; ++round) {
    start();
    for (int i = 0; i < 250; ++i) {
      const uint32_t before = ledger->classes().count();
      const bool had_work = !runs.empty() && !plain.blocks.empty();
      switch (draw(9)) {
        case 0:
          if (sets.size() + plans.size() < 12) register_something();
          break;
        case 1:
        case 2:
        case 3:
          run();
          break;
        case 4:
        case 5:
          put();
          break;
        case 6:
          end_run();
          break;
        case 7:
        case 8:
          release();
          break;
        default:
          change();
      }
      compare();
      if (HasFatalFailure()) return;
      if (had_work) splits += ledger->classes().count() - before;
      grouped += ledger->classes().count() < kSpaces ? 1U : 0U;
    }
  }
  EXPECT_GT(splits, 100u);     // with runs and blocks on the spaces
  EXPECT_GT(grouped, 10000u);  // with classes of several spaces
}

}  // namespace
}  // namespace pathways::test::test_space_classes
