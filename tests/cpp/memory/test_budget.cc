// memory/budget.h
//   MEM-1 accounted   Budget.CountsReservations, Budget.NeverExceedsItsLimit, Budget.ReleasingTooMuchAborts
#include "memory/budget.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "support.h"

namespace pathways {
namespace {

TEST(Budget, CountsReservations) {
  Budget budget(100);
  EXPECT_EQ(budget.limit(), 100U);
  EXPECT_EQ(budget.try_reserve(60), Status::kOk);
  EXPECT_EQ(budget.try_reserve(41), Status::kNoMemory);
  EXPECT_EQ(budget.try_reserve(40), Status::kOk);
  EXPECT_EQ(budget.try_reserve(0), Status::kOk);
  EXPECT_EQ(budget.in_use(), 100U);
  budget.release(60);
  EXPECT_EQ(budget.in_use(), 40U);
  EXPECT_EQ(budget.high_water(), 100U);
  EXPECT_EQ(budget.try_reserve(101), Status::kInvalid) << "it can never fit";
  EXPECT_EQ(budget.try_reserve(UINT64_MAX), Status::kInvalid);
  budget.set_limit(30);
  EXPECT_EQ(budget.in_use(), 40U);
  EXPECT_EQ(budget.try_reserve(1), Status::kNoMemory);
}

TEST(Budget, ReleasingTooMuchAborts) {
  Budget budget(100);
  ASSERT_EQ(budget.try_reserve(10), Status::kOk);
  EXPECT_DEATH(budget.release(11), "before >= bytes");
}

TEST(Budget, NeverExceedsItsLimit) {
  const test::Watchdog watchdog("NeverExceedsItsLimit");
  Budget budget(1000);
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(test::seed() + t);
      for (int i = 0; i < 10'000 * test::kStressScale; ++i) {
        const std::uint64_t bytes = random() % 600;
        if (budget.try_reserve(bytes) != Status::kOk) continue;
        EXPECT_LE(budget.in_use(), 1000U);
        budget.release(bytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.in_use(), 0U);
  EXPECT_LE(budget.high_water(), 1000U);
}

}  // namespace
}  // namespace pathways
