#include "bulk/row_copies.h"

#include <algorithm>
#include <span>

#include "base/check.h"

namespace pathways {
namespace {

constexpr uint64_t kNumberBytes = sizeof(int32_t);

struct Rectangles {
  std::vector<uint64_t> words;
  uint64_t count = 0;

  void add(uint64_t source, uint64_t block, uint64_t source_offset, uint64_t target_offset, uint64_t bytes) {
    if (bytes == 0) return;
    words.insert(words.end(), {source, block, source_offset, target_offset, bytes, 0});
    ++count;
  }
};

template <typename Items, typename Key>
uint64_t index_of(const Items& items, uint32_t number, Key key) {
  const auto at = std::lower_bound(items.begin(), items.end(), number,
                                   [&](const auto& item, uint32_t wanted) { return key(item) < wanted; });
  PW_CHECK(at != items.end() && key(*at) == number);
  return static_cast<uint64_t>(at - items.begin());
}

}  // namespace

RowCopies::RowCopies(const RowWrite& write) {
  const uint64_t shard_bytes = write.shards.empty() ? 0 : write.shards.front().rows.size();
  const uint64_t row_bytes = write.source_rows == 0 ? 0 : shard_bytes / write.source_rows;
  std::vector<uint64_t> words{0, write.shards.size() + 1};
  for (const RowWrite::Shard& shard : write.shards) words.push_back(shard.rows.size());
  words.push_back(write.moves.size() * kNumberBytes);
  words.push_back(2 * uint64_t{write.targets});
  for (uint32_t i = 0; i < write.targets; ++i) {
    words.push_back(write.capacity * row_bytes);
    words.push_back(write.capacity * kNumberBytes);
  }
  Rectangles rectangles;
  const auto& moves = write.moves;
  for (size_t i = 0; i < moves.size();) {
    size_t rows = 1, slots = 1;  // that follow each other
    const auto follows = [&](size_t next) {
      return next < moves.size() && moves[next].source == moves[i].source && moves[next].target == moves[i].target &&
             moves[next].slot == moves[i].slot + (next - i);
    };
    while (follows(i + slots)) ++slots;
    const uint64_t source =
        index_of(write.shards, moves[i].source, [](const RowWrite::Shard& shard) { return shard.number; });
    const uint64_t target =
        write.places[index_of(write.rooms, moves[i].target, [](const Room& room) { return room.target; })];
    rectangles.add(write.shards.size(), 2 * target + 1, i * kNumberBytes, moves[i].slot * kNumberBytes,
                   slots * kNumberBytes);
    const size_t end = i + slots;
    for (size_t first = i; first < end; first += rows) {
      for (rows = 1; first + rows < end && moves[first + rows].row == moves[first].row + rows;) ++rows;
      rectangles.add(source, 2 * target, moves[first].row * row_bytes, moves[first].slot * row_bytes, rows * row_bytes);
    }
    i = end;
  }
  words.push_back(rectangles.count);
  words.insert(words.end(), rectangles.words.begin(), rectangles.words.end());
  copy_plan = CopyPlan::parse(words);
  numbers.reserve(moves.size());
  for (const HostExchange::Move& move : moves) {
    numbers.push_back(static_cast<int32_t>(move.source * write.source_rows + move.row));
  }
}

}  // namespace pathways
