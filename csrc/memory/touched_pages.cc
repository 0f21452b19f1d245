#include "memory/touched_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace pathways {
namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14

/// The bits `first` to `last`, both included.
constexpr uint64_t bits(uint64_t first, uint64_t last) {
  return (~uint64_t{0} << first) & (~uint64_t{0} >> (63 - last));
}

}  // namespace

TouchedPages::TouchedPages() : page_(static_cast<uint64_t>(::sysconf(_SC_PAGESIZE))) {
  PW_CHECK(kRegion % page_ == 0 && kRegion / page_ <= 64);
}

void TouchedPages::touch(std::byte* target, uint64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(target), end = begin + bytes;
  for (uintptr_t region = begin & ~(kRegion - 1); region < end; region += kRegion) {
    const uint64_t first = (std::max(region, begin) - region) / page_;
    const uint64_t last = (std::min(region + kRegion, end) - 1 - region) / page_;
    uint64_t& known = regions_[region];
    const uint64_t missing = bits(first, last) & ~known;
    known |= missing;
    if (std::popcount(missing) < 2) continue;  // the fault of one page costs no more than the call
    const auto from = static_cast<uint64_t>(std::countr_zero(missing));
    const auto to = static_cast<uint64_t>(64 - std::countl_zero(missing));
    // May fail (an older kernel): then each page faults.
    (void)::madvise(reinterpret_cast<void*>(region + from * page_), (to - from) * page_, kPopulateWrite);
    ++calls_;
  }
}

uint64_t TouchedPages::count() const {
  uint64_t pages = 0;
  for (const auto& [region, known] : regions_) pages += static_cast<uint64_t>(std::popcount(known));
  return pages;
}

}  // namespace pathways
