// Which process am I? A number that no other process of the machine has, not even one of another pid namespace, and
// that a forked child does not inherit. Shared structures keep it to know their owner.
//
// Threading: any thread. Costs one load after the first call.
#pragma once

#include <cstdint>

namespace pathways {

/// Random, never 0.
std::uint64_t process_token() noexcept;

}  // namespace pathways
