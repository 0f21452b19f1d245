// Handle: names a slot of a table for one lifetime of that slot.
//
// Layout of `raw`:   63........32 31.........0
//                    generation   index
// A generation is never 0, so raw == 0 is "no handle". A handle is a value: copy it, put it in shared memory, send it
// in a message. FUT-3: a table refuses a handle whose generation is over.
//
// A handle whose index has its highest bit set is hidden: it names a buffer that the controller keeps for a client
// between two runs of a composite (loops/loops.h). No table of futures has such an index, and no client may send
// such a handle.
#pragma once

#include <cstdint>
#include <type_traits>

namespace pathways {

struct Handle {
  static constexpr std::uint32_t kHidden = std::uint32_t{1} << 31;
  std::uint64_t raw = 0;

  static constexpr Handle make(std::uint32_t index, std::uint32_t generation) noexcept {
    return Handle{(std::uint64_t{generation} << 32) | index};
  }
  [[nodiscard]] constexpr std::uint32_t index() const noexcept { return static_cast<std::uint32_t>(raw); }
  [[nodiscard]] constexpr std::uint32_t generation() const noexcept { return static_cast<std::uint32_t>(raw >> 32); }
  [[nodiscard]] constexpr bool is_hidden() const noexcept { return (index() & kHidden) != 0; }
  [[nodiscard]] constexpr bool valid() const noexcept { return raw != 0; }

  friend constexpr bool operator==(Handle a, Handle b) noexcept { return a.raw == b.raw; }
  friend constexpr bool operator!=(Handle a, Handle b) noexcept { return a.raw != b.raw; }
};

static_assert(sizeof(Handle) == 8 && std::is_trivially_copyable_v<Handle>);

}  // namespace pathways
