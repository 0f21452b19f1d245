// HPACK by the examples of RFC 7541, appendix C, and by what is malformed.
#include <gtest/gtest.h>

#include <random>

#include "http2/hpack.h"
#include "http2/hpack_tables.h"
#include "http2/peer.h"
#include "support.h"

namespace pathways::test_hpack {
namespace {

using http2::Header;
using http2::HeaderDecoder;
using Fields = std::vector<Header>;

std::string hex(std::string_view digits) {
  std::string out;
  for (size_t at = 0; at + 1 < digits.size(); at += 2) {
    out += static_cast<char>(std::stoi(std::string(digits.substr(at, 2)), nullptr, 16));
  }
  return out;
}

std::optional<Fields> decode(HeaderDecoder& decoder, std::string_view digits) {
  const std::string block = hex(digits);
  return decoder.decode(test::bytes_of(block));
}

TEST(Hpack, ExamplesOfTheStandard) {
  const Fields first{{":method", "GET"}, {":scheme", "http"}, {":path", "/"}, {":authority", "www.example.com"}};
  Fields second = first;
  second.push_back({"cache-control", "no-cache"});
  const Fields third{{":method", "GET"},
                     {":scheme", "https"},
                     {":path", "/index.html"},
                     {":authority", "www.example.com"},
                     {"custom-key", "custom-value"}};
  HeaderDecoder plain(1 << 16), coded(1 << 16);
  EXPECT_EQ(decode(plain, "828684410f7777772e6578616d706c652e636f6d"), first);
  EXPECT_EQ(decode(plain, "828684be58086e6f2d6361636865"), second);
  EXPECT_EQ(decode(plain, "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565"), third);
  EXPECT_EQ(decode(coded, "828684418cf1e3c2e5f23a6ba0ab90f4ff"), first);
  EXPECT_EQ(decode(coded, "828684be5886a8eb10649cbf"), second);
  EXPECT_EQ(decode(coded, "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf"), third);
}

TEST(Hpack, WhatIsWrittenIsRead) {
  const Fields all{
      {"grpc-status", "0"}, {"empty", ""}, {"long", std::string(1000, 'x')}, {"at the edge", std::string(127, 'y')}};
  std::string block;
  for (const auto& [name, value] : all) http2::write_header(block, name, value);
  HeaderDecoder decoder(1 << 16);
  EXPECT_EQ(decoder.decode(test::bytes_of(block)), all);
}

TEST(Hpack, WhatIsMalformedIsRefused) {
  for (const std::string_view digits : {
           "80",                    // field 0
           "be",                    // a field that was never kept
           "ffffffffffffffffff7f",  // a number without an end
           "4005",                  // a name that is cut off
           "400161",                // no value
           "3fe13f",                // a table that is larger than it may be
           "8220",                  // a size of the table behind a field
           "4083ffffff0161",        // Huffman: the end of a text within it
           "408100",                // Huffman: filled up by zeros
       }) {
    HeaderDecoder decoder(1 << 16);
    EXPECT_EQ(decode(decoder, digits), std::nullopt) << digits;
  }
  HeaderDecoder small(100);
  EXPECT_EQ(decode(small, "828684"), std::nullopt) << "more bytes than there may be";
}

TEST(Hpack, TheTableKeepsWhatFits) {
  HeaderDecoder decoder(1 << 16);
  std::string block;
  for (int turn = 0; turn != 100; ++turn) {  // 100 fields of 82 bytes: 49 of them stay
    block += hex("40") + static_cast<char>(1) + 'n' + static_cast<char>(49) +
             std::string(49, static_cast<char>('0' + turn % 10));
  }
  ASSERT_TRUE(decoder.decode(test::bytes_of(block)));
  EXPECT_TRUE(decode(decoder, "be"));   // the newest
  EXPECT_TRUE(decode(decoder, "ee"));   // the 49th
  EXPECT_FALSE(decode(decoder, "ef"));  // the 50th is gone
  EXPECT_TRUE(decode(decoder, "20"));   // no table any more
  EXPECT_FALSE(decode(decoder, "be"));
}

TEST(Hpack, HuffmanOfAllBytes) {
  // The codes, made anew from their lengths.
  std::vector<std::pair<uint32_t, unsigned>> codes(257);
  uint32_t code = 0;
  for (unsigned bits = 1; bits <= 30; ++bits, code <<= 1) {
    for (size_t symbol = 0; symbol != 257; ++symbol) {
      if (http2::kCodeBits[symbol] == bits) codes[symbol] = {code++, bits};
    }
  }
  std::mt19937_64 random(test::seed());
  for (int turn = 0; turn != 200; ++turn) {
    std::string text(random() % 40, '\0'), coded;
    for (char& each : text) each = static_cast<char>(random());
    uint64_t left = 0;
    unsigned count = 0;
    for (const char each : text) {
      const auto& [value, bits] = codes[static_cast<uint8_t>(each)];
      left = (left << bits) | value;
      for (count += bits; count >= 8; count -= 8) coded += static_cast<char>(left >> (count - 8));
    }
    if (count != 0) coded += static_cast<char>((left << (8 - count)) | ((1u << (8 - count)) - 1));
    std::string read;
    ASSERT_TRUE(http2::read_huffman(test::bytes_of(coded), 100, read));
    EXPECT_EQ(read, text);
    EXPECT_EQ(http2::read_huffman(test::bytes_of(coded), text.size() / 2, read), text.empty());
  }
}

}  // namespace
}  // namespace pathways::test_hpack
