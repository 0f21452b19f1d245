/// TRUST-1: what another process can write is data. It is copied out once, then checked, then used.
///
/// `copy_once` is the copying: afterwards the compiler takes the copy, and never looks at the source again. Sizes,
/// capacities and addresses of a shared structure are copied so when it is first met, checked against what is mapped,
/// and kept privately by each reader: ByteRing's roles, FutureView, ReadBackView, ArenaView, ClientView, HostView.
///
/// Threading: any thread. The source may change meanwhile: then the copy is some mixture, which the checks must bear.
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
