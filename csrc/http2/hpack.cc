#include "http2/hpack.h"

#include <algorithm>
#include <array>

#include "http2/hpack_tables.h"

namespace pathways::http2 {
namespace {

constexpr size_t kFieldBytes = 32;  // what a field takes beside its name and value
constexpr unsigned kLongestCode = 30;
constexpr unsigned kEnd = 256;  // the symbol that ends a text; a text never has it

/// Of the codes of each length: the first one, how many there are, and where their symbols begin in `symbols`.
struct Codes {
  std::array<uint32_t, kLongestCode + 1> first{}, count{}, at{};
  std::array<uint16_t, kCodeBits.size()> symbols{};
};

constexpr Codes kCodes = [] {
  Codes codes;
  uint32_t code = 0, at = 0;
  for (unsigned bits = 1; bits <= kLongestCode; ++bits) {
    code <<= 1;
    codes.first[bits] = code;
    codes.at[bits] = at;
    for (size_t symbol = 0; symbol != kCodeBits.size(); ++symbol) {
      if (kCodeBits[symbol] == bits) codes.symbols[at++] = static_cast<uint16_t>(symbol);
    }
    codes.count[bits] = at - codes.at[bits];
    code += codes.count[bits];
  }
  return codes;
}();

/// Reads from the front of a block.
class Reader {
 public:
  Reader(std::span<const std::byte> block, size_t most) : left_(block), most_(most) {}

  bool is_over() const { return left_.empty(); }
  uint8_t peek() const { return static_cast<uint8_t>(left_.front()); }

  /// An integer whose first byte has it in the lowest `bits` bits.
  bool integer(unsigned bits, uint64_t& number) {
    if (left_.empty()) return false;
    const uint8_t mask = static_cast<uint8_t>((1u << bits) - 1);
    number = take() & mask;
    if (number < mask) return true;
    for (unsigned shift = 0; shift <= 28; shift += 7) {
      if (left_.empty()) return false;
      const uint8_t byte = take();
      number += uint64_t{byte & 0x7fu} << shift;
      if ((byte & 0x80) == 0) return true;
    }
    return false;  // larger than anything that makes sense here
  }

  bool text(std::string& out) {
    if (left_.empty()) return false;
    const bool is_coded = (peek() & 0x80) != 0;
    uint64_t bytes = 0;
    if (!integer(7, bytes) || bytes > left_.size()) return false;
    const auto content = left_.first(bytes);
    left_ = left_.subspan(bytes);
    if (is_coded) return read_huffman(content, most_, out);
    if (bytes > most_) return false;
    out.assign(reinterpret_cast<const char*>(content.data()), content.size());
    return true;
  }

 private:
  uint8_t take() {
    const uint8_t byte = peek();
    left_ = left_.subspan(1);
    return byte;
  }

  std::span<const std::byte> left_;
  size_t most_;
};

void write_text(std::string& block, std::string_view text) {
  size_t bytes = text.size();
  if (bytes < 127) {
    block += static_cast<char>(bytes);
  } else {
    block += static_cast<char>(127);
    for (bytes -= 127; bytes >= 128; bytes >>= 7) block += static_cast<char>(0x80 | (bytes & 0x7f));
    block += static_cast<char>(bytes);
  }
  block += text;
}

}  // namespace

bool read_huffman(std::span<const std::byte> coded, size_t most, std::string& text) {
  text.clear();
  uint32_t code = 0;
  unsigned bits = 0;
  for (const std::byte byte : coded) {
    for (unsigned bit = 8; bit-- != 0;) {
      code = (code << 1) | ((static_cast<uint32_t>(byte) >> bit) & 1);
      if (++bits > kLongestCode) return false;
      const uint32_t number = code - kCodes.first[bits];
      if (code < kCodes.first[bits] || number >= kCodes.count[bits]) continue;
      const unsigned symbol = kCodes.symbols[kCodes.at[bits] + number];
      if (symbol == kEnd || text.size() == most) return false;
      text += static_cast<char>(symbol);
      code = bits = 0;
    }
  }
  return bits < 8 && code == (1u << bits) - 1;  // the last byte is filled up by ones
}

void write_header(std::string& block, std::string_view name, std::string_view value) {
  block += '\0';
  write_text(block, name);
  write_text(block, value);
}

std::optional<std::vector<Header>> HeaderDecoder::decode(std::span<const std::byte> block) {
  Reader reader(block, most_bytes_);
  std::vector<Header> fields;
  size_t bytes = 0;
  uint64_t index = 0;
  while (!reader.is_over()) {
    const uint8_t first = reader.peek();
    if ((first & 0xe0) == 0x20) {  // another size of the table
      if (!fields.empty() || !reader.integer(5, index) || index > kTableBytes) return std::nullopt;
      limit_ = index;
      shrink_to(limit_);
      continue;
    }
    Header header;
    if ((first & 0x80) != 0) {
      if (!reader.integer(7, index)) return std::nullopt;
      const Header* known = field(index);
      if (known == nullptr) return std::nullopt;
      header = *known;
    } else {
      const bool is_kept = (first & 0x40) != 0;
      if (!reader.integer(is_kept ? 6 : 4, index)) return std::nullopt;
      if (index == 0) {
        if (!reader.text(header.name)) return std::nullopt;
      } else {
        const Header* known = field(index);
        if (known == nullptr) return std::nullopt;
        header.name = known->name;
      }
      if (!reader.text(header.value)) return std::nullopt;
      if (is_kept) keep(header);
    }
    bytes += header.name.size() + header.value.size() + kFieldBytes;
    if (bytes > most_bytes_) return std::nullopt;
    fields.push_back(std::move(header));
  }
  return fields;
}

const Header* HeaderDecoder::field(uint64_t index) const {
  static const std::vector<Header> known = [] {
    std::vector<Header> made;
    made.reserve(kStaticFields.size());
    for (const StaticField& each : kStaticFields) made.push_back({std::string(each.name), std::string(each.value)});
    return made;
  }();
  if (index == 0) return nullptr;
  if (index <= known.size()) return &known[index - 1];
  index -= known.size() + 1;
  return index < table_.size() ? &table_[index] : nullptr;
}

void HeaderDecoder::keep(const Header& header) {
  const size_t bytes = header.name.size() + header.value.size() + kFieldBytes;
  shrink_to(bytes > limit_ ? 0 : limit_ - bytes);
  if (bytes > limit_) return;
  table_.push_front(header);
  used_ += bytes;
}

void HeaderDecoder::shrink_to(size_t bytes) {
  while (used_ > bytes) {
    used_ -= table_.back().name.size() + table_.back().value.size() + kFieldBytes;
    table_.pop_back();
  }
}

}  // namespace pathways::http2
