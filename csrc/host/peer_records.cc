/// What a host says to its peers about transfers, branches and exchanges of rows, and what it hears from them. An
/// invalid record closes the channel from its sender (PEER-1).
#include <algorithm>
#include <cstdio>

#include "base/status.h"
#include "host/host.h"
#include "messages/peer_records.h"

namespace pathways {
namespace {

constexpr size_t kMostOffsets = 1u << 20;  // of one receive ready: more blocks than a host receives in one transfer
constexpr size_t kMostWords = 1u << 26;    // of one report or decision of an exchange: all pairs of 4,096 shards

std::string sizes(const char* kind, uint64_t bytes, uint64_t expected) {
  return std::string(kind) + " has " + std::to_string(bytes) + " bytes, expected " + std::to_string(expected);
}

const char* name_of(RecordKind kind) {
  switch (kind) {
    case RecordKind::kReceiveReady:
      return "a receive-ready record";
    case RecordKind::kReceiveDone:
      return "a receive-done record";
    case RecordKind::kExchangeReport:
      return "a report of an exchange";
    case RecordKind::kExchangeDecision:
      return "a decision of an exchange";
    default:
      return "an end of an exchange's rows";
  }
}

template <typename Record>
std::string no_such_part(const Record& record) {
  return std::string(name_of(record.header.kind)) + " for node " + std::to_string(record.node) + " of run " +
         std::to_string(record.order) + ", in which it has no such part";
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------- said

void Host::send_words(RecordKind kind, uint32_t host, uint64_t order, uint32_t node, std::span<const uint64_t> words) {
  if (!peers_.is_there(host)) return;
  const size_t most = (peers_.max_record(host) - sizeof(WordsRecord)) / sizeof(uint64_t);
  do {
    const auto chunk = words.first(std::min(most, words.size()));
    words = words.subspan(chunk.size());
    const RecordHeader header{kind, static_cast<uint16_t>(words.empty() ? 0 : 1), 0};
    peers_.send(host, WordsRecord{header, order, node, static_cast<uint32_t>(chunk.size())}, std::as_bytes(chunk));
  } while (!words.empty());
}

void Host::send_written(RecordKind kind, uint32_t host, uint64_t order, uint32_t node, Outcome outcome,
                        std::string_view text) {
  if (!peers_.is_there(host)) return;
  const auto bytes = text_bytes(text, peers_.max_record(host) - uint32_t{sizeof(WrittenRecord)});
  const RecordHeader header{kind, static_cast<uint16_t>(outcome), 0};
  peers_.send(host, WrittenRecord{header, order, node, static_cast<uint32_t>(bytes.size())}, bytes);
}

void Host::receive_ready(uint32_t host, uint64_t order, uint32_t node, std::span<const uint64_t> offsets) {
  send_words(RecordKind::kReceiveReady, host, order, node, offsets);
}

void Host::receive_done(uint32_t host, uint64_t order, uint32_t node, Outcome outcome, std::string_view text) {
  send_written(RecordKind::kReceiveDone, host, order, node, outcome, text);
}

void Host::exchange_words(uint32_t host, ExchangeWords kind, uint64_t order, uint32_t node,
                          std::span<const uint64_t> words) {
  const bool is_report = kind == ExchangeWords::kReport;
  send_words(is_report ? RecordKind::kExchangeReport : RecordKind::kExchangeDecision, host, order, node, words);
}

void Host::exchange_written(uint32_t host, uint64_t order, uint32_t node, std::string_view error) {
  const Outcome outcome = error.empty() ? Outcome::kDone : Outcome::kFailed;
  send_written(RecordKind::kExchangeWritten, host, order, node, outcome, error);
}

void Host::decided(uint32_t host, uint64_t order, uint32_t choice, const Decision& decision) {
  if (!peers_.is_there(host)) return;
  const auto bytes = text_bytes(decision.text, peers_.max_record(host) - uint32_t{sizeof(DecisionRecord)});
  const RecordHeader header{RecordKind::kDecision, static_cast<uint16_t>(decision.outcome), 0};
  peers_.send(host, DecisionRecord{header, order, choice, decision.taken, static_cast<uint32_t>(bytes.size()), 0},
              bytes);
}

// ---------------------------------------------------------------------------------------------------------- heard

/// Does a peer's record. Returns what is wrong with it; empty: nothing, and it was done.
std::string Host::take_peer(uint32_t peer, std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(RecordHeader)) return "a record is shorter than its header";
  const auto header = read_record<RecordHeader>(bytes);
  switch (header.kind) {
    case RecordKind::kReceiveReady:
    case RecordKind::kExchangeReport:
    case RecordKind::kExchangeDecision:
      return take_words(peer, bytes);
    case RecordKind::kReceiveDone:
    case RecordKind::kExchangeWritten:
      return take_written(peer, bytes);
    case RecordKind::kDecision:
      return take_decision(peer, bytes);
    default:
      return "a record is of kind " + std::to_string(static_cast<int>(header.kind)) + ", which hosts do not send";
  }
}

std::string Host::take_words(uint32_t peer, std::span<const std::byte> bytes) {
  const auto kind = read_record<RecordHeader>(bytes).kind;
  if (bytes.size() < sizeof(WordsRecord)) return sizes(name_of(kind), bytes.size(), sizeof(WordsRecord));
  const auto record = read_record<WordsRecord>(bytes);
  const uint64_t expected = sizeof record + uint64_t{record.count} * sizeof(uint64_t);
  if (bytes.size() != expected) return sizes(name_of(kind), bytes.size(), expected);
  const std::span words{reinterpret_cast<const uint64_t*>(bytes.data() + sizeof record), record.count};
  std::vector<uint64_t>& partial = peers_.partial_words(peer);
  if (partial.size() + words.size() > (kind == RecordKind::kReceiveReady ? kMostOffsets : kMostWords)) {
    return std::string(name_of(kind)) + " is longer than any";
  }
  if (record.header.detail != 0 || !partial.empty()) partial.insert(partial.end(), words.begin(), words.end());
  if (record.header.detail != 0) return {};  // more words follow
  const std::vector<uint64_t> long_words = std::move(partial);
  partial.clear();
  const std::span<const uint64_t> whole = long_words.empty() ? words : std::span(long_words);
  const auto exchange = kind == RecordKind::kExchangeReport ? ExchangeWords::kReport : ExchangeWords::kDecision;
  const Status status = kind == RecordKind::kReceiveReady
                            ? executor_.on_receive_ready(record.order, record.node, peer, whole)
                            : executor_.on_exchange_words(exchange, record.order, record.node, peer, whole);
  return status == Status::kOk ? std::string() : no_such_part(record);
}

std::string Host::take_written(uint32_t peer, std::span<const std::byte> bytes) {
  const auto kind = read_record<RecordHeader>(bytes).kind;
  if (bytes.size() < sizeof(WrittenRecord)) return sizes(name_of(kind), bytes.size(), sizeof(WrittenRecord));
  const auto record = read_record<WrittenRecord>(bytes);
  const uint64_t expected = sizeof record + padded(uint64_t{record.bytes});
  if (bytes.size() != expected) return sizes(name_of(kind), bytes.size(), expected);
  const std::string_view text{reinterpret_cast<const char*>(bytes.data() + sizeof record), record.bytes};
  const bool is_exchange = kind == RecordKind::kExchangeWritten;
  const auto last = is_exchange ? Outcome::kFailed : Outcome::kDead;
  if (record.header.detail > static_cast<uint16_t>(last)) return std::string(name_of(kind)) + " has an unknown outcome";
  const Outcome outcome{record.header.detail};
  const std::string_view error = outcome == Outcome::kDone ? "" : text.empty() ? "unknown error" : text;
  const Status status = is_exchange ? executor_.on_exchange_written(record.order, record.node, peer, error)
                                    : executor_.on_receive_done(record.order, record.node, peer, outcome, text);
  return status == Status::kOk ? std::string() : no_such_part(record);
}

std::string Host::take_decision(uint32_t peer, std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(DecisionRecord)) return sizes("a decision", bytes.size(), sizeof(DecisionRecord));
  const auto record = read_record<DecisionRecord>(bytes);
  const uint64_t expected = sizeof record + padded(uint64_t{record.bytes});
  if (bytes.size() != expected) return sizes("a decision", bytes.size(), expected);
  if (record.header.detail > static_cast<uint16_t>(Outcome::kDead)) return "a decision has an unknown outcome";
  const std::string_view text{reinterpret_cast<const char*>(bytes.data() + sizeof record), record.bytes};
  const Decision decision{Outcome{record.header.detail}, record.taken, text};
  if (executor_.on_decision(record.order, record.choice, peer, decision) == Status::kOk) return {};
  return "a decision about choice " + std::to_string(record.choice) + " of run " + std::to_string(record.order) +
         ", in which it has no such part";
}

/// PEER-1: closes the channel only. What the peer still owes fails with the reason, and so does what later runs expect
/// from it.
void Host::close_peer(uint32_t peer, const std::string& fault) {
  const std::string text = "ComputationError: a transfer between host " + std::to_string(peer) + " and host " +
                           std::to_string(options_.host) + " failed: the channel from host " + std::to_string(peer) +
                           " was closed, because " + fault;
  std::fprintf(stderr, "pathways: %s\n", text.c_str());
  executor_.close_peer(peer, text);
}

}  // namespace pathways
