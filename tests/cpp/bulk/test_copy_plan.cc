// bulk/copy_plan.h
//   COPYPLAN-1 bounds   CopyPlan.RefusesWhatIsOutOfBounds, CopyPlan.AnyRectangle
//   COPYPLAN-2 order    CopyPlan.AnyRectangle
#include "bulk/copy_plan.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>

#include "base/status.h"
#include "bulk/copier.h"
#include "support.h"

namespace pathways::test::test_copy_plan {
namespace {

TEST(CopyPlan, RefusesWhatIsOutOfBounds) {
  const auto refused = [](std::vector<uint64_t> words) { EXPECT_THROW((void)CopyPlan::parse(words), Error); };
  EXPECT_EQ(CopyPlan::parse(std::vector<uint64_t>{0, 1, 64, 1, 64, 1, 0, 0, 0, 0, 64, 0}).bytes(), 64u);
  EXPECT_TRUE(CopyPlan::parse(std::vector<uint64_t>{1, 0, 0, 0}).has_direct());
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

TEST(CopyPlan, AnyRectangle) {
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
    Copier::Job job{std::make_shared<const CopyPlan>(CopyPlan::parse(words)), {data.data()}, {got.data()}};
    EXPECT_TRUE(copier.start(job));
    EXPECT_EQ(got, want);

    // The same, put together in one way and taken apart in another.
    const CopyPlan& copy_plan = *job.copy_plan;
    std::vector<std::byte> packed(copy_plan.bytes() + 1), landed(to_bytes);
    CopyWalk there(copy_plan), here(copy_plan);
    const std::byte* const sources[] = {data.data()};
    std::byte* const blocks[] = {landed.data()};
    for (size_t at = 0; !there.is_over();) {
      at += gather(there, sources, std::span(packed).subspan(at).first(1 + random() % (packed.size() - at)));
      ASSERT_EQ(at, there.passed());
    }
    ASSERT_EQ(there.passed(), copy_plan.bytes());
    while (!here.is_over()) {
      const uint64_t left = copy_plan.bytes() - here.passed();
      scatter(here, blocks, std::span(packed).subspan(here.passed()).first(1 + random() % left));
    }
    EXPECT_EQ(landed, want);
  }
}

}  // namespace
}  // namespace pathways::test::test_copy_plan
