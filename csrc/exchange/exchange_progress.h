/// ExchangeProgress: what a host's exchanges still wait for, on a ProgressTracker.
///
/// An exchange passes three stages: the reports of all hosts come to the coordinator; the decision comes to each host;
/// the rows come to a target's host from the writers that the decision names. A writer may have had its decision
/// earlier, so its record may come first. The tracker allows that: work at a stage is counted beside open work at the
/// stage before it.
///
///   EXCH-1  a target's host goes on when all of its writers have written, known from the one count in its decision.
///           Of `hosts` hosts of which `pairs` pairs exchange rows, at most 2 * (hosts - 1) + pairs records are sent: a
///           report and a decision for each host but the coordinator, and one record per pair. What a host says to
///           itself is no record.
///
/// Pure. Threading: one owner.
#pragma once

#include <cstdint>
#include <vector>

#include "progress/progress_tracker.h"

namespace pathways {

class ExchangeProgress {
 public:
  enum class Stage : uint8_t { kReports = 0, kDecision = 1, kRows = 2 };
  /// A stage of an exchange is over at this host: of kReports only at its coordinator.
  struct Over {
    uint64_t exchange;
    Stage stage;
    bool operator==(const Over&) const = default;
  };

  ExchangeProgress();
  /// `reports`: how many hosts report to this one; 0: another host is the coordinator. An exchange is known by a number
  /// of its own, which no other run of it has. Call it before anything else about the exchange.
  void begin(uint64_t exchange, uint32_t reports);
  void reported(uint64_t exchange) { count(exchange, Stage::kReports, -1); }
  /// The decision is there: so many hosts write rows to this one.
  void decided(uint64_t exchange, uint32_t writers) {
    count(exchange, Stage::kRows, writers);
    count(exchange, Stage::kDecision, -1);
  }
  /// All rows of one host are written here. It may come before decided().
  void written(uint64_t exchange) { count(exchange, Stage::kRows, -1); }
  /// Appends the stages that are over since the last call.
  void propagate(std::vector<Over>* over);
  /// For tests: what is counted and watched for the exchanges under way.
  size_t size() const { return tracker_.size(); }

 private:
  void count(uint64_t exchange, Stage stage, int64_t delta) {
    tracker_.update({static_cast<Location>(stage), {exchange}}, delta);
  }
  ProgressTracker tracker_;
  std::vector<ProgressTracker::Point> passed_;  ///< scratch of propagate()
};

}  // namespace pathways
