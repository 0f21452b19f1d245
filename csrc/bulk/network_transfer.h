/// Network transfers: the bytes of transfers between machines, sent through a stream of messages.
///
/// An outgoing transfer is all that one host sends to another host in one transfer. A chunk is a part of one outgoing
/// transfer: a ChunkRecord, in the first chunk of a transfer the words of its copy plan, and the payload. A message is
/// one chunk or more, one behind the other. All machines of a cluster run one release (PROTOCOL_VERSION), so the format
/// has no versions. The sender gathers the bytes of an outgoing transfer from its shards straight into messages, as far
/// as there is room. The receiver's
/// incoming transfer scatters them into the blocks of the receive that waits for them. Where many bytes lie in one
/// piece, they are sent from the shard itself, and received into the block itself. The stream itself is in Python
/// (pathways/host/network_transfer.py).
///
///   FAR-1  a chunk is written only where an incoming transfer waits for it, only in turn, and only when all of it but
///          the payload itself is known to be valid. An invalid chunk is refused, and nothing of it is written. If a
///          stream breaks within a payload, the transfer fails, so nobody reads what was written of it.
///
/// Threading: one thread at a time uses an outgoing transfer, or an incoming transfer. Both are used without Python's
/// lock (GIL-1).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bulk/copy_plan.h"

namespace pathways {

class OutgoingTransfer {
 public:
  /// `sources`: those of the copy plan. They must outlive this object.
  OutgoingTransfer(uint64_t order, uint32_t node, uint32_t host, std::shared_ptr<const CopyPlan> copy_plan,
                   std::vector<const std::byte*> sources);

  uint64_t bytes() const { return copy_plan_->bytes(); }
  bool is_over() const { return walk_.is_over(); }
  /// The bytes that one chunk of all that is left takes in a message, and the bytes that the smallest chunk takes.
  uint64_t room() const;
  uint64_t least() const { return overhead() + std::min<uint64_t>(8, left()); }
  /// Writes one chunk, as large as fits into `out`. Returns the bytes that it takes there; 0: not even the smallest
  /// chunk fits.
  uint64_t pack(std::span<std::byte> out);
  /// Writes only the head of a chunk into `out`, and sets `payload` to its bytes, which lie in one piece in a source.
  /// Returns the bytes of the head. 0: the next `most` bytes, or all that is left, are not one piece of at least
  /// `least` bytes, or `out` is too small.
  uint64_t pack_head(std::span<std::byte> out, uint64_t least, uint64_t most, std::span<const std::byte>* payload);

  /// The bytes that are not packed yet.
  uint64_t left() const { return copy_plan_->bytes() - walk_.passed(); }

 private:
  void write_head(std::byte* out, uint64_t at, uint64_t bytes) const;
  uint64_t overhead() const;

  const uint64_t order_;
  const uint32_t node_, host_;
  const std::shared_ptr<const CopyPlan> copy_plan_;
  const std::vector<const std::byte*> sources_;
  CopyWalk walk_;
};

/// What a chunk begins with, in the order of bytes of all machines that we support. Its size is a multiple of 16. So
/// when a chunk without words begins at a multiple of 16, its payload does too, and vector copies are fast.
struct ChunkRecord {
  static constexpr uint64_t kMagic = 0x31'6b'6e'75'68'63'77'70;  ///< "pwchunk1"
  uint64_t magic = kMagic;
  uint64_t order = 0;    ///< of the run
  uint32_t node = 0;     ///< the number of the transfer in its program
  uint32_t host = 0;     ///< the sender
  uint64_t at = 0;       ///< bytes of the transfer before this chunk
  uint64_t words = 0;    ///< of the copy plan; behind this record
  uint64_t payload = 0;  ///< bytes; behind the words
};
static_assert(sizeof(ChunkRecord) == 48);

/// A chunk as it lies in a message.
struct Chunk {
  uint64_t order = 0;
  uint32_t node = 0;
  uint32_t host = 0;
  uint64_t at = 0;
  std::vector<uint64_t> words;       ///< of the copy plan
  std::span<const std::byte> bytes;  ///< the payload; in the message itself
};

/// The chunk that a message begins with, and the bytes that it takes there. Throws Error(kInvalid) when it is cut off,
/// or no chunk.
std::pair<Chunk, uint64_t> first_chunk(std::span<const std::byte> message);

/// The chunk that a message begins with, without its payload, of which it says where it lies in the message.
struct ChunkHead {
  Chunk chunk;
  uint64_t payload_at, payload_bytes;
};
/// `prefix`: the first bytes of the message. nullopt: they do not hold the whole head, or it is no valid one.
std::optional<ChunkHead> chunk_head(std::span<const std::byte> prefix);

/// Whether a chunk is all of its transfer. Throws Error(kInvalid) when its copy plan is malformed.
bool is_whole(const Chunk& chunk);

class IncomingTransfer {
 public:
  /// `blocks`: addresses of the receive's blocks, nullptr where nothing may be written. `bytes`: the blocks' sizes.
  IncomingTransfer(std::vector<std::byte*> blocks, std::vector<uint64_t> bytes)
      : blocks_(std::move(blocks)), bytes_(std::move(bytes)) {}

  /// Writes the next chunk. Throws Error(kInvalid) when `chunk` is not the next one, or does not fit the blocks; then
  /// it writes nothing (FAR-1).
  void take(const Chunk& chunk);
  /// For a chunk whose payload of `bytes` goes into one piece of a block: goes on behind it, and returns where the
  /// caller must write it. Empty, and nothing changes: it does not, or `take` would refuse it.
  std::span<std::byte> place(const Chunk& chunk, uint64_t bytes);
  /// Everything is written.
  bool is_over() const { return walk_.has_value() && walk_->is_over(); }

 private:
  void begin(const Chunk& chunk);

  const std::vector<std::byte*> blocks_;
  const std::vector<uint64_t> bytes_;
  std::optional<CopyPlan> copy_plan_;
  std::optional<CopyWalk> walk_;
};

}  // namespace pathways
