// Progress against models that search all states.
//
//   PROG-1  AnyGraph: refused exactly when some timestamp can come back to where it was; the seed is printed
//   PROG-2  AnyWork: what has passed is out of reach of all work that is really open (random graphs, late updates in
//           any order); EveryOrder: all orders of the updates of a small case
//   PROG-3  AnyWork, EveryOrder: validate() after each propagate; NothingChangesBeforePropagate
//   PROG-4  AnyWork, EveryOrder: each watch is reported once, not too late
//   PROG-5  SizeIsThatOfOpenWork
#include "progress/progress_tracker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "base/status.h"
#include "support.h"

namespace pathways::test::test_progress {
namespace {

using Edge = ProgressGraph::Edge;
using Point = ProgressTracker::Point;
using State = std::pair<Location, std::array<uint32_t, kLoopLevels>>;

/// Loops have at most two levels here, and no counter of a search goes beyond this. A path that needs more rounds is
/// later than one that needs fewer.
constexpr uint32_t kMostRounds = 9;

/// What one kind of edge does to counters, written apart from Summary.
enum class Kind : uint8_t { kSame, kNext0, kNext1, kBoundary0, kBoundary1 };

Summary summary_of(Kind kind) {
  switch (kind) {
    case Kind::kSame:
      return {};
    case Kind::kNext0:
      return Summary::next_round(0);
    case Kind::kNext1:
      return Summary::next_round(1);
    case Kind::kBoundary0:
      return Summary::boundary(0);
    default:
      return Summary::boundary(1);
  }
}

struct ModelEdge {
  Location from, to;
  Kind kind;

  std::array<uint32_t, kLoopLevels> follow(std::array<uint32_t, kLoopLevels> counters) const {
    if (kind == Kind::kNext0) ++counters[0];
    if (kind == Kind::kNext1) ++counters[1];
    if (kind == Kind::kBoundary0) counters[0] = 0;
    if (kind == Kind::kBoundary1) counters[1] = 0;
    return counters;
  }
};

struct Model {
  uint32_t locations;
  std::vector<ModelEdge> edges;

  static Model random(std::mt19937_64& random) {
    Model model{static_cast<uint32_t>(1 + random() % 4), {}};
    for (size_t left = random() % 6; left != 0; --left) {
      model.edges.push_back({static_cast<Location>(random() % model.locations),
                             static_cast<Location>(random() % model.locations), static_cast<Kind>(random() % 5)});
    }
    return model;
  }
  ProgressGraph build() const {
    std::vector<std::string> names;
    for (uint32_t i = 0; i < locations; ++i) names.push_back("place " + std::to_string(i));
    std::vector<Edge> built;
    for (const ModelEdge& edge : edges) built.push_back({edge.from, edge.to, summary_of(edge.kind)});
    return {names, built};
  }
  /// All states that work can come to from `start`, over one edge or more.
  std::set<State> behind(const State& start) const {
    std::set<State> seen;
    std::deque<State> open{start};
    while (!open.empty()) {
      const State state = open.front();
      open.pop_front();
      for (const ModelEdge& edge : edges) {
        if (edge.from != state.first) continue;
        const State next{edge.to, edge.follow(state.second)};
        if (next.second[0] <= kMostRounds && next.second[1] <= kMostRounds && seen.insert(next).second) {
          open.push_back(next);
        }
      }
    }
    return seen;
  }
  bool comes_back() const {
    for (Location at = 0; at < locations; ++at) {
      for (uint32_t a = 0; a <= 4; ++a) {
        for (uint32_t b = 0; b <= 4; ++b) {
          const State state{at, {a, b}};
          if (behind(state).contains(state)) return true;
        }
      }
    }
    return false;
  }
  bool reaches(const Point& from, const Point& to) const {
    if (from.time.run != to.time.run) return false;
    std::set<State> states = behind({from.at, from.time.counters});
    states.insert({from.at, from.time.counters});
    return std::any_of(states.begin(), states.end(), [&](const State& state) {
      return state.first == to.at && state.second[0] <= to.time.counters[0] && state.second[1] <= to.time.counters[1];
    });
  }
};

TEST(Progress, AnyGraph) {
  std::mt19937_64 random(test::seed());
  size_t refused = 0;
  for (int round = 0; round < 1000; ++round) {
    const Model model = Model::random(random);
    bool was_refused = false;
    try {
      (void)model.build();
    } catch (const Error& error) {
      was_refused = true;
      EXPECT_EQ(error.status(), Status::kInvalid);
      EXPECT_NE(std::string(error.what()).find("place "), std::string::npos);
    }
    ASSERT_EQ(was_refused, model.comes_back()) << "round " << round;
    refused += was_refused ? 1 : 0;
  }
  EXPECT_GT(refused, 100u);
  EXPECT_LT(refused, 900u);
}

TEST(Progress, UnknownLocationIsRefused) {
  const std::vector<Edge> edges{{0, 2}};
  EXPECT_THROW(ProgressGraph({"a", "b"}, edges), Error);
}

/// Work that is really open, and the updates about it that are still on their way.
struct World {
  const Model& model;
  ProgressTracker tracker;
  std::vector<Point> open;
  std::vector<std::vector<std::pair<Point, int64_t>>> late;
  std::vector<Point> watched, passed;

  World(const Model& of, ProgressGraph graph) : model(of), tracker(std::move(graph)) {}

  /// A piece of work ends, and makes others. All this is one batch of updates, which comes later.
  void work(size_t which, std::mt19937_64& random, bool may_make) {
    const Point point = open[which];
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(which));
    std::vector<std::pair<Point, int64_t>> batch{{point, -1}};
    for (const ModelEdge& edge : model.edges) {
      if (edge.from != point.at || !may_make || random() % 2 == 0) continue;
      const Point made{edge.to, {point.time.run, edge.follow(point.time.counters)}};
      if (made.time.counters[0] > 3 || made.time.counters[1] > 3) continue;
      batch.emplace_back(made, 1);
      open.push_back(made);
    }
    late.push_back(std::move(batch));
  }
  void tell(size_t which) {
    for (const auto& update : late[which]) tracker.update(update.first, update.second);
    late.erase(late.begin() + static_cast<std::ptrdiff_t>(which));
  }
  bool can_come(const Point& point) const {
    return std::any_of(open.begin(), open.end(), [&](const Point& from) { return model.reaches(from, point); });
  }
  void propagate() {
    tracker.propagate(&passed);
    tracker.validate();
    for (const Point& point : watched) {
      if (tracker.has_passed(point)) {
        ASSERT_FALSE(can_come(point));
      } else if (late.empty()) {
        ASSERT_TRUE(can_come(point));
      }
      const bool is_reported = std::find(passed.begin(), passed.end(), point) != passed.end();
      ASSERT_EQ(is_reported, tracker.has_passed(point));
      const std::vector<Timestamp> frontier = tracker.frontier(point.at, point.time.run);
      ASSERT_EQ(tracker.has_passed(point), std::none_of(frontier.begin(), frontier.end(), [&](const Timestamp& first) {
                  return first.is_before_or_at(point.time);
                }));
    }
  }
};

Point any_point(const Model& model, std::mt19937_64& random) {
  return {static_cast<Location>(random() % model.locations),
          {random() % 2, {static_cast<uint32_t>(random() % 3), static_cast<uint32_t>(random() % 3)}}};
}

TEST(Progress, AnyWork) {
  std::mt19937_64 random(test::seed() + 1);
  size_t early = 0;
  for (int round = 0; round < 400; ++round) {
    Model model = Model::random(random);
    while (model.comes_back()) model = Model::random(random);
    World world(model, model.build());
    for (int i = 0; i < 3; ++i) {
      world.open.push_back(any_point(model, random));
      world.tracker.update(world.open.back(), 1);
    }
    while (world.watched.size() < 4) {
      const Point point = any_point(model, random);
      if (std::find(world.watched.begin(), world.watched.end(), point) != world.watched.end()) continue;
      world.watched.push_back(point);
      world.tracker.watch(point);
    }
    world.propagate();
    for (int steps = 0; !world.open.empty() || !world.late.empty(); ++steps) {
      if (!world.open.empty() && (world.late.empty() || random() % 2 == 0)) {
        world.work(random() % world.open.size(), random, steps < 60);
      } else {
        world.tell(random() % world.late.size());
        if (random() % 3 != 0) world.propagate();
        early += world.open.empty() ? 0 : world.passed.size();
      }
    }
    world.propagate();
    ASSERT_EQ(world.passed.size(), world.watched.size());  // each once: propagate() compares them one by one
    EXPECT_EQ(world.tracker.size(), 0u);
  }
  EXPECT_GT(early, 100u);  // some were reported while other work was open
}

/// Two senders announce three messages; the receiver reports them done, perhaps before they are announced.
TEST(Progress, EveryOrder) {
  const std::vector<Edge> edges{{0, 1}};
  const Point senders{0, {7}}, messages{1, {7}};
  using Batch = std::vector<std::pair<Point, int64_t>>;
  const std::vector<Batch> batches{{{senders, -1}, {messages, 2}},
                                   {{messages, 1}, {senders, -1}},
                                   {{messages, -1}},
                                   {{messages, -1}},
                                   {{messages, -1}}};
  std::vector<size_t> order{0, 1, 2, 3, 4};
  size_t orders = 0;
  do {
    ProgressTracker tracker(ProgressGraph({"senders", "messages"}, edges));
    std::vector<Point> passed;
    tracker.update(senders, 2);
    tracker.watch(messages);
    tracker.propagate(&passed);
    for (size_t i = 0; i < order.size(); ++i) {
      ASSERT_TRUE(passed.empty());
      for (const auto& update : batches[order[i]]) tracker.update(update.first, update.second);
      tracker.propagate(&passed);
      tracker.validate();
    }
    ASSERT_EQ(passed, std::vector<Point>{messages});
    ++orders;
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(orders, 120u);
}

TEST(Progress, NothingChangesBeforePropagate) {
  ProgressTracker tracker(ProgressGraph({"work"}, {}));
  std::vector<Point> passed;
  const Point work{0, {1}};
  tracker.update(work, 1);
  EXPECT_TRUE(tracker.has_passed(work));
  tracker.propagate(&passed);
  EXPECT_FALSE(tracker.has_passed(work));
  tracker.update(work, -1);
  EXPECT_FALSE(tracker.has_passed(work));
  tracker.update(work, 1);  // the raising one is applied first, so nothing passes between
  tracker.watch(work);
  tracker.propagate(&passed);
  EXPECT_TRUE(passed.empty());
}

/// A later round is held by an earlier one, and another run is not.
TEST(Progress, RoundsOfALoop) {
  const std::vector<Edge> edges{{0, 1}, {1, 1, Summary::next_round(0)}, {1, 2, Summary::boundary(0)}};
  ProgressTracker tracker(ProgressGraph({"before", "body", "after"}, edges));
  std::vector<Point> passed;
  tracker.update({1, {5, {3}}}, 1);
  tracker.propagate(&passed);
  EXPECT_TRUE(tracker.has_passed({1, {5, {2}}}));
  EXPECT_FALSE(tracker.has_passed({1, {5, {3}}}));
  EXPECT_FALSE(tracker.has_passed({1, {5, {9}}}));
  EXPECT_TRUE(tracker.has_passed({0, {5, {9}}}));
  EXPECT_FALSE(tracker.has_passed({2, {5}}));
  EXPECT_TRUE(tracker.has_passed({2, {6}}));
  EXPECT_EQ(tracker.frontier(2, 5), std::vector<Timestamp>{{5}});
}

TEST(Progress, SizeIsThatOfOpenWork) {
  const std::vector<Edge> edges{{0, 1}};
  ProgressTracker tracker(ProgressGraph({"reports", "rows"}, edges));
  std::vector<Point> passed;
  tracker.update({0, {1}}, 1 << 20);
  for (int i = 0; i < 1000; ++i) tracker.update({1, {1}}, 1);
  tracker.propagate(&passed);
  EXPECT_EQ(tracker.size(), 2u);
  tracker.update({0, {1}}, -(1 << 20));
  tracker.update({1, {1}}, -1000);
  tracker.propagate(&passed);
  EXPECT_EQ(tracker.size(), 0u);
}

}  // namespace
}  // namespace pathways::test::test_progress
