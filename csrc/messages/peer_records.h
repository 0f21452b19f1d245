/// The records that hosts send each other: about transfers, branches, and exchanges of rows.
///
/// They are like those of messages/records.h, where their kinds and directions are. Each begins with a PeerHeader,
/// whatever channel it takes (host/peers.h).
#pragma once

#include <cstdint>

#include "messages/records.h"

namespace pathways {

/// A host in an epoch. On a ring between two hosts it is the sender. On a host's ring to its machine's link it is the
/// destination, in the epoch that the sender knows; on the ring from the link it is the sender, as its link says it.
struct PeerHeader {
  uint32_t host;
  int32_t epoch;  ///< counts the host's starts
  bool operator==(const PeerHeader&) const = default;
};

inline constexpr int32_t kAbsent = -1;  ///< instead of an epoch: the host is not there now

/// Followed by `count` words. kReceiveReady, from a transfer's destination to one of its sources: offsets into the
/// destination's arena. kExchangeReport, kExchangeDecision: an encoded message (exchange/messages.h).
struct WordsRecord {
  RecordHeader header;  ///< detail: 1 when more words of the same follow in the next record
  uint64_t order;
  uint32_t node;  ///< global node
  uint32_t count;
};

/// kReceiveDone, kExchangeWritten. If it failed or is dead, nothing was written; `bytes` bytes of text, padded to 8.
struct WrittenRecord {
  RecordHeader header;  ///< detail: Outcome
  uint64_t order;
  uint32_t node;  ///< global node
  uint32_t bytes;
};

/// What was chosen between cases. When there is no case, `bytes` bytes of text say why, padded to 8.
struct DecisionRecord {
  RecordHeader header;  ///< detail: Outcome
  uint64_t order;
  uint32_t choice;  ///< its number in the program
  uint32_t taken;   ///< the case
  uint32_t bytes, reserved;
};

static_assert(sizeof(PeerHeader) == 8 && sizeof(WordsRecord) == 24 && sizeof(WrittenRecord) == 24);
static_assert(sizeof(DecisionRecord) == 32);

}  // namespace pathways
