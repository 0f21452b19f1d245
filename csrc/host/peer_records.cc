/// What a host says to its peers about transfers, branches and exchanges of rows, and what it hears from them. An
/// invalid record closes the channel from its sender (PEER-1).
#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/status.h"
#include "host/host.h"
#include "messages/peer_records.h"

namespace pathways {
namespace {

constexpr size_t kMostOffsets = 1u << 20;  // of one receive ready: more blocks than a host receives in one transfer
constexpr size_t kMostWords = 1u << 26;    // of one report or decision of an exchange: all pairs of 4,096 shards

bool is_words(RecordKind kind) {
  return kind == RecordKind::kReceiveReady || kind == RecordKind::kExchangeReport ||
         kind == RecordKind::kExchangeDecision;
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------- said

void Host::send_words(RecordKind kind, uint32_t host, uint64_t order, uint32_t node, std::span<const uint64_t> words) {
  if (!peers_.is_there(host)) return;
  const size_t most = peers_.max_bytes(host) / sizeof(uint64_t);
  do {
    const auto chunk = words.first(std::min(most, words.size()));
    words = words.subspan(chunk.size());
    const uint16_t has_more = words.empty() ? 0 : 1;
    const auto bytes = std::as_bytes(chunk);
    peers_.send(host, PeerRecord{kind, has_more, node, order, 0, static_cast<uint32_t>(bytes.size())}, bytes);
  } while (!words.empty());
}

void Host::send_outcome(RecordKind kind, uint32_t host, uint64_t order, uint32_t node, const Decision& outcome) {
  if (!peers_.is_there(host)) return;
  const auto bytes = text_bytes(outcome.text, peers_.max_bytes(host));
  const auto detail = static_cast<uint16_t>(outcome.outcome);
  peers_.send(host, PeerRecord{kind, detail, node, order, outcome.taken, static_cast<uint32_t>(bytes.size())}, bytes);
}

void Host::receive_ready(uint32_t host, uint64_t order, uint32_t node, std::span<const uint64_t> offsets) {
  send_words(RecordKind::kReceiveReady, host, order, node, offsets);
}

void Host::receive_done(uint32_t host, uint64_t order, uint32_t node, Outcome outcome, std::string_view text) {
  send_outcome(RecordKind::kReceiveDone, host, order, node, {outcome, 0, text});
}

void Host::exchange_words(uint32_t host, ExchangeWords kind, uint64_t order, uint32_t node,
                          std::span<const uint64_t> words) {
  const bool is_report = kind == ExchangeWords::kReport;
  send_words(is_report ? RecordKind::kExchangeReport : RecordKind::kExchangeDecision, host, order, node, words);
}

void Host::exchange_written(uint32_t host, uint64_t order, uint32_t node, std::string_view error) {
  const Outcome outcome = error.empty() ? Outcome::kDone : Outcome::kFailed;
  send_outcome(RecordKind::kExchangeWritten, host, order, node, {outcome, 0, error});
}

void Host::decided(uint32_t host, uint64_t order, uint32_t choice, const Decision& decision) {
  send_outcome(RecordKind::kDecision, host, order, choice, decision);
}

// ---------------------------------------------------------------------------------------------------------- heard

/// Does a peer's record. Returns what is wrong with it; empty: nothing, and it was done.
std::string Host::take_peer(uint32_t peer, std::span<const std::byte> bytes) {
  if (std::string why = unsound_peer_record(bytes); !why.empty()) return why;
  const auto record = read_record<PeerRecord>(bytes);
  const std::string name = name_of_peer_record(record.kind);
  bytes = bytes.subspan(sizeof record, record.bytes);
  std::span words{reinterpret_cast<const uint64_t*>(bytes.data()), bytes.size() / sizeof(uint64_t)};
  const std::string_view text{reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  std::vector<uint64_t> long_words;
  if (is_words(record.kind)) {
    std::vector<uint64_t>& partial = peers_.partial_words(peer);
    const size_t most = record.kind == RecordKind::kReceiveReady ? kMostOffsets : kMostWords;
    if (partial.size() + words.size() > most) return name + " is longer than any";
    if (record.detail != 0 || !partial.empty()) partial.insert(partial.end(), words.begin(), words.end());
    if (record.detail != 0) return {};  // more words follow
    long_words = std::exchange(partial, {});
    if (!long_words.empty()) words = long_words;
  } else if (record.detail > static_cast<uint16_t>(Outcome::kDead)) {
    return name + " has an unknown outcome";
  }
  const Outcome outcome{record.detail};
  const std::string_view error = outcome == Outcome::kDone ? "" : text.empty() ? "unknown error" : text;
  Status status = Status::kInvalid;
  switch (record.kind) {
    case RecordKind::kReceiveReady:
      status = executor_.on_receive_ready(record.order, record.node, peer, words);
      break;
    case RecordKind::kExchangeReport:
      status = executor_.on_exchange_words(ExchangeWords::kReport, record.order, record.node, peer, words);
      break;
    case RecordKind::kExchangeDecision:
      status = executor_.on_exchange_words(ExchangeWords::kDecision, record.order, record.node, peer, words);
      break;
    case RecordKind::kReceiveDone:
      status = executor_.on_receive_done(record.order, record.node, peer, outcome, text);
      break;
    case RecordKind::kExchangeWritten:
      if (outcome != Outcome::kDead) status = executor_.on_exchange_written(record.order, record.node, peer, error);
      break;
    default:
      status = executor_.on_decision(record.order, record.node, peer, {outcome, record.taken, text});
  }
  if (status == Status::kOk) return {};
  return name + (record.kind == RecordKind::kDecision ? " about choice " : " for node ") + std::to_string(record.node) +
         " of run " + std::to_string(record.order) + ", in which it has no such part";
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
