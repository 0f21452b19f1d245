/// The frames of a link between machines: a header, and a payload padded to 8 bytes, in the machine's byte order (both
/// ends are little-endian; nothing else runs jaxlib). Records are the same bytes as on rings.
///
/// Directions: "home" is the controller's machine, "agent" another one.
///   kFromController   home -> agent   a record of the controller to host a, incarnation b. Its deadline, if it has
///   one,
///                                     is the time that is left, because no two machines share a clock
///   kToController     agent -> home   a record of host a, incarnation b, to the controller, or for the future of a
///   client kPeer             both            a record to host a, incarnation b; begins with a FarHeader that names the
///   source kLease            home -> agent   LeaseFrame: client a leases a block to hosts; b: how many kData both
///   DataFrame: bytes of a block of client a kLeaseBack        agent -> home   LeaseBackFrame: host b returns its lease
///   of client a's block kPing, kPong      both            a word, which the pong repeats
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "messages/records.h"

namespace pathways {

enum class FrameKind : uint16_t {
  kFromController = 1,
  kToController = 2,
  kPeer = 3,
  kLease = 4,
  kData = 5,
  kLeaseBack = 6,
  kPing = 7,
  kPong = 8,
};

struct FrameHeader {
  uint32_t bytes;  ///< of the payload, without the padding
  FrameKind kind;
  uint16_t reserved;
  uint32_t a;
  int32_t b;
};

/// Followed by the hosts' numbers, 4 bytes each.
struct LeaseFrame {
  uint64_t offset, bytes;
  uint64_t token;  ///< of a fetch into the block, whose bytes go back before the token is completed; else 0
  uint64_t lease;  ///< its number: no two leases of a link have the same
};

/// Followed by bytes: those of the block at `offset`, from `at` on.
struct DataFrame {
  uint64_t offset, at, lease;
};

struct LeaseBackFrame {
  uint64_t offset, lease;
};

inline constexpr uint32_t kMostFrame = uint32_t{1} << 20;   ///< bytes of the longest frame, with its header
inline constexpr uint32_t kMostData = uint32_t{256} << 10;  ///< bytes of a block in one frame
inline constexpr uint32_t kMostLeases = 1024;               ///< hosts in one LeaseFrame

static_assert(sizeof(FrameHeader) == 16 && sizeof(LeaseFrame) == 32 && sizeof(DataFrame) == 24);

/// Writes frames into memory of a fixed size.
class FrameWriter {
 public:
  explicit FrameWriter(std::span<std::byte> out) : out_(out) {}

  size_t used() const { return used_; }
  size_t left() const { return out_.size() - used_; }
  static size_t room_for(size_t payload) { return sizeof(FrameHeader) + padded(payload); }
  bool fits(size_t payload) const { return room_for(payload) <= left(); }

  /// Begins a frame, which must fit, and returns its payload, which the caller fills.
  std::byte* begin(FrameKind kind, uint32_t a, int32_t b, size_t payload) {
    const FrameHeader header{static_cast<uint32_t>(payload), kind, 0, a, b};
    std::byte* at = out_.data() + used_;
    std::memcpy(at, &header, sizeof header);
    const size_t padding = padded(payload) - payload;
    if (padding != 0) std::memset(at + sizeof header + payload, 0, padding);
    used_ += room_for(payload);
    return at + sizeof header;
  }
  /// Adds a frame whose bytes are already complete; it must fit.
  void add(std::span<const std::byte> frame) {
    std::memcpy(out_.data() + used_, frame.data(), frame.size());
    used_ += frame.size();
  }

 private:
  std::span<std::byte> out_;
  size_t used_ = 0;
};

/// No two machines share a clock: on a link, the deadline of a run is the time that is left. Adds `by` to it, if the
/// record is a run with a deadline, which is its last word.
inline void move_deadline(std::span<std::byte> record, int64_t by) {
  const auto header = read_record<RecordHeader>(record);
  int64_t at;
  if (header.kind != RecordKind::kRun || (header.detail & kRunHasDeadline) == 0 ||
      record.size() < sizeof(RunRecord) + sizeof at) {
    return;
  }
  std::byte* word = record.data() + record.size() - sizeof at;
  std::memcpy(&at, word, sizeof at);
  at = static_cast<int64_t>(static_cast<uint64_t>(at) + static_cast<uint64_t>(by));
  std::memcpy(word, &at, sizeof at);
}

}  // namespace pathways
