// sync/ring_block.h
//   RING-2 whole     RingBlockTest.ARecordIsBehindItsHeader, .ASkipLeadsToTheStartOfTheBlock
//   RING-5 trust     RingBlockTest.RefusesALengthThat*, .RefusesAnUnknownMark, .RefusesASkipWithoutARecord
// Records between two roles: test_byte_ring.cc.
#include "sync/ring_block.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

#include "base/status.h"

namespace pathways::test::test_ring_block {
namespace {

constexpr std::uint32_t kCapacity = 4096;

class RingBlockTest : public testing::Test {
 protected:
  /// The error of reading at `position`, or "" when a record is there.
  std::string refusal(std::uint64_t position, std::uint64_t tail) const {
    try {
      (void)block.checked_length(position, tail);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kInvalid);
      return error.what();
    }
    return "";
  }
  std::uint32_t length_at(std::uint64_t position, std::uint64_t tail) const {
    return block.checked_length(position, tail);
  }

  alignas(8) std::array<std::byte, kCapacity> bytes{};
  RingBlock block{bytes.data(), kCapacity};
};

TEST_F(RingBlockTest, ARecordIsBehindItsHeader) {
  EXPECT_EQ(RingBlock::footprint(1), 16U);
  EXPECT_EQ(RingBlock::footprint(8), 16U);
  EXPECT_EQ(RingBlock::footprint(9), 24U);
  std::byte* const record = block.begin_record(kCapacity * 3 + 64, 9);
  EXPECT_EQ(record, bytes.data() + 64 + 8);
  EXPECT_EQ(record, block.record_at(kCapacity * 3 + 64));
  EXPECT_EQ(length_at(kCapacity * 3 + 64, kCapacity * 3 + 64 + 24), 9U);
}

TEST_F(RingBlockTest, ASkipLeadsToTheStartOfTheBlock) {
  block.mark_skip(kCapacity - 16, 16);
  block.begin_record(kCapacity, 100);
  std::uint64_t position = kCapacity - 16;
  EXPECT_EQ(block.checked_length(position, kCapacity + RingBlock::footprint(100)), 100U);
  EXPECT_EQ(position, kCapacity);
  block.validate(kCapacity - 16, kCapacity + RingBlock::footprint(100));
}

TEST_F(RingBlockTest, TheLongestRecordIsTakenAndALongerOneIsRefused) {
  const std::uint32_t longest = RingBlock::longest(kCapacity);
  block.begin_record(0, longest);
  EXPECT_EQ(length_at(0, kCapacity), longest);
  block.begin_record(0, longest + 1);
  EXPECT_NE(refusal(0, kCapacity).find("record length " + std::to_string(longest + 1)), std::string::npos);
}

TEST_F(RingBlockTest, RefusesALengthThatIsZeroOrHuge) {
  for (const std::uint32_t length : {0U, UINT32_MAX, UINT32_MAX - 7U}) {
    block.begin_record(0, length);
    EXPECT_NE(refusal(0, kCapacity), "") << length;
  }
}

TEST_F(RingBlockTest, RefusesALengthThatReachesOverTheBlockOrTheTail) {
  block.begin_record(kCapacity - 32, 25);  // 8 + 32 bytes, 32 are left
  EXPECT_NE(refusal(kCapacity - 32, kCapacity * 2), "");
  block.begin_record(kCapacity - 32, 24);
  EXPECT_EQ(refusal(kCapacity - 32, kCapacity * 2), "");
  EXPECT_NE(refusal(kCapacity - 32, kCapacity - 8), "");
  EXPECT_THROW(block.validate(kCapacity - 32, kCapacity - 8), Error);
}

TEST_F(RingBlockTest, RefusesAnUnknownMark) {
  EXPECT_NE(refusal(0, kCapacity).find("record mark 0"), std::string::npos);
  block.mark_skip(kCapacity - 16, 16);  // and no record at the start of the block
  EXPECT_NE(refusal(kCapacity - 16, kCapacity + 16).find("record mark 0"), std::string::npos);
}

TEST_F(RingBlockTest, RefusesASkipWithoutARecord) {
  block.mark_skip(kCapacity - 16, 16);
  EXPECT_NE(refusal(kCapacity - 16, kCapacity).find("skip mark"), std::string::npos);  // nothing is published behind it
  block.mark_skip(kCapacity, kCapacity);
  EXPECT_NE(refusal(kCapacity - 16, kCapacity * 2).find("skip mark"), std::string::npos);  // a skip behind a skip
}

}  // namespace
}  // namespace pathways::test::test_ring_block
