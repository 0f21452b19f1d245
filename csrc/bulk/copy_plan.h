/// CopyPlan: all that one host writes into the blocks of another in one transfer, as rectangles of bytes; and the walk
/// along it. Use it for all code that moves a transfer's bytes: the copier, which writes them into the blocks, and the
/// network transfers between machines, which gather them on the sender and scatter them on the receiver.
///
/// Threading: a copy plan is immutable; a walk belongs to one thread at a time.
///
///   COPYPLAN-1 (bounds)  a copy plan that parse() took writes inside its blocks and reads inside its sources only.
///   COPYPLAN-2 (order)   every walk along a copy plan meets the same bytes in the same order, however it is cut into
///                        runs; so what one walk gathers another walk scatters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace pathways {

/// The encoding, in words of 64 bits: `direct`; number of sources, bytes of each; number of blocks, bytes of each;
/// number of rectangles, and for each: source, block, offset in the source, offset in the block, bytes in a row, number
/// of dimensions, and per dimension, outermost first: count, stride in the source, stride in the block (bytes).
class CopyPlan {
 public:
  struct Dimension {
    uint64_t count, source_stride, target_stride;
  };
  struct Rectangle {
    uint32_t source, block;
    uint64_t source_offset, target_offset, row;
    std::vector<Dimension> dimensions;
    uint64_t rows = 1;
  };

  /// Throws Error(kInvalid) when a rectangle leaves its source or its block, or when more is written into a block than
  /// it has room for (COPYPLAN-1).
  static CopyPlan parse(std::span<const uint64_t> words);

  std::span<const uint64_t> words() const { return words_; }
  /// True when the sender is also the receiver, and some of its blocks are its shards as they are: for these nothing is
  /// written.
  bool has_direct() const { return direct_; }
  uint64_t bytes() const { return bytes_; }
  std::span<const uint64_t> source_bytes() const { return sources_; }
  std::span<const uint64_t> block_bytes() const { return blocks_; }
  std::span<const Rectangle> rectangles() const { return rectangles_; }
  /// Whether some rectangle is written into block `block`.
  bool writes(size_t block) const { return written_[block]; }

 private:
  bool direct_ = false;
  uint64_t bytes_ = 0;
  std::vector<uint64_t> words_, sources_, blocks_;
  std::vector<bool> written_;
  std::vector<Rectangle> rectangles_;
};

/// Rows that follow each other at a stride, from a source into a block.
struct CopyRun {
  uint32_t source, block;
  uint64_t source_offset, target_offset;
  uint64_t row, count;
  uint64_t source_stride, target_stride;
};

/// A position in a copy plan, which must outlive the walk.
class CopyWalk {
 public:
  explicit CopyWalk(const CopyPlan& copy_plan) : copy_plan_(&copy_plan) {}

  /// The next run, of 1 to `most` bytes: whole rows of one dimension, or a part of one row. False at the end, or when
  /// `most` is 0.
  bool next(uint64_t most, CopyRun* run);
  bool is_over() const { return rectangle_ == copy_plan_->rectangles().size(); }
  /// Bytes passed.
  uint64_t passed() const { return passed_; }

 private:
  const CopyPlan* copy_plan_;
  size_t rectangle_ = 0;
  uint64_t row_ = 0;     // index in the rectangle, counted over all its dimensions
  uint64_t column_ = 0;  // offset in the row, in bytes
  uint64_t passed_ = 0;
};

/// Copies `count` rows of `row` bytes.
void copy_rows(std::byte* target, uint64_t target_stride, const std::byte* source, uint64_t source_stride, uint64_t row,
               uint64_t count);

/// Copies the next bytes of the walk from the sources into `out`, one after the other, until `out` is full or the walk
/// is over. Returns how many.
uint64_t gather(CopyWalk& walk, std::span<const std::byte* const> sources, std::span<std::byte> out);
/// Copies gathered bytes to their places in the blocks; the next call goes on behind them. `in` must not be longer than
/// the rest of the walk.
void scatter(CopyWalk& walk, std::span<std::byte* const> blocks, std::span<const std::byte> in);

}  // namespace pathways
