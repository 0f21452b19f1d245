// The sending end of a ring, which never waits.
//
//   RING-4   Box.KeepsTheOrder: records held back go first; Box.SaysWhenItHoldsBack
#include "messages/outbox.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "base/status.h"
#include "memory/segment.h"
#include "support.h"

namespace pathways::test::test_outbox {
namespace {

struct Box : ::testing::Test {
  Segment memory = Segment::heap(ByteRing::bytes_for(4096));
  ByteRing* ring = ByteRing::create(memory.data(), 4096);
  DoorbellWord bell{};

  static void send(Outbox& box, uint64_t number, uint32_t bytes) {
    box.send(bytes, [&](std::byte* out) { std::memcpy(out, &number, sizeof number); });
  }
};

TEST_F(Box, KeepsTheOrder) {
  Outbox box(ring, &bell);
  auto consumer = ring->claim_consumer();
  std::mt19937_64 random(seed());
  uint64_t sent = 0, seen = 0;
  while (seen < 20000) {
    if (sent < 20000 && random() % 2 == 0) {
      for (uint64_t n = random() % 40; n > 0 && sent < 20000; --n) {
        send(box, ++sent, static_cast<uint32_t>(8 + random() % 300));
      }
    }
    const bool holds = box.flush();
    EXPECT_EQ(holds, box.has_overflow());
    for (uint64_t n = random() % 30; n > 0; --n) {
      const auto bytes = consumer.try_front();
      if (bytes.empty()) break;
      uint64_t number = 0;
      std::memcpy(&number, bytes.data(), sizeof number);
      ASSERT_EQ(number, ++seen);
      consumer.pop();
    }
  }
  EXPECT_FALSE(box.flush());
}

TEST_F(Box, SaysWhenItHoldsBack) {
  auto board = std::make_unique<ReadyBitmap>();
  Outbox box(ring, &bell, board.get(), 77);
  auto consumer = ring->claim_consumer();
  EXPECT_TRUE(box.is_connected());
  EXPECT_FALSE(Outbox().is_connected());
  const uint32_t ticket = bell.ticket();
  EXPECT_FALSE(box.flush());
  EXPECT_EQ(bell.ticket(), ticket);  // nothing was sent, nobody is woken
  send(box, 1, box.max_record());
  EXPECT_TRUE(consumer.try_front().empty());  // visible at the flush
  send(box, 2, box.max_record());
  send(box, 3, box.max_record());
  EXPECT_TRUE(box.flush());
  EXPECT_NE(bell.ticket(), ticket);
  std::vector<uint32_t> places;
  board->collect(&places);
  EXPECT_EQ(places, std::vector<uint32_t>{77});
  for (int i = 0; i < 2; ++i) {
    ASSERT_FALSE(consumer.try_front().empty());
    consumer.pop();
  }
  EXPECT_TRUE(consumer.try_front().empty());
  EXPECT_FALSE(box.flush());
  EXPECT_FALSE(consumer.try_front().empty());
  EXPECT_THROW(send(box, 4, box.max_record() + 1), Error);
}

TEST_F(Box, KeepsWhatIsFarUntilItIsDue) {
  Outbox box(ring, &bell);
  auto consumer = ring->claim_consumer();
  box.set_distance(2000000, test_clock);
  EXPECT_EQ(box.due(), 0);
  send(box, 1, 8);
  send(box, 2, 8);
  const uint32_t ticket = bell.ticket();
  EXPECT_TRUE(box.flush());
  EXPECT_TRUE(consumer.try_front().empty());
  EXPECT_EQ(bell.ticket(), ticket);  // nobody is woken for nothing
  EXPECT_EQ(box.due(), test_clock() + 2000000);
  let_pass(1999999ns);
  EXPECT_TRUE(box.flush());
  EXPECT_TRUE(consumer.try_front().empty());
  let_pass(1ns);
  EXPECT_FALSE(box.flush());
  for (uint64_t expected = 1; expected <= 2; ++expected) {
    uint64_t number = 0;
    const auto bytes = consumer.try_front();
    ASSERT_FALSE(bytes.empty());
    std::memcpy(&number, bytes.data(), sizeof number);
    EXPECT_EQ(number, expected);
    consumer.pop();
  }
  EXPECT_NE(bell.ticket(), ticket);
  EXPECT_EQ(box.due(), 0);
}

TEST_F(Box, SaysHowManyAreVisible) {
  Outbox box(ring, &bell);
  auto consumer = ring->claim_consumer();
  uint64_t visible = 0;
  const auto published = [&](uint64_t count) {
    visible = count;
    EXPECT_FALSE(consumer.was_empty());  // they are there before this says so
  };
  for (uint64_t number = 1; number <= 10; ++number) send(box, number, 1000);
  uint64_t seen = 0;
  while (box.flush(published)) {
    EXPECT_GT(visible, seen);
    EXPECT_EQ(box.overflow_bytes(), (10 - visible) * 1000);
    for (; seen < visible; ++seen) {
      ASSERT_FALSE(consumer.try_front().empty());
      consumer.pop();
    }
    EXPECT_TRUE(consumer.try_front().empty());
    consumer.release();
  }
  EXPECT_EQ(visible, 10u);
  EXPECT_EQ(box.overflow_bytes(), 0u);
}

}  // namespace
}  // namespace pathways::test::test_outbox
