// RingBlock: the records in the block of a ByteRing. It writes the header of a record, and finds and checks the next
// record. It is a value that each role of a ring keeps for itself: the block's address and its capacity, copied once
// and checked (TRUST-1).
//
// Threading: none of its own. Only the ring's producer calls begin_record() and mark_skip(), for positions that it has
// not published; only the consumer (or validate()) calls checked_length() and record_at(), for published positions.
//
// Invariants
//   RING-2 (whole)   a record is contiguous and 8-aligned; it never wraps.
//   RING-5 (trust)   checked_length() reads a header once, into private memory, and checks it before it uses it: a
//                    length that reaches over the end of the block or over the published records, an unknown mark, or a
//                    skip without a record behind it throws Error(kInvalid).
//
// Layout: a record at byte position p lives at offset p & (capacity - 1):
//   31........0   63.......32
//   length        mark          8 bytes of header, then `length` bytes, padded to 8. Mark is kRecord, or kSkip when the
//                               rest of the block is unused because the next record did not fit before its end.
//
// Source: the skip mark is from LMAX/Aeron.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/copy_once.h"
#include "sync/atomic.h"

namespace pathways {

/// Throws Error(kInvalid): the `what` of a ring in shared memory is `got`, which no intact ring has.
[[noreturn]] void throw_corrupt_ring(const char* what, std::uint64_t got);

struct RingBlock {
  std::byte* data = nullptr;   ///< 8-aligned
  std::uint32_t capacity = 0;  ///< in bytes, a power of two

  /// Bytes that a record of `length` bytes takes.
  static constexpr std::uint64_t footprint(std::uint64_t length) noexcept {
    return sizeof(RecordHeader) + ((length + 7) & ~std::uint64_t{7});
  }
  /// The longest record in a block of `capacity` bytes. It fits even when a skip precedes it.
  static constexpr std::uint32_t longest(std::uint32_t capacity) noexcept {
    return capacity / 2 - static_cast<std::uint32_t>(sizeof(RecordHeader));
  }

  [[nodiscard]] std::uint64_t offset_of(std::uint64_t position) const noexcept { return position & (capacity - 1U); }
  /// The bytes of the record at `position`.
  [[nodiscard]] std::byte* record_at(std::uint64_t position) const noexcept {
    return header_at(position) + sizeof(RecordHeader);
  }

  /// Writes the header of a record of `length` bytes at `position`, and returns where its bytes go. The caller has made
  /// sure that footprint(length) bytes are free there and do not reach over the end of the block.
  std::byte* begin_record(std::uint64_t position, std::uint32_t length) const noexcept {
    write_header(position, {length, kRecord});
    return record_at(position);
  }
  /// Says that the `rest` bytes from `position` to the end of the block stay unused.
  void mark_skip(std::uint64_t position, std::uint32_t rest) const noexcept { write_header(position, {rest, kSkip}); }

  /// The length of the next record at or behind `position`, checked (RING-5). `tail` is the end of the published
  /// records. Moves `position` over a skip to the record.
  std::uint32_t checked_length(std::uint64_t& position, std::uint64_t tail) const {
    RecordHeader header = copy_header(position);
    if (header.mark != kRecord) header = behind_skip(header, position, tail);
    const std::uint64_t need = footprint(header.length);
    if (header.length - 1U >= longest(capacity) || need > capacity - offset_of(position) || need > tail - position) {
      throw_corrupt_ring("record length", header.length);
    }
    return header.length;
  }

  /// Checks every record from `head` to `tail`; throws Error(kInvalid). Only while nobody writes there.
  void validate(std::uint64_t head, std::uint64_t tail) const;

 private:
  static constexpr std::uint32_t kRecord = 0x52454331;
  static constexpr std::uint32_t kSkip = 0x534b4950;
  struct RecordHeader {
    std::uint32_t length;
    std::uint32_t mark;
  };
  static_assert(sizeof(RecordHeader) == 8);

  [[nodiscard]] std::byte* header_at(std::uint64_t position) const noexcept { return data + offset_of(position); }
  void write_header(std::uint64_t position, RecordHeader header) const noexcept {
    model_write(header_at(position));
    std::memcpy(header_at(position), &header, sizeof header);
  }
  [[nodiscard]] RecordHeader copy_header(std::uint64_t position) const noexcept {
    RecordHeader header;
    model_read(header_at(position));
    copy_once(&header, header_at(position), sizeof header);
    return header;
  }
  /// Checks that `header` is a skip, moves `position` over it, and returns the header of the record there.
  RecordHeader behind_skip(RecordHeader header, std::uint64_t& position, std::uint64_t tail) const;
};

}  // namespace pathways
