// A host's pulse, by which who started it sees that it is not stopped.
#include <thread>

#include "host/pulse.h"
#include "support.h"

#include <gtest/gtest.h>

namespace pathways::test::test_pulse {
namespace {

TEST(Pulse, BeatsUntilItIsGone) {
  const Watchdog watchdog("a pulse");
  Segment segment = HostBlock::make(0, 1, {4096, 0, 0, 0}, false);
  HostBlock* block = HostBlock::attach(segment);
  EXPECT_EQ(block->pulse.load(std::memory_order_relaxed), 0U);
  {
    const Pulse pulse(block, 1ms);
    while (block->pulse.load(std::memory_order_relaxed) < 20) std::this_thread::sleep_for(1ms);
  }
  const uint64_t last = block->pulse.load(std::memory_order_relaxed);
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(block->pulse.load(std::memory_order_relaxed), last);
  const Pulse slow(block, std::chrono::hours(1));  // its end does not wait for the next beat
}

}  // namespace
}  // namespace pathways::test::test_pulse
