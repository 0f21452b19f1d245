// The ring of a trace: what it returns, what it counts as lost, and that it is nothing while it is off.
//
//   TRACE-1  TraceRing.*: each record comes back once or is counted once, also when the ring wraps between two takes
#include "base/trace_ring.h"

#include <gtest/gtest.h>

#include <random>

namespace pathways::test::test_trace_ring {
namespace {

struct Item {
  uint64_t number;
};
using Ring = TraceRing<Item>;

TEST(TraceRing, OffTakesNothing) {
  Ring ring;
  EXPECT_FALSE(ring.is_on());
  ring.add({1});
  EXPECT_TRUE(ring.take().records.empty());
  EXPECT_EQ(ring.take().dropped, 0u);
}

TEST(TraceRing, WrapsAndCounts) {
  std::mt19937 random(7);
  for (const size_t capacity : {1u, 2u, 7u, 64u}) {
    Ring ring;
    ring.start(capacity);
    uint64_t added = 0, next = 0, dropped = 0;
    for (int round = 0; round < 200; ++round) {
      const uint64_t count = random() % (2 * capacity + 2);
      for (uint64_t i = 0; i < count; ++i) ring.add({added++});
      const Ring::Taken taken = ring.take();
      EXPECT_EQ(taken.dropped, count > capacity ? count - capacity : 0);
      next += taken.dropped;  // the oldest ones
      dropped += taken.dropped;
      for (const Item& item : taken.records) ASSERT_EQ(item.number, next++);
      ASSERT_EQ(next, added);
    }
    EXPECT_GT(dropped, 0u);
  }
}

TEST(TraceRing, StopKeepsWhatIsThere) {
  Ring ring;
  ring.start(4);
  ring.add({1});
  ring.stop();
  ring.add({2});
  const Ring::Taken taken = ring.take();
  ASSERT_EQ(taken.records.size(), 1u);
  EXPECT_EQ(taken.records[0].number, 1u);
  ring.start(4);
  EXPECT_TRUE(ring.take().records.empty());
}

}  // namespace
}  // namespace pathways::test::test_trace_ring
