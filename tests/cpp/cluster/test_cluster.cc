// A whole cluster, stepped by one thread in a seeded random order: who runs next is drawn, so each seed is another
// interleaving and can be repeated.
//
//   ORD-1, ORD-2  Ordered (the devices' own check), Faults.SwapIsDetected (broken on purpose)
//   GANG-1        Ordered, Cancelled, ClientsGo: no communicator is left with a gang that some host did not launch
//   MEM-4, OWN-1  every test ends with no value, object, run, exchange or future left
//   ERR-1         Faults.*: what does not depend on a failure is right
//   ASY-1         TinyWindow: credits and windows of one
#include "cluster/workload.h"
#include "support.h"

namespace pathways::test::test_cluster {
namespace {

const std::vector<ModelledSlice> kSlices = {{{0, 1}, 3},       {{2, 3}, 1}, {{1, 2}, 2},
                                            {{0, 1, 2, 3}, 1}, {{3}, 3},    {{0}, 2}};

struct Scene {
  SimulationOptions options{};
  uint32_t clients = 2;
  uint32_t actions = 400;
  Workload::Rates rates{};
  bool remove_some = false;
};

SimulationOptions small(int64_t step_ns = 700) {
  SimulationOptions options;
  options.hosts = 4;
  options.devices = 2;
  options.step_ns = step_ns;
  options.transfer_ns = step_ns / 2;
  options.ring_bytes = 4096;
  options.peer_ring_bytes = 4096;
  options.client_ring_bytes = 4096;
  options.futures = 256;
  return options;
}

uint64_t play(const Scene& scene, uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  Simulation sim(scene.options);
  for (uint32_t c = 0; c < scene.clients; ++c) sim.add_client();
  const Stage stage = make_stage(sim, kSlices, 6, 8, seed);
  std::vector<std::unique_ptr<Workload>> loads;
  for (uint32_t c = 0; c < scene.clients; ++c) {
    loads.push_back(std::make_unique<Workload>(sim, stage, c, random(), scene.rates));
  }
  std::vector<bool> gone(scene.clients, false);
  uint32_t actions = 0;
  for (uint64_t turn = 0; actions < scene.actions && turn < 400000; ++turn) {
    const auto c = static_cast<uint32_t>(random() % scene.clients);
    if (random() % 3 == 0 && !gone[c]) {
      if (loads[c]->act() == Status::kOk) ++actions;
      if (scene.remove_some && c != 0 && actions > scene.actions / 4 && random() % 64 == 0) {
        gone[c] = true;
        sim.remove_client(c);
      }
    } else {
      sim.step(random);
    }
  }
  EXPECT_GE(actions, scene.actions);
  for (uint32_t round = 0;; ++round) {
    bool done = true;
    for (uint32_t c = 0; c < scene.clients; ++c) done = (gone[c] || loads[c]->finish()) && done;
    if (done) break;
    sim.step();
    if (round > 100000) {
      ADD_FAILURE() << "the work does not end: " << sim.client(0).cluster_failure();
      return 0;
    }
  }
  EXPECT_TRUE(sim.run_until_idle());
  expect_ordered(sim);
  expect_clean(sim);
  uint64_t compared = 0;
  for (const auto& load : loads) compared += load->compared();
  for (uint32_t c = 0; c < scene.clients; ++c) {
    if (!gone[c]) {
      EXPECT_EQ(sim.client(c).in_flight(), 0u);
    }
  }
  return compared;
}

void play_many(const Scene& scene, uint32_t seeds) {
  const Watchdog watchdog("a stepped cluster");
  uint64_t compared = 0;
  for (uint32_t i = 0; i < seeds && !::testing::Test::HasFailure(); ++i) compared += play(scene, seed() + i);
  EXPECT_GT(compared, 0u);
}

constexpr uint32_t kSeeds = 10 * kStressScale;

TEST(Cluster, Ordered) { play_many({small()}, kSeeds); }
TEST(Cluster, AtOnce) { play_many({small(0)}, kSeeds); }
TEST(Cluster, Cancelled) { play_many({small(), 3, 400, {15, 45, 15, 10, 15}}, kSeeds); }
TEST(Cluster, ClientsGo) { play_many({small(), 5, 500, {15, 45, 15, 10, 15}, true}, kSeeds); }

TEST(Cluster, TinyWindow) {
  Scene scene{small()};
  scene.options.window = 1;
  scene.options.client_window = 2;
  scene.options.max_in_flight = 1;
  play_many(scene, kSeeds);
}

TEST(Cluster, ManyClientsThrottled) {
  Scene scene{small(3000), 6, 600};
  scene.options.window = 3;
  scene.options.max_in_flight = 2;
  play_many(scene, kSeeds / 2 + 1);
}

Scene own_handles(Scene scene) {
  scene.options.own_handles = true;
  scene.clients = 1;
  return scene;
}
TEST(Cluster, OwnHandles) { play_many(own_handles({small(), 1, 400, {15, 45, 15, 10, 15}}), 2 * kSeeds); }

// Each of the modelled device's faults, once per run of the cluster: only what depends on it may fail.
TEST(Faults, OnlyDependentsFail) {
  const Watchdog watchdog("a cluster with faults");
  for (uint32_t i = 0; i < kSeeds && !HasFailure(); ++i) {
    SCOPED_TRACE("seed " + std::to_string(seed() + i));
    std::mt19937_64 random(seed() + i);
    Simulation sim(small());
    sim.add_client();
    const Stage stage = make_stage(sim, kSlices, 6, 8, random());
    ModelledFaults faults;
    switch (i % 6) {
      case 0:
        faults.fail_launch = 20;
        break;
      case 1:
        faults.fail_value = 20;
        break;
      case 2:
        faults.fail_receive = 7;
        break;
      case 3:
        faults.fail_send = 7;
        break;
      case 4:
        faults.fail_put = 5;
        break;
      default:
        faults.no_memory = 50;
        break;
    }
    sim.backend(static_cast<uint32_t>(random() % 4)).set_faults(faults);
    Workload load(sim, stage, 0, random());
    load.expect_faults();
    for (uint32_t actions = 0; actions < 400;) {
      if (random() % 3 == 0) {
        actions += load.act() == Status::kOk ? 1U : 0U;
      } else {
        sim.step(random);
      }
    }
    for (uint32_t round = 0; !load.finish(); ++round) {
      sim.step();
      ASSERT_LT(round, 100000u) << "the work does not end";
    }
    EXPECT_TRUE(sim.run_until_idle());
    EXPECT_EQ(load.wrong(), 0u);
    if (i % 6 == 5) {
      EXPECT_EQ(load.failed(), 0u);
    }
    expect_ordered(sim);
    expect_clean(sim);
  }
}

// ORD-1 broken on purpose on one host: the values of the crossed gangs are wrong, and the devices notice.
TEST(Faults, SwapIsDetected) {
  const Watchdog watchdog("a cluster with swapped runs");
  SimulationOptions options = small(0);
  options.swapping_host = 1;
  Simulation sim(options);
  sim.add_client();
  sim.add_client();
  Stage stage;
  stage.slices = {{{0, 1}, 3}};
  stage.groups = {sim.add_group({0, 1})};
  stage.programs = {&sim.add_program(make_chain(stage.slices[0], 2)), &sim.add_program(make_chain(stage.slices[0], 3))};
  Workload one(sim, stage, 0, 1, {5, 60, 30, 5, 0}), two(sim, stage, 1, 2, {5, 60, 30, 5, 0});
  one.expect_faults();
  two.expect_faults();
  std::mt19937_64 random(seed());
  for (uint32_t i = 0; i < 4000; ++i) {
    if (random() % 2 == 0) {
      (void)(random() % 2 == 0 ? one : two).act();
    } else {
      sim.step(random);
    }
  }
  for (uint32_t round = 0; !one.finish() || !two.finish(); ++round) {
    sim.step();
    ASSERT_LT(round, 100000u) << "the work does not end";
  }
  EXPECT_TRUE(sim.run_until_idle());
  EXPECT_GT(sim.fabric().crossed(), 0u);
  EXPECT_GT(sim.order_violations(), 0u);
  EXPECT_GT(one.wrong() + two.wrong(), 0u);
  EXPECT_EQ(sim.fabric().incomplete(), 0u);  // GANG-1 holds all the same
  expect_clean(sim);
}

}  // namespace
}  // namespace pathways::test::test_cluster
