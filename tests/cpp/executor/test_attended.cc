// Launches that the backend attends to on a thread of its own, for they call their client back; the test ends them.
//
//   ORD-1   Attended.HoldTheirDevicesAndNoOther
//   ERR-1   Attended.FailWhatDependsOnThem
//   GANG-1  Attended.AFailedGangIsCountedAndWhatFollowsIsLaunched
//   OWN-1   Attended.TheClientThatGoesTakesNothingAlong
#include "executor/bench_host.h"

namespace pathways::test::test_attended {
namespace {

struct Attended : Bench {
  /// The oldest one under way ends.
  void end(const std::vector<Value>& made, const std::optional<std::string>& error = std::nullopt) {
    ASSERT_FALSE(host.backend.attended().empty());
    const ModelledBackend::Attended launch = host.backend.attended().front();
    host.backend.attended().erase(host.backend.attended().begin());
    for (const Value input : launch.inputs) host.backend.drop(input);
    host.executor.on_launched(launch.order, launch.node, made, error);
  }
  Value value(uint64_t hash) { return host.backend.make_value(hash, 0); }
};

const uint64_t A = handle(1), B = handle(2), C = handle(3), D = handle(4), T = handle(5);

TEST_F(Attended, HoldTheirDevicesAndNoOther) {
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1));
  host.add_plan(1, plan_of({0}, {call({0}, {1})}, {1}, 2));
  host.add_plan(2, plan_of({}, {call({}, {0}, 2)}, {0}, 1));
  host.backend.attend(0);
  host.run(1, 0, {}, {A});
  host.run(2, 0, {}, {B});   // the same device
  host.run(3, 1, {A}, {C});  // what the first one makes
  host.run(4, 2, {}, {D});   // another device
  pass();
  EXPECT_EQ(host.backend.attended().size(), 1u);
  EXPECT_EQ(host.link.completions(A), 0u);
  EXPECT_EQ(host.link.completions(D), 1u);
  EXPECT_FALSE(host.executor.is_idle());
  EXPECT_NE(host.executor.describe_runs(1)[0].find("calls its client back"), std::string::npos);
  uint64_t seen = 0;
  host.fetch(A, T, &seen);
  end({value(7)});
  EXPECT_EQ(host.backend.attended().size(), 1u);  // now the second
  pass();
  EXPECT_EQ(host.link.completions(A), 1u);
  EXPECT_EQ(seen, 7u);
  EXPECT_EQ(host.link.completions(C), 0u);
  end({value(8)});
  pass();
  EXPECT_EQ(host.link.completions(B), 1u);
  EXPECT_EQ(host.link.completions(C), 1u);
  EXPECT_EQ(host.executor.stats().launches, 4u);
  drop({A, B, C, D});
}

TEST_F(Attended, FailWhatDependsOnThem) {
  host.add_plan(0, plan_of({}, {call({}, {0, 1})}, {0}, 2));
  host.add_plan(1, plan_of({0}, {call({0}, {1})}, {1}, 2));
  host.backend.attend(0);
  host.run(1, 0, {}, {A});
  host.run(2, 1, {A}, {B});
  host.run(3, 0, {}, {C});
  end({}, "its client said no");
  end({value(1), value(2)});
  pass();
  EXPECT_EQ(host.link.failure(A), "its client said no");
  EXPECT_EQ(host.link.failure(B), "its client said no");
  EXPECT_EQ(host.link.completions(C), 1u);
  drop({A, B, C});
}

TEST_F(Attended, AFailedGangIsCountedAndWhatFollowsIsLaunched) {
  host.add_plan(0, plan_of({}, {call({}, {0}, 1, true)}, {0}, 1));
  host.add_plan(1, plan_of({0}, {call({0}, {1}, 1, true)}, {1}, 2));
  host.backend.attend(0);
  host.run(1, 0, {}, {A});
  host.run(2, 1, {A}, {B});
  end({}, "no");
  pass();
  EXPECT_EQ(host.executor.stats().gangs, 2u);  // the second on a stand-in
  EXPECT_EQ(host.link.failure(B), "no");
  EXPECT_EQ(host.link.runs[1], (std::pair<uint32_t, uint32_t>{1, 1}));
  drop({A, B});
}

TEST_F(Attended, TheClientThatGoesTakesNothingAlong) {
  host.executor.add_client(1);
  host.add_plan(0, plan_of({0}, {call({0}, {1})}, {1}, 2));
  host.add_plan(1, plan_of({}, {call({}, {0})}, {0}, 1));
  host.backend.attend(0);
  host.put(A, 5, 1, 1);
  host.run(1, 0, {A}, {B}, 1);
  host.run(2, 1, {}, {A});
  host.executor.on_client_gone(1);
  pass();
  EXPECT_EQ(host.link.completions(A), 0u);  // behind it
  end({value(3)});
  pass();
  EXPECT_EQ(host.link.completions(A), 1u);
  EXPECT_EQ(host.link.completions(B, 1), 1u);
  drop({A});
}

TEST_F(Attended, AnEndThatNobodyWaitsForIsDropped) {
  host.executor.on_launched(9, 1, std::vector<Value>{value(1)}, std::nullopt);
  drop({});
}

}  // namespace
}  // namespace pathways::test::test_attended
