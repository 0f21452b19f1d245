// A client of a ServerConnection, by hand: it writes frames and reads those that come back.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "http2/server_connection.h"

namespace pathways::test {

inline std::string big_endian(uint64_t number, unsigned bytes) {
  std::string out;
  while (bytes-- != 0) out += static_cast<char>(number >> (8 * bytes));
  return out;
}

inline std::string frame(uint8_t kind, uint8_t flags, uint32_t call, std::string_view payload) {
  return big_endian(payload.size(), 3) + static_cast<char>(kind) + static_cast<char>(flags) + big_endian(call, 4) +
         std::string(payload);
}

inline const std::string kHello = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, "");

inline std::string fields(const std::vector<http2::Header>& all) {
  std::string block;
  for (const auto& [name, value] : all) http2::write_header(block, name, value);
  return block;
}

inline std::string begin_call(uint32_t call, bool is_all = false) {
  return frame(1, static_cast<uint8_t>(4 | (is_all ? 1 : 0)), call, fields({{":path", "/service/method"}}));
}

inline std::string prefixed(std::string_view message) {
  return big_endian(0, 1) + big_endian(message.size(), 4) + std::string(message);
}

inline std::string window(uint32_t call, uint32_t bytes) { return frame(8, 0, call, big_endian(bytes, 4)); }

inline std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

struct Seen {
  uint8_t kind, flags;
  uint32_t call;
  std::string payload;
};

/// All that the connection has to say now, as frames.
inline std::vector<Seen> take_frames(http2::ServerConnection& connection) {
  std::string all;
  while (true) {
    const std::string_view output = connection.output();
    if (output.empty()) break;
    all += output;
    connection.written(output.size());
  }
  std::vector<Seen> seen;
  const auto number = [&](size_t at, size_t count) {
    uint32_t value = 0;
    for (size_t byte = 0; byte != count; ++byte) value = (value << 8) | static_cast<uint8_t>(all[at + byte]);
    return value;
  };
  for (size_t at = 0; at + 9 <= all.size();) {
    const size_t bytes = number(at, 3);
    seen.push_back({static_cast<uint8_t>(all[at + 3]), static_cast<uint8_t>(all[at + 4]), number(at + 5, 4),
                    all.substr(at + 9, bytes)});
    at += 9 + bytes;
  }
  return seen;
}

/// The data of one call in these frames.
inline std::string data_of(const std::vector<Seen>& frames, uint32_t call) {
  std::string data;
  for (const Seen& each : frames) {
    if (each.kind == 0 && each.call == call) data += each.payload;
  }
  return data;
}

}  // namespace pathways::test
