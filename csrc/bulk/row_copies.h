/// RowCopies: the copy plan of rows that go to the target shards of one host, and the numbers of these rows.
///
/// Sources: the source shards, then `numbers`. Blocks: of each target shard of the host, that of its rows, then that of
/// their numbers; so the host knows the blocks, wherever the copy plan comes from. Rows that follow each other at both
/// ends are one rectangle.
///
/// Threading: immutable once it is made.
#pragma once

#include <cstdint>
#include <vector>

#include "bulk/copy_plan.h"
#include "device/exchange_io.h"

namespace pathways {

struct RowCopies {
  explicit RowCopies(const RowWrite& write);

  std::vector<int32_t> numbers;  ///< per move: source shard * rows of a source shard + row
  CopyPlan copy_plan;
};

}  // namespace pathways
