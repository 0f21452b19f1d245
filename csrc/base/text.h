/// Texts for people that must fit into a message.
///
/// Threading: pure functions.
#pragma once

#include <cstddef>
#include <string_view>

namespace pathways {

/// The longest beginning of `text` of at most `most` bytes that does not end inside a UTF-8 character. A text that is
/// no UTF-8 is cut at `most`.
inline std::string_view cut_text(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  const auto continues = [&](size_t at) { return (static_cast<unsigned char>(text[at]) & 0xc0u) == 0x80u; };
  size_t end = most;
  while (end != 0 && most - end < 4 && continues(end)) --end;
  return text.substr(0, continues(end) ? most : end);
}

}  // namespace pathways
