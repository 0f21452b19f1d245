#include "executor/network_transfer.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "base/status.h"
#include "messages/records.h"

namespace pathways {
namespace {

constexpr uint64_t kMostBytes = std::numeric_limits<uint32_t>::max() & ~7u;  // of one piece

[[noreturn]] void refuse(const PieceRecord& piece, const std::string& why) {
  throw Error(Status::kInvalid, "host " + std::to_string(piece.host) + " sent a piece of transfer " +
                                    std::to_string(piece.node) + " of run " + std::to_string(piece.order) + " " + why);
}

}  // namespace

Shipment::Shipment(uint64_t order, uint32_t node, uint32_t host, std::shared_ptr<const Parcel> parcel,
                   std::vector<const std::byte*> sources)
    : order_(order),
      node_(node),
      host_(host),
      parcel_(std::move(parcel)),
      sources_(std::move(sources)),
      walk_(*parcel_) {}

uint64_t Shipment::room() const { return overhead() + padded(parcel_->bytes() - walk_.passed()); }

uint64_t Shipment::pack(std::span<std::byte> out) {
  const uint64_t before = overhead();
  if (out.size() < least()) return 0;
  PieceRecord piece{order_, node_, host_, walk_.passed(), 0, 0};
  if (walk_.passed() == 0) {
    const auto words = parcel_->words();
    piece.words = static_cast<uint32_t>(words.size());
    std::memcpy(out.data() + sizeof piece, words.data(), words.size_bytes());
  }
  const uint64_t most = std::min((out.size() - before) & ~uint64_t{7}, kMostBytes);
  const uint64_t bytes = gather(walk_, sources_, out.subspan(before, most));
  std::memset(out.data() + before + bytes, 0, padded(bytes) - bytes);
  piece.bytes = static_cast<uint32_t>(bytes);
  std::memcpy(out.data(), &piece, sizeof piece);
  return before + padded(bytes);
}

std::pair<Piece, uint64_t> first_piece(std::span<const std::byte> message) {
  Piece piece{};
  if (message.size() < sizeof piece.record) throw Error(Status::kInvalid, "a piece of freight is cut off");
  std::memcpy(&piece.record, message.data(), sizeof piece.record);
  const uint64_t before = sizeof piece.record + uint64_t{piece.record.words} * 8;
  const uint64_t all = before + padded(uint64_t{piece.record.bytes});
  if (all > message.size()) refuse(piece.record, "that is cut off");
  piece.words.resize(piece.record.words);
  if (!piece.words.empty()) {
    std::memcpy(piece.words.data(), message.data() + sizeof piece.record, piece.words.size() * 8);
  }
  piece.bytes = message.subspan(before, piece.record.bytes);
  return {std::move(piece), all};
}

void Delivery::take(const Piece& piece) {
  if (!walk_.has_value()) {
    Parcel parcel = Parcel::parse(piece.words);
    const auto blocks = parcel.block_bytes();
    if (blocks.size() != blocks_.size()) refuse(piece.record, "for another number of blocks");
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (parcel.writes(i) && (blocks_[i] == nullptr || blocks[i] != bytes_[i])) {
        refuse(piece.record, "for block " + std::to_string(i) + ", which is not what it takes it for");
      }
    }
    parcel_.emplace(std::move(parcel));
    walk_.emplace(*parcel_);
  }
  if (piece.record.at != walk_->passed() || piece.bytes.size() > parcel_->bytes() - walk_->passed()) {
    refuse(piece.record, "out of turn");
  }
  scatter(*walk_, blocks_, piece.bytes);
}

}  // namespace pathways
