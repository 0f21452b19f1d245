/// TRUST-1: what another process can write is data. Copy it out once, then check the copy, then use the copy.
///
/// `copy_once` makes the copy: afterwards the compiler uses the copy, and never reads the source again. When a process
/// first attaches to a shared structure, it copies the sizes and capacities in this way, checks them against the mapped
/// size, and keeps them and the addresses privately: ByteRing's roles, FutureView, ReadBackView, ArenaView, ClientView,
/// HostView.
///
/// Threading: any thread. The source may change during the copy. Then the copy mixes old and new bytes, and the checks
/// must be safe for any mixture.
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>

namespace pathways {

inline void copy_once(void* to, const void* from, std::size_t bytes) noexcept {
  std::memcpy(to, from, bytes);
  asm volatile("" : : "r"(to) : "memory");
}

template <typename T>
[[nodiscard]] T copied_once(const T& from) noexcept {
  static_assert(std::is_trivially_copyable_v<T>);
  T copy;
  copy_once(&copy, &from, sizeof copy);
  return copy;
}

}  // namespace pathways
