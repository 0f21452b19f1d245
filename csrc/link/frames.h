/// The frames of a link between machines: a header, and a payload padded to 8 bytes, in the machine's byte order (both
/// ends are little-endian; nothing else runs jaxlib). Records are the same bytes as on rings.
///
/// "head" is the controller's machine. A host link (machine_link.h) joins it with a machine that has hosts, "agent"; a
/// client link (client_link_at_head.h) joins it with a machine that has a client.
///
///   kind              from -> to        a, b                 payload
///   kFromController   head -> agent     host, incarnation    a record of the controller to the host
///   kToController     agent -> head     host, incarnation    a record of the host to the controller, or a
///                                                            FutureDoneRecord
///   kPeer             both, of hosts    host, incarnation    a PeerHeader that names the source, and a record
///   kBlock            head -> agent     client, count        BlockFrame, and a BlockHost for each host
///                     client -> head    group, 0             BlockFrame, and the stamp of the lease (8 bytes)
///   kData             both              client, 0            DataFrame, and bytes of a block
///   kBlockOver        head -> client    0, 0                 a word: the number of a block; nothing more comes
///   kKept             head -> client    0, 0                 KeptFrame: what the head keeps of the client's blocks
///   kPing             both ways         0, 0                 a word: the sender's clock; once per second
///   kPong             both ways         0, 0                 PongFrame: that word, and the answerer's clock
///   kFromClient       client -> head    ClientRing, 0        a record of the client to the controller
///   kToClient         head -> client    0, 0                 a record of the controller to the client
///   kFutureDone       head -> client    0, 0                 FutureDoneRecord: a host has done its part of a future
///   kRetired          head -> client    0, 0                 a word: how many runs of the client are over
///   kStatus           head -> client    status, is traced    the text of the cluster's failure
///   kCredit           both, of clients  0, 0                 a word: bytes of records that the reader's ring has taken
///   kCarried          both, by a relay  machine, 0           frames of the link to that machine, sealed (carrier.h)
///   kHold             relay -> both     machine, 1 or 0      send nothing more for that machine, or go on
///   kExpect           head -> relay     machine, 0           the name of the machine that has this number
///   kEnd              head, relay       machine, 0           that machine is carried no more
///
/// No two machines share a clock: a time in a record of kFromController or kFromClient is the time that is left, or
/// past.
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
  kBlock = 4,
  kData = 5,
  kBlockOver = 6,
  kPing = 7,
  kPong = 8,
  kFromClient = 9,
  kToClient = 10,
  kFutureDone = 11,
  kRetired = 12,
  kStatus = 13,
  kCredit = 14,
  kKept = 15,
  kCarried = 16,
  kHold = 17,
  kExpect = 18,
  kEnd = 19,
};

/// The two rings of a client to the controller.
enum class ClientRing : uint32_t { kRecords = 0, kCancels = 1 };

struct FrameHeader {
  uint32_t bytes;  ///< of the payload, without the padding
  FrameKind kind;
  uint16_t reserved;
  uint32_t a;
  int32_t b;
};

/// A block that the next command leases: the other end makes room for it. That command names it by its number.
struct BlockFrame {
  uint64_t number;  ///< no two blocks of a link have the same
  uint64_t bytes;
  uint64_t token;  ///< of a fetch into the block, whose bytes go back before the token is completed; else 0
};

/// Followed by bytes of the block, from `at` on.
struct DataFrame {
  uint64_t number, at;
};

struct BlockHost {
  uint32_t number;
  int32_t incarnation;
};

struct KeptFrame {
  uint64_t taken;   ///< bytes of all blocks that the head has taken from the client
  uint64_t in_use;  ///< bytes that it still keeps
  bool operator==(const KeptFrame&) const = default;
};

struct PongFrame {
  int64_t asked_ns, there_ns;
};

inline constexpr uint32_t kMostFrame = uint32_t{1} << 20;   ///< bytes of the longest frame, with its header
inline constexpr uint32_t kMostData = uint32_t{256} << 10;  ///< bytes of a block in one frame
inline constexpr uint32_t kMostHosts = 1024;                ///< hosts in one BlockFrame

static_assert(sizeof(FrameHeader) == 16 && sizeof(BlockFrame) == 24 && sizeof(DataFrame) == 16);

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

/// Adds `by` to the times in a run's record: when the client submitted it, and its deadline. They are its last words.
inline void move_times(std::span<std::byte> record, int64_t by) {
  const auto header = read_record<RecordHeader>(record);
  if (header.kind != RecordKind::kRun) return;
  const size_t words =
      ((header.detail & kRunHasSubmitted) != 0 ? 1u : 0u) + ((header.detail & kRunHasDeadline) != 0 ? 1u : 0u);
  if (record.size() < sizeof(RunRecord) + words * sizeof(int64_t)) return;
  for (size_t i = 1; i <= words; ++i) {
    std::byte* word = record.data() + record.size() - i * sizeof(int64_t);
    int64_t at;
    std::memcpy(&at, word, sizeof at);
    at = static_cast<int64_t>(static_cast<uint64_t>(at) + static_cast<uint64_t>(by));
    std::memcpy(word, &at, sizeof at);
  }
}

}  // namespace pathways
