// The news board. Label -> test:
//   NEWS-1 (nothing is missed)   NewsBoard.EveryPostIsCollected, NewsBoard.WritersAndAReader
#include "channel/news_board.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <set>
#include <thread>
#include <vector>

namespace pathways {
namespace {

TEST(NewsBoard, EveryPostIsCollected) {
  auto board = std::make_unique<NewsBoard>();
  const std::set<uint32_t> posted{0, 1, 63, 64, 4095, 4096, 40000, NewsBoard::kPlaces - 1};
  for (uint32_t place : posted) board->post(place);
  board->post(64);  // twice is once
  std::vector<uint32_t> places;
  board->collect(&places);
  EXPECT_EQ(std::set<uint32_t>(places.begin(), places.end()), posted);
  EXPECT_EQ(places.size(), posted.size());
  places.clear();
  board->collect(&places);
  EXPECT_TRUE(places.empty());
}

// Each writer counts up and posts; the reader, told by the board alone where to look, must see every last count.
TEST(NewsBoard, WritersAndAReader) {
  constexpr uint32_t kWriters = 3, kRounds = 20000;
  auto board = std::make_unique<NewsBoard>();
  std::vector<std::atomic<uint32_t>> counts(kWriters);
  std::vector<std::thread> writers;
  for (uint32_t w = 0; w < kWriters; ++w) {
    writers.emplace_back([&, w] {
      for (uint32_t round = 1; round <= kRounds; ++round) {
        counts[w].store(round, std::memory_order_release);
        board->post(w * 64 * 64);
      }
    });
  }
  std::vector<uint32_t> seen(kWriters, 0), places;
  bool over = false;
  while (true) {
    if (over) {
      for (std::thread& writer : writers) writer.join();
    }
    places.clear();
    board->collect(&places);
    for (uint32_t place : places) seen[place / (64 * 64)] = counts[place / (64 * 64)].load(std::memory_order_acquire);
    if (over) break;
    over = seen == std::vector<uint32_t>(kWriters, kRounds) || counts[0].load(std::memory_order_acquire) == kRounds;
    std::this_thread::yield();
  }
  EXPECT_EQ(seen, std::vector<uint32_t>(kWriters, kRounds));
}

}  // namespace
}  // namespace pathways
