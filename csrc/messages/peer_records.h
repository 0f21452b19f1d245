/// What hosts send each other: about transfers, branches, and exchanges of rows.
///
/// Each record is a PeerHeader, a PeerRecord, and what follows it, whatever channel it takes (host/peers.h). Their
/// kinds and directions are in messages/records.h.
#pragma once

#include <cstdint>
#include <span>
#include <string>

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

/// Followed by `bytes` bytes, padded to 8.
///   kReceiveReady                        words, from a transfer's destination to one of its sources: offsets into the
///                                        destination's arena
///   kExchangeReport, kExchangeDecision   words: an encoded message (exchange/messages.h)
///   kReceiveDone, kExchangeWritten       text: why nothing was written, if it failed
///   kDecision                            text: why there is no case, if there is none
struct PeerRecord {
  RecordKind kind;
  uint16_t detail;  ///< of words: 1 when more of the same follow in the next record; else Outcome
  uint32_t node;    ///< global node; kDecision: the choice, by its number in the program
  uint64_t order;
  uint32_t taken;  ///< kDecision: the case
  uint32_t bytes;
};

static_assert(sizeof(PeerHeader) == 8 && sizeof(PeerRecord) == 24);

/// Bytes of a host's rings to and from its machine's link: no record between hosts of two machines is longer than half
/// of it.
inline constexpr uint32_t kLinkRingBytes = uint32_t{1} << 20;

/// What is wrong with a record between hosts, without its PeerHeader, whatever it is about; empty: nothing.
std::string unsound_peer_record(std::span<const std::byte> record);
/// What a kind of record between hosts is called; nullptr: hosts do not send each other such a record.
const char* name_of_peer_record(RecordKind kind);

}  // namespace pathways
