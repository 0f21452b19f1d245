// futures/future_layout.h
//   FUT-3 stale    FutureLayoutTest.AWordOfAnotherGenerationIsFree, .AnIndexOutOfRangeIsTheLastSlot
// Futures themselves: test_future_table.cc.
#include "futures/future_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "futures/future_view.h"

namespace pathways::test::test_future_layout {
namespace {

TEST(FutureLayoutTest, AWordKeepsItsParts) {
  for (const std::uint32_t generation : {0U, 1U, UINT32_MAX}) {
    for (const std::uint32_t payload : {0U, 1U, FutureWord::kMaxPayload}) {
      for (const FutureState state :
           {FutureState::kFree, FutureState::kPending, FutureState::kReady, FutureState::kFailed}) {
        const std::uint64_t word = FutureWord::of(generation, state, payload);
        EXPECT_EQ(FutureWord::generation_of(word), generation);
        EXPECT_EQ(FutureWord::payload_of(word), payload);
        EXPECT_EQ(FutureWord::state_of(word), state);
        EXPECT_EQ(word & FutureWord::kNotify, 0U);
        const std::uint64_t noted = word | FutureWord::kListed;
        EXPECT_EQ(FutureWord::generation_of(noted), generation);
        EXPECT_EQ(FutureWord::payload_of(noted), payload);
        EXPECT_EQ(FutureWord::state_of(noted), state);
      }
    }
  }
}

TEST(FutureLayoutTest, FinishingKeepsTheGenerationAndWhoIsNotified) {
  const std::uint64_t word = FutureWord::of(7, FutureState::kPending, 3) | FutureWord::kWaited;
  const std::uint64_t failed = FutureWord::finished(word, FutureState::kFailed, 42);
  EXPECT_EQ(failed, FutureWord::of(7, FutureState::kFailed, 42) | FutureWord::kWaited);
  EXPECT_EQ(FutureWord::counted(word, 2), FutureWord::of(7, FutureState::kPending, 1) | FutureWord::kWaited);
}

TEST(FutureLayoutTest, AnErrorFitsIntoTheWord) { EXPECT_LE(FutureView::kMaxError, FutureWord::kMaxPayload); }

TEST(FutureLayoutTest, AWordOfAnotherGenerationIsFree) {
  const Handle handle = Handle::make(5, 7);
  EXPECT_TRUE(FutureWord::is_pending(FutureWord::of(7, FutureState::kPending, 1), handle));
  EXPECT_FALSE(FutureWord::is_pending(FutureWord::of(8, FutureState::kPending, 1), handle));
  EXPECT_FALSE(FutureWord::is_pending(FutureWord::of(7, FutureState::kReady, 0), handle));
  EXPECT_EQ(FutureWord::state_for(FutureWord::of(7, FutureState::kReady, 0), handle), FutureState::kReady);
  EXPECT_EQ(FutureWord::state_for(FutureWord::of(8, FutureState::kReady, 0), handle), FutureState::kFree);
}

TEST(FutureLayoutTest, TheArraysFollowEachOtherAndFillTheBlock) {
  for (const std::uint32_t capacity : {1U, 63U, 64U, 65U, 4096U, 4097U, 10'000U}) {
    std::vector<std::uint64_t> block(FutureArrays::bytes_for(capacity) / 8 + 1);
    const FutureArrays arrays{reinterpret_cast<Atomic<std::uint64_t>*>(block.data()), capacity};
    EXPECT_EQ(arrays.lists(), arrays.words + capacity + 1);
    EXPECT_EQ(arrays.notify_bits(), arrays.lists() + capacity + 1);
    EXPECT_EQ(arrays.notify_summary(), arrays.notify_bits() + FutureArrays::bit_words(capacity));
    EXPECT_GE(FutureArrays::bit_words(capacity) * 64, capacity);
    EXPECT_GE(FutureArrays::summary_words(capacity) * 64, FutureArrays::bit_words(capacity));
    const auto* end = reinterpret_cast<const std::byte*>(arrays.links() + capacity);
    EXPECT_EQ(end, reinterpret_cast<const std::byte*>(block.data()) + FutureArrays::bytes_for(capacity)) << capacity;
  }
}

TEST(FutureLayoutTest, AnIndexOutOfRangeIsTheLastSlot) {
  const FutureArrays arrays{nullptr, 10};
  EXPECT_EQ(arrays.slot_of(Handle::make(9, 1)), 9U);
  for (const std::uint32_t index : {10U, 11U, UINT32_MAX}) EXPECT_EQ(arrays.slot_of(Handle::make(index, 1)), 10U);
}

}  // namespace
}  // namespace pathways::test::test_future_layout
