// memory/copier.h
//   COPY-1 bounds    Parcel.RefusesWhatIsOutOfBounds, Parcel.AnyRectangle
//   COPY-2 told      Copier.ToldOnce, Copier.StopGivesBackTheRest
//   COPY-3 visible   Copier.ToldOnce (under ThreadSanitizer), Copier.RandomJobs
//   COPY-4 short     Copier.ShortOnesOvertake
#include "memory/copier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "base/status.h"
#include "support.h"

namespace pathways::test {
namespace {

using namespace std::chrono_literals;

std::vector<std::byte> pattern(size_t bytes, uint64_t seed) {
  std::vector<std::byte> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>((i * 131 + i / 251 + seed) & 0xff);
  return data;
}

std::shared_ptr<const Parcel> whole(uint64_t bytes) {
  const std::vector<uint64_t> words{0, 1, bytes, 1, bytes, 1, 0, 0, 0, 0, bytes, 0};
  return std::make_shared<const Parcel>(Parcel::parse(words));
}

TEST(Parcel, RefusesWhatIsOutOfBounds) {
  const auto refused = [](std::vector<uint64_t> words) { EXPECT_THROW((void)Parcel::parse(words), Error); };
  EXPECT_EQ(Parcel::parse(std::vector<uint64_t>{0, 1, 64, 1, 64, 1, 0, 0, 0, 0, 64, 0}).bytes(), 64u);
  EXPECT_TRUE(Parcel::parse(std::vector<uint64_t>{1, 0, 0, 0}).has_direct());
  refused({});
  refused({0, 1, 64, 1, 64, 1, 0, 0, 0, 0});                           // cut off
  refused({0, ~0ull, 64, 1, 64, 0});                                   // a length beyond the end
  refused({0, 1, 64, 1, 64, 1, 0, 0, 0, 0, 64, 0, 7});                 // too long
  refused({0, 1, 64, 1, 64, 1, 1, 0, 0, 0, 64, 0});                    // no such source
  refused({0, 1, 64, 1, 64, 1, 0, 1, 0, 0, 64, 0});                    // no such block
  refused({0, 1, 64, 1, 64, 1, 0, 0, 1, 0, 64, 0});                    // reads one byte too far
  refused({0, 1, 64, 1, 64, 1, 0, 0, 0, 1, 64, 0});                    // writes one byte too far
  refused({0, 1, 64, 1, 64, 1, 0, 0, 0, 0, 8, 1, 9, 8, 8});            // one row too many
  refused({0, 1, 64, 1, 64, 1, 0, 0, 0, 0, 8, 1, 2, ~0ull, 8});        // wraps around
  refused({0, 1, 64, 1, 64, 1, 0, 0, 0, 0, 8, 1, 1ull << 60, 32, 0});  // the same
  refused({0, 1, 64, 1, 64, 1, 0, 0, 0, 0, 8, 1, 0, 8, 8});            // no rows
}

TEST(Parcel, AnyRectangle) {
  std::mt19937_64 random(seed());
  for (uint32_t trial = 0; trial < 300 * kStressScale; ++trial) {
    // A sub-box of one box into a sub-box of another, element by element and by the copier.
    const size_t rank = random() % 4;
    const uint64_t item = uint64_t{1} << (random() % 5);
    std::vector<uint64_t> from(rank), to(rank), box(rank), from_at(rank), to_at(rank);
    for (size_t d = 0; d < rank; ++d) {
      box[d] = 1 + random() % 9;
      from_at[d] = random() % 3, to_at[d] = random() % 3;
      from[d] = box[d] + from_at[d] + random() % 3, to[d] = box[d] + to_at[d] + random() % 3;
    }
    std::vector<uint64_t> from_stride(rank, item), to_stride(rank, item);
    for (size_t d = rank; d-- > 1;) {
      from_stride[d - 1] = from_stride[d] * from[d], to_stride[d - 1] = to_stride[d] * to[d];
    }
    uint64_t from_bytes = item, to_bytes = item, source = 0, target = 0;
    for (size_t d = 0; d < rank; ++d) {
      from_bytes *= from[d], to_bytes *= to[d];
      source += from_at[d] * from_stride[d], target += to_at[d] * to_stride[d];
    }
    std::vector<uint64_t> words{0, 1, from_bytes, 1, to_bytes, 1, 0, 0, source, target, item, rank};
    for (size_t d = 0; d < rank; ++d) words.insert(words.end(), {box[d], from_stride[d], to_stride[d]});
    const std::vector<std::byte> data = pattern(from_bytes, trial);
    std::vector<std::byte> got(to_bytes), want(to_bytes);
    std::vector<uint64_t> at(rank, 0);
    for (bool more = true; more;) {
      uint64_t s = source, t = target;
      for (size_t d = 0; d < rank; ++d) s += at[d] * from_stride[d], t += at[d] * to_stride[d];
      std::memcpy(want.data() + t, data.data() + s, item);
      more = false;
      for (size_t d = rank; d-- > 0 && !more;) {
        if (++at[d] < box[d]) {
          more = true;
        } else {
          at[d] = 0;
        }
      }
    }
    Copier copier([] {});
    Copier::Job job{std::make_shared<const Parcel>(Parcel::parse(words)), {data.data()}, {got.data()}};
    EXPECT_TRUE(copier.start(job));
    EXPECT_EQ(got, want);
  }
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
  for (const uint64_t bytes : {uint64_t{1}, Copier::kInlineBytes, Copier::kInlineBytes + 1, Copier::kPieceBytes + 13,
                               5 * Copier::kPieceBytes + 3}) {
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

TEST(Copier, StopGivesBackTheRest) {
  const Watchdog watchdog("a copier that is stopped");
  Bell bell;
  Copier copier(bell.ring());
  copier.set_delay(1h);
  const std::vector<std::byte> data = pattern(100, 1);
  std::vector<std::byte> got(100);
  for (uint64_t i = 0; i < 3; ++i) {
    Copier::Job job{whole(100), {data.data()}, {got.data()}, i, 0, nullptr};
    EXPECT_FALSE(copier.start(job));
  }
  EXPECT_EQ(copier.under_way(), 3u);
  EXPECT_EQ(copier.stop().size(), 3u);
  EXPECT_EQ(copier.under_way(), 0u);
  copier.set_delay(0ns);
  Copier::Job job{whole(100), {data.data()}, {got.data()}};
  EXPECT_TRUE(copier.start(job));
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
}  // namespace pathways::test
