// Arena: allocates host buffers inside one region (usually a shared Segment). Use it for array data that JAX and NumPy
// read in place: payloads are 64-byte aligned.
//
// Threading: allocate() and validate() in the process that called create(), from any thread (a lock inside);
// retain(), release() and the accessors from any thread of any process that maps the region, lock-free.
//
// Invariants
//   ARENA-1 (disjoint)  live blocks do not overlap, and each payload is 64-byte aligned.
//   ARENA-2 (counted)   a block is reused only after as many release() as 1 + retain(), and when every borrower has
//   given
//                       back; one too many aborts.
//   ARENA-3 (merged)    no two neighbouring blocks are both free, so a region with no live block is one free block.
//   ARENA-4 (fits)      allocate() fails only when no free block is large enough.
//   ARENA-5 (lent)      reclaim() takes back exactly what a borrower that is dead had been lent by then and had not
//   given
//                       back, whenever it died. Why: borrowers have a bit each in the word of the references, so a
//                       lease is given back in one step; and leases are stamped, so one to a successor is told apart.
//   TRUST-1 (data)      what an arena's owner writes is data to a process that maps it: an ArenaView stays inside the
//                       mapped memory, whatever is written there, and never aborts.
// A process that dies holding references which are no leases leaves them counted.
//
// The last release() of a block, in whatever process, pushes it on the returned list; allocate() takes that whole list
// (one exchange, so no ABA), merges the blocks with their free neighbours, and searches.
//
// Layout: Arena header | block | block | ... | sentinel, all by offsets from the Arena's address:
//   block = 64 bytes of header {bytes, bytes of the block before, free-list links, returned link, references, state}
//   and the payload. An offset given out is that of a payload; 0 is never a block.
// Source: M. Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems" (2004): free lists by two
// levels of size class found by two bit scans, O(1); on a miss the exact class is searched too (ARENA-4).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/cacheline.h"
#include "base/status.h"
#include "sync/atomic.h"
#include "sync/futex_lock.h"

namespace pathways {

class Arena {
 public:
  static constexpr std::size_t kAlignment = kCacheLine;
  static constexpr unsigned kBorrowers = 48;

  /// The smallest region: it has room for one payload of 64 bytes.
  static std::size_t min_bytes() noexcept;
  /// Makes an arena over `bytes` bytes of `memory` (64-byte aligned), which must outlive it and all its blocks. Throws
  /// Error(kInvalid) if too small or misaligned.
  static Arena* create(void* memory, std::size_t bytes);
  /// The arena that create() made, perhaps in another process. Throws Error(kInvalid) if `memory` holds none.
  static Arena* attach(void* memory);

  /// A block of at least `bytes` bytes with one reference, its payload at *offset. kNoMemory when it does not fit now,
  /// kInvalid when it never can. 0 bytes are a block too. The content is whatever was there.
  Status allocate(std::size_t bytes, std::uint64_t* offset) noexcept;
  /// One more reference. The caller holds one already.
  void retain(std::uint64_t offset) noexcept;
  /// One more reference to each block that has some which are no leases; their payloads' offsets. Owner process;
  /// O(blocks).
  std::vector<std::uint64_t> retain_held();
  /// One reference less. The payload must not be touched through it any more.
  void release(std::uint64_t offset) noexcept;
  /// Lends the block, once in its life, to each of `borrowers`, a bit each: who gives it back by number. Stamps go up.
  /// Owner process.
  void lease_out(std::uint64_t offset, std::uint64_t borrowers, std::uint64_t stamp) noexcept;
  /// A borrower's release().
  void return_lease(std::uint64_t offset, unsigned borrower) noexcept;
  /// Gives back in the stead of a borrower that is dead what was lent to it with stamps up to `stamp`. Owner process;
  /// O(blocks lent).
  void reclaim(unsigned borrower, std::uint64_t stamp) noexcept;

  /// Gives pages of free blocks back to the system, from position `from` on (0: the beginning), a few megabytes of them
  /// with the lock held. Where to go on, or 0 at the end; adds to *bytes what was looked through. Their content is
  /// zeros afterwards. Owner process.
  std::uint64_t trim(std::uint64_t from, std::uint64_t* bytes) noexcept;

  /// References now, leases included: a stale snapshot.
  [[nodiscard]] std::uint32_t was_references(std::uint64_t offset) const noexcept;

  /// The payload; valid while the caller holds a reference. Aborts on what allocate() did not give.
  [[nodiscard]] std::byte* at(std::uint64_t offset) const noexcept;
  /// Bytes of the payload: what was asked for, rounded up to 64.
  [[nodiscard]] std::size_t block_bytes(std::uint64_t offset) const noexcept;

  /// Payload and header bytes of blocks that hold references.
  [[nodiscard]] std::uint64_t bytes_in_use() const noexcept { return in_use_.load(std::memory_order_relaxed); }
  /// The most that bytes_in_use() has been.
  [[nodiscard]] std::uint64_t high_water() const noexcept { return high_water_.load(std::memory_order_relaxed); }
  /// Bytes that blocks and their headers share.
  [[nodiscard]] std::uint64_t capacity() const noexcept { return end_ - begin_; }
  /// The longest payload of an empty arena.
  [[nodiscard]] std::uint64_t max_block() const noexcept { return capacity() - kHeaderBytes; }

  struct Holding {
    std::uint64_t offset;
    std::uint64_t bytes;
    std::uint32_t references;
    std::uint64_t borrowers;  ///< a bit each
  };
  /// The live blocks, for who wonders where its memory is. Owner process; O(blocks).
  std::vector<Holding> holdings() noexcept;
  /// Checks ARENA-1, ARENA-3 and the free lists; aborts when broken. Owner process; O(blocks).
  void validate() noexcept;

  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

 private:
  friend class ArenaView;
  struct Block;

  static constexpr std::uint64_t kMagic = 0x50574152'454e4131;  // "PWARENA1"
  static constexpr std::uint64_t kHeaderBytes = kCacheLine;
  static constexpr unsigned kMinLog2 = 7;  // the smallest block: header and 64 bytes
  static constexpr unsigned kLevels = 41;  // first level: powers of two up to 2^47
  static constexpr unsigned kSubBits = 4;  // second level: 16 classes in each
  static constexpr unsigned kSubs = 1U << kSubBits;
  struct SizeClass {
    unsigned level;
    unsigned sub;
  };

  Arena(std::uint64_t begin, std::uint64_t end) noexcept : magic_(kMagic), begin_(begin), end_(end) {}

  static SizeClass class_of(std::uint64_t bytes) noexcept;
  [[nodiscard]] Block* block(std::uint64_t offset) const noexcept;
  [[nodiscard]] std::uint64_t offset_of(const Block* block) const noexcept;
  [[nodiscard]] Block* checked_block(std::uint64_t payload) const noexcept;
  [[nodiscard]] Block* after(const Block* block) const noexcept;
  void insert_free(Block* block) noexcept;
  void remove_free(Block* block) noexcept;
  Block* find_free(std::uint64_t bytes) noexcept;
  Block* merge(Block* block) noexcept;
  void drop(Block* block, std::uint64_t references) noexcept;
  void push_returned(Block* freed, std::uint64_t offset) noexcept;
  void forget_lease(Block* block) noexcept;
  void drain_returned() noexcept;
  void count_in_use(std::uint64_t bytes) noexcept;

  std::uint64_t magic_;                                 // immutable after create
  std::uint64_t begin_;                                 // immutable after create: offset of the first block
  std::uint64_t end_;                                   // immutable after create: offset of the sentinel
  FutexLock lock_;                                      // guards the free lists and the links of all blocks
  std::uint64_t level_bits_ = 0;                        // guarded by lock_: levels with a free block
  std::uint32_t sub_bits_[kLevels] = {};                // guarded by lock_
  std::uint64_t free_heads_[kLevels][kSubs] = {};       // guarded by lock_
  std::uint64_t leased_head_ = 0;                       // guarded by lock_: blocks that were ever lent
  alignas(kCacheLine) Atomic<std::uint64_t> returned_;  // any process pushes, the owner takes all
  alignas(kCacheLine) Atomic<std::uint64_t> in_use_;
  Atomic<std::uint64_t> high_water_;
};

/// An arena of another process, of which nothing is believed: its size is what this process mapped. Offsets come from
/// messages; each is checked, and the answer is an address inside the mapping that no later write can move.
///
/// Threading: as the accessors of Arena. A value; the mapping must outlive it.
class ArenaView {
 public:
  ArenaView() = default;
  /// `bytes` of `memory` are mapped. Throws Error(kInvalid) when no arena fits there, or none begins there.
  ArenaView(void* memory, std::size_t bytes);

  [[nodiscard]] bool is_there() const noexcept { return arena_ != nullptr; }
  /// The payload of a live block of at least `bytes` bytes; nullptr when `offset` is none.
  [[nodiscard]] std::byte* find(std::uint64_t offset, std::uint64_t bytes) const noexcept;
  /// The same of a block that `borrower` was lent and has not given back.
  [[nodiscard]] std::byte* find_leased(std::uint64_t offset, std::uint64_t bytes, unsigned borrower) const noexcept;
  /// A borrower's release(). False, and nothing happens, when it holds no such lease.
  bool return_lease(std::uint64_t offset, unsigned borrower) const noexcept;
  /// One counted reference less. False, and nothing happens, when there is none.
  bool release(std::uint64_t offset) const noexcept;

 private:
  [[nodiscard]] Arena::Block* live(std::uint64_t payload) const noexcept;
  void returned(Arena::Block* freed, std::uint64_t block) const noexcept;

  Arena* arena_ = nullptr;
  std::uint64_t bytes_ = 0;
};

}  // namespace pathways
