/// HPACK, the compression of header fields of HTTP/2 (RFC 7541): all of decoding, and of encoding what needs no state.
///
/// Threading: one thread at a time uses a decoder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pathways::http2 {

struct Header {
  std::string name, value;
  bool operator==(const Header&) const = default;
};

/// Decodes the header blocks of one connection, in the order in which they come: each changes the table for the next.
class HeaderDecoder {
 public:
  /// `most_bytes`: of the names and values of one block, 32 for each field added.
  explicit HeaderDecoder(size_t most_bytes) : most_bytes_(most_bytes) {}

  /// The fields of a whole block; nothing if it is malformed, or has too many bytes. Then the connection is over.
  std::optional<std::vector<Header>> decode(std::span<const std::byte> block);

 private:
  static constexpr size_t kTableBytes = 4096;  ///< HTTP/2's default, as this end says nothing else

  const Header* field(uint64_t index) const;
  void keep(const Header& header);
  void shrink_to(size_t bytes);

  const size_t most_bytes_;
  size_t limit_ = kTableBytes, used_ = 0;
  std::deque<Header> table_;  ///< the newest first
};

/// Appends a field that the decoder does not keep, as plain bytes.
void write_header(std::string& block, std::string_view name, std::string_view value);

/// The text of Huffman-coded bytes, appended; false if they are malformed or the text has more than `most` bytes.
bool read_huffman(std::span<const std::byte> coded, size_t most, std::string& text);

}  // namespace pathways::http2
