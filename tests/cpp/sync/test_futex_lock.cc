// sync/futex_lock.h
//   one holder at a time   FutexLock.ThreadStress; all interleavings: tests/model
#include "sync/futex_lock.h"

#include <gtest/gtest.h>

#include <mutex>
#include <thread>
#include <vector>

#include "support.h"

namespace pathways::test::test_futex_lock {
namespace {

TEST(FutexLock, ThreadStress) {
  const test::Watchdog watchdog("FutexLock.ThreadStress");
  FutexLock lock;
  long counter = 0;
  constexpr int kEach = 20'000 * test::kStressScale;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kEach; ++i) {
        const std::lock_guard guard(lock);
        ++counter;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counter, 4L * kEach);
}

}  // namespace
}  // namespace pathways::test::test_futex_lock
