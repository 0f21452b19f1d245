#include "bulk/copy_plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/status.h"

namespace pathways {
namespace {

/// Reads words in turn. Throws Error(kInvalid) when there are no more.
struct Words {
  std::span<const uint64_t> left;
  uint64_t next() {
    if (left.empty()) throw Error(Status::kInvalid, "a copy plan ends too early");
    const uint64_t word = left.front();
    left = left.subspan(1);
    return word;
  }
  std::vector<uint64_t> list() {
    const uint64_t count = next();
    if (count > left.size()) throw Error(Status::kInvalid, "a copy plan ends too early");
    std::vector<uint64_t> words(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(count));
    left = left.subspan(count);
    return words;
  }
};

/// a * b + c, but at most half of the largest value, so that it cannot overflow.
uint64_t multiply_add(uint64_t a, uint64_t b, uint64_t c) {
  const auto wide = static_cast<unsigned __int128>(a) * b + c;
  return wide > std::numeric_limits<uint64_t>::max() / 2 ? std::numeric_limits<uint64_t>::max() / 2
                                                         : static_cast<uint64_t>(wide);
}

template <size_t kRow>
void copy_rows_of(std::byte* target, uint64_t target_stride, const std::byte* source, uint64_t source_stride,
                  uint64_t count) {
  for (; count != 0; --count, target += target_stride, source += source_stride) std::memcpy(target, source, kRow);
}

}  // namespace

CopyPlan CopyPlan::parse(std::span<const uint64_t> words) {
  Words in{words};
  CopyPlan copy_plan;
  copy_plan.words_.assign(words.begin(), words.end());
  copy_plan.direct_ = in.next() != 0;
  copy_plan.sources_ = in.list();
  copy_plan.blocks_ = in.list();
  copy_plan.written_.resize(copy_plan.blocks_.size());
  std::vector<uint64_t> room = copy_plan.blocks_;  // bytes left per block: the rectangles must not exceed a block
  const uint64_t count = in.next();
  for (uint64_t i = 0; i < count; ++i) {
    Rectangle r;
    const uint64_t source = in.next(), block = in.next();
    r.source_offset = in.next(), r.target_offset = in.next(), r.row = in.next();
    const uint64_t rank = in.next();
    uint64_t last = multiply_add(1, r.source_offset, r.row), end = multiply_add(1, r.target_offset, r.row);
    for (uint64_t d = 0; d < rank; ++d) {
      Dimension dimension{in.next(), in.next(), in.next()};
      if (dimension.count == 0) throw Error(Status::kInvalid, "a copy plan has a rectangle without rows");
      if (dimension.count == 1) dimension.source_stride = dimension.target_stride = 0;  // never used
      last = multiply_add(dimension.count - 1, dimension.source_stride, last);
      end = multiply_add(dimension.count - 1, dimension.target_stride, end);
      r.rows = multiply_add(r.rows, dimension.count, 0);
      r.dimensions.push_back(dimension);
    }
    if (source >= copy_plan.sources_.size() || block >= copy_plan.blocks_.size() || r.row == 0 ||
        last > copy_plan.sources_[source] || end > copy_plan.blocks_[block]) {
      throw Error(Status::kInvalid, "rectangle " + std::to_string(i) + " of a copy plan is out of bounds (COPYPLAN-1)");
    }
    const uint64_t bytes = multiply_add(r.rows, r.row, 0);
    if (bytes > room[block]) {
      throw Error(Status::kInvalid, "rectangle " + std::to_string(i) + " of a copy plan overlaps others (COPYPLAN-1)");
    }
    room[block] -= bytes;
    r.source = static_cast<uint32_t>(source), r.block = static_cast<uint32_t>(block);
    copy_plan.written_[block] = true;
    copy_plan.bytes_ += bytes;
    copy_plan.rectangles_.push_back(std::move(r));
  }
  if (!in.left.empty()) throw Error(Status::kInvalid, "a copy plan has words behind its end");
  return copy_plan;
}

bool CopyWalk::next(uint64_t most, CopyRun* run) {
  if (is_over() || most == 0) return false;
  static constexpr CopyPlan::Dimension kOneRow{1, 0, 0};
  const CopyPlan::Rectangle& r = copy_plan_->rectangles()[rectangle_];
  const CopyPlan::Dimension& inner = r.dimensions.empty() ? kOneRow : r.dimensions.back();
  uint64_t source = r.source_offset + column_, target = r.target_offset + column_, rest = row_;
  for (size_t d = r.dimensions.size(); d-- != 0; rest /= r.dimensions[d].count) {
    const uint64_t at = rest % r.dimensions[d].count;
    source += at * r.dimensions[d].source_stride;
    target += at * r.dimensions[d].target_stride;
  }
  *run = {r.source, r.block, source, target, r.row, 1, inner.source_stride, inner.target_stride};
  if (column_ != 0 || most < r.row) {
    run->row = std::min(r.row - column_, most);
    column_ += run->row;
    if (column_ == r.row) column_ = 0, ++row_;
  } else {
    run->count = std::min(inner.count - row_ % inner.count, most / r.row);
    row_ += run->count;
  }
  passed_ += run->row * run->count;
  if (row_ == r.rows) row_ = 0, ++rectangle_;
  return true;
}

void copy_rows(std::byte* target, uint64_t target_stride, const std::byte* source, uint64_t source_stride, uint64_t row,
               uint64_t count) {
  switch (row) {
    case 1:
      return copy_rows_of<1>(target, target_stride, source, source_stride, count);
    case 2:
      return copy_rows_of<2>(target, target_stride, source, source_stride, count);
    case 4:
      return copy_rows_of<4>(target, target_stride, source, source_stride, count);
    case 8:
      return copy_rows_of<8>(target, target_stride, source, source_stride, count);
    case 16:
      return copy_rows_of<16>(target, target_stride, source, source_stride, count);
    default:
      for (; count != 0; --count, target += target_stride, source += source_stride) std::memcpy(target, source, row);
  }
}

uint64_t gather(CopyWalk& walk, std::span<const std::byte* const> sources, std::span<std::byte> out) {
  CopyRun run;
  uint64_t done = 0;
  while (walk.next(out.size() - done, &run)) {
    copy_rows(out.data() + done, run.row, sources[run.source] + run.source_offset, run.source_stride, run.row,
              run.count);
    done += run.row * run.count;
  }
  return done;
}

void scatter(CopyWalk& walk, std::span<std::byte* const> blocks, std::span<const std::byte> in) {
  CopyRun run;
  while (!in.empty()) {
    const bool is_owed = walk.next(in.size(), &run);
    PW_CHECK(is_owed);
    copy_rows(blocks[run.block] + run.target_offset, run.target_stride, in.data(), run.row, run.row, run.count);
    in = in.subspan(run.row * run.count);
  }
}

}  // namespace pathways
