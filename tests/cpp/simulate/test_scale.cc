// The measurement of the control path, and the sizes that must not grow with the cluster. No times: see
// benchmarks/scale for those.
//
//   COST-1  Sizes.DoNotGrow: bytes per buffer
//   COST-2  Sizes.DoNotGrow: nodes and bytes of a plan, bytes of a run on a host and in the controller
//   (memory) Memory.StaysWhereItWas: calls leave nothing behind
//   (policies) Policies.ChooseBetweenClientsOnly: the controller's cost is measured with the policy, or without
//   COST-3  Messages.OnePerHostAndRun: a cluster of many hosts says no more per host and run than a small one
#include "simulate/scale.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <tuple>

#include "base/status.h"
#include "simulate/controller_cost.h"
#include "simulate/simulation.h"
#include "support.h"

namespace pathways::test::test_scale {
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

TEST(Policies, ChooseBetweenClientsOnly) {
  for (const auto& [clients, policy, chooses] :
       {std::tuple{2u, PolicyKind::kShare, true}, {2u, PolicyKind::kFifo, false}, {1u, PolicyKind::kShare, false}}) {
    const ControllerCost cost = measure_controller({3, 2, clients, policy, 4, 3});
    EXPECT_GT(cost.ns, 0.0);
    EXPECT_EQ(cost.runs, 12u * clients);
    EXPECT_EQ(cost.charged > 0, chooses);
  }
  EXPECT_THROW((void)measure_controller({0, 2, 2, PolicyKind::kShare, 4, 1}), Error);
  EXPECT_THROW((void)measure_controller({1, 65, 2, PolicyKind::kShare, 4, 1}), Error);
  EXPECT_THROW((void)measure_controller({1, 2, 2, PolicyKind::kShare, 25, 1}), Error);
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

uint64_t resident_bytes() {
  unsigned long pages = 0, resident = 0;
  if (std::FILE* file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%lu %lu", &pages, &resident) != 2) resident = 0;
    std::fclose(file);
  }
  return uint64_t{resident} * 4096;
}

// 100,000 calls (fewer under a sanitizer, whose own memory grows) leave memory where it was.
TEST(Memory, StaysWhereItWas) {
  SimulationOptions options;
  options.hosts = 2;
  Simulation sim(options);
  Client& client = sim.add_client();
  ModelledProgram program;
  const uint32_t slice = program.add_slice({{0, 1}, 1}), half = program.add_slice({{1}, 1});
  const uint32_t value = program.add_call(slice, {program.add_argument(slice)});
  program.add_result(value);
  program.add_result(program.add_call(half, {program.add_transfer(value, half)}));
  const auto& chain = sim.add_program(std::move(program));
  const GroupId groups[] = {sim.add_group({0, 1}), sim.add_group({1})};
  uint64_t last = 0;
  const auto calls = [&](uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
      uint64_t results[2] = {};
      while (client.submit(chain.ref, {&last, 1}, results) != Status::kOk) sim.step();
      client.release(Handle{last}, groups[0], 8);
      client.release(Handle{results[1]}, groups[1], 8);
      last = results[0];
    }
    ASSERT_TRUE(sim.run_until_idle());
  };
  Handle first;
  ASSERT_EQ(client.allocate(2, &first), Status::kOk);
  const ModelledBackend::Put put{1, 1};
  ASSERT_EQ(client.command(CommandKind::kPut, groups[0], first, Handle{}, std::as_bytes(std::span{&put, 1})),
            Status::kOk);
  last = first.raw;
  calls(10000);
  const uint64_t before = resident_bytes();
  calls(test::kStressScale * 20000);
  EXPECT_EQ(client.poll(Handle{last}), FutureState::kReady);
#if !defined(PATHWAYS_SANITIZED)
  EXPECT_LE(resident_bytes(), before + (1u << 20));
#endif
  EXPECT_GT(before, 0u);
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
}  // namespace pathways::test::test_scale
