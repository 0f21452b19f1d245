// executor/network_transfer.h
//   FAR-1  Freight.AnyCuts, Freight.RefusesWhatMakesNoSense
#include "executor/network_transfer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "base/status.h"
#include "support.h"

namespace pathways::test {
namespace {

/// Rows of 12 bytes of a source of `rows` rows of 20 into a block of rows of 16, and `tail` bytes into another.
std::shared_ptr<const Parcel> parcel_of(uint64_t rows, uint64_t tail) {
  return std::make_shared<const Parcel>(
      Parcel::parse(std::vector<uint64_t>{0, 2, rows * 20, tail, 3,    rows * 16, 5,    tail, 2,   //
                                          0, 0, 4,         1,    12,   1,         rows, 20,   16,  //
                                          1, 2, 0,         0,    tail, 0}));
}

struct Landing {
  explicit Landing(const Parcel& parcel) {
    for (const uint64_t bytes : parcel.block_bytes()) blocks.emplace_back(bytes);
  }
  Delivery delivery() {
    std::vector<std::byte*> at;
    std::vector<uint64_t> bytes;
    for (auto& block : blocks) at.push_back(block.data()), bytes.push_back(block.size());
    return {std::move(at), std::move(bytes)};
  }
  std::vector<std::vector<std::byte>> blocks;
};

TEST(Freight, AnyCuts) {
  std::mt19937_64 random(seed());
  for (uint32_t trial = 0; trial < 200 * kStressScale; ++trial) {
    // Three shipments share messages of any size; each is put together from its own pieces.
    struct Way {
      std::shared_ptr<const Parcel> parcel;
      std::vector<std::vector<std::byte>> sources;
      std::unique_ptr<Shipment> shipment;
      std::unique_ptr<Landing> landing;
      std::unique_ptr<Delivery> delivery;
    };
    std::vector<Way> ways;
    for (uint32_t i = 0; i < 3; ++i) {
      Way& way = ways.emplace_back();
      way.parcel = parcel_of(1 + random() % 50, 1 + random() % 300);
      std::vector<const std::byte*> at;
      for (const uint64_t bytes : way.parcel->source_bytes()) {
        at.push_back(way.sources.emplace_back(pattern(bytes, trial + i)).data());
      }
      way.shipment = std::make_unique<Shipment>(7, i, 3, way.parcel, at);
      way.landing = std::make_unique<Landing>(*way.parcel);
      way.delivery = std::make_unique<Delivery>(way.landing->delivery());
    }
    while (!(ways[0].shipment->is_over() && ways[1].shipment->is_over() && ways[2].shipment->is_over())) {
      std::vector<std::byte> message((8 + random() % 100) * 8);
      uint64_t used = 0;
      for (Way& way : ways) {
        if (!way.shipment->is_over()) used += way.shipment->pack(std::span(message).subspan(used));
      }
      ASSERT_LE(used, message.size());
      for (std::span<const std::byte> left = std::span(message).first(used); !left.empty();) {
        const auto [piece, bytes] = first_piece(left);
        EXPECT_EQ(piece.record.order, 7u);
        EXPECT_EQ(piece.record.host, 3u);
        ways[piece.record.node].delivery->take(piece);
        left = left.subspan(bytes);
      }
    }
    for (const Way& way : ways) {
      EXPECT_TRUE(way.delivery->is_over());
      Landing want(*way.parcel);
      ParcelWalk walk(*way.parcel);
      for (ParcelRun run; walk.next(1, &run);) {
        want.blocks[run.block][run.target_offset] = way.sources[run.source][run.source_offset];
      }
      EXPECT_EQ(way.landing->blocks, want.blocks);
    }
  }
}

TEST(Freight, RefusesWhatMakesNoSense) {
  const auto parcel = parcel_of(4, 9);
  const std::vector<std::byte> one = pattern(80, 1), two = pattern(9, 2);
  Shipment shipment(7, 1, 3, parcel, {one.data(), two.data()});
  std::vector<std::byte> message(shipment.room());
  EXPECT_EQ(shipment.pack(std::span(message).first(shipment.least() - 1)), 0u);
  EXPECT_EQ(shipment.pack(message), message.size());
  EXPECT_TRUE(shipment.is_over());
  for (size_t bytes = 0; bytes < message.size(); ++bytes) {
    EXPECT_THROW((void)first_piece(std::span(message).first(bytes)), Error) << bytes;
  }
  const Piece piece = first_piece(message).first;
  const auto refused = [&](auto&& spoil, std::vector<std::vector<std::byte>> blocks) {
    Piece spoilt = piece;
    spoil(spoilt);
    Landing landing(*parcel);
    landing.blocks = std::move(blocks);
    const auto before = landing.blocks;
    Delivery delivery = landing.delivery();
    EXPECT_THROW(delivery.take(spoilt), Error);
    EXPECT_EQ(landing.blocks, before);
    EXPECT_FALSE(delivery.is_over());
  };
  using Blocks = std::vector<std::vector<std::byte>>;
  const Blocks right = Landing(*parcel).blocks;
  refused([](Piece& p) { p.record.at = 8; }, right);
  refused([](Piece& p) { p.words.pop_back(); }, right);
  refused([](Piece& p) { p.words.clear(); }, right);
  refused([](Piece& p) { p.words[1] = ~0ull; }, right);
  const std::vector<std::byte> more(piece.bytes.size() + 1);
  refused([&](Piece& p) { p.bytes = more; }, right);
  refused([](Piece&) {}, Blocks(right.begin(), right.begin() + 2));
  refused([](Piece&) {}, {right[0], right[1], std::vector<std::byte>(8)});
  Landing landing(*parcel);
  Delivery nowhere({landing.blocks[0].data(), nullptr, nullptr}, {64, 5, 9});
  EXPECT_THROW(nowhere.take(piece), Error);
  Delivery delivery = landing.delivery();
  delivery.take(piece);
  EXPECT_TRUE(delivery.is_over());
  EXPECT_THROW(delivery.take(piece), Error);  // again
}

}  // namespace
}  // namespace pathways::test
