// The pending values of a host: ReadinessTracker.
//   LOOK-1  the last of a chain answers for the chain               TheLastOfAChainAnswersForIt,
//   AFailureCountsAtTheFront LOOK-1  a donated value tells nothing; another output answers,
//           or the launch that took it over                         AnotherOutputAnswers, TheTakerAnswers
//   GANG-2  what is ready before the taker is settled before it     WhatLiesBetweenIsSettledBeforeTheTaker
#include "runs/readiness_tracker.h"

#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

#include "executor/stub_backend.h"

namespace pathways::test::test_readiness_tracker {
namespace {

using Kind = PendingValue::Kind;

struct FakeValue {
  Readiness readiness = Readiness::kPending;
  int references = 1;
  int looks = 0;
};

FakeValue& fake(Value value) { return *static_cast<FakeValue*>(value); }

/// Knows the readiness of values, and counts references and looks. It does nothing else.
class FakeDevice final : public Device {
 public:
  Readiness readiness(Value value) override {
    ++fake(value).looks;
    return fake(value).readiness;
  }
  Value retain(Value value) override {
    ++fake(value).references;
    return value;
  }
  void drop(Value value) override { --fake(value).references; }
};

struct Tracked : ::testing::Test, private OutputFinder {
  Value another_output(const PendingValue&, std::span<const Value> taken) override {
    asked_without.assign(taken.begin(), taken.end());
    return other;
  }
  Value make(Readiness readiness = Readiness::kPending) {
    values.push_back({readiness, 1, 0});
    return &values.back();
  }
  /// A pending value of a new launch on device 0; its node is `index`.
  uint64_t launch(uint32_t index, Value value, std::vector<uint64_t> input_ages = {}) {
    const uint64_t age = tracker.next_age();
    tracker.add(1, {Kind::kNode, false, 0, index, value, 0, age}, input_ages);
    return age;
  }
  /// Polls once. Returns the indices that were settled; those that failed as negative numbers.
  std::vector<int> poll() {
    std::vector<int> settled;
    const uint32_t done = tracker.poll([&](const PendingValue& item, Readiness readiness) {
      settled.push_back(readiness == Readiness::kFailed ? -static_cast<int>(item.index) : static_cast<int>(item.index));
      refs.drop(item.value);
    });
    EXPECT_EQ(done, settled.size());
    tracker.validate();
    return settled;
  }
  void TearDown() override {
    tracker.clear();
    EXPECT_EQ(tracker.waiting(), 0u);
    for (const FakeValue& value : values) EXPECT_EQ(value.references, 0);
  }

  std::deque<FakeValue> values;
  Value other = nullptr;             ///< what another_output() finds
  std::vector<Value> asked_without;  ///< the values that it was told are taken
  FakeDevice device;
  Ledger ledger{1};
  ValueRefs refs{device, ledger};
  ReadinessTracker tracker{device, refs, *this};
};

using Settled = std::vector<int>;

TEST_F(Tracked, TheLastOfAChainAnswersForIt) {
  const Value first = make(), second = make(), third = make();
  const uint64_t a = launch(1, first);
  const uint64_t b = launch(2, second, {a});
  launch(3, third, {b});
  EXPECT_EQ(poll(), Settled{});
  fake(third).readiness = Readiness::kReady;
  const int looks = fake(first).looks + fake(second).looks;
  EXPECT_EQ(poll(), Settled({1, 2, 3}));
  EXPECT_EQ(fake(first).looks + fake(second).looks, looks);  // nobody asked them
}

TEST_F(Tracked, AFailureCountsAtTheFront) {
  const Value first = make(), second = make(Readiness::kFailed);
  const uint64_t a = launch(1, first);
  launch(2, second, {a});
  EXPECT_EQ(poll(), Settled{});
  fake(first).readiness = Readiness::kReady;
  EXPECT_EQ(poll(), Settled({1, -2}));
}

TEST_F(Tracked, ALateRequestForAnOldValueDoesNotWait) {
  const Value old = make(Readiness::kReady), young = make();
  const uint64_t age = tracker.next_age();
  launch(2, young);
  tracker.add(1, {Kind::kFetch, false, 0, 7, old, 0, age});
  EXPECT_EQ(poll(), Settled({7}));
  fake(young).readiness = Readiness::kReady;
  EXPECT_EQ(poll(), Settled({2}));
}

TEST_F(Tracked, AnotherOutputAnswers) {
  const Value donated = make(), kept = make(), result = make();
  const uint64_t a = launch(1, donated);
  other = kept;
  const uint64_t b = tracker.next_age();
  tracker.take_over(1, std::vector<uint32_t>{0}, std::vector<Value>{donated}, std::vector<uint64_t>{a});
  EXPECT_EQ(asked_without, std::vector<Value>{donated});
  EXPECT_EQ(fake(donated).references, 0);
  EXPECT_EQ(fake(kept).references, 2);
  tracker.add(1, {Kind::kNode, false, 0, 2, result, 0, b}, std::vector<uint64_t>{a});
  fake(kept).readiness = Readiness::kReady;
  EXPECT_EQ(poll(), Settled({1}));
  refs.drop(kept);
}

TEST_F(Tracked, TheTakerAnswers) {
  const Value donated = make(Readiness::kDeleted), result = make();
  const uint64_t a = launch(1, donated);
  const uint64_t b = tracker.next_age();
  tracker.take_over(1, std::vector<uint32_t>{0}, std::vector<Value>{donated}, std::vector<uint64_t>{a});
  tracker.add(1, {Kind::kNode, false, 0, 2, result, 0, b});
  EXPECT_EQ(poll(), Settled{});
  std::vector<Value> watched;
  tracker.watched(&watched);
  EXPECT_EQ(watched, std::vector<Value>{result});
  fake(result).readiness = Readiness::kFailed;
  EXPECT_EQ(poll(), Settled({1, -2}));  // nobody can read the donated value any more
}

TEST_F(Tracked, WhatLiesBetweenIsSettledBeforeTheTaker) {
  const Value donated = make(Readiness::kDeleted), sent = make(), result = make();
  const uint64_t a = launch(1, donated);
  tracker.add(1, {Kind::kSend, false, 0, 5, sent, 0, tracker.next_age()});
  const uint64_t b = tracker.next_age();
  tracker.take_over(1, std::vector<uint32_t>{0}, std::vector<Value>{donated}, std::vector<uint64_t>{a});
  tracker.add(1, {Kind::kNode, false, 0, 2, result, 0, b});
  EXPECT_EQ(poll(), Settled{});
  fake(sent).readiness = Readiness::kReady;
  EXPECT_EQ(poll(), Settled({5}));
  EXPECT_EQ(tracker.waiting(), 2u);
  fake(result).readiness = Readiness::kReady;
  EXPECT_EQ(poll(), Settled({1, 2}));
}

TEST_F(Tracked, FindsTheLaunchOfAnAgeOrNode) {
  const Value value = make();
  const uint64_t age = launch(4, value);
  ASSERT_NE(tracker.find_launch(age), nullptr);
  EXPECT_EQ(tracker.find_launch(age)->index, 4u);
  EXPECT_EQ(tracker.find_launch(0, 4), tracker.find_launch(age));
  EXPECT_EQ(tracker.find_launch(0, 5), nullptr);
  EXPECT_EQ(tracker.find_launch(age + 1), nullptr);
}

}  // namespace
}  // namespace pathways::test::test_readiness_tracker
