/// Frames of HTTP/2 (RFC 9113, section 6), and how numbers are written in them.
///
/// Threading: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace pathways::http2 {

inline constexpr size_t kFrameHeaderBytes = 9;
inline constexpr size_t kPrefixBytes = 5;  ///< gRPC's, before each message: whether it is compressed, and its bytes

enum FrameKind : uint8_t {
  kData = 0,
  kHeaders = 1,
  kPriority = 2,
  kReset = 3,
  kSettings = 4,
  kPush = 5,
  kPing = 6,
  kGoAway = 7,
  kWindowUpdate = 8,
  kContinuation = 9,
};
enum FrameFlag : uint8_t { kAck = 1, kEndStream = 1, kEndHeaders = 4, kPadded = 8, kWithPriority = 32 };
enum ErrorCode : uint32_t {
  kNoError = 0,
  kProtocolError = 1,
  kFlowControlError = 3,
  kFrameSizeError = 6,
  kRefusedStream = 7,
  kCompressionError = 9,
  kCalm = 11,
};
enum Setting : uint16_t { kMaxCalls = 3, kFirstWindowSize = 4, kMaxFrameSize = 5, kMaxFieldBytes = 6 };

/// Appends a number, its highest byte first.
inline void put(std::string& out, uint64_t number, unsigned bytes) {
  while (bytes-- != 0) out += static_cast<char>(number >> (8 * bytes));
}

template <typename Byte>
uint32_t number_of(std::span<Byte> bytes) {
  uint32_t number = 0;
  for (const auto byte : bytes) number = (number << 8) | static_cast<uint8_t>(byte);
  return number;
}

inline std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace pathways::http2
