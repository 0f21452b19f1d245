/// Which of many rings have new records: one bit per writer, in shared memory.
///
/// A reader of thousands of rings looks at a few words instead of at every ring. So the cost of a pass depends on the
/// rings that have records, not on the number of rings (COST-3). A bit carries no data: it means "look at this ring".
///
/// READY-1 no record is missed: a writer publishes its record, then sets its bit in `words`, then the bit of that word
/// in `summary`, and then rings the reader's doorbell. The reader clears in the opposite order, and reads the ring
/// last. If a bit is set after the reader cleared it, the reader finds it at its next look.
///
/// Layout: bit i of words[i / 64]; bit w of summary[w / 64] for words[w]. All zeros is an empty bitmap.
/// Threading: `mark` by any thread of any process; `collect` by the reader.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "base/cacheline.h"
#include "sync/atomic.h"

namespace pathways {

struct ReadyBitmap {
  static constexpr uint32_t kBits = 1u << 16;

  void mark(uint32_t bit) noexcept {
    const uint32_t word = bit / 64;
    // SYNC ready/mark: pairs with ready/collect. Write the bit even if it is set: the reader may be about to clear it.
    words[word].fetch_or(uint64_t{1} << (bit % 64), std::memory_order_acq_rel);
    summary[word / 64].fetch_or(uint64_t{1} << (word % 64), std::memory_order_acq_rel);
  }

  /// Appends the bits set since the last call, and clears them.
  void collect(std::vector<uint32_t>* out) {
    for (uint32_t s = 0; s < kBits / 64 / 64; ++s) {
      if (summary[s].load(std::memory_order_relaxed) == 0) continue;
      // SYNC ready/collect: pairs with ready/mark; the records are visible.
      uint64_t marked = summary[s].exchange(0, std::memory_order_acq_rel);
      for (; marked != 0; marked &= marked - 1) {
        const uint32_t word = s * 64 + static_cast<uint32_t>(std::countr_zero(marked));
        uint64_t bits = words[word].exchange(0, std::memory_order_acq_rel);
        for (; bits != 0; bits &= bits - 1) {
          out->push_back(word * 64 + static_cast<uint32_t>(std::countr_zero(bits)));
        }
      }
    }
  }

  alignas(kCacheLine) Atomic<uint64_t> summary[kBits / 64 / 64];
  alignas(kCacheLine) Atomic<uint64_t> words[kBits / 64];
};

}  // namespace pathways
