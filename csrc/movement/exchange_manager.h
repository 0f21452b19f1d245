/// ExchangeManager: a host's part in all exchanges of rows that are under way.
///
/// The owner prepares each exchange when its run is prepared, and gives the host's part when it is there: routed source
/// shards, memory of target shards. Then the host reports to the coordinator of the exchange, which is one of its
/// hosts. When all have reported, the coordinator sends each its decision. A host writes its rows straight to their
/// slots, and tells each host that it wrote to. The exchange ends here when all rows for this host have come and all of
/// its own are written; the plane hears of the end once. `poll` does what has become possible; the other calls only
/// keep what happened. RowExchanges uses it.
///
///   EXCH-1  as in exchange/exchange_progress.h. A `written` that comes before the decision waits. What comes before
///           the exchange is prepared here, the owner keeps (PEER-4).
///   EXCH-3  a record that is none of its exchange is refused (kInvalid) and changes nothing.
///   EXCH-4  the exchange fails on all hosts or on none, unless a host is lost.
///   ORD-2   a report waits for the host's own part, a decision for reports, rows for decisions. Within an exchange
///           nobody waits in a circle; between exchanges nobody waits at all.
///   ERR-1   if a host's part fails, or its run is cancelled, before the host has reported, the exchange fails. Later
///           the exchange goes on, because other hosts wait for its rows.
///   ERR-2   if a host is lost: was it the coordinator, each host without a decision fails; has it not reported, the
///           coordinator reports a fault for it; was it a writer, its targets fail; nobody writes to it any more.
///   MEM-4   memory of target shards is kept until no live host writes to it. Only a host that fails without a decision
///           cannot know that: Memory::kMayBeWritten.
///
/// Threading: one owner. The plane must not call the manager from within a call.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "exchange/coordinator.h"
#include "exchange/exchange_progress.h"
#include "exchange/host_exchange.h"

namespace pathways {

/// What exchanges need of the host: records to others, memory, and who hears of the end.
class ExchangePlane {
 public:
  /// Whether another host may still write to the memory of a failed exchange's target shards.
  enum class Memory : uint8_t { kFree, kMayBeWritten };

  virtual ~ExchangePlane() = default;
  virtual void send_report(uint32_t host, uint64_t exchange, std::vector<uint64_t> words) = 0;
  virtual void send_decision(uint32_t host, uint64_t exchange, std::vector<uint64_t> words) = 0;
  /// All rows for `host` are written; with a text: they are not.
  virtual void send_written(uint32_t host, uint64_t exchange, std::string_view error) = 0;
  /// Copies rows to their slots. `rooms`: of the targets of `moves`, ascending. Then ExchangeManager::rows_written
  /// follows, once, not within this call.
  virtual void write_rows(uint64_t exchange, uint32_t host, std::vector<HostExchange::Move> moves,
                          std::vector<Room> rooms) = 0;
  /// The exchange is over here. `part` has the decision, for slots and counts; it is gone after the call.
  virtual void finished(uint64_t exchange, const HostExchange& part) = 0;
  virtual void failed(uint64_t exchange, std::string_view text, Memory memory) = 0;
  /// Nothing is sent or written to such a host (PEER-3).
  virtual bool is_dead(uint32_t host, uint64_t exchange) const = 0;
};

class ExchangeManager {
 public:
  ExchangeManager(uint32_t host, ExchangePlane& plane) : host_(host), plane_(plane) {}

  /// `exchange`: a number that no other exchange of a run has, the same on all hosts; `node`: of the program. This host
  /// has a part in `shape`, which must outlive the exchange.
  void prepare(uint64_t exchange, const ExchangeShape& shape, uint32_t node);
  // See HostExchange. After a fail() they have no effect.
  void add_source(uint64_t exchange, ShardRouting routing);
  void add_rooms(uint64_t exchange, std::vector<Room> rooms);
  void expect(uint64_t exchange, uint32_t target, std::span<const int32_t> origins);
  /// The host's value failed, or its run is cancelled. No effect when the host has reported, or the exchange is over.
  void fail(uint64_t exchange, std::string text);
  /// The plane has written the rows for `host`; with a text: it could not.
  void rows_written(uint64_t exchange, uint32_t host, std::string_view error);

  Status on_report(uint64_t exchange, uint32_t from, std::span<const uint64_t> words);
  Status on_decision(uint64_t exchange, uint32_t from, std::span<const uint64_t> words);
  /// No effect on an exchange that is over: this host failed without a decision, and the writer had one.
  Status on_written(uint64_t exchange, uint32_t from, std::string_view error);
  /// Nothing comes from the host any more. Unless it is dead, it is told of failures as any other host. No effect when
  /// the exchange is over, or has lost this host before.
  void lose(uint64_t exchange, uint32_t host, const std::string& text);

  /// Reports, decides, writes, and ends what can.
  void poll();
  /// GANG-2: other hosts may wait for something that this host has not done for the exchange.
  bool owes(uint64_t exchange) const;
  /// The host's part has failed here, and needs nothing more.
  bool has_failed(uint64_t exchange) const;
  /// What an exchange under way waits for, for people to read.
  std::string describe(uint64_t exchange) const;
  void clear();
  /// Exchanges under way.
  size_t count() const { return parts_.size(); }

 private:
  struct Part {
    Part(const ExchangeShape& of, uint32_t host, uint32_t coordinating)
        : shape(of), here(of, host), coordinator_host(coordinating) {}
    const ExchangeShape& shape;
    HostExchange here;
    const uint32_t coordinator_host;
    std::unique_ptr<ExchangeCoordinator> coordinator;       ///< on the coordinator, until it has decided
    std::vector<Room> rooms;                                ///< this host's own
    std::vector<uint32_t> reported, written, lost;          ///< hosts; `reported` at the coordinator only
    std::vector<std::pair<uint32_t, std::string>> gave_up;  ///< writers that failed before the decision, and why
    std::optional<std::string> error;
    uint32_t writes_left = 0;
    bool has_reported = false, is_cancelled = false, is_decided = false, has_rows = false, may_be_written = false;
  };

  Part* find(uint64_t exchange);
  Part* find_open(uint64_t exchange);
  void lose_coordinator(uint64_t exchange, Part& part, std::string_view text);
  void fail_writer(Part& part, uint64_t exchange, uint32_t host, std::string_view text);
  void take_report(uint64_t exchange, Part& part, HostReport report);
  void report_for(uint64_t exchange, Part& part, uint32_t host, std::string text);
  void report_if_ready(uint64_t exchange, Part& part);
  void send_decisions(uint64_t exchange, Part& part);
  void decide(uint64_t exchange, Part& part, HostDecision decision);
  void mark_written(uint64_t exchange, Part& part, uint32_t from, std::string_view error);
  void end_if_over(uint64_t exchange);

  const uint32_t host_;
  ExchangePlane& plane_;
  std::optional<ExchangeProgress> progress_{std::in_place};  ///< always there; clear() makes it anew
  std::unordered_map<uint64_t, std::unique_ptr<Part>> parts_;
  std::vector<uint64_t> touched_;             ///< where something changed since the last poll()
  std::vector<ExchangeProgress::Over> over_;  ///< scratch of poll()
};

}  // namespace pathways
