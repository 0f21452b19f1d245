// A client that goes, on one host's executor: what it owned goes with it, and what other hosts count on still happens.
//
//   OWN-1   Clients.*
//   GANG-1  Clients.PlansGoBehindTheLastRun, Clients.GoneWithWorkInFlight: gangs that were granted are launched
//   MEM-4   a test that ends with `expect_empty` or `drop` has dropped each reference exactly once
#include "executor/bench_host.h"

namespace pathways::test::test_clients_gone {
namespace {

using Clients = Bench;

const uint64_t A = handle(1), B = handle(2), C = handle(3), D = handle(4);

TEST_F(Clients, PlansGoBehindTheLastRun) {
  const PlanBuilder gang = plan_of({}, {call({}, {0}, 1, true)}, {0}, 1);
  host.executor.add_client(1);
  host.add_plan(0, gang, false, 0);
  host.add_plan(1, gang, true, 0);
  host.add_plan(2, gang, true, 1);
  host.add_plan(3, gang);
  host.run(1, 0, {}, {A});
  host.executor.on_client_gone(0);
  EXPECT_EQ(host.backend.forgotten(), std::vector<uint32_t>{1});
  EXPECT_EQ(host.backend.gone(), std::vector<uint32_t>{0});
  host.executor.set_compiled(0);
  pass();
  EXPECT_EQ(host.link.runs[1], (std::pair{1u, 1u}));  // the other hosts of the gang launched theirs
  EXPECT_EQ(host.backend.forgotten(), (std::vector<uint32_t>{1, 0}));
  host.executor.on_client_gone(0);  // said again, it is nothing
  host.run(2, 2, {}, {B}, 1);
  host.run(3, 3, {}, {C}, 1);
  pass();
  EXPECT_EQ(host.link.completions(B, 1), 1u);
  EXPECT_EQ(host.link.completions(C, 1), 1u);
  host.executor.on_client_gone(1);
  EXPECT_EQ(host.backend.forgotten(), (std::vector<uint32_t>{1, 0, 2}));
  host.expect_empty();
}

TEST_F(Clients, WhatIsRegisteredTooLateIsForgotten) {
  const PlanBuilder builder = plan_of({}, {call({}, {0})}, {0}, 1);
  host.executor.on_client_gone(7);  // it never got as far as being attached here
  EXPECT_TRUE(host.executor.is_gone(7));
  EXPECT_FALSE(host.executor.is_gone(0));
  host.add_plan(0, builder, false, 7);
  EXPECT_EQ(host.backend.forgotten(), std::vector<uint32_t>{0});
  host.executor.set_compiled(0);  // what the compiler made of it meanwhile goes too
  EXPECT_EQ(host.backend.forgotten(), (std::vector<uint32_t>{0, 0}));
  host.add_plan(1, builder, false, 0);
  host.executor.on_client_gone(0);
  host.executor.set_compiled(1);
  EXPECT_EQ(host.backend.forgotten(), (std::vector<uint32_t>{0, 0, 1, 1}));
}

TEST_F(Clients, GoesWhileARunIsHeldBack) {
  // The fault that holds a run back may hold the last one of a client that goes, with its plan.
  host.add_plan(0, plan_of({}, {call({}, {0})}, {0}, 1), true, 0);
  host.swap_runs();
  host.run(1, 0, {}, {A});
  host.client_gone(0);
  pass();
  EXPECT_EQ(host.link.runs.size(), 1u);
  EXPECT_EQ(host.backend.forgotten(), std::vector<uint32_t>{0});
  host.expect_empty();
}

TEST_F(Clients, GoneWithWorkInFlight) {
  host.executor.add_client(1);
  host.add_plan(0, plan_of({0}, {call({0}, {1}, 1, true), call({1}, {2})}, {1, 2}, 3), false);
  host.put(A, 7, 1, 1);
  host.put(A, 8, 1, 0);
  uint64_t out = 0;
  host.run(1, 0, {A}, {B, C}, 1);
  host.run(2, 0, {A}, {B, C}, 0);
  host.fetch(B, D, &out, 1);
  pass();
  host.link.done.clear();
  host.executor.on_client_gone(1);
  host.executor.on_client_gone(1);
  host.executor.set_compiled(0);
  host.run(3, 0, {A}, {B, C}, 1);  // was granted before the client went
  pass();
  EXPECT_EQ(host.backend.gangs(), 3u);  // GANG-1: other hosts launch it, too
  EXPECT_EQ(host.link.completions(D, 1), 0u);
  EXPECT_EQ(out, 0u);
  EXPECT_EQ(host.link.completions(B, 0) + host.link.completions(C, 0), 2u);
  EXPECT_EQ(host.link.runs.size(), 3u);
  host.command(CommandKind::kBackend, 0, 0, {}, 1);
  EXPECT_EQ(host.backend.commands(), 0u);
  drop({A, B, C});
}

TEST_F(Clients, ClearWithWorkInFlight) {
  host.add_plan(0, plan_of({0}, {call({0}, {1}), call({1}, {2}, 2)}, {2}, 3));
  host.put(A, 7);
  uint64_t out = 0;
  host.run(1, 0, {A}, {B});
  host.fetch(B, D, &out);
  host.executor.clear();
  EXPECT_EQ(host.backend.live_values(), 0u);
  EXPECT_TRUE(host.executor.is_idle());
}

}  // namespace
}  // namespace pathways::test::test_clients_gone
