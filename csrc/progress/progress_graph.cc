#include "progress/progress_graph.h"

#include <utility>

#include "base/status.h"

namespace pathways {

ProgressGraph::ProgressGraph(std::vector<std::string> names, std::span<const Edge> edges) : names_(std::move(names)) {
  const size_t count = names_.size();
  for (const Edge& edge : edges) {
    if (edge.from >= count || edge.to >= count) {
      throw Error(Status::kInvalid, "an edge goes from location " + std::to_string(edge.from) + " to " +
                                        std::to_string(edge.to) + " of " + std::to_string(count));
    }
  }
  // First the paths of one edge or more. Each round extends the paths that the last one found. It ends, because a set
  // of summaries of which none is before another cannot grow for ever (Dickson's lemma).
  paths_.resize(count * count);
  struct Path {
    Location from, to;
    Summary summary;
  };
  std::vector<Path> found, longer;
  const auto add = [&](const Path& path) {
    if (add_to_antichain(paths_[path.from * count + path.to], path.summary)) longer.push_back(path);
  };
  for (const Edge& edge : edges) add({edge.from, edge.to, edge.summary});
  while (!longer.empty()) {
    found.swap(longer);
    longer.clear();
    for (const Path& path : found) {
      for (const Edge& edge : edges) {
        if (edge.from == path.to) add({path.from, edge.to, path.summary.then(edge.summary)});
      }
    }
  }
  for (Location at = 0; at < count; ++at) {
    std::vector<Summary>& cycles = paths_[at * count + at];
    for (const Summary& cycle : cycles) {  // a cycle that does not advance is among the earliest, or one like it is
      if (cycle.advances()) continue;
      throw Error(Status::kInvalid, "PROG-1, a cycle through location '" + names_[at] +
                                        "' raises no loop counter: expected one edge of it to be the way back to the "
                                        "start of a loop that the cycle does not leave");
    }
    add_to_antichain(cycles, Summary());
  }
}

}  // namespace pathways
