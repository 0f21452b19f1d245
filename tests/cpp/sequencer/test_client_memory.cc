// Quotas in the ledger of memory, and what each client holds.
//
//   MEM-5  Quota.*; Quota.AnyOrder draws cases by chance against a model; the seed is printed
//   MEM-1  ClientMemory.SumsByClient
#include "sequencer/client_memory.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <utility>
#include <vector>

#include "sequencer/admission.h"
#include "support.h"

namespace pathways::test::test_client_memory {
namespace {

TEST(ClientMemory, SumsByClient) {
  Admission ledger({100, 100});
  const SpaceSetId both = ledger.add_set({0, 1}), second = ledger.add_set({1});
  const BlockId a = ledger.add_block(1, 7, both, 10, true), b = ledger.add_block(2, 7, second, 30, false);
  ledger.add_block(1, 7, second, 0, true);  // an empty one makes nobody a holder
  EXPECT_EQ(ledger.held(1, 0), 10u);
  EXPECT_EQ(ledger.clients().most_held(2), 30u);
  EXPECT_EQ(ledger.clients_on(0).size(), 1u);
  EXPECT_EQ(ledger.clients_on(1).size(), 2u);
  ledger.share(a);
  ledger.release(a);
  EXPECT_EQ(ledger.held(1, 1), 10u);
  ledger.offload(1);
  EXPECT_EQ(ledger.held(1, 1), 0u);
  EXPECT_EQ(ledger.clients_on(0).size(), 0u);
  ledger.validate();
  SpaceId worst = 0;
  ASSERT_TRUE(ledger.restore(1, &worst));
  EXPECT_EQ(ledger.held(1, 1), 10u);
  ledger.release(a);
  ledger.release(b);
  EXPECT_TRUE(ledger.clients_on(1).empty());
  ledger.validate();
  ledger.forget(1);
  ledger.forget(2);
  ledger.forget(3);  // it never held anything
  ledger.validate();
}

struct Quota : ::testing::Test {
  Admission ledger{{1000, 1000, 1000}, 2};
  SpaceSetId set = ledger.add_set({0}), both = ledger.add_set({0, 1}), transfers = ledger.add_set({2});
  SpaceId worst = 99;
};

TEST_F(Quota, BoundsWhatAClientHoldsAndRuns) {
  ledger.set_quota(1, 100);
  const RunNeeds whole = ledger.by_class({{0, 100, 0}}), more = ledger.by_class({{0, 60, 41}}),
                 half = ledger.by_class({{0, 50, 0}});
  EXPECT_EQ(ledger.check_quota(1, more, &worst), Verdict::kNever);
  EXPECT_EQ(worst, 0u);
  EXPECT_EQ(ledger.check_quota(1, whole, &worst), Verdict::kFits);
  EXPECT_EQ(ledger.check_quota(2, more, &worst), Verdict::kFits);  // another has none
  EXPECT_EQ(ledger.check_block_quota(1, both, 101, &worst), Verdict::kNever);
  const uint64_t run = ledger.enter(half, 1);
  EXPECT_EQ(ledger.check_quota(1, whole, &worst), Verdict::kFits);          // runs go one after the other
  EXPECT_EQ(ledger.check_block_quota(1, set, 60, &worst), Verdict::kBusy);  // a put may come before the run
  EXPECT_EQ(ledger.check_block_quota(2, set, 60, &worst), Verdict::kFits);
  ledger.leave(half, run, 1);
  EXPECT_EQ(ledger.check_block_quota(1, set, 60, &worst), Verdict::kFits);
  const BlockId block = ledger.add_block(1, 7, set, 60, true);
  EXPECT_EQ(ledger.check_quota(1, half, &worst), Verdict::kHeld);
  EXPECT_EQ(ledger.check_block_quota(1, both, 41, &worst), Verdict::kHeld);
  const uint64_t before = ledger.version();
  ledger.release(block);
  EXPECT_NE(ledger.version(), before);
  EXPECT_EQ(ledger.check_quota(1, half, &worst), Verdict::kFits);
  ledger.validate();
}

TEST_F(Quota, CountsDevicesOnly) {
  ledger.set_quota(1, 10);
  const RunNeeds receives = ledger.by_class({{2, 500, 0}});
  EXPECT_EQ(ledger.check_quota(1, receives, &worst), Verdict::kFits);
  ledger.add_block(1, 7, transfers, 300, true);
  EXPECT_EQ(ledger.clients().most_held(1), 0u);
  EXPECT_EQ(ledger.check_quota(1, receives, &worst), Verdict::kFits);
  ledger.validate();
}

TEST_F(Quota, ASmallerOneTakesNothingAway) {
  const BlockId block = ledger.add_block(1, 7, set, 80, true);
  ledger.set_quota(1, 50);
  const RunNeeds some = ledger.by_class({{0, 10, 0}}), none = ledger.by_class({{0, 0, 0}});
  EXPECT_EQ(ledger.live(0), 80u);
  EXPECT_EQ(ledger.check_quota(1, some, &worst), Verdict::kHeld);
  EXPECT_EQ(ledger.check_quota(1, none, &worst), Verdict::kFits);  // one that works in place may make room
  ledger.set_quota(1, kUnlimited);
  EXPECT_EQ(ledger.check_quota(1, some, &worst), Verdict::kFits);
  ledger.set_quota(1, 50);
  ledger.release(block);
  EXPECT_EQ(ledger.check_quota(1, some, &worst), Verdict::kFits);
  ledger.validate();
}

TEST_F(Quota, RunsFromBeforeAreNotCounted) {
  const RunNeeds some = ledger.by_class({{0, 70, 5}});
  const uint64_t before = ledger.enter(some, 1);
  ledger.set_quota(1, 100);
  const uint64_t after = ledger.enter(some, 1);
  ledger.set_quota(1, kUnlimited);
  ledger.set_quota(1, 100);
  ledger.leave(some, before, 1);
  ledger.leave(some, after, 1);
  ledger.validate();
  EXPECT_EQ(ledger.check_block_quota(1, set, 100, &worst), Verdict::kFits);
}

/// Random runs, puts and releases of two clients. A run's need is taken at its position at the latest and until its end
/// at most, so at any time a client never holds more than its quota, whichever of its runs have begun.
TEST_F(Quota, AnyOrder) {
  std::mt19937 random(test::seed());
  const auto draw = [&](uint64_t most) { return random() % (most + 1); };
  struct Run {
    RunNeeds needs;
    uint64_t number;
  };
  std::map<uint32_t, std::vector<Run>> runs;
  std::map<uint32_t, std::vector<std::pair<BlockId, uint64_t>>> blocks;
  ledger.set_quota(1, 100);
  for (int i = 0; i < 20000; ++i) {
    const uint32_t client = 1 + static_cast<uint32_t>(draw(1));
    auto& its_runs = runs[client];
    auto& its_blocks = blocks[client];
    switch (draw(4)) {
      case 0: {
        const uint64_t peak = draw(60);
        const RunNeeds needs = ledger.by_class({{0, peak, draw(10)}});
        if (ledger.check(needs) != Verdict::kFits) break;
        if (ledger.check_quota(client, needs, &worst) != Verdict::kFits) break;
        const uint64_t number = ledger.enter(needs, client);
        its_runs.push_back({needs, number});
        if (const uint64_t result = draw(peak); result != 0) {
          its_blocks.emplace_back(ledger.add_block(client, 7, set, result, false), result);
        }
        break;
      }
      case 1: {
        const uint64_t bytes = draw(60);
        if (ledger.check_block(set, bytes) != Verdict::kFits) break;
        if (ledger.check_block_quota(client, set, bytes, &worst) != Verdict::kFits) break;
        its_blocks.emplace_back(ledger.add_block(client, 7, set, bytes, true), bytes);
        break;
      }
      case 2:
        if (its_runs.empty()) break;
        ledger.leave(its_runs.front().needs, its_runs.front().number, client);
        its_runs.erase(its_runs.begin());
        break;
      default: {
        if (its_blocks.empty()) break;
        const size_t at = draw(its_blocks.size() - 1);
        ledger.release(its_blocks[at].first);
        its_blocks.erase(its_blocks.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
    uint64_t held = 0;
    for (const auto& each : blocks[1]) held += each.second;
    ASSERT_LE(held, 100u);
    ASSERT_EQ(ledger.held(1, 0), held);
    if (i % 64 == 0) ledger.validate();
  }
}

}  // namespace
}  // namespace pathways::test::test_client_memory
