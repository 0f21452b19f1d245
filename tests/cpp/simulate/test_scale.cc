// The measurement of the control path, and the sizes that must not grow with the cluster. No times: see `pathways bench
// scale` for those.
//
//   COST-1  Sizes.DoNotGrow: bytes per buffer
//   COST-2  Sizes.DoNotGrow: nodes and bytes of a plan, bytes of a run on a host and in the controller
//   COST-3  Messages.OnePerHostAndRun: a cluster of many hosts says no more per host and run than a small one
#include "simulate/scale.h"

#include <gtest/gtest.h>

#include "base/status.h"
#include "simulate/simulation.h"

namespace pathways {
namespace {

TEST(Sizes, DoNotGrow) {
  const ScaleReport small = measure_scale({1, 4, 2, 8, 3}), big = measure_scale({1024, 4096, 2, 8, 1});
  EXPECT_EQ(small.plan_nodes, 4u);
  EXPECT_EQ(big.plan_nodes, 4u);
  EXPECT_EQ(small.plan_bytes_per_host, big.plan_bytes_per_host);
  EXPECT_EQ(small.run_bytes_per_host, big.run_bytes_per_host);
  EXPECT_EQ(small.run_bytes_controller, big.run_bytes_controller);
  EXPECT_EQ(small.bytes_per_buffer, big.bytes_per_buffer);
  EXPECT_EQ(big.shards, 4096u);
  EXPECT_EQ(big.repeats, 1u);
  EXPECT_GT(big.controller_ns, 0.0);
  EXPECT_GT(big.host_ns, 0.0);
  EXPECT_GT(big.client_call_ns, 0.0);
}

TEST(Messages, OnePerHostAndRun) {
  SimulationOptions options;
  options.hosts = 300;
  options.peer_ring_bytes = 0;
  Simulation sim(options);
  Client& client = sim.add_client();
  ModelledSlice all, few{{7, 250}, 1};
  for (uint32_t h = 0; h < options.hosts; ++h) all.hosts.push_back(h);
  ModelledProgram wide, narrow;
  wide.add_result(wide.add_call(wide.add_slice(all), {}));
  narrow.add_result(narrow.add_call(narrow.add_slice(few), {}));
  const auto &everywhere = sim.add_program(std::move(wide)), &somewhere = sim.add_program(std::move(narrow));
  ASSERT_TRUE(sim.run_until_idle());
  const auto cost_of = [&](const Simulation::Program& program) {
    const uint64_t before = sim.controller().stats().records_out;
    uint64_t result = 0;
    EXPECT_EQ(client.submit(program.ref, {}, &result), Status::kOk);
    uint32_t taken = 0;
    while (client.poll(Handle{result}) == FutureState::kPending || client.in_flight() != 0) {
      taken += sim.controller().step();
      for (uint32_t h = 0; h < options.hosts; ++h) sim.host(h).step();
    }
    EXPECT_EQ(taken, program.hosts.size() + 1);  // the client's record, and one back from each host of the run
    return sim.controller().stats().records_out - before;
  };
  EXPECT_EQ(cost_of(everywhere), 300u);
  EXPECT_EQ(cost_of(somewhere), 2u);
}

TEST(Options, Refused) {
  EXPECT_THROW(measure_scale({0, 4}), Error);
  EXPECT_THROW(measure_scale({3, 4}), Error);
  EXPECT_THROW(measure_scale({1, 65}), Error);
  EXPECT_THROW(measure_scale({1, 0}), Error);
  EXPECT_THROW(measure_scale({1, 4, 0}), Error);
  EXPECT_THROW(measure_scale({1, 4, 1, 0}), Error);
  EXPECT_THROW(measure_scale({1, 4, 1, 49}), Error);
}

}  // namespace
}  // namespace pathways
