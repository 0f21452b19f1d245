// The ledger of memory as the order sees it: Admission.
//   MEM-1  live is the sum of the blocks             CountsBlocks, WhatIsParkedTakesNothing, and validate() elsewhere
//   MEM-2  no place is ever overfull                 EveryMomentOfEveryScheduleFits (enumerated),
//                                                    WhatARunTakesOverDoesNotRaiseTheMark
//          no two runs wait for each other           NobodyWaitsForOneThatWaits (enumerated)
//   MEM-3  what never fits is told from what is kept out by blocks, and from what waits for runs   TellsTheReasons
#include "sequencer/admission.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "base/status.h"

namespace pathways::test::test_admission {
namespace {

#if defined(PATHWAYS_SANITIZED)
constexpr bool kIsSanitized = true;  // nothing here has threads: the sanitizers see enough in fewer cases
#else
constexpr bool kIsSanitized = false;
#endif

TEST(Admission, CountsBlocks) {
  Admission ledger({100, 100, 100});
  const SpaceSetId both = ledger.add_set({0, 1});
  const SpaceSetId last = ledger.add_set({2});
  const BlockId a = ledger.add_block(1, 7, both, 30, false);
  const BlockId b = ledger.add_block(2, Admission::kPut, last, 20, true);
  ledger.share(a);
  EXPECT_EQ(ledger.live(0), 30u);
  EXPECT_EQ(ledger.live(1), 30u);
  EXPECT_EQ(ledger.live(2), 20u);
  EXPECT_FALSE(ledger.release(a));
  EXPECT_EQ(ledger.live(1), 30u);
  EXPECT_TRUE(ledger.release(a));
  EXPECT_EQ(ledger.live(1), 0u);
  ASSERT_EQ(ledger.holders(2, 5).size(), 1u);
  EXPECT_EQ(ledger.holders(2, 5)[0].client, 2u);
  ledger.validate();
  EXPECT_TRUE(ledger.release(b));
  EXPECT_EQ(ledger.high_water(2), 20u);
}

TEST(Admission, WhatARunTakesOverDoesNotRaiseTheMark) {
  Admission ledger({100});
  const SpaceSetId set = ledger.add_set({0});
  const BlockId given = ledger.add_block(1, Admission::kPut, set, 60, true);
  const RunNeeds needs = ledger.by_class({{0, 10, 0}});  // 60 and 10 of temporaries, less the argument
  ASSERT_EQ(ledger.check(needs), Verdict::kFits);
  ledger.enter(needs);
  ledger.add_block(1, 7, set, 60, false);
  ledger.release(given);
  EXPECT_EQ(ledger.live(0), 60u);
  EXPECT_EQ(ledger.high_water(0), 70u);
  ledger.validate();
}

TEST(Admission, WhatIsParkedTakesNothing) {
  Admission ledger({100, 100});
  const SpaceSetId both = ledger.add_set({0, 1}), second = ledger.add_set({1});
  const BlockId a = ledger.add_block(1, 7, both, 60, false);
  const BlockId b = ledger.add_block(2, 7, second, 10, false);
  ledger.offload(1);
  ledger.offload(1);
  EXPECT_EQ(ledger.live(0), 0u);
  EXPECT_EQ(ledger.live(1), 10u);
  EXPECT_EQ(ledger.holders(0, 5).size(), 0u);
  ledger.validate();
  const BlockId other = ledger.add_block(2, 7, second, 50, false);
  SpaceId worst = 0;
  EXPECT_FALSE(ledger.restore(1, &worst));  // all or nothing
  EXPECT_EQ(worst, 1u);
  EXPECT_EQ(ledger.live(0), 0u);
  ledger.release(other);
  const RunNeeds needs = ledger.by_class({{1, 40, 0}});
  const uint64_t run = ledger.enter(needs);
  EXPECT_FALSE(ledger.restore(1, &worst));  // a run may stand there
  ledger.leave(needs, run);
  EXPECT_TRUE(ledger.restore(1, &worst));
  EXPECT_EQ(ledger.live(1), 70u);
  ledger.validate();
  ledger.offload(1);
  ledger.release(a);  // its client died
  ledger.release(b);
  EXPECT_EQ(ledger.live(1), 0u);
  const BlockId again = ledger.add_block(3, 7, both, 5, false);  // in the same place of the table
  EXPECT_EQ(ledger.live(0), 5u);
  ledger.release(again);
  ledger.validate();
}

TEST(Admission, RefusesSetsThatMakeNoSense) {
  Admission ledger({1, 1});
  EXPECT_THROW(ledger.add_set({0, 0}), Error);
  EXPECT_THROW(ledger.add_set({2}), Error);
  EXPECT_THROW(ledger.by_class({{1, 1, 0}, {1, 1, 0}}), Error);
  EXPECT_THROW(ledger.by_class({{2, 1, 0}}), Error);
  EXPECT_THROW(ledger.set_budget({2}, 1), Error);
  EXPECT_EQ(ledger.classes().count(), 0u);
}

TEST(Admission, TellsTheReasons) {
  Admission ledger({100});
  const SpaceSetId set = ledger.add_set({0});
  const RunNeeds whole = ledger.by_class({{0, 100, 0}}), more = ledger.by_class({{0, 60, 41}}),
                 half = ledger.by_class({{0, 30, 30}}), none = ledger.by_class({{0, 0, 0}});
  EXPECT_EQ(ledger.check(more), Verdict::kNever);
  EXPECT_EQ(ledger.check(whole), Verdict::kFits);
  const uint64_t first = ledger.enter(half);
  EXPECT_EQ(ledger.check(whole), Verdict::kBusy);  // the first's early bytes may still be there
  EXPECT_EQ(ledger.check(none), Verdict::kFits);
  ledger.leave(half, first);
  const BlockId block = ledger.add_block(1, 0, set, 1, false);
  EXPECT_EQ(ledger.check(whole), Verdict::kHeld);
  EXPECT_EQ(ledger.check_block(set, 99), Verdict::kFits);
  EXPECT_EQ(ledger.check_block(set, 100), Verdict::kHeld);
  EXPECT_EQ(ledger.check_block(set, 101), Verdict::kNever);
  ledger.claim(none);
  EXPECT_EQ(ledger.check(none), Verdict::kBusy);
  ledger.clear_claims();
  EXPECT_EQ(ledger.check(none), Verdict::kFits);
  ledger.release(block);
}

TEST(Admission, RunsInARowNeedTheirPeaksOneAfterTheOther) {
  Admission ledger({100});
  const RunNeeds tall = ledger.by_class({{0, 100, 0}});
  for (int i = 0; i < 50; ++i) {
    ASSERT_EQ(ledger.check(tall), Verdict::kFits);
    ledger.enter(tall);
    ledger.validate();
  }
}

// One place. What is admitted, as a clock would see it: the runs take their lazy bytes strictly one after the other,
// their early ones and the early blocks at any time from the admission on.
struct Model {
  struct Run {
    uint64_t below;  // live when it was admitted
    uint64_t peak, eager;
    uint64_t early_after = 0;  // early blocks admitted behind it
    uint64_t number = 0;
    bool is_over = false;
  };
  std::vector<Run> runs;

  uint64_t worst() const {
    uint64_t most = 0, eager = 0;
    for (const Run& run : runs) eager += run.is_over ? 0 : run.eager;
    for (const Run& run : runs) {
      if (!run.is_over) most = std::max(most, run.below + run.peak + run.early_after + eager);
    }
    return most;
  }
};

TEST(Admission, EveryMomentOfEveryScheduleFits) {
  // All sequences of kLength events out of: run(peak, eager, keeps), put, oldest run over, oldest block released.
  constexpr uint64_t kBudget = 6;
  struct Kind {
    uint64_t peak, eager, keeps;
  };
  const std::vector<Kind> kinds{{6, 0, 0}, {3, 0, 2}, {1, 3, 2}, {0, 2, 2}, {4, 1, 0}};
  const size_t events = kinds.size() + 4;
  uint64_t checked = 0, admitted = 0;
  const auto play = [&](std::vector<size_t> script) {
    Admission ledger({kBudget});
    const SpaceSetId set = ledger.add_set({0});
    Model model;
    std::vector<BlockId> blocks;
    for (const size_t event : script) {
      if (event < kinds.size()) {
        const Kind& kind = kinds[event];
        const RunNeeds need = ledger.by_class({{0, kind.peak, kind.eager}});
        if (ledger.check(need) != Verdict::kFits) continue;
        ++admitted;
        Model::Run run{ledger.live(0), kind.peak, kind.eager};
        run.number = ledger.enter(need);
        model.runs.push_back(run);
        if (kind.keeps != 0) blocks.push_back(ledger.add_block(0, 0, set, kind.keeps, false));
      } else if (event == kinds.size()) {
        if (ledger.check_block(set, 2) != Verdict::kFits) continue;
        blocks.push_back(ledger.add_block(0, 0, set, 2, true));
        for (Model::Run& run : model.runs) run.early_after += 2;
      } else if (event == kinds.size() + 1) {
        const auto run = std::find_if(model.runs.begin(), model.runs.end(), [](const auto& r) { return !r.is_over; });
        if (run == model.runs.end()) continue;
        run->is_over = true;
        ledger.leave(ledger.by_class({{0, run->peak, run->eager}}), run->number);
      } else if (event == kinds.size() + 2) {  // the youngest ends first: on other places it may
        const auto run = std::find_if(model.runs.rbegin(), model.runs.rend(), [](const auto& r) { return !r.is_over; });
        if (run == model.runs.rend()) continue;
        run->is_over = true;
        ledger.leave(ledger.by_class({{0, run->peak, run->eager}}), run->number);
      } else if (!blocks.empty()) {
        ledger.release(blocks.front());
        blocks.erase(blocks.begin());
      }
      ledger.validate();
      ASSERT_LE(model.worst(), kBudget);
      ASSERT_LE(ledger.live(0), kBudget);
      ASSERT_LE(ledger.high_water(0), kBudget);
      ++checked;
    }
  };
  constexpr int kLength = kIsSanitized ? 5 : 6;
  std::vector<size_t> script(kLength, 0);
  for (bool more = true; more;) {
    play(script);
    size_t digit = 0;
    while (digit < script.size() && ++script[digit] == events) script[digit++] = 0;
    more = digit < script.size();
  }
  EXPECT_GT(admitted, checked / 8);  // the scripts are not all refusals
}

// Clients that each do their runs in turn over two places and let go of what the run before left once the next one is
// admitted. Who is not admitted waits as the controller has them wait: tried again oldest first, claiming what they are
// kept from by runs. Explores every interleaving of: a client's next step, the end of any admitted run.
struct World {
  struct Step {
    RunNeeds needs;
    SpaceSetId set = 0;
    uint64_t keeps = 0;
  };
  struct Client {
    std::vector<Step> steps;
    size_t next = 0;
    std::vector<BlockId> blocks;
    bool is_waiting = false;
  };
  struct Running {
    RunNeeds needs;
    uint64_t number = 0;
  };
  Admission ledger;
  std::vector<Client> clients;
  std::vector<size_t> waiting;  // the oldest first
  std::vector<Running> running;
  std::vector<ClassId> claimed;

  Verdict attempt(size_t who) {
    Client& client = clients[who];
    const Step& step = client.steps[client.next];
    const Verdict verdict = ledger.check(step.needs);
    if (verdict != Verdict::kFits) return verdict;
    for (const ClassNeed& need : step.needs.at(ledger.classes())) {  // nobody overtakes a claim
      EXPECT_EQ(std::count(claimed.begin(), claimed.end(), need.id), 0);
    }
    running.push_back({step.needs, ledger.enter(step.needs)});
    const BlockId fresh = ledger.add_block(static_cast<uint32_t>(who), 0, step.set, step.keeps, false);
    for (const BlockId block : client.blocks) ledger.release(block);
    client.blocks = {fresh};
    if (++client.next == client.steps.size()) {  // it leaves, and what it has goes
      ledger.release(fresh);
      client.blocks.clear();
    }
    return verdict;
  }

  void retry() {
    ledger.clear_claims();
    claimed.clear();
    for (size_t i = 0; i < waiting.size();) {
      Client& client = clients[waiting[i]];
      Verdict verdict = Verdict::kFits;
      while (client.next < client.steps.size() && verdict == Verdict::kFits) {
        verdict = attempt(waiting[i]);
        if (verdict == Verdict::kBusy) {
          EXPECT_FALSE(running.empty()) << "waits for runs, and there are none";
          for (const ClassNeed& need : client.steps[client.next].needs.at(ledger.classes())) claimed.push_back(need.id);
          ledger.claim(client.steps[client.next].needs);
        }
        if (verdict != Verdict::kFits) break;
      }
      client.is_waiting = verdict != Verdict::kFits;
      if (client.is_waiting) {
        ++i;
      } else {
        waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
  }
};

struct Tally {
  uint64_t states = 0, ends = 0, held = 0;
};

void explore(const World& world, Tally* tally) {
  ++tally->states;
  bool could_move = false;
  for (size_t who = 0; who < world.clients.size(); ++who) {
    const World::Client& client = world.clients[who];
    if (client.is_waiting || client.next == client.steps.size()) continue;
    could_move = true;
    World next = world;
    if (next.attempt(who) != Verdict::kFits) {
      next.clients[who].is_waiting = true;
      next.waiting.push_back(who);
    }
    next.retry();
    explore(next, tally);
  }
  for (size_t i = 0; i < world.running.size(); ++i) {
    could_move = true;
    World next = world;
    next.ledger.leave(next.running[i].needs, next.running[i].number);
    next.running.erase(next.running.begin() + static_cast<std::ptrdiff_t>(i));
    next.retry();
    explore(next, tally);
  }
  if (could_move) return;
  world.ledger.validate();
  ++tally->ends;
  // Who is left over is kept out by blocks alone: MEM-3 says so to them, and nobody waits for a run.
  for (const size_t who : world.waiting) {
    ++tally->held;
    EXPECT_EQ(world.ledger.check(world.clients[who].steps[world.clients[who].next].needs), Verdict::kHeld);
  }
}

TEST(Admission, NobodyWaitsForOneThatWaits) {
  using Step = World::Step;
  Tally all;
  for (uint64_t budget = 4; budget <= 8; budget += kIsSanitized ? 3 : 1) {
    World world{Admission({budget, budget}), {}, {}, {}, {}};
    const SpaceSetId first = world.ledger.add_set({0}), second = world.ledger.add_set({1}),
                     pair = world.ledger.add_set({0, 1});
    const auto both = [&](uint64_t peak, uint64_t eager) {
      return world.ledger.by_class({{0, peak, eager}, {1, peak, eager}});
    };
    const auto one = [&](SpaceId space, uint64_t peak, uint64_t eager) {
      return world.ledger.by_class({{space, peak, eager}});
    };
    world.clients.push_back({{Step{both(1, 2), pair, 1}, Step{one(0, 2, 2), first, 2}}, 0, {}, false});
    world.clients.push_back({{Step{one(1, 1, 3), second, 2}, Step{both(2, 1), pair, 1}}, 0, {}, false});
    world.clients.push_back({{Step{one(0, 4, 0), first, 0}, Step{one(1, 0, 4), second, 1}}, 0, {}, false});
    explore(world, &all);
  }
  EXPECT_GT(all.states, 10000u);
  EXPECT_GT(all.ends, 1000u);
}

}  // namespace
}  // namespace pathways::test::test_admission
