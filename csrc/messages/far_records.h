/// What crosses a host's rings to and from other machines, and the completions of futures that lie on another machine.
///
/// A host has one ring to all hosts of other machines, and one from them. The link between machines carries their
/// records (link/link.h). Each begins with a FarHeader, and then is as it would be on a ring between two hosts of one
/// machine (messages/peer_records.h).
///
/// A future of a client on another machine is completed by a FutureDoneRecord on the host's ring to the controller. The
/// link on the client's machine takes it off there. Why on that ring: it must arrive before the record of the run's
/// end, after which the controller does not fail the run's futures any more (LINK-1).
#pragma once

#include <cstdint>

#include "messages/records.h"

namespace pathways {

/// Incarnations of hosts of other machines, for Host: the host is on this machine; or it is not there now.
inline constexpr int32_t kNear = -2, kAbsent = -1;

struct FarHeader {
  uint32_t host;        ///< on the ring to other machines: the destination; on the ring from them: the source
  int32_t incarnation;  ///< of that host: as the sender of a record knows it; as the link of the source says it
};

/// This host's part of a future is done. Followed by `runs` pieces of the value that the client wanted with it, each a
/// ValueRun and its bytes, padded to 8.
struct FutureDoneRecord {
  RecordHeader header;
  uint64_t handle;
  uint32_t runs;
  uint32_t is_large;  ///< 1: the value is in the future's large slot (ReadBackSlot)
};

struct ValueRun {
  uint32_t offset, bytes;
};

static_assert(sizeof(FarHeader) == 8 && sizeof(FutureDoneRecord) == 24 && sizeof(ValueRun) == 8);

}  // namespace pathways
