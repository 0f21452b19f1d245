// bulk/copier.h
//   COPY-1 told      Copier.ToldOnce, Copier.StopGivesBackTheRest
//   COPY-2 visible   Copier.ToldOnce (under ThreadSanitizer), Copier.RandomJobs
//   COPY-3 short     Copier.ShortOnesOvertake
//   COPY-4 long      Copier.LongOnesGoOn
#include "bulk/slow_copier_for_testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "base/status.h"
#include "support.h"

namespace pathways::test::test_copier {
namespace {

using namespace std::chrono_literals;

std::shared_ptr<const CopyPlan> whole(uint64_t bytes) {
  const std::vector<uint64_t> words{0, 1, bytes, 1, bytes, 1, 0, 0, 0, 0, bytes, 0};
  return std::make_shared<const CopyPlan>(CopyPlan::parse(words));
}

struct Bell {
  std::atomic<uint32_t> rings{0};
  std::function<void()> ring() {
    return [this] { rings.fetch_add(1, std::memory_order_relaxed); };
  }
};

std::vector<Copier::Job> wait_for(Copier& copier, size_t jobs) {
  std::vector<Copier::Job> done;
  while (done.size() < jobs) {
    copier.take_done(&done);
    std::this_thread::yield();
  }
  return done;
}

TEST(Copier, ToldOnce) {
  const Watchdog watchdog("a copier");
  Bell bell;
  Copier copier(bell.ring());
  for (const uint64_t bytes : {uint64_t{1}, Copier::kInlineBytes, Copier::kInlineBytes + 1, Copier::kChunkBytes + 13,
                               5 * Copier::kChunkBytes + 3}) {
    const std::vector<std::byte> data = pattern(bytes, bytes);
    std::vector<std::byte> got(bytes);
    Copier::Job job{whole(bytes), {data.data()}, {got.data()}, bytes, 3, nullptr};
    const bool at_once = copier.start(job);
    EXPECT_EQ(at_once, bytes <= Copier::kInlineBytes);
    if (!at_once) {
      const auto done = wait_for(copier, 1);
      EXPECT_EQ(done[0].key, bytes);
      EXPECT_EQ(done[0].to, 3u);
    }
    EXPECT_EQ(got, data);
    EXPECT_EQ(copier.under_way(), 0u);
  }
  EXPECT_TRUE(copier.stop().empty());
  EXPECT_EQ(bell.rings.load(), 3u);
}

TEST(Copier, ShortOnesOvertake) {
  const Watchdog watchdog("a copier with short and long jobs");
  Bell bell;
  Copier copier(bell.ring());
  const uint64_t large = 256 << 20, small = 128 << 10;
  const std::vector<std::byte> data = pattern(small, 5);
  std::vector<std::byte> source(large), target(large), got(small);
  Copier::Job first{whole(large), {source.data()}, {target.data()}, 1, 0, nullptr};
  Copier::Job second{whole(small), {data.data()}, {got.data()}, 2, 0, nullptr};
  ASSERT_FALSE(copier.start(first));
  ASSERT_FALSE(copier.start(second));
  const auto done = wait_for(copier, 2);
  EXPECT_EQ(done[0].key, 2u);
  EXPECT_EQ(got, data);
}

TEST(Copier, LongOnesGoOn) {
  // Short jobs are always under way, as many as ever are done, beside one of eight pieces.
  const Watchdog watchdog("a copier with a long job beside short ones without end");
  for (const uint64_t small : {Copier::kShortBytes, Copier::kInlineBytes + 1}) {
    Bell bell;
    Copier copier(bell.ring());
    const uint64_t large = 8 * Copier::kChunkBytes;
    std::vector<std::byte> source(large), target(large), from(small), to(small);
    const auto short_copy_plan = whole(small);
    const auto start_short = [&] {
      Copier::Job job{short_copy_plan, {from.data()}, {to.data()}, 1, 0, nullptr};
      ASSERT_FALSE(copier.start(job));
    };
    const uint32_t ahead = 64;
    for (uint32_t i = 0; i < ahead; ++i) start_short();
    Copier::Job job{whole(large), {source.data()}, {target.data()}, 2, 0, nullptr};
    ASSERT_FALSE(copier.start(job));
    const uint64_t bound = ahead + 8 * (Copier::kChunkBytes / small + 1);
    uint64_t overtook = 0;
    bool is_done = false;
    std::vector<Copier::Job> done;
    while (!is_done && overtook <= 100 * bound) {
      done.clear();
      copier.take_done(&done);
      for (const Copier::Job& each : done) {
        is_done = is_done || each.key == 2;
        if (!is_done) ++overtook;
        start_short();
      }
    }
    EXPECT_LE(overtook, bound) << "short jobs of " << small << " bytes";
    (void)copier.stop();
  }
}

TEST(Copier, StopGivesBackTheRest) {
  const Watchdog watchdog("a copier that is stopped");
  Bell bell;
  SlowCopierForTesting copier(bell.ring(), 1h);
  const std::vector<std::byte> data = pattern(100, 1);
  std::vector<std::byte> got(100);
  for (uint64_t i = 0; i < 3; ++i) {
    Copier::Job job{whole(100), {data.data()}, {got.data()}, i, 0, nullptr};
    EXPECT_FALSE(copier.start(job));
  }
  EXPECT_EQ(copier.under_way(), 3u);
  EXPECT_EQ(copier.stop().size(), 3u);
  EXPECT_EQ(copier.under_way(), 0u);
  Copier::Job late{whole(100), {data.data()}, {got.data()}};
  EXPECT_FALSE(copier.start(late));  // it goes on after a stop
  EXPECT_EQ(copier.stop().size(), 1u);

  Copier plain(bell.ring());
  EXPECT_TRUE(plain.stop().empty());
  Copier::Job job{whole(100), {data.data()}, {got.data()}};
  EXPECT_TRUE(plain.start(job));
  EXPECT_EQ(got, data);
}

TEST(Copier, RandomJobs) {
  const Watchdog watchdog("a copier under load");
  std::mt19937_64 random(seed());
  Bell bell;
  Copier copier(bell.ring());
  std::vector<std::vector<std::byte>> sources, targets;
  const uint32_t jobs = 100 * kStressScale;
  sources.reserve(jobs), targets.reserve(jobs);
  size_t told = 0;
  std::vector<Copier::Job> done;
  for (uint32_t i = 0; i < jobs; ++i) {
    const uint64_t bytes = 1 + random() % (uint64_t{1} << (random() % 22));
    sources.push_back(pattern(bytes, i)), targets.emplace_back(bytes);
    Copier::Job job{whole(bytes), {sources[i].data()}, {targets[i].data()}, i, 0, nullptr};
    if (copier.start(job)) ++told;
    if (random() % 4 == 0) copier.take_done(&done);
  }
  while (told + done.size() < jobs) copier.take_done(&done);
  for (uint32_t i = 0; i < jobs; ++i) EXPECT_EQ(targets[i], sources[i]);
}

}  // namespace
}  // namespace pathways::test::test_copier
