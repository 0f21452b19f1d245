// Arena: allocates host buffers inside one region (usually a shared Segment). Use it for array data that JAX and NumPy
// read in place: payloads are 64-byte aligned. A block has counted references, and leases: one per borrower (a host).
//
// Threading: call allocate() and validate() in the process that called create(), from any thread (a lock inside). Call
// retain(), release() and the accessors from any thread of any process that maps the region; they are lock-free.
//
// Invariants
//   ARENA-1 (disjoint)  live blocks do not overlap, and each payload is 64-byte aligned.
//   ARENA-2 (counted)   a block is reused only after one release() for allocate() and one for each retain(), and after
//                       every borrower has returned its lease. One release too many aborts.
//   ARENA-3 (merged)    no two neighbouring blocks are both free, so a region with no live block is one free block.
//   ARENA-4 (fits)      allocate() fails only when no free block is large enough.
//   ARENA-5 (leased)    reclaim() takes back exactly the leases which the dead borrower held, whenever it died: those
//                       up to the given stamp that it had not returned. Why: each borrower has its own bit in the word
//                       of references, so one atomic step returns a lease. Each lease has a stamp, so a lease of the
//                       borrower's successor (the same bit) is not mistaken for a lease of the dead one.
//   TRUST-1 (data)      what an arena's owner writes is data to another process that maps the arena. An ArenaView stays
//                       inside the mapped memory and never aborts, whatever is written there.
// When a process dies, its counted references stay counted; only leases can be reclaimed.
//
// The last release() of a block, in any process, pushes the block on the returned list. allocate() takes the whole list
// (one exchange, so no ABA), merges its blocks with their free neighbours, and searches.
//
// Layout: Arena header | block | block | ... | sentinel. All links are offsets from the Arena's address.
//   block = 64 bytes of header {bytes, bytes of the block before, list links, returned link, references, state, stamp}
//   and the payload. allocate() gives out the offset of the payload; 0 is never a block.
// Source: M. Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems" (2004): two levels of size
// classes, each with a free list, found by two bit scans, O(1). On a miss the exact class is searched too (ARENA-4).
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

  /// The bytes of the smallest region, which has room for one payload of 64 bytes.
  static std::size_t min_bytes() noexcept;
  /// Makes an arena over `bytes` bytes of `memory` (64-byte aligned), which must outlive it and all its blocks. Throws
  /// Error(kInvalid) if too small or misaligned.
  static Arena* create(void* memory, std::size_t bytes);
  /// The arena that create() made, perhaps in another process. Throws Error(kInvalid) if `memory` holds none.
  static Arena* attach(void* memory);

  /// Allocates a block of at least `bytes` bytes (0 too) with one reference; *offset becomes its payload's offset.
  /// Returns kNoMemory when the block does not fit now, kInvalid when it can never fit. The payload is not cleared.
  Status allocate(std::size_t bytes, std::uint64_t* offset) noexcept;
  /// Adds one reference. The caller must hold one already.
  void retain(std::uint64_t offset) noexcept;
  /// Adds one reference to each live block that has a counted reference (leases do not count), and returns the offsets
  /// of their payloads. Owner process; O(blocks).
  std::vector<std::uint64_t> retain_held();
  /// Takes one reference away. The caller must not touch the payload through that reference any more.
  void release(std::uint64_t offset) noexcept;
  /// Leases the block to each borrower whose bit is set in `borrowers`; each returns its lease by its number. Call it
  /// at most once between allocate() and the last release. A later call must use a higher stamp. Owner process.
  void lease_out(std::uint64_t offset, std::uint64_t borrowers, std::uint64_t stamp) noexcept;
  /// A borrower's release().
  void return_lease(std::uint64_t offset, unsigned borrower) noexcept;
  /// Takes back all leases of a dead borrower with stamps up to `stamp`. Owner process; O(leased blocks).
  void reclaim(unsigned borrower, std::uint64_t stamp) noexcept;

  /// Gives pages of a free block back to the system; they read as zeros afterwards. Starts at position `from` (0: the
  /// beginning), and handles a few megabytes per call, because it holds the lock. Adds the bytes handled to *bytes.
  /// Returns the position for the next call, or 0 at the end. Owner process.
  std::uint64_t trim(std::uint64_t from, std::uint64_t* bytes) noexcept;

  /// The number of references, leases included: a stale snapshot.
  [[nodiscard]] std::uint32_t was_references(std::uint64_t offset) const noexcept;

  /// The payload; valid while the caller holds a reference. Aborts when `offset` is not that of a live block.
  [[nodiscard]] std::byte* at(std::uint64_t offset) const noexcept;
  /// Bytes of the payload: at least what was asked for, rounded up to 64.
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
    std::uint64_t borrowers;  ///< one bit per borrower
  };
  /// The live blocks, to find out what holds the memory. Owner process; O(blocks).
  std::vector<Holding> holdings() noexcept;
  /// Checks ARENA-1, ARENA-3 and the free lists; aborts when broken. Owner process; O(blocks).
  void validate() noexcept;

  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

 private:
  friend class ArenaView;
  friend class ReceivedArena;
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
  std::uint64_t leased_head_ = 0;                       // guarded by lock_: blocks leased out since allocate()
  alignas(kCacheLine) Atomic<std::uint64_t> returned_;  // any process pushes, the owner takes all
  alignas(kCacheLine) Atomic<std::uint64_t> in_use_;
  Atomic<std::uint64_t> high_water_;
};

/// ArenaView: another process's arena, whose content is not trusted. Its size is the size that this process mapped.
/// Offsets come from messages. The view checks each offset, and returns an address inside the mapping; no later write
/// of the owner can change that address.
///
/// Threading: as the accessors of Arena. A view is a value; the mapping must outlive it.
class ArenaView {
 public:
  ArenaView() = default;
  /// `bytes` bytes are mapped at `memory`. Throws Error(kInvalid) when they are too few for an arena, or when no arena
  /// begins there.
  ArenaView(void* memory, std::size_t bytes);

  [[nodiscard]] bool is_there() const noexcept { return arena_ != nullptr; }
  /// The bytes that are mapped of the arena, its own header included.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  /// The payload at `offset`, or nullptr when no live block of at least `bytes` bytes is there.
  [[nodiscard]] std::byte* find(std::uint64_t offset, std::uint64_t bytes) const noexcept;
  /// As find(), but nullptr also when `borrower` holds no lease of the block.
  [[nodiscard]] std::byte* find_leased(std::uint64_t offset, std::uint64_t bytes, unsigned borrower) const noexcept;
  /// As find(), but nullptr also when nobody holds a lease of the block.
  [[nodiscard]] std::byte* find_lent(std::uint64_t offset, std::uint64_t bytes) const noexcept;
  /// A borrower's release(). Does nothing and returns false when the borrower holds no such lease.
  bool return_lease(std::uint64_t offset, unsigned borrower) const noexcept;
  /// Returns the leases of all borrowers, and `counted` counted references. Does nothing and returns false when the
  /// block has fewer.
  bool return_all(std::uint64_t offset, std::uint32_t counted) const noexcept;
  /// Takes one counted reference away. Does nothing and returns false when there is none.
  bool release(std::uint64_t offset) const noexcept;

 private:
  [[nodiscard]] Arena::Block* live(std::uint64_t payload) const noexcept;
  void returned(Arena::Block* freed, std::uint64_t block) const noexcept;

  Arena* arena_ = nullptr;
  std::uint64_t bytes_ = 0;
};

}  // namespace pathways
