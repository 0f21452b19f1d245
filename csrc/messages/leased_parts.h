/// What each host needs of the block that a put leases. The client says it behind the block's bytes, so that it goes
/// where they go, and no command carries it to each host.
#pragma once

#include <cstdint>

#include "messages/records.h"

namespace pathways {

/// What a host needs of a block that is leased to it.
struct LeasedPart {
  uint32_t host, reserved;
  uint64_t at, bytes;
};

inline constexpr uint32_t kMostLeasedParts = 1 << 16;  ///< in one block

/// Bytes of the block that a command leases, with what it says of its parts. UINT64_MAX: no block has so many.
inline uint64_t leased_bytes(const CommandRecord& record) {
  const uint64_t parts = record.lease_parts * uint64_t{sizeof(LeasedPart)};
  const bool is_there = record.lease_parts <= kMostLeasedParts && record.lease_bytes <= UINT64_MAX - parts;
  return is_there ? record.lease_bytes + parts : UINT64_MAX;
}

static_assert(sizeof(LeasedPart) == 24);

}  // namespace pathways
