#include "exchange/exchange_progress.h"

#include <array>

namespace pathways {
namespace {

ProgressGraph stages() {
  const std::array<ProgressGraph::Edge, 2> edges{{{0, 1}, {1, 2}}};
  return {{"reports", "decision", "rows"}, edges};
}

}  // namespace

ExchangeProgress::ExchangeProgress() : tracker_(stages()) {}

void ExchangeProgress::begin(uint64_t exchange, uint32_t reports) {
  count(exchange, Stage::kReports, reports);
  count(exchange, Stage::kDecision, 1);
  for (const Stage stage : {Stage::kReports, Stage::kDecision, Stage::kRows}) {
    if (stage == Stage::kReports && reports == 0) continue;
    tracker_.watch({static_cast<Location>(stage), {exchange}});
  }
}

void ExchangeProgress::propagate(std::vector<Over>* over) {
  passed_.clear();
  tracker_.propagate(&passed_);
  for (const ProgressTracker::Point& point : passed_) {
    over->push_back({point.time.run, static_cast<Stage>(point.at)});
  }
}

}  // namespace pathways
