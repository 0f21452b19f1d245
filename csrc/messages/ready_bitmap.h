/// Which of many rings have something new: one bit per writer, in shared memory.
///
/// A reader of thousands of rings looks at a few words instead of at every ring, so that a pass costs what there is to
/// do and not what there could be (COST-3). A bit carries no data: it says "look at this ring".
///
/// READY-1 nothing is missed: a writer publishes its record, then sets its bit in `words`, then its word's bit in
/// `summary`; the reader clears in the opposite order and looks at the ring last. A bit set after it was cleared is
/// found at the next look, and whoever posts rings the reader's doorbell after that.
///
/// Layout: bit i of words[i / 64]; bit w of summary[w / 64] for words[w]. Zero is an empty board.
/// Threading: `post` by any thread of any process; `collect` by the reader.
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
    // SYNC ready/mark: pairs with ready/collect; always written, for a bit seen set may be about to be cleared.
    words[word].fetch_or(uint64_t{1} << (bit % 64), std::memory_order_acq_rel);
    summary[word / 64].fetch_or(uint64_t{1} << (word % 64), std::memory_order_acq_rel);
  }

  /// Appends the bits posted since the last call, and clears them.
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
