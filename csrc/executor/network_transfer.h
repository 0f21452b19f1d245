/// Freight: the bytes of transfers between machines, on their way through a stream of messages.
///
/// A message is some pieces, one behind the other; a piece is a part of one shipment, all that one host sends to
/// another in one transfer. The sender gathers a shipment's bytes from its shards straight into messages, as there is
/// room; the receiver's delivery scatters them into the blocks of the landing that waits for them. The stream itself is
/// Python's (pathways/host/network_transfer.py).
///
///   FAR-1  a piece is written only where a delivery waits for it, whole and in turn; one that makes no sense is
///   refused
///          and writes nothing.
///
/// Threading: one thread at a time uses a shipment, or a delivery. Both are used without Python's lock (GIL-1).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "memory/copy_plan.h"

namespace pathways {

/// Which part of which shipment follows: `words` 8-byte words, the parcel, with the first piece only; then `bytes`
/// bytes, padded to 8. Of fixed width, in the machines' byte order.
struct PieceRecord {
  uint64_t order;  ///< of the run
  uint32_t node;   ///< global node
  uint32_t host;   ///< who sends
  uint64_t at;     ///< bytes of the shipment that came before
  uint32_t words;
  uint32_t bytes;
};
static_assert(sizeof(PieceRecord) == 32);

class Shipment {
 public:
  /// `sources`: of the parcel; they must outlive it.
  Shipment(uint64_t order, uint32_t node, uint32_t host, std::shared_ptr<const Parcel> parcel,
           std::vector<const std::byte*> sources);

  uint64_t bytes() const { return parcel_->bytes(); }
  bool is_over() const { return walk_.is_over(); }
  /// What a piece of all that is left would take, and the smallest piece.
  uint64_t room() const;
  uint64_t least() const { return overhead() + 8; }
  /// Writes one piece, of as much as there is room for: what it took; 0 when there is no room for any of it.
  uint64_t pack(std::span<std::byte> out);

 private:
  uint64_t overhead() const { return sizeof(PieceRecord) + (walk_.passed() == 0 ? parcel_->words().size() * 8 : 0); }

  const uint64_t order_;
  const uint32_t node_, host_;
  const std::shared_ptr<const Parcel> parcel_;
  const std::vector<const std::byte*> sources_;
  ParcelWalk walk_;
};

/// A piece as it lies in a message.
struct Piece {
  PieceRecord record;
  std::vector<uint64_t> words;
  std::span<const std::byte> bytes;
};

/// The piece that a message begins with, and what it takes there. Throws Error(kInvalid) when it is cut off.
std::pair<Piece, uint64_t> first_piece(std::span<const std::byte> message);

class Delivery {
 public:
  /// Where the landing's blocks are, and their bytes; nullptr where nothing may be written.
  Delivery(std::vector<std::byte*> blocks, std::vector<uint64_t> bytes)
      : blocks_(std::move(blocks)), bytes_(std::move(bytes)) {}

  /// Throws Error(kInvalid) when it is not the next one (FAR-1).
  void take(const Piece& piece);
  /// Everything is written.
  bool is_over() const { return walk_.has_value() && walk_->is_over(); }

 private:
  const std::vector<std::byte*> blocks_;
  const std::vector<uint64_t> bytes_;
  std::optional<Parcel> parcel_;
  std::optional<ParcelWalk> walk_;
};

}  // namespace pathways
