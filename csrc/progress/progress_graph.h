/// ProgressGraph: the places where work may be open, and the ways from one to another.
///
/// A location stands for all shards and hosts that do one kind of work, so the graph's size does not depend on their
/// number. An edge says that work at one location may make work at another, and what it does to the timestamp. The
/// graph computes, for each pair of locations, the earliest summaries of all paths between them.
///
///   PROG-1 (cycles)  a path from a location back to itself raises a counter that no edge of it resets. The constructor
///                    refuses other graphs with an Error(kInvalid) that names the location: there, work could come
///                    again at a timestamp that is over.
///
/// Threading: immutable once it is built.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "progress/timestamp.h"

namespace pathways {

/// The index of a location in its graph.
using Location = uint32_t;

class ProgressGraph {
 public:
  struct Edge {
    Location from, to;
    Summary summary = {};
  };

  /// `names`: of the locations, for errors.
  ProgressGraph(std::vector<std::string> names, std::span<const Edge> edges);

  uint32_t size() const { return static_cast<uint32_t>(names_.size()); }
  /// The earliest summaries of the paths between two locations, with the empty path from a location to itself; none:
  /// there is no path.
  std::span<const Summary> paths(Location from, Location to) const { return paths_[from * names_.size() + to]; }

 private:
  std::vector<std::string> names_;
  std::vector<std::vector<Summary>> paths_;
};

}  // namespace pathways
