// process_token(): a number that identifies this process. No other process of the machine has it, not even in another
// pid namespace, and a forked child does not inherit it. Shared structures store it to know their owner.
//
// Threading: any thread. Costs one load after the first call.
#pragma once

#include <cstdint>

namespace pathways {

/// Random, never 0.
std::uint64_t process_token() noexcept;

}  // namespace pathways
