/// The records that hosts send each other: about transfers, branches, and exchanges of rows.
///
/// They are like those of messages/records.h, where their kinds and directions are.
#pragma once

#include <cstdint>

#include "messages/records.h"

namespace pathways {

/// Followed by `count` words. kReceiveReady, from a transfer's destination to one of its sources: offsets into the
/// destination's arena. kExchangeReport, kExchangeDecision: an encoded message (exchange/messages.h).
struct WordsRecord {
  RecordHeader header;  ///< detail: 1 when more words of the same follow in the next record
  uint64_t order;
  uint32_t node;  ///< global node
  uint32_t host;  ///< the host that tells
  uint32_t count;
  uint32_t reserved;
};

/// kReceiveDone, kExchangeWritten. If it failed or is dead, nothing was written; `bytes` bytes of text, padded to 8.
struct WrittenRecord {
  RecordHeader header;  ///< detail: Outcome
  uint64_t order;
  uint32_t node, host;  ///< global node; the host that has written
  uint32_t bytes;
  uint32_t reserved;
};

/// What was chosen between cases. When there is no case, `bytes` bytes of text say why, padded to 8.
struct DecisionRecord {
  RecordHeader header;  ///< detail: Outcome
  uint64_t order;
  uint32_t choice, host;  ///< its number in the program; the host that tells
  uint32_t taken;         ///< the case
  uint32_t bytes;
};

}  // namespace pathways
