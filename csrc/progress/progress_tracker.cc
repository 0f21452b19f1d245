#include "progress/progress_tracker.h"

#include <algorithm>

#include "base/check.h"

namespace pathways {

void ProgressTracker::update(const Point& point, int64_t delta) {
  PW_CHECK(point.at < graph_.size());
  if (delta == 0) return;
  buffer_.push_back({point, delta});
  touched_.push_back(point.time.run);
}

void ProgressTracker::watch(const Point& point) {
  PW_CHECK(point.at < graph_.size());
  runs_[point.time.run].watches.push_back(point);
  touched_.push_back(point.time.run);
}

void ProgressTracker::apply(Run& run, const Counted& update) {
  const auto at =
      std::find_if(run.counts.begin(), run.counts.end(), [&](const Counted& c) { return c.point == update.point; });
  if (at == run.counts.end()) {
    run.counts.push_back(update);
  } else if ((at->count += update.count) == 0) {
    *at = run.counts.back();
    run.counts.pop_back();
  }
}

void ProgressTracker::propagate(std::vector<Point>* passed) {
  std::stable_partition(buffer_.begin(), buffer_.end(), [](const Counted& update) { return update.count > 0; });
  for (const Counted& update : buffer_) apply(runs_[update.point.time.run], update);
  buffer_.clear();
  std::sort(touched_.begin(), touched_.end());
  touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
  for (const uint64_t number : touched_) {
    const auto found = runs_.find(number);
    if (found == runs_.end()) continue;  // its updates cancelled each other in an earlier call
    Run& run = found->second;
    std::erase_if(run.watches, [&](const Point& point) {
      if (!has_passed(run, point)) return false;
      passed->push_back(point);
      return true;
    });
    if (run.counts.empty() && run.watches.empty()) runs_.erase(found);
  }
  touched_.clear();
#if defined(PATHWAYS_DCHECK)
  validate();
#endif
}

bool ProgressTracker::has_passed(const Run& run, const Point& point) const {
  for (const Counted& open : run.counts) {
    if (open.count < 0) continue;
    for (const Summary& path : graph_.paths(open.point.at, point.at)) {
      if (path.apply(open.point.time).is_before_or_at(point.time)) return false;
    }
  }
  return true;
}

bool ProgressTracker::has_passed(const Point& point) const {
  const auto found = runs_.find(point.time.run);
  return found == runs_.end() || has_passed(found->second, point);
}

std::vector<Timestamp> ProgressTracker::frontier(Location at, uint64_t run) const {
  std::vector<Timestamp> earliest;
  const auto found = runs_.find(run);
  if (found == runs_.end()) return earliest;
  for (const Counted& open : found->second.counts) {
    if (open.count < 0) continue;
    for (const Summary& path : graph_.paths(open.point.at, at)) {
      add_to_antichain(earliest, path.apply(open.point.time));
    }
  }
  return earliest;
}

size_t ProgressTracker::size() const {
  size_t points = 0;
  for (const auto& [number, run] : runs_) points += run.counts.size() + run.watches.size();
  return points;
}

void ProgressTracker::validate() const {
  for (const auto& [number, run] : runs_) {
    PW_CHECK(!run.counts.empty() || run.watches.empty());  // a watch without open work is over
    for (const Counted& counted : run.counts) {
      PW_CHECK(counted.count != 0);
      PW_CHECK(counted.count > 0 || !has_passed(run, counted.point));
    }
  }
}

}  // namespace pathways
