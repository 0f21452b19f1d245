// What lies on a host's devices: Ledger.
//   MEM-1  devices and accounts are the sums of the values   FollowsAModel (random, seeded), and the rest
#include "runs/ledger.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <random>
#include <vector>

namespace pathways::test::test_ledger {
namespace {

Value at(uintptr_t n) { return reinterpret_cast<Value>(n * 16); }

TEST(Ledger, CountsAValueOnceFromItsFirstReferenceToItsLast) {
  Ledger ledger(2);
  const auto account = ledger.open(3, 9);
  ledger.add(at(1), account, 0b11, 100);
  ledger.add(at(1), account, 0b11, 100);  // the same value as another output
  ledger.retain(at(1));
  EXPECT_EQ(ledger.devices()[0].bytes, 100u);
  EXPECT_EQ(ledger.accounts()[account].bytes, 200u);
  ledger.drop(at(1));
  ledger.drop(at(1));
  EXPECT_EQ(ledger.devices()[1].bytes, 100u);
  ledger.drop(at(1));
  EXPECT_EQ(ledger.devices()[1].bytes, 0u);
  EXPECT_EQ(ledger.devices()[1].high_water, 100u);
  EXPECT_EQ(ledger.count(), 0u);
  ledger.drop(at(1));    // nobody knows it
  ledger.retain(at(2));  // nor that
  ledger.validate();
}

TEST(Ledger, WhatWasDonatedCountsNoMore) {
  Ledger ledger(1);
  const auto account = ledger.open(0, 0);
  ledger.add(at(1), account, 1, 64);
  ledger.consume(at(1));
  ledger.add(at(2), account, 1, 64);
  EXPECT_EQ(ledger.devices()[0].bytes, 64u);
  EXPECT_EQ(ledger.devices()[0].high_water, 64u);
  ledger.drop(at(1));
  EXPECT_EQ(ledger.devices()[0].bytes, 64u);
  ledger.validate();
}

TEST(Ledger, WhatIsParkedIsBookedAgainWhenItComesBack) {
  Ledger ledger(2);
  const auto account = ledger.open(3, 9);
  ledger.add(at(1), account, 0b11, 100);
  ledger.retain(at(1));
  ledger.retain(at(1));
  ledger.offload(at(1), at(10));
  ledger.offload(at(1), at(10));
  EXPECT_EQ(ledger.devices()[0].bytes, 100u);  // somebody still reads it there
  ledger.drop(at(1));
  EXPECT_EQ(ledger.devices()[0].bytes, 0u);
  EXPECT_EQ(ledger.accounts()[account].bytes, 0u);
  ledger.validate();
  ledger.close(account);
  EXPECT_NE(ledger.open(4, 1), account);  // it is still to be booked on
  ledger.restore(at(10), at(2));
  EXPECT_EQ(ledger.devices()[1].bytes, 100u);
  ledger.validate();
  ledger.drop(at(10));  // the other name was released meanwhile
  ledger.restore(at(10), at(2));
  ledger.drop(at(2));
  EXPECT_EQ(ledger.devices()[1].bytes, 0u);
  EXPECT_EQ(ledger.count(), 0u);
  EXPECT_EQ(ledger.open(5, 1), account);
  ledger.offload(at(7), at(8));  // nobody knows it
  ledger.restore(at(7), at(8));
  ledger.validate();
}

TEST(Ledger, KnowsWhatFits) {
  Ledger ledger(2);
  EXPECT_TRUE(ledger.fits(0b11, UINT64_MAX));
  ledger.set_limit(100);
  const auto account = ledger.open(0, 0);
  ledger.add(at(1), account, 0b01, 60);
  EXPECT_TRUE(ledger.fits(0b01, 40));
  EXPECT_FALSE(ledger.fits(0b01, 41));
  EXPECT_TRUE(ledger.fits(0b10, 100));
  EXPECT_FALSE(ledger.fits(0b11, 100));
  EXPECT_FALSE(ledger.fits(0b10, UINT64_MAX));
  ledger.touch(0b10, 70);
  EXPECT_EQ(ledger.devices()[1].high_water, 70u);
  EXPECT_EQ(ledger.devices()[1].bytes, 0u);
}

TEST(Ledger, AnAccountIsUsedAgainWhenItsLastByteIsGone) {
  Ledger ledger(1);
  const auto first = ledger.open(1, 1);
  ledger.add(at(1), first, 1, 8);
  ledger.close(first);
  EXPECT_NE(ledger.open(2, 2), first);
  ledger.drop(at(1));
  EXPECT_EQ(ledger.open(3, 3), first);
}

TEST(Ledger, FollowsAModel) {
  const unsigned seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  Ledger ledger(3);
  const auto account = ledger.open(0, 0);
  struct Known {
    uint64_t mask, bytes;
    int references;
  };
  std::map<uintptr_t, Known> model;
  for (int step = 0; step < 200000; ++step) {
    const uintptr_t n = 1 + random() % 700;
    switch (random() % 4) {
      case 0: {
        const uint64_t mask = 1 + random() % 7, bytes = random() % 100;
        ledger.add(at(n), account, mask, bytes);
        if (model.contains(n) && bytes != 0) {
          ++model[n].references;
        } else if (bytes != 0) {
          model[n] = {mask, bytes, 1};
        }
        break;
      }
      case 1:
        ledger.retain(at(n));
        if (model.contains(n)) ++model[n].references;
        break;
      case 2:
      case 3:
        ledger.drop(at(n));
        if (model.contains(n) && --model[n].references == 0) model.erase(n);
        break;
    }
    if (step % 1000 != 0) continue;
    ledger.validate();
    ASSERT_EQ(ledger.count(), model.size());
    for (uint32_t device = 0; device < 3; ++device) {
      uint64_t sum = 0;
      for (const auto& [_, known] : model) sum += (known.mask >> device & 1) != 0 ? known.bytes : 0;
      ASSERT_EQ(ledger.devices()[device].bytes, sum);
    }
  }
}

}  // namespace
}  // namespace pathways::test::test_ledger
