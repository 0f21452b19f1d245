// memory/touched_pages.h: which pages are asked for, and how often.
#include "memory/touched_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

namespace pathways::test::test_touched_pages {
namespace {

constexpr uint64_t kRegion = TouchedPages::kRegion;

class TouchedPagesTest : public testing::Test {
 protected:
  static constexpr uint64_t kBytes = 6 * kRegion;
  TouchedPagesTest() {
    const auto whole = reinterpret_cast<uintptr_t>(memory);
    base = reinterpret_cast<std::byte*>((whole + kRegion - 1) / kRegion * kRegion);
  }
  ~TouchedPagesTest() override { ::munmap(memory, kBytes + kRegion); }

  /// Whether each page from `offset` on, up to `bytes` bytes, is in memory.
  bool are_mapped(uint64_t offset, uint64_t bytes) const {
    std::vector<unsigned char> found((bytes + page - 1) / page);
    EXPECT_EQ(::mincore(base + offset, bytes, found.data()), 0);
    for (const unsigned char each : found) {
      if ((each & 1) == 0) return false;
    }
    return true;
  }

  const uint64_t page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  void* memory =
      ::mmap(nullptr, kBytes + kRegion, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  std::byte* base = nullptr;  // the first region
  TouchedPages pages;
};

TEST_F(TouchedPagesTest, ABufferAcrossTwoRegionsIsAskedForOnce) {
  // 256 KiB that begin in the middle of a region: no region is covered whole.
  std::byte* const target = base + kRegion / 2 + 64;
  pages.touch(target, kRegion);
  EXPECT_EQ(pages.calls(), 2u);
  EXPECT_EQ(pages.count(), kRegion / page + 1);
  for (int again = 0; again < 10; ++again) pages.touch(target, kRegion);
  EXPECT_EQ(pages.calls(), 2u);
}

TEST_F(TouchedPagesTest, OnlyWhatIsMissingIsAskedFor) {
  pages.touch(base, kRegion / 2);
  EXPECT_EQ(pages.calls(), 1u);
  pages.touch(base, kRegion);  // the other half
  EXPECT_EQ(pages.calls(), 2u);
  EXPECT_EQ(pages.count(), kRegion / page);
  pages.touch(base + page, page * 3);
  EXPECT_EQ(pages.calls(), 2u);
}

TEST_F(TouchedPagesTest, OnePageIsLeftToItsFault) {
  pages.touch(base + 10, page / 2);
  EXPECT_EQ(pages.calls(), 0u);
  EXPECT_EQ(pages.count(), 1u);
  pages.touch(base + 10, page);  // and a part of the next one
  EXPECT_EQ(pages.calls(), 0u);
  EXPECT_EQ(pages.count(), 2u);
}

TEST_F(TouchedPagesTest, NothingOutsideIsCounted) {
  pages.touch(base + kRegion - 2 * page, 4 * page);
  EXPECT_EQ(pages.count(), 4u);
  EXPECT_EQ(pages.calls(), 2u);
  pages.touch(base, 0);
  EXPECT_EQ(pages.count(), 4u);
}

TEST_F(TouchedPagesTest, WhatIsAskedForIsMappedAndKeepsItsBytes) {
  std::memset(base + kRegion, 7, page);
  pages.touch(base + kRegion - 3 * page, 2 * kRegion);
  if (::madvise(base, page, 23) != 0) GTEST_SKIP() << "this kernel has no MADV_POPULATE_WRITE";
  EXPECT_TRUE(are_mapped(kRegion - 3 * page, 2 * kRegion));
  EXPECT_EQ(base[kRegion], std::byte{7});
  EXPECT_EQ(base[kRegion + page - 1], std::byte{7});
  EXPECT_EQ(base[kRegion + page], std::byte{0});
}

TEST_F(TouchedPagesTest, AgainstASetOfPages) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  std::vector<bool> known(kBytes / page);
  for (int step = 0; step < 2000; ++step) {
    const uint64_t begin = random() % kBytes, bytes = 1 + random() % std::min(kBytes - begin, 2 * kRegion);
    bool is_known = true;
    for (uint64_t at = begin / page; at <= (begin + bytes - 1) / page; ++at) {
      is_known = is_known && known[at];
      known[at] = true;
    }
    const uint64_t before = pages.calls();
    pages.touch(base + begin, bytes);
    if (is_known) {
      ASSERT_EQ(pages.calls(), before);
    }
    ASSERT_EQ(pages.count(), static_cast<uint64_t>(std::count(known.begin(), known.end(), true)));
  }
}

}  // namespace
}  // namespace pathways::test::test_touched_pages
