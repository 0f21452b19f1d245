#include "exchange/messages.h"

#include <cstring>
#include <string_view>

#include "base/status.h"
#include "base/text.h"

namespace pathways {
namespace {

constexpr uint64_t kMostText = 4096;

uint32_t high(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
uint32_t low(uint64_t word) { return static_cast<uint32_t>(word); }

[[noreturn]] void refuse() { throw Error(Status::kInvalid, "a message of an exchange is malformed"); }

class Writer {
 public:
  void put(uint64_t word) { words.push_back(word); }
  void put(const std::string& text) {
    const std::string_view taken = cut_text(text, kMostText);
    put(taken.size());
    const size_t at = words.size();
    words.resize(at + (taken.size() + 7) / 8);
    if (!taken.empty()) std::memcpy(words.data() + at, taken.data(), taken.size());
  }
  void put(const ExchangeFault& fault) {
    put(static_cast<uint64_t>(fault.kind));
    put(fault.shard);
    put(fault.rows);
    put(static_cast<uint64_t>(fault.limit));
    put(fault.text);
  }
  void put(uint32_t high, uint32_t low) { put(uint64_t{high} << 32 | low); }
  std::vector<uint64_t> words;
};

class Reader {
 public:
  explicit Reader(std::span<const uint64_t> words) : words_(words) {}
  uint64_t word() {
    if (words_.empty()) refuse();
    const uint64_t value = words_.front();
    words_ = words_.subspan(1);
    return value;
  }
  uint32_t small() {
    const uint64_t value = word();
    if (value > UINT32_MAX) refuse();
    return static_cast<uint32_t>(value);
  }
  /// How many items of `words` words follow.
  size_t count(uint64_t words) {
    const uint64_t items = word();
    if (items > words_.size() / words) refuse();
    return items;
  }
  std::string text() {
    const uint64_t bytes = word();
    const uint64_t taken = (bytes + 7) / 8;
    if (bytes > kMostText || taken > words_.size()) refuse();
    std::string out(bytes, '\0');
    if (bytes != 0) std::memcpy(out.data(), words_.data(), bytes);
    words_ = words_.subspan(taken);
    return out;
  }
  ExchangeFault fault() {
    ExchangeFault fault;
    const uint64_t kind = word();
    if (kind > static_cast<uint64_t>(ExchangeFault::Kind::kOverflow)) refuse();
    fault.kind = static_cast<ExchangeFault::Kind>(kind);
    fault.shard = small();
    fault.rows = word();
    fault.limit = static_cast<int64_t>(word());
    fault.text = text();
    return fault;
  }
  std::vector<Batch> batches() {
    std::vector<Batch> out(count(2));
    for (Batch& batch : out) {
      const uint64_t pair = word(), rows = word();
      if (high(rows) > 1) refuse();
      batch = {high(pair), low(pair), low(rows), high(rows) != 0 ? word() : 0};
    }
    return out;
  }
  std::vector<Room> rooms() {
    std::vector<Room> out(count(3));
    for (Room& room : out) {
      room.target = small();
      room.rows = word();
      room.numbers = word();
    }
    return out;
  }
  void end() const {
    if (!words_.empty()) refuse();
  }

 private:
  std::span<const uint64_t> words_;
};

void put_batches(Writer& out, const std::vector<Batch>& batches) {
  out.put(batches.size());
  for (const Batch& batch : batches) {
    out.put(batch.source, batch.target);
    out.put(batch.digest != 0, batch.rows);  // a digest costs nothing where there is none
    if (batch.digest != 0) out.put(batch.digest);
  }
}

void put_rooms(Writer& out, const std::vector<Room>& rooms) {
  out.put(rooms.size());
  for (const Room& room : rooms) {
    out.put(room.target);
    out.put(room.rows);
    out.put(room.numbers);
  }
}

}  // namespace

std::string ExchangeFault::describe(uint32_t targets) const {
  const std::string where = "shard " + std::to_string(shard);
  switch (kind) {
    case Kind::kNone:
      return {};
    case Kind::kSourceFailed:
    case Kind::kBadRoutes:
      return text;
    case Kind::kBadDestination:
      return "pw.exchange: row " + std::to_string(rows) + " of source " + where + " has destination " +
             std::to_string(limit) + ": expected a target shard from 0 to " + std::to_string(targets - 1);
    case Kind::kOverflow:
      return "pw.exchange: " + std::to_string(rows) + " rows go to target " + where + ", whose capacity is " +
             std::to_string(limit) + ": give a greater capacity, or overflow=\"drop\"";
  }
  return {};
}

std::vector<uint64_t> encode(const HostReport& report) {
  Writer out;
  out.put(report.host);
  out.put(report.fault);
  put_batches(out, report.batches);
  put_rooms(out, report.rooms);
  put_batches(out, report.expected);
  return std::move(out.words);
}

HostReport parse_report(std::span<const uint64_t> words) {
  Reader in(words);
  HostReport report;
  report.host = in.small();
  report.fault = in.fault();
  report.batches = in.batches();
  report.rooms = in.rooms();
  report.expected = in.batches();
  in.end();
  return report;
}

std::vector<uint64_t> encode(const HostDecision& decision) {
  Writer out;
  out.put(decision.fault);
  out.put(decision.ranges.size());
  for (const SlotRange& range : decision.ranges) {
    out.put(range.source, range.target);
    out.put(range.first, range.rows);
  }
  put_rooms(out, decision.rooms);
  out.put(decision.writers.size());
  for (const uint32_t writer : decision.writers) out.put(writer);
  out.put(decision.arrivals.size());
  for (const Arrivals& arrivals : decision.arrivals) {
    out.put(arrivals.target);
    out.put(arrivals.kept);
    out.put(arrivals.offered);
  }
  return std::move(out.words);
}

HostDecision parse_decision(std::span<const uint64_t> words) {
  Reader in(words);
  HostDecision decision;
  decision.fault = in.fault();
  decision.ranges.resize(in.count(2));
  for (SlotRange& range : decision.ranges) {
    const uint64_t pair = in.word(), slots = in.word();
    range = {high(pair), low(pair), high(slots), low(slots)};
  }
  decision.rooms = in.rooms();
  decision.writers.resize(in.count(1));
  for (uint32_t& writer : decision.writers) writer = in.small();
  decision.arrivals.resize(in.count(3));
  for (Arrivals& arrivals : decision.arrivals) arrivals = {in.small(), in.word(), in.word()};
  in.end();
  return decision;
}

}  // namespace pathways
