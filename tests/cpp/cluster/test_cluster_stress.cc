// The cluster with real threads: controller, four hosts, clients. For the thread and address sanitizers, and for
// wake-ups: nobody here waits with a time limit, so a lost one ends at the watchdog.
//
//   ORD-1, GANG-1   Threads.*: the devices' own check, and the fabric's, after everything
//   ASY-1           Threads.TinyWindow: the clients sleep for credits most of the time
//   OWN-1           Threads.ClientsComeAndGo: clients leave with work in flight; memory freed once the hosts let go
//   FUT-1           Threads.ManyWaiters: several threads wait for one client's futures
#include <atomic>
#include <thread>

#include "cluster/workload.h"
#include "support.h"

namespace pathways::test::test_cluster_stress {
namespace {

const std::vector<ModelledSlice> kSlices = {{{0, 1}, 3},       {{2, 3}, 1}, {{1, 2}, 2},
                                            {{0, 1, 2, 3}, 1}, {{3}, 3},    {{0}, 2}};
constexpr uint32_t kActions = 600 + 120 * kStressScale;

SimulationOptions threaded() {
  SimulationOptions options;
  options.hosts = 4;
  options.devices = 2;
  options.clock = ModelClock::Kind::kReal;
  options.step_ns = 2000;
  options.ring_bytes = 1u << 14;
  options.peer_ring_bytes = 4096;
  options.client_ring_bytes = 1u << 14;
  options.futures = 512;
  return options;
}

void drive(Workload& load, uint32_t actions, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (uint32_t done = 0; done < actions && !::testing::Test::HasFailure();) {
    if (load.act() == Status::kOk) {
      ++done;
      if (random() % 16 == 0) load.wait_oldest();
    } else {
      load.wait_room();
    }
  }
  while (!load.finish() && !::testing::Test::HasFailure()) {
    load.wait_oldest();
    load.wait_room();
  }
}

void settle(Simulation& sim) {
  sim.stop();
  EXPECT_TRUE(sim.run_until_idle());
  expect_ordered(sim);
  expect_clean(sim);
}

void play(SimulationOptions options, uint32_t clients, Workload::Rates rates) {
  const Watchdog watchdog("a cluster of threads");
  Simulation sim(options);
  for (uint32_t c = 0; c < clients; ++c) sim.add_client();
  const Stage stage = make_stage(sim, kSlices, 6, 8, seed());
  std::vector<std::unique_ptr<Workload>> loads;
  for (uint32_t c = 0; c < clients; ++c) {
    loads.push_back(std::make_unique<Workload>(sim, stage, c, seed() + c, rates));
  }
  sim.start();
  std::vector<std::thread> threads;
  for (uint32_t c = 0; c < clients; ++c) threads.emplace_back([&, c] { drive(*loads[c], kActions, seed() * 31 + c); });
  for (std::thread& thread : threads) thread.join();
  settle(sim);
  for (uint32_t c = 0; c < clients; ++c) {
    EXPECT_EQ(sim.client(c).in_flight(), 0u);
    EXPECT_GT(loads[c]->compared(), 0u);
  }
}

TEST(Threads, Ordered) { play(threaded(), 2, {15, 45, 20, 15, 0}); }
TEST(Threads, Cancelled) { play(threaded(), 2, {15, 45, 15, 10, 15}); }

TEST(Threads, TinyWindow) {
  SimulationOptions options = threaded();
  options.window = 2;
  options.client_window = 3;
  options.max_in_flight = 1;
  options.step_ns = 0;
  play(options, 2, {15, 60, 10, 15, 0});
}

TEST(Threads, ClientsComeAndGo) {
  const Watchdog watchdog("a cluster whose clients go");
  Simulation sim(threaded());
  const uint32_t generations = 4 + kStressScale / 4;
  for (uint32_t c = 0; c <= generations; ++c) sim.add_client();
  const Stage stage = make_stage(sim, kSlices, 6, 8, seed());
  Workload stays(sim, stage, 0, seed());
  sim.start();
  std::thread steady([&] { drive(stays, kActions, seed()); });
  std::vector<std::unique_ptr<Workload>> gone;  // hosts may write to what they read until they have heard
  for (uint32_t c = 1; c <= generations; ++c) {
    gone.push_back(std::make_unique<Workload>(sim, stage, c, seed() + c, Workload::Rates{15, 45, 20, 10, 10}));
    for (uint32_t i = 0; i < 60; ++i) {
      if (gone.back()->act() != Status::kOk) gone.back()->wait_room();
    }
    sim.remove_client(c);
  }
  steady.join();
  for (uint32_t h = 0; h < 4; ++h) {
    while (sim.host(h).attached_clients() != 1) std::this_thread::yield();
  }
  EXPECT_EQ(sim.controller().stats().clients, 1u);
  settle(sim);
}

TEST(Threads, ManyWaiters) {
  const Watchdog watchdog("a client with many waiters");
  SimulationOptions options = threaded();
  options.client_window = 16;
  Simulation sim(options);
  Client& client = sim.add_client();
  const ModelledSlice slice{{0, 1, 2, 3}, 1};
  ModelledProgram program;
  program.add_result(program.add_call(program.add_slice(slice), {}));
  const Simulation::Program& one = sim.add_program(std::move(program));
  sim.start();
  constexpr uint32_t kWaiters = 3, kRuns = 40 * kStressScale;
  std::atomic<uint64_t> latest{0};
  std::atomic<uint32_t> waited{0};
  std::vector<std::thread> waiters;
  for (uint32_t w = 0; w < kWaiters; ++w) {
    waiters.emplace_back([&] {
      for (uint64_t seen = 0; seen != ~uint64_t{0};) {
        const uint64_t next = latest.load(std::memory_order_acquire);
        if (next == seen) {
          std::this_thread::yield();
          continue;
        }
        seen = next;
        if (seen == ~uint64_t{0}) break;
        while (client.wait(Handle{seen}, std::chrono::nanoseconds::max(), SpinPolicy::sleep_at_once()) ==
               FutureState::kPending) {
        }
        waited.fetch_add(1);
      }
    });
  }
  for (uint32_t i = 0; i < kRuns || waited.load() == 0; ++i) {
    uint64_t result = 0;
    while (client.submit(one.ref, {}, &result) != Status::kOk) {
      client.flush();
      client.wait_room(std::chrono::nanoseconds::max(), SpinPolicy::adaptive());
    }
    latest.store(result, std::memory_order_release);
    if (i % 4 == 0) {
      while (client.wait(Handle{result}, std::chrono::nanoseconds::max(), SpinPolicy::adaptive()) ==
             FutureState::kPending) {
      }
    }
    client.release(Handle{result}, one.ref.group, 8);  // also while somebody waits for it
  }
  latest.store(~uint64_t{0}, std::memory_order_release);
  for (std::thread& waiter : waiters) waiter.join();
  while (client.in_flight() != 0) std::this_thread::yield();
  client.flush();
  EXPECT_GT(waited.load(), 0u);
  settle(sim);
}

}  // namespace
}  // namespace pathways::test::test_cluster_stress
