// The size that keeps two words written by different threads apart.
//
// std::hardware_destructive_interference_size warns in headers because it follows the compiler's -mtune; shared
// memory needs one value that every process agrees on, so it is a constant here.
#pragma once

#include <cstddef>

namespace pathways {

inline constexpr std::size_t kCacheLine = 64;

}  // namespace pathways
