// ByteRing: a single-producer, single-consumer ring of variable-length records in one block of memory, heap or shared.
// It is the dispatch queue between two threads or two processes.
//
// Threading: one Producer and one Consumer at a time, each used by one thread at a time. The two run concurrently, in
// one process or two. Each role is an object: claim_producer() and claim_consumer() give the only one, and its
// destructor frees the role. When a process dies with a role, the role stays taken until reset_roles().
//
// Invariants
//   RING-1 (batch)   publish() makes all reserved records visible by one release store. When a producer dies before
//                    publish(), its reserved records never become visible.
//   RING-2 (whole)   a record is contiguous and 8-aligned; it never wraps (ring_block.h).
//   RING-3 (bounds)  0 <= tail - head <= capacity; positions only grow (64 bits: they never wrap in practice).
//   RING-4 (order)   records come out in the order they went in. When a consumer dies before release(), the next
//                    consumer gets the popped but unreleased records again.
//   RING-5 (trust)   nothing read from the block is used before it is checked: a corrupt length or position throws
//                    Error(kInvalid) and never causes a read outside the block. TRUST-1: each role keeps the capacity,
//                    its own position and the block's address privately. try_take() returns a copy of the record, so
//                    the record is not read from the ring again.
//
// Layout: ByteRing header (magic, version, capacity | tail | head | roles: a cache line each), then the block of
// `capacity` bytes, which holds the records (ring_block.h).
//
// Each side caches the other's position (the Producer keeps the last head it saw, the Consumer the last tail). So in
// the steady state each side touches one shared line per batch. Source: Rigtorp's SPSCQueue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/cacheline.h"
#include "base/copy_once.h"
#include "sync/atomic.h"
#include "sync/ring_block.h"

namespace pathways {

class ByteRing {
 public:
  class Producer;
  class Consumer;

  static constexpr std::uint32_t kMinCapacity = 4096;
  static constexpr std::uint32_t kMaxCapacity = std::uint32_t{1} << 30;

  /// Bytes of memory for a ring of `capacity` bytes. Throws Error(kInvalid) unless `capacity` is a power of two in
  /// [4096, 2^30].
  static std::size_t bytes_for(std::uint32_t capacity);
  /// Makes a ring in `memory` (64-byte aligned, bytes_for(capacity) bytes). The memory must outlive the ring's users.
  static ByteRing* create(void* memory, std::uint32_t capacity);
  /// The ring that create() made, perhaps in another process. Throws Error(kInvalid) if `memory`, of which `room` bytes
  /// are mapped, holds none.
  static ByteRing* attach(void* memory, std::size_t room = SIZE_MAX);

  /// Takes the role. Throws Error(kInvalid) when it is taken already, or when the ring does not fit into the `room`
  /// bytes that are mapped from its address on.
  Producer claim_producer(std::size_t room = SIZE_MAX);
  Consumer claim_consumer(std::size_t room = SIZE_MAX);
  /// Frees both roles after the process that held them died. Nobody else may be using the ring.
  void reset_roles() noexcept;

  [[nodiscard]] std::uint32_t capacity() const noexcept { return capacity_; }
  /// The longest record that try_reserve() takes: half the capacity less the record header.
  [[nodiscard]] std::uint32_t max_record() const noexcept { return RingBlock::longest(capacity_); }
  /// Checks RING-3 and that every published record is well formed; throws Error(kInvalid). Only while nobody uses it.
  void validate() const;

  ByteRing(const ByteRing&) = delete;
  ByteRing& operator=(const ByteRing&) = delete;

 private:
  friend class Producer;
  friend class Consumer;

  static constexpr std::uint64_t kMagic = 0x50575242'52494e47;  // "PWRBRING"
  static constexpr std::uint32_t kVersion = 1;
  [[nodiscard]] RingBlock checked_block(std::size_t room) const;

  explicit ByteRing(std::uint32_t capacity) noexcept : magic_(kMagic), version_(kVersion), capacity_(capacity) {}

  std::uint64_t magic_;                                       // immutable after create
  std::uint32_t version_;                                     // immutable after create
  std::uint32_t capacity_;                                    // immutable after create
  alignas(kCacheLine) Atomic<std::uint64_t> tail_;            // producer writes: end of the published records
  alignas(kCacheLine) Atomic<std::uint64_t> head_;            // consumer writes: end of the released records
  alignas(kCacheLine) Atomic<std::uint32_t> producer_claim_;  // 0, or the number of the claim that holds the role
  Atomic<std::uint32_t> consumer_claim_;                      // likewise
  Atomic<std::uint32_t> claims_;                              // the last claim number given out
};

/// The one writer. Movable; the moved-from object may only be destroyed or assigned to.
class ByteRing::Producer {
 public:
  Producer() noexcept = default;
  Producer(Producer&& other) noexcept { swap(other); }
  Producer& operator=(Producer&& other) noexcept;
  ~Producer() { hand_back(); }

  /// Reserves a record of exactly `bytes` bytes (8-aligned, contiguous), which the caller fills before publish().
  /// Returns an empty span when there is no room now; then publish() what is reserved and wait for the consumer. Throws
  /// Error(kInvalid) if `bytes` is more than max_record(), or 0 (its span would look like "no room").
  std::span<std::byte> try_reserve(std::uint32_t bytes) {
    if (bytes - 1U >= max_record()) throw_too_big(bytes);
    const std::uint64_t need = RingBlock::footprint(bytes);
    const std::uint64_t rest = block_.capacity - block_.offset_of(write_);
    const std::uint64_t skip = rest < need ? rest : 0;
    if (write_ + skip + need - head_seen_ > block_.capacity && !refresh(skip + need)) return {};
    if (skip != 0) {
      block_.mark_skip(write_, static_cast<std::uint32_t>(skip));
      write_ += skip;
    }
    std::byte* const record = block_.begin_record(write_, bytes);
    write_ += need;
    return {record, bytes};
  }

  /// Makes every record reserved so far visible, by one release store.
  void publish() noexcept {
    // SYNC byte_ring/publish: pairs with byte_ring/consume.
    ring_->tail_.store(write_, std::memory_order_release);
  }

  [[nodiscard]] std::uint32_t max_record() const noexcept { return RingBlock::longest(block_.capacity); }
  /// True while this object holds the role.
  [[nodiscard]] bool valid() const noexcept { return ring_ != nullptr; }

  /// Treats all records as consumed, so that a final record always fits. Use it when the consumer wrote corrupt
  /// positions; records that it has not read may be overwritten.
  void forget_consumer() noexcept { head_seen_ = write_; }

 private:
  friend class ByteRing;
  Producer(ByteRing* ring, RingBlock block, std::uint32_t claim);

  void swap(Producer& other) noexcept;
  void hand_back() noexcept;
  bool refresh(std::uint64_t need);
  [[noreturn]] void throw_too_big(std::uint32_t bytes) const;

  ByteRing* ring_ = nullptr;
  RingBlock block_;
  std::uint64_t write_ = 0;      // end of the reserved records
  std::uint64_t head_seen_ = 0;  // the consumer's head when last read
  std::uint32_t claim_ = 0;
};

/// The one reader. Movable; the moved-from object may only be destroyed or assigned to.
class ByteRing::Consumer {
 public:
  Consumer() noexcept = default;
  Consumer(Consumer&& other) noexcept { swap(other); }
  Consumer& operator=(Consumer&& other) noexcept;
  ~Consumer() { hand_back(); }

  /// The oldest record, or an empty span when there is none (then all popped space is released). Valid until pop().
  /// Throws Error(kInvalid) on a corrupt length or position (RING-5).
  std::span<const std::byte> try_front() {
    if (read_ == tail_seen_ && !refresh()) return {};
    const std::uint32_t length = block_.checked_length(read_, tail_seen_);
    front_ = RingBlock::footprint(length);
    return {block_.record_at(read_), length};
  }

  /// As try_front(), but returns a copy in `scratch`, which grows to the longest record. What the producer writes
  /// afterwards does not change the copy (TRUST-1). Use it wherever another process may be the producer.
  std::span<const std::byte> try_take(std::vector<std::byte>& scratch) {
    const std::span<const std::byte> record = try_front();
    if (scratch.size() < record.size()) scratch.resize(record.size());
    if (!record.empty()) copy_once(scratch.data(), record.data(), record.size());
    return {scratch.data(), record.size()};
  }

  /// Steps over the record that try_front() gave; without one it does nothing. Releases the popped space after each 1/8
  /// of the capacity.
  void pop() noexcept {
    read_ += front_;
    front_ = 0;
    if (read_ - released_ >= block_.capacity / 8U) release();
  }

  /// Releases all popped space to the producer now.
  void release() noexcept {
    released_ = read_;
    // SYNC byte_ring/release: pairs with byte_ring/reuse; the reads of popped records are done.
    ring_->head_.store(read_, std::memory_order_release);
  }

  /// True when nothing was published beyond what is popped: a stale snapshot.
  [[nodiscard]] bool was_empty() const noexcept {
    return read_ == tail_seen_ && ring_->tail_.load(std::memory_order_relaxed) == read_;
  }
  /// True while this object holds the role.
  [[nodiscard]] bool valid() const noexcept { return ring_ != nullptr; }

 private:
  friend class ByteRing;
  Consumer(ByteRing* ring, RingBlock block, std::uint32_t claim);

  void swap(Consumer& other) noexcept;
  void hand_back() noexcept;
  bool refresh();

  ByteRing* ring_ = nullptr;
  RingBlock block_;
  std::uint64_t read_ = 0;       // the next record
  std::uint64_t tail_seen_ = 0;  // the producer's tail when last read
  std::uint64_t released_ = 0;   // the value this role last stored in head_
  std::uint64_t front_ = 0;      // footprint of the record at read_ that try_front() gave, or 0
  std::uint32_t claim_ = 0;
};

}  // namespace pathways
