// bulk/network_transfer.h
//   FAR-1  Network transfers.AnyCuts, Network transfers.RefusesWhatMakesNoSense
#include "bulk/network_transfer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/status.h"
#include "support.h"

namespace pathways::test::test_network_transfer {
namespace {

/// Rows of 12 bytes of a source of `rows` rows of 20 into a block of rows of 16, and `tail` bytes into another.
std::shared_ptr<const CopyPlan> copy_plan_of(uint64_t rows, uint64_t tail) {
  return std::make_shared<const CopyPlan>(
      CopyPlan::parse(std::vector<uint64_t>{0, 2, rows * 20, tail, 3,    rows * 16, 5,    tail, 2,   //
                                            0, 0, 4,         1,    12,   1,         rows, 20,   16,  //
                                            1, 2, 0,         0,    tail, 0}));
}

struct ReceiveBuffers {
  explicit ReceiveBuffers(const CopyPlan& copy_plan) {
    for (const uint64_t bytes : copy_plan.block_bytes()) blocks.emplace_back(bytes);
  }
  IncomingTransfer incoming() {
    std::vector<std::byte*> at;
    std::vector<uint64_t> bytes;
    for (auto& block : blocks) at.push_back(block.data()), bytes.push_back(block.size());
    return {std::move(at), std::move(bytes)};
  }
  std::vector<std::vector<std::byte>> blocks;
};

TEST(NetworkTransfer, AnyCuts) {
  std::mt19937_64 random(seed());
  uint32_t placed = 0;
  for (uint32_t trial = 0; trial < 200 * kStressScale; ++trial) {
    // Three outgoing transfers share messages of any size; each is put together from its own chunks.
    struct Stream {
      std::shared_ptr<const CopyPlan> copy_plan;
      std::vector<std::vector<std::byte>> sources;
      std::unique_ptr<OutgoingTransfer> outgoing;
      std::unique_ptr<ReceiveBuffers> receive;
      std::unique_ptr<IncomingTransfer> incoming;
    };
    std::vector<Stream> ways;
    for (uint32_t i = 0; i < 3; ++i) {
      Stream& way = ways.emplace_back();
      way.copy_plan = copy_plan_of(1 + random() % 50, 1 + random() % 300);
      std::vector<const std::byte*> at;
      for (const uint64_t bytes : way.copy_plan->source_bytes()) {
        at.push_back(way.sources.emplace_back(pattern(bytes, trial + i)).data());
      }
      way.outgoing = std::make_unique<OutgoingTransfer>(7, i, 3, way.copy_plan, at);
      way.receive = std::make_unique<ReceiveBuffers>(*way.copy_plan);
      way.incoming = std::make_unique<IncomingTransfer>(way.receive->incoming());
    }
    while (!(ways[0].outgoing->is_over() && ways[1].outgoing->is_over() && ways[2].outgoing->is_over())) {
      std::vector<std::byte> message((8 + random() % 100) * 8);
      uint64_t used = 0;
      const bool has_messages = random() % 2 == 0;
      for (Stream& way : ways) {
        if (!has_messages) break;
        if (!way.outgoing->is_over()) used += way.outgoing->pack(std::span(message).subspan(used));
      }
      // A piece of a source goes into a piece of a block without a message of its own.
      for (Stream& way : ways) {
        std::vector<std::byte> head(2000);
        std::span<const std::byte> piece;
        // Only behind what the messages have brought.
        if (way.outgoing->is_over() || random() % 2 == 0 || used != 0) continue;
        const uint64_t size = way.outgoing->pack_head(head, 1, 1 + random() % 100, &piece);
        if (size == 0) continue;
        EXPECT_FALSE(chunk_head(std::span(head).first(size - 1)).has_value());
        const auto there = chunk_head(std::span(head).first(size));
        ASSERT_TRUE(there.has_value());
        ASSERT_EQ(there->payload_at, size);
        ASSERT_EQ(there->payload_bytes, piece.size());
        Chunk other = there->chunk;
        other.at += 1;
        EXPECT_TRUE(way.incoming->place(other, piece.size()).empty());
        EXPECT_TRUE(way.incoming->place(there->chunk, uint64_t{1} << 20).empty());
        const std::span<std::byte> to = way.incoming->place(there->chunk, piece.size());
        if (to.empty()) {  // it is in several pieces there
          head.resize(size);
          head.insert(head.end(), piece.begin(), piece.end());
          way.incoming->take(first_chunk(head).first);
        } else {
          ASSERT_EQ(to.size(), piece.size());
          std::memcpy(to.data(), piece.data(), piece.size());
          ++placed;
        }
      }
      ASSERT_LE(used, message.size());
      for (std::span<const std::byte> left = std::span(message).first(used); !left.empty();) {
        const auto [chunk, bytes] = first_chunk(left);
        EXPECT_EQ(chunk.order, 7u);
        EXPECT_EQ(chunk.host, 3u);
        ways[chunk.node].incoming->take(chunk);
        left = left.subspan(bytes);
      }
    }
    for (const Stream& way : ways) {
      EXPECT_TRUE(way.incoming->is_over());
      ReceiveBuffers want(*way.copy_plan);
      CopyWalk walk(*way.copy_plan);
      for (CopyRun run; walk.next(1, &run);) {
        want.blocks[run.block][run.target_offset] = way.sources[run.source][run.source_offset];
      }
      EXPECT_EQ(way.receive->blocks, want.blocks);
    }
  }
  EXPECT_GT(placed, 100u);
}

// tests/python/machines/chunks.py writes the same bytes.
TEST(NetworkTransfer, WritesRecordWordsPayload) {
  const std::vector<uint64_t> words{0, 1, 5, 1, 5, 1, 0, 0, 0, 0, 5, 0};
  const auto copy_plan = std::make_shared<const CopyPlan>(CopyPlan::parse(words));
  const std::string five = "hello";
  OutgoingTransfer outgoing(7, 1, 3, copy_plan, {reinterpret_cast<const std::byte*>(five.data())});
  std::vector<std::byte> message(outgoing.room());
  ASSERT_EQ(outgoing.pack(message), message.size());
  std::string want("pwchunk1\7\0\0\0\0\0\0\0\1\0\0\0\3\0\0\0\0\0\0\0\0\0\0\0\x0c\0\0\0\0\0\0\0\5\0\0\0\0\0\0\0", 48);
  want.append(reinterpret_cast<const char*>(words.data()), words.size() * 8);
  want += five;
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(message.data()), message.size()), want);
}

TEST(NetworkTransfer, RefusesWhatMakesNoSense) {
  const auto copy_plan = copy_plan_of(4, 9);
  const std::vector<std::byte> one = pattern(80, 1), two = pattern(9, 2);
  OutgoingTransfer outgoing(7, 1, 3, copy_plan, {one.data(), two.data()});
  std::vector<std::byte> message(outgoing.room());
  EXPECT_EQ(outgoing.pack(std::span(message).first(outgoing.least() - 1)), 0u);
  EXPECT_EQ(outgoing.pack(message), message.size());
  EXPECT_TRUE(outgoing.is_over());
  for (size_t bytes = 0; bytes < message.size(); ++bytes) {
    EXPECT_THROW((void)first_chunk(std::span(message).first(bytes)), Error) << bytes;
  }
  for (const size_t at : {0u, 32u, 39u, 40u, 47u}) {  // magic, words, payload
    std::vector<std::byte> spoilt = message;
    spoilt[at] ^= std::byte{0x80};
    EXPECT_THROW((void)first_chunk(spoilt), Error) << at;
  }
  const Chunk chunk = first_chunk(message).first;
  const auto refused = [&](auto&& spoil, std::vector<std::vector<std::byte>> blocks) {
    Chunk spoilt = chunk;
    spoil(spoilt);
    ReceiveBuffers receive(*copy_plan);
    receive.blocks = std::move(blocks);
    const auto before = receive.blocks;
    IncomingTransfer incoming = receive.incoming();
    EXPECT_THROW(incoming.take(spoilt), Error);
    EXPECT_EQ(receive.blocks, before);
    EXPECT_FALSE(incoming.is_over());
  };
  using Blocks = std::vector<std::vector<std::byte>>;
  const Blocks right = ReceiveBuffers(*copy_plan).blocks;
  refused([](Chunk& p) { p.at = 8; }, right);
  refused([](Chunk& p) { p.words.pop_back(); }, right);
  refused([](Chunk& p) { p.words.clear(); }, right);
  refused([](Chunk& p) { p.words[1] = ~0ull; }, right);
  const std::vector<std::byte> more(chunk.bytes.size() + 1);
  refused([&](Chunk& p) { p.bytes = more; }, right);
  refused([](Chunk&) {}, Blocks(right.begin(), right.begin() + 2));
  refused([](Chunk&) {}, {right[0], right[1], std::vector<std::byte>(8)});
  ReceiveBuffers receive(*copy_plan);
  IncomingTransfer nowhere({receive.blocks[0].data(), nullptr, nullptr}, {64, 5, 9});
  EXPECT_THROW(nowhere.take(chunk), Error);
  IncomingTransfer incoming = receive.incoming();
  incoming.take(chunk);
  EXPECT_TRUE(incoming.is_over());
  EXPECT_THROW(incoming.take(chunk), Error);  // again
}

}  // namespace
}  // namespace pathways::test::test_network_transfer
