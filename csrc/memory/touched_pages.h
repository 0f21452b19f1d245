// TouchedPages: maps the pages that a copy is about to write, many with one call, and remembers them. Use it for memory
// that another process owns and that this process writes again and again: the receive buffers of transfers.
//
// Why: the first write to each page of shared memory costs a page fault. One madvise for many pages takes a third of
// the time of one fault for each (benchmarks/results/transfer-*). But for pages that are mapped already, the same call
// is pure loss: it visits each page, and took longer than the copy itself for buffers of 256 KiB. So what is
// mapped is not asked for again, wherever in a region a buffer begins and ends; only known pages between missing ones
// are.
//
// It is a hint. The owner of the memory may give pages back to the kernel, or unmap the segment and map another one at
// the same address. Then the writes that follow take one fault per page, and nothing else happens.
//
// Threading: one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace pathways {

class TouchedPages {
 public:
  /// Memory is divided into regions of so many bytes: at most 64 pages, a bit each.
  static constexpr uint64_t kRegion = 256 << 10;

  TouchedPages();

  /// Maps what is not known to be mapped of the pages from `target` on, which hold `bytes` bytes. Never fails: pages
  /// that the kernel does not map now fault when they are written.
  void touch(std::byte* target, uint64_t bytes);

  /// The number of calls to the kernel.
  [[nodiscard]] uint64_t calls() const { return calls_; }
  /// The number of pages that are known to be mapped. O(regions).
  [[nodiscard]] uint64_t count() const;

 private:
  const uint64_t page_;  // bytes
  uint64_t calls_ = 0;
  std::unordered_map<uintptr_t, uint64_t> regions_;  // by the address of a region: its pages that are mapped
};

}  // namespace pathways
