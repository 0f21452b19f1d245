// ByteRing: a single-producer, single-consumer ring of variable-length records in one block of memory, heap or shared.
// It is the dispatch queue between two threads or two processes.
//
// Threading: one Producer and one Consumer at a time, each used by one thread at a time; the two run concurrently, in
// one process or two. Roles are types: claim_producer() and claim_consumer() give the only one, its destructor hands
// the role back. A process that died holding a role keeps it until reset_roles().
//
// Invariants
//   RING-1 (batch)   a record becomes visible at publish(), all reserved ones by one release store; a producer that
//                    dies before publish() leaves no trace.
//   RING-2 (whole)   a record is contiguous and 8-aligned; it never wraps.
//   RING-3 (bounds)  0 <= tail - head <= capacity; positions only grow (64 bits: they never wrap in practice).
//   RING-4 (order)   records come out in the order they went in. A consumer that dies before release() leaves its
//                    popped but unreleased records to the next one.
//   RING-5 (trust)   nothing read from the block is used before it is checked: a corrupt length or position throws
//                    Error(kInvalid), it never reads outside the block. TRUST-1: each role keeps the capacity, its own
//                    position and the block's address privately; of a record that try_take() gave nothing is read again
//                    from the ring.
//
// Layout: ByteRing header (magic, version, capacity | tail | head | roles: a cache line each), then `capacity` bytes.
// A record at byte position p lives at offset p & (capacity - 1):
//   31........0   63.......32
//   length        mark          8 bytes of header, then `length` bytes, padded to 8. Mark is kRecord, or kSkip when the
//                               rest of the block is unused because the next record did not fit before its end.
//
// Positions are cached on both sides (Producer keeps the last head it saw, Consumer the last tail), so in the steady
// state a hop touches one shared line per batch. Source: Rigtorp's SPSCQueue; the skip mark is from LMAX/Aeron.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/cacheline.h"
#include "base/copy_once.h"
#include "sync/atomic.h"

namespace pathways {

class ByteRing {
 public:
  class Producer;
  class Consumer;

  static constexpr std::uint32_t kMinCapacity = 4096;
  static constexpr std::uint32_t kMaxCapacity = std::uint32_t{1} << 30;

  /// Bytes of memory for a ring of `capacity` bytes. Throws Error(kInvalid) unless a power of two in [4096, 2^30].
  static std::size_t bytes_for(std::uint32_t capacity);
  /// Makes a ring in `memory` (64-byte aligned, bytes_for(capacity) bytes). The memory must outlive the ring's users.
  static ByteRing* create(void* memory, std::uint32_t capacity);
  /// The ring that create() made, perhaps in another process. Throws Error(kInvalid) if `memory`, of which `room` bytes
  /// are mapped, holds none.
  static ByteRing* attach(void* memory, std::size_t room = SIZE_MAX);

  /// Throws Error(kInvalid) when the role is taken, or when the ring does not fit into the `room` bytes that are mapped
  /// from its address on.
  Producer claim_producer(std::size_t room = SIZE_MAX);
  Consumer claim_consumer(std::size_t room = SIZE_MAX);
  /// Takes both roles back from a process that died. Nobody else may be using the ring.
  void reset_roles() noexcept;

  [[nodiscard]] std::uint32_t capacity() const noexcept { return capacity_; }
  /// The longest record that try_reserve() takes: half the capacity less the record header.
  [[nodiscard]] std::uint32_t max_record() const noexcept { return longest(capacity_); }
  /// Checks RING-3 and that every published record is well formed; throws Error(kInvalid). Only while nobody uses it.
  void validate() const;

  ByteRing(const ByteRing&) = delete;
  ByteRing& operator=(const ByteRing&) = delete;

 private:
  friend class Producer;
  friend class Consumer;

  static constexpr std::uint64_t kMagic = 0x50575242'52494e47;  // "PWRBRING"
  static constexpr std::uint32_t kVersion = 1;
  static constexpr std::uint32_t kHeaderBytes = 8;
  static constexpr std::uint32_t kRecord = 0x52454331;
  static constexpr std::uint32_t kSkip = 0x534b4950;

  struct RecordHeader {
    std::uint32_t length;
    std::uint32_t mark;
  };
  static_assert(sizeof(RecordHeader) == kHeaderBytes);

  /// What a role knows of its ring: where the block lies and how long it is, copied out once and checked (TRUST-1).
  struct Block {
    std::byte* data = nullptr;
    std::uint32_t capacity = 0;

    [[nodiscard]] std::uint64_t offset_of(std::uint64_t position) const noexcept { return position & (capacity - 1U); }
    [[nodiscard]] std::byte* header_at(std::uint64_t position) const noexcept { return data + offset_of(position); }
    /// The length of the record at `position`, skipping over the end of the block; moves `position` to it. RING-5.
    std::uint32_t checked_length(std::uint64_t& position, std::uint64_t tail) const {
      RecordHeader header = copy_header(position);
      if (header.mark != kRecord) header = behind_skip(header, position, tail);
      const std::uint64_t need = footprint(header.length);
      if (header.length - 1U >= longest(capacity) || need > capacity - offset_of(position) || need > tail - position) {
        throw_corrupt("record length", header.length);
      }
      return header.length;
    }
    /// What follows a skip that `header` is to be; moves `position` to it.
    RecordHeader behind_skip(RecordHeader header, std::uint64_t& position, std::uint64_t tail) const;
    [[nodiscard]] RecordHeader copy_header(std::uint64_t position) const noexcept {
      RecordHeader header;
      model_read(header_at(position));
      copy_once(&header, header_at(position), sizeof header);
      return header;
    }
  };
  [[nodiscard]] Block checked_block(std::size_t room) const;

  explicit ByteRing(std::uint32_t capacity) noexcept : magic_(kMagic), version_(kVersion), capacity_(capacity) {}

  /// Bytes that a record of `length` bytes takes.
  static constexpr std::uint64_t footprint(std::uint64_t length) noexcept {
    return kHeaderBytes + ((length + 7) & ~std::uint64_t{7});
  }
  static constexpr std::uint32_t longest(std::uint32_t capacity) noexcept { return capacity / 2 - kHeaderBytes; }
  [[noreturn]] static void throw_corrupt(const char* what, std::uint64_t got);

  std::uint64_t magic_;                                       // immutable after create
  std::uint32_t version_;                                     // immutable after create
  std::uint32_t capacity_;                                    // immutable after create
  alignas(kCacheLine) Atomic<std::uint64_t> tail_;            // producer writes: end of what is published
  alignas(kCacheLine) Atomic<std::uint64_t> head_;            // consumer writes: end of what is given back
  alignas(kCacheLine) Atomic<std::uint32_t> producer_claim_;  // 0, or the claim's number
  Atomic<std::uint32_t> consumer_claim_;                      // likewise
  Atomic<std::uint32_t> claims_;                              // numbers given so far
};

/// The one writer. Movable; the moved-from object may only be destroyed or assigned to.
class ByteRing::Producer {
 public:
  Producer() noexcept = default;
  Producer(Producer&& other) noexcept { swap(other); }
  Producer& operator=(Producer&& other) noexcept;
  ~Producer() { hand_back(); }

  /// A record of exactly `bytes` bytes (8-aligned, contiguous), or an empty span when there is no room now; then
  /// publish() what is reserved and wait for the consumer. Throws Error(kInvalid) if bytes > max_record(). A record of
  /// 0 bytes is refused the same way (its span could not be told from "no room"). The span is the caller's to fill
  /// until publish().
  std::span<std::byte> try_reserve(std::uint32_t bytes) {
    if (bytes - 1U >= max_record()) throw_too_big(bytes);
    const std::uint64_t need = footprint(bytes);
    const std::uint64_t rest = block_.capacity - block_.offset_of(write_);
    const std::uint64_t skip = rest < need ? rest : 0;
    if (write_ + skip + need - head_seen_ > block_.capacity && !refresh(skip + need)) return {};
    if (skip != 0) pass_over(static_cast<std::uint32_t>(skip));
    const RecordHeader header{bytes, kRecord};
    std::byte* at = block_.header_at(write_);
    model_write(at);
    std::memcpy(at, &header, sizeof header);
    write_ += need;
    return {at + kHeaderBytes, bytes};
  }

  /// Makes every record reserved so far visible, by one release store.
  void publish() noexcept {
    // SYNC byte_ring/publish: pairs with byte_ring/consume.
    ring_->tail_.store(write_, std::memory_order_release);
  }

  [[nodiscard]] std::uint32_t max_record() const noexcept { return longest(block_.capacity); }
  /// True while this object holds the role.
  [[nodiscard]] bool valid() const noexcept { return ring_ != nullptr; }

  /// For last words to a consumer that makes no sense: whatever it has not read may be written over.
  void forget_consumer() noexcept { head_seen_ = write_; }

 private:
  friend class ByteRing;
  Producer(ByteRing* ring, Block block, std::uint32_t claim);

  void swap(Producer& other) noexcept;
  void hand_back() noexcept;
  bool refresh(std::uint64_t need);
  void pass_over(std::uint32_t skip) noexcept;
  [[noreturn]] void throw_too_big(std::uint32_t bytes) const;

  ByteRing* ring_ = nullptr;
  Block block_;
  std::uint64_t write_ = 0;      // end of what is reserved
  std::uint64_t head_seen_ = 0;  // the consumer's head when last looked at
  std::uint32_t claim_ = 0;
};

/// The one reader. Movable; the moved-from object may only be destroyed or assigned to.
class ByteRing::Consumer {
 public:
  Consumer() noexcept = default;
  Consumer(Consumer&& other) noexcept { swap(other); }
  Consumer& operator=(Consumer&& other) noexcept;
  ~Consumer() { hand_back(); }

  /// The oldest record, or an empty span when there is none (then all popped space is given back). Valid until pop().
  /// Throws Error(kInvalid) on a corrupt length or position (RING-5).
  std::span<const std::byte> try_front() {
    if (read_ == tail_seen_ && !refresh()) return {};
    const std::uint32_t length = block_.checked_length(read_, tail_seen_);
    front_ = footprint(length);
    return {block_.header_at(read_) + kHeaderBytes, length};
  }

  /// As try_front(), of a copy in `scratch`, which grows to the longest record: what the producer writes afterwards
  /// changes nothing (TRUST-1). Use it wherever the producer may be somebody else's.
  std::span<const std::byte> try_take(std::vector<std::byte>& scratch) {
    const std::span<const std::byte> record = try_front();
    if (scratch.size() < record.size()) scratch.resize(record.size());
    if (!record.empty()) copy_once(scratch.data(), record.data(), record.size());
    return {scratch.data(), record.size()};
  }

  /// Steps over the record that try_front() gave; without one it does nothing. Space goes back every 1/8 of the
  /// capacity.
  void pop() noexcept {
    read_ += front_;
    front_ = 0;
    if (read_ - released_ >= block_.capacity / 8U) release();
  }

  /// Gives all popped space back now.
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
  Consumer(ByteRing* ring, Block block, std::uint32_t claim);

  void swap(Consumer& other) noexcept;
  void hand_back() noexcept;
  bool refresh();

  ByteRing* ring_ = nullptr;
  Block block_;
  std::uint64_t read_ = 0;       // the next record
  std::uint64_t tail_seen_ = 0;  // the producer's tail when last looked at
  std::uint64_t released_ = 0;   // what head_ says
  std::uint64_t front_ = 0;      // footprint of the record at read_ that try_front() gave, or 0
  std::uint32_t claim_ = 0;
};

}  // namespace pathways
