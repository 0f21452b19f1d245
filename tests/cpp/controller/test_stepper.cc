// Sequential dispatch: which step of which run is next, and the controller that asks.
//
//   ORD-1   Controlled.RunsInTurn: nothing of a run leaves before the run before it was stepped through
//   GANG-1  Stepper.WaitsForEveryHost
#include "controller/stepper.h"

#include <gtest/gtest.h>

#include <cstring>

#include "simulate/simulation.h"
#include "support.h"

namespace pathways::test::test_stepper {
namespace {

using Hosts = std::vector<uint32_t>;

/// Call 0 on hosts 0 and 1, a transfer to host 2, call 2 there, and a transfer back.
Stepper pipeline() {
  Stepper stepper(3);
  const std::vector<ProgramNode> nodes = {
      {0, true, {0, 1}}, {1, false, {2, 0, 1}}, {2, true, {2}}, {3, false, {0, 1, 2}}};
  stepper.add_plan(5, nodes);
  return stepper;
}

TEST(Stepper, StepsAreCallsWithTheTransfersBefore) {
  const Stepper stepper = pipeline();
  const auto steps = stepper.steps_of(5);
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_TRUE(steps[0].last == 0 && steps[0].hosts_to_notify == (Hosts{0, 1}) && steps[0].heard == (Hosts{0, 1}));
  EXPECT_TRUE(steps[1].last == 2 && steps[1].hosts_to_notify == (Hosts{0, 1, 2}) && steps[1].heard == (Hosts{2}));
  EXPECT_TRUE(steps[2].last == 3 && steps[2].hosts_to_notify == (Hosts{0, 1, 2}) && steps[2].heard.empty());
  EXPECT_TRUE(stepper.knows(5));
  EXPECT_FALSE(stepper.knows(4));
}

TEST(Stepper, WaitsForEveryHost) {
  Stepper stepper = pipeline();
  EXPECT_EQ(stepper.next(), nullptr);
  stepper.begin(9, 100, 1, 5);
  ASSERT_NE(stepper.next(), nullptr);
  EXPECT_EQ(stepper.next(), nullptr);
  EXPECT_FALSE(stepper.enqueued(8, 0, 0));  // another run
  EXPECT_FALSE(stepper.enqueued(9, 2, 0));  // another node
  EXPECT_FALSE(stepper.enqueued(9, 0, 2));  // another host
  EXPECT_TRUE(stepper.enqueued(9, 0, 1));
  EXPECT_FALSE(stepper.enqueued(9, 0, 1));  // again
  EXPECT_EQ(stepper.next(), nullptr);
  EXPECT_TRUE(stepper.enqueued(9, 0, 0));
  const Stepper::Step* step = stepper.next();
  ASSERT_NE(step, nullptr);
  EXPECT_EQ(step->last, 2u);
  EXPECT_EQ(stepper.next(), nullptr);
  EXPECT_TRUE(stepper.enqueued(9, 2, 2));
  ASSERT_NE(stepper.next(), nullptr);  // the transfer back, which nobody reports
  EXPECT_TRUE(stepper.is_busy());
  EXPECT_EQ(stepper.next(), nullptr);
  EXPECT_FALSE(stepper.is_busy());
}

TEST(Stepper, HostThatIsDoneIsNotAwaited) {
  Stepper stepper = pipeline();
  stepper.begin(9, 100, 1, 5);
  ASSERT_NE(stepper.next(), nullptr);
  stepper.host_done(8, 0);  // of another run
  stepper.host_done(9, 2);  // refused the run
  stepper.host_done(9, 0);
  EXPECT_EQ(stepper.next(), nullptr);
  EXPECT_TRUE(stepper.enqueued(9, 0, 1));
  ASSERT_NE(stepper.next(), nullptr);
  ASSERT_NE(stepper.next(), nullptr);
  EXPECT_EQ(stepper.next(), nullptr);
  EXPECT_FALSE(stepper.is_busy());
}

struct Controlled : ::testing::Test {
  Controlled() {
    options.hosts = 2;
    options.step_ns = 1000;
    options.sequential = true;
  }
  /// A call on host 0, whose result a call on host 1 takes.
  static const Simulation::Program& add_pipeline(Simulation& sim) {
    ModelledProgram program;
    const uint32_t first = program.add_slice({{0}, 1}), second = program.add_slice({{1}, 1});
    const uint32_t made = program.add_call(first, {});
    program.add_result(program.add_call(second, {program.add_transfer(made, second)}));
    return sim.add_program(std::move(program));
  }
  SimulationOptions options;
};

TEST_F(Controlled, ALaterStageIsNotPreparedBeforeTheEarlierIsEnqueued) {
  Simulation sim(options);
  Client& client = sim.add_client();
  const Simulation::Program& pipeline = add_pipeline(sim);
  uint64_t result = 0;
  ASSERT_EQ(client.submit(pipeline.ref, {}, &result), Status::kOk);
  sim.controller().step();
  sim.host(1).step();
  EXPECT_EQ(sim.host(1).executor().stats().live_runs, 1u);
  EXPECT_EQ(sim.open_receives(), 0u);  // in parallel dispatch it has posted its receive by now
  sim.host(0).step();
  EXPECT_EQ(sim.backend(0).launches(), 1u);
  sim.controller().step();
  sim.host(1).step();
  EXPECT_EQ(sim.open_receives(), 1u);
  EXPECT_TRUE(sim.run_until_idle());
  EXPECT_EQ(client.poll(Handle{result}), FutureState::kReady);
}

TEST_F(Controlled, RunsInTurn) {
  Simulation sim(options);
  Client& client = sim.add_client();
  const Simulation::Program& pipeline = add_pipeline(sim);
  uint64_t results[2] = {};
  for (uint64_t& result : results) ASSERT_EQ(client.submit(pipeline.ref, {}, &result), Status::kOk);
  sim.controller().step();
  sim.host(0).step();
  EXPECT_EQ(sim.host(0).executor().stats().runs, 1u);
  EXPECT_EQ(sim.controller().stats().granted, 1u);
  EXPECT_FALSE(sim.controller().is_idle());
  EXPECT_TRUE(sim.run_until_idle());
  EXPECT_EQ(sim.controller().stats().granted, 2u);
  for (const uint64_t result : results) EXPECT_EQ(client.poll(Handle{result}), FutureState::kReady);
}

TEST_F(Controlled, APlanNamesHostsThatAreThere) {
  Simulation sim(options);
  EXPECT_THROW(sim.controller().add_plan(3, {{0, true, {5}}}), Error);
}

}  // namespace
}  // namespace pathways::test::test_stepper
