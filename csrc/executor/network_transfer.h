/// Network transfers: the bytes of transfers between machines, on their way through a stream of messages.
///
/// A message is some chunks, one behind the other; a chunk is a part of one outgoing transfer, all that one host sends
/// to another in one transfer. The sender gathers an outgoing transfer's bytes from its shards straight into messages,
/// as there is room; the receiver's incoming transfer scatters them into the blocks of the receive that waits for them.
/// The stream itself is Python's (pathways/host/network_transfer.py).
///
///   FAR-1  a chunk is written only where an incoming transfer waits for it, whole and in turn; one that makes no sense
///   is refused
///          and writes nothing.
///
/// Threading: one thread at a time uses an outgoing transfer, or an incoming transfer. Both are used without Python's
/// lock (GIL-1).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "memory/copy_plan.h"

namespace pathways {

/// Which part of which outgoing transfer follows: `words` 8-byte words, the copy plan, with the first chunk only; then
/// `bytes` bytes, padded to 8. Of fixed width, in the machines' byte order.
struct ChunkRecord {
  uint64_t order;  ///< of the run
  uint32_t node;   ///< global node
  uint32_t host;   ///< who sends
  uint64_t at;     ///< bytes of the outgoing transfer that came before
  uint32_t words;
  uint32_t bytes;
};
static_assert(sizeof(ChunkRecord) == 32);

class OutgoingTransfer {
 public:
  /// `sources`: of the copy plan; they must outlive it.
  OutgoingTransfer(uint64_t order, uint32_t node, uint32_t host, std::shared_ptr<const CopyPlan> copy_plan,
                   std::vector<const std::byte*> sources);

  uint64_t bytes() const { return copy_plan_->bytes(); }
  bool is_over() const { return walk_.is_over(); }
  /// What a chunk of all that is left would take, and the smallest chunk.
  uint64_t room() const;
  uint64_t least() const { return overhead() + 8; }
  /// Writes one chunk, of as much as there is room for: what it took; 0 when there is no room for any of it.
  uint64_t pack(std::span<std::byte> out);

 private:
  uint64_t overhead() const { return sizeof(ChunkRecord) + (walk_.passed() == 0 ? copy_plan_->words().size() * 8 : 0); }

  const uint64_t order_;
  const uint32_t node_, host_;
  const std::shared_ptr<const CopyPlan> copy_plan_;
  const std::vector<const std::byte*> sources_;
  CopyWalk walk_;
};

/// A chunk as it lies in a message.
struct Chunk {
  ChunkRecord record;
  std::vector<uint64_t> words;
  std::span<const std::byte> bytes;
};

/// The chunk that a message begins with, and what it takes there. Throws Error(kInvalid) when it is cut off.
std::pair<Chunk, uint64_t> first_chunk(std::span<const std::byte> message);

class IncomingTransfer {
 public:
  /// Where the receive's blocks are, and their bytes; nullptr where nothing may be written.
  IncomingTransfer(std::vector<std::byte*> blocks, std::vector<uint64_t> bytes)
      : blocks_(std::move(blocks)), bytes_(std::move(bytes)) {}

  /// Throws Error(kInvalid) when it is not the next one (FAR-1).
  void take(const Chunk& chunk);
  /// Everything is written.
  bool is_over() const { return walk_.has_value() && walk_->is_over(); }

 private:
  const std::vector<std::byte*> blocks_;
  const std::vector<uint64_t> bytes_;
  std::optional<CopyPlan> copy_plan_;
  std::optional<CopyWalk> walk_;
};

}  // namespace pathways
