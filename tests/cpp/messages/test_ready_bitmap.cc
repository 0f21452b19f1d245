// The board that says which rings have records.
//
//   READY-1   Board.MissesNothing: several writers, a reader that looks only where the board says
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "messages/ready_bitmap.h"
#include "support.h"

namespace pathways::test::test_ready_bitmap {
namespace {

TEST(Board, CollectsOnce) {
  auto board = std::make_unique<ReadyBitmap>();
  std::vector<uint32_t> places;
  board->collect(&places);
  EXPECT_TRUE(places.empty());
  for (const uint32_t place : {65535u, 0u, 64u, 63u, 4096u, 64u}) board->mark(place);
  board->collect(&places);
  EXPECT_EQ(places, (std::vector<uint32_t>{0, 63, 64, 4096, 65535}));
  places.clear();
  board->collect(&places);
  EXPECT_TRUE(places.empty());
}

TEST(Board, MissesNothing) {  // READY-1
  const Watchdog watchdog("the ready bitmap");
  constexpr uint32_t kWriters = 3, kPlacesEach = 5, kReceivesReady = 20000;
  auto board = std::make_unique<ReadyBitmap>();
  auto published = std::make_unique<Atomic<uint32_t>[]>(ReadyBitmap::kBits);
  const auto place_of = [](uint32_t writer, uint32_t i) { return (writer * 7 + i * 61 + (i % 2) * 40000) % 65536; };
  std::vector<std::thread> writers;
  for (uint32_t w = 0; w < kWriters; ++w) {
    writers.emplace_back([&, w] {
      std::mt19937_64 random(seed() + w);
      for (uint32_t i = 0; i < kReceivesReady; ++i) {
        const uint32_t place = place_of(w, static_cast<uint32_t>(random() % kPlacesEach));
        published[place].fetch_add(1, std::memory_order_release);
        board->mark(place);
      }
    });
  }
  std::vector<uint32_t> places, taken(ReadyBitmap::kBits, 0);
  uint64_t sum = 0;
  while (sum < uint64_t{kWriters} * kReceivesReady) {  // a missed one is never taken: the watchdog ends it
    places.clear();
    board->collect(&places);
    for (const uint32_t place : places) {
      const uint32_t now = published[place].load(std::memory_order_acquire);
      sum += now - taken[place];
      taken[place] = now;
    }
  }
  for (std::thread& writer : writers) writer.join();
}

}  // namespace
}  // namespace pathways::test::test_ready_bitmap
