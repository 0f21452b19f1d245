#include "messages/peer_records.h"

namespace pathways {

std::string unsound_peer_record(std::span<const std::byte> bytes) {
  if (bytes.empty()) return "more of its records wait than are taken";  // so the link says it
  if (bytes.size() < sizeof(PeerRecord)) return "a record is shorter than its header";
  const auto record = read_record<PeerRecord>(bytes);
  const char* const name = name_of_peer_record(record.kind);
  if (name == nullptr) {
    return "a record is of kind " + std::to_string(static_cast<int>(record.kind)) + ", which hosts do not send";
  }
  const uint64_t expected = sizeof record + padded(uint64_t{record.bytes});
  if (bytes.size() == expected) return {};
  return std::string(name) + " has " + std::to_string(bytes.size()) + " bytes, expected " + std::to_string(expected);
}

const char* name_of_peer_record(RecordKind kind) {
  switch (kind) {
    case RecordKind::kReceiveReady:
      return "a receive-ready record";
    case RecordKind::kReceiveDone:
      return "a receive-done record";
    case RecordKind::kExchangeReport:
      return "a report of an exchange";
    case RecordKind::kExchangeDecision:
      return "a decision of an exchange";
    case RecordKind::kExchangeWritten:
      return "an end of an exchange's rows";
    case RecordKind::kDecision:
      return "a decision";
    default:
      return nullptr;
  }
}

}  // namespace pathways
