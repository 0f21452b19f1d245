// The distance at which words written by different threads do not share a cache line.
//
// It is a constant, because in shared memory every process needs the same value.
// std::hardware_destructive_interference_size follows the compiler's -mtune, and so causes warnings in headers.
#pragma once

#include <cstddef>

namespace pathways {

inline constexpr std::size_t kCacheLine = 64;

}  // namespace pathways
