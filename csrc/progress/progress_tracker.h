/// ProgressTracker: tells when all work of a step has come to a location, from counts.
///
/// A user counts open work by location and timestamp: +n when n pieces of work become open, -1 when one is done. It
/// asks at which locations nothing can come any more for a timestamp. Work upstream may still make some, so the
/// locations upstream count too. Use it for whatever needs "all of this step has come".
///
/// Counts of different senders come in any order: a piece of work may be reported done before the record that announced
/// it. So a count may be below zero for a while. The law for users is: who announces work at a location keeps open work
/// upstream of it until the announcement is counted.
///
///   PROG-2 (safety)     a location has passed a timestamp only if no open work can still cause work there at the
///                       timestamp or before it.
///   PROG-3 (batches)    updates change nothing until propagate(). It applies the raising ones first. After it, each
///                       count below zero has open work upstream of it, by the law for users (validate()).
///   PROG-4 (liveness)   propagate() reports each watch once, as soon as its location has passed its timestamp.
///   PROG-5 (size)       a run takes memory per location and round that has open work or a watch, whatever the number
///                       of shards and hosts; propagate() looks at the runs with updates or new watches only.
///
/// Pure: no thread, clock or lock. Threading: one owner.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "progress/progress_graph.h"

namespace pathways {

class ProgressTracker {
 public:
  struct Point {
    Location at;
    Timestamp time;
    bool operator==(const Point&) const = default;
  };

  explicit ProgressTracker(ProgressGraph graph) : graph_(std::move(graph)) {}

  /// `delta` pieces of work became open, or, below zero, are done. Buffered.
  void update(const Point& point, int64_t delta);
  /// Asks for a report when the point is passed.
  void watch(const Point& point);
  /// Applies what is buffered. Appends the watches that are over to `passed`.
  void propagate(std::vector<Point>* passed);

  /// Nothing can come any more at this timestamp or before it. Buffered updates do not count yet.
  bool has_passed(const Point& point) const;
  /// The earliest timestamps of a run at which something may still come to a location; none of them is before another.
  std::vector<Timestamp> frontier(Location at, uint64_t run) const;
  /// Points with a count or a watch.
  size_t size() const;
  /// For debug builds and tests: PROG-3.
  void validate() const;

 private:
  struct Counted {
    Point point;
    int64_t count;
  };
  struct Run {
    std::vector<Counted> counts;  ///< none is zero
    std::vector<Point> watches;
  };
  static void apply(Run& run, const Counted& update);
  bool has_passed(const Run& run, const Point& point) const;

  const ProgressGraph graph_;
  std::unordered_map<uint64_t, Run> runs_;
  std::vector<Counted> buffer_;
  std::vector<uint64_t> touched_;  ///< runs with updates or watches since the last propagate()
};

}  // namespace pathways
