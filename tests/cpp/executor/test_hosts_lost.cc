// Three executors, of which one is lost at some moment and has a successor; the test carries the messages.
//
//   ERR-2   all of it: what waited for the lost host fails with that host's failure reason, the rest is as if nothing
//           happened
//   PEER-3  Trio.AtAnyMoment: one successor after the other
//   GANG-1  Trio.AtAnyMoment: each host says of each of its runs that it is done, once
//   MEM-4   every test ends with no value, receive or exchange left on the survivors
//   (room)  Trio.AStalledReceive: its other sources are told, and who stalled behind it finds room
#include <random>

#include "executor/bench_host.h"
#include "support.h"

namespace pathways::test::test_hosts_lost {
namespace {

const uint64_t A = handle(1), B = handle(2), C = handle(3), D = handle(4);
const std::string kWhy = "HostLostError: host 2 was killed";

struct Trio : ::testing::Test {
  ModelClock clock{ModelClock::Kind::kVirtual};
  std::unique_ptr<BenchHost> hosts[3];

  Trio() {
    for (uint32_t h = 0; h < 3; ++h) start(h);
  }
  void start(uint32_t h) {
    hosts[h] = std::make_unique<BenchHost>(clock, h);
    // 0: host 0 calls, its value goes to host 2, which calls.
    plan(h, 0, 0, 2);
    // 1: the other way round.
    plan(h, 1, 2, 0);
    // 2: hosts 1 and 2 both hold a part of what hosts 0 and 1 receive; hosts 0 and 1 call.
    if (h == 0)
      hosts[h]->add_plan(2, plan_of({kNoValue}, {transfer(7, {}, {0}, {1, 2}, {}), call({0}, {1})}, {1}, 2, 0));
    if (h == 1) {
      hosts[h]->add_plan(2, plan_of({0}, {transfer(7, {0}, {1}, {1, 2}, {0, 1}), call({1}, {2})}, {2}, 3, 1));
    }
    if (h == 2) hosts[h]->add_plan(2, plan_of({0}, {transfer(7, {0}, {}, {}, {0, 1})}, {kNoValue}, 1, 2));
  }
  void plan(uint32_t h, uint32_t id, uint32_t from, uint32_t to) {
    if (h == from) {
      hosts[h]->add_plan(id, plan_of({0}, {call({0}, {1}), transfer(5, {1}, {}, {}, {to})}, {1, kNoValue}, 2, h));
    } else if (h == to) {
      hosts[h]->add_plan(id,
                         plan_of({kNoValue}, {transfer(5, {}, {0}, {from}, {}), call({0}, {1})}, {kNoValue, 1}, 2, h));
    }
  }
  bool deliver(uint32_t from) {
    auto& outgoing = hosts[from]->link.outgoing;
    if (outgoing.empty()) return false;
    const auto message = outgoing.front();
    outgoing.pop_front();
    message.deliver(hosts[message.host]->executor);
    return true;
  }
  void lose() {
    for (uint32_t h = 0; h < 2; ++h) {
      std::erase_if(hosts[h]->link.outgoing, [](const auto& message) { return message.host == 2; });
    }
    hosts[2]->executor.clear();
    start(2);
    const uint32_t number = 2;
    for (uint32_t h = 0; h < 2; ++h) hosts[h]->executor.on_hosts_lost({&number, 1}, kWhy);
    hosts[2]->executor.set_predecessor_failure(kWhy, 0);
  }
  void settle() {
    for (int round = 0; round < 50; ++round) {
      clock.advance(1000);
      for (auto& host : hosts) host->poll();
      while (deliver(0) || deliver(1) || deliver(2)) {
      }
    }
  }
  void expect_survivors_empty(const std::vector<uint64_t>& handles) {
    for (uint32_t h = 0; h < 2; ++h) {
      for (const uint64_t each : handles) hosts[h]->release(each);
    }
    settle();
    for (uint32_t h = 0; h < 2; ++h) hosts[h]->expect_empty();
  }
};

TEST_F(Trio, TheSourceIsLost) {
  hosts[0]->run(1, 1, {A}, {B, C});  // has posted
  EXPECT_EQ(hosts[0]->executor.stats().exchanges, 1u);
  lose();
  settle();
  EXPECT_EQ(hosts[0]->link.failure(C), kWhy);
  EXPECT_EQ(hosts[0]->link.runs.count(1), 1u);
  expect_survivors_empty({B, C});
}

TEST_F(Trio, TheDestinationIsLostBeforeItPosts) {
  hosts[0]->put(A, 7);
  hosts[0]->run(1, 0, {A}, {B, C});
  clock.advance(1000);
  hosts[0]->poll();
  EXPECT_EQ(hosts[0]->link.runs.count(1), 0u);  // its value waits for a place to go to
  lose();
  settle();
  EXPECT_EQ(hosts[0]->link.completions(B), 1u);
  EXPECT_EQ(hosts[0]->link.runs.count(1), 1u);
  expect_survivors_empty({A, B, C});
}

TEST_F(Trio, TheDestinationIsLostBeforeTheSourceIsReady) {
  for (const bool has_announced : {false, true}) {
    hosts[0]->put(A, 7);
    hosts[0]->run(has_announced ? 2 : 1, 0, {A}, {B, C});
    if (has_announced) {
      hosts[2]->run(2, 0, {A}, {B, C});
      while (deliver(2)) {
      }
    }
    lose();
    settle();
    // The post names memory that the successor uses otherwise: nothing was written there, nothing said.
    EXPECT_EQ(hosts[0]->link.completions(B), has_announced ? 2u : 1u);
    EXPECT_TRUE(hosts[0]->link.outgoing.empty());
    expect_survivors_empty({A, B, C});
  }
}

TEST_F(Trio, OneOfTwoSourcesIsLost) {
  hosts[1]->put(A, 7);
  hosts[0]->run(1, 2, {A}, {B});
  hosts[1]->run(1, 2, {A}, {B});
  lose();
  EXPECT_EQ(hosts[0]->executor.stats().exchanges, 1u);  // the other source still writes: its memory must stay
  settle();
  EXPECT_EQ(hosts[0]->link.failure(B), kWhy);
  EXPECT_EQ(hosts[1]->link.failure(B), kWhy);
  expect_survivors_empty({A, B});
}

TEST_F(Trio, APostForARunToComeStays) {
  // Host 0 has heard of the loss and of the run behind it; its post comes to host 1 before either.
  hosts[1]->put(A, 7);
  lose();
  hosts[2]->put(A, 7);
  hosts[0]->run(9, 2, {A}, {B});
  while (deliver(0)) {
  }
  const uint32_t number = 2;
  hosts[1]->executor.on_hosts_lost({&number, 1}, kWhy);
  for (const uint32_t h : {1u, 2u}) hosts[h]->run(9, 2, {A}, {B});
  settle();
  for (const auto& host : hosts) EXPECT_EQ(host->link.runs.count(9), 1u);
  EXPECT_EQ(hosts[0]->link.completions(B), 1u);
  expect_survivors_empty({A, B});
}

TEST_F(Trio, AStalledReceive) {
  ModelledFaults faults;
  faults.no_memory = 3;
  hosts[0]->backend.set_faults(faults);
  hosts[1]->put(A, 7);
  hosts[0]->run(1, 2, {A}, {B});     // finds no room
  hosts[0]->run(2, 1, {A}, {C, D});  // stalls behind it
  hosts[1]->run(1, 2, {A}, {B});
  lose();
  settle();
  EXPECT_EQ(hosts[0]->link.failure(B), kWhy);
  EXPECT_EQ(hosts[0]->link.failure(D), kWhy);
  EXPECT_EQ(hosts[1]->link.failure(B), kWhy);
  EXPECT_EQ(hosts[1]->link.runs.count(1), 1u);
  expect_survivors_empty({A, B, C, D});
}

TEST_F(Trio, ASuccessorSaysWhatIsMissing) {
  lose();
  hosts[2]->run(1, 1, {A}, {B, C});
  EXPECT_EQ(hosts[2]->link.failure(B), kWhy);
  uint64_t out = 0;
  hosts[2]->fetch(A, D, &out);
  EXPECT_EQ(hosts[2]->link.failure(D), kWhy);
  hosts[2]->executor.add_client(1);  // it came later, and has lost nothing
  hosts[2]->run(2, 1, {A}, {B, C}, 1);
  EXPECT_NE(hosts[2]->link.failure(B, 1).find("no buffer on host 2"), std::string::npos);
}

TEST_F(Trio, AtAnyMoment) {
  std::mt19937_64 random(seed());
  for (uint32_t trial = 0; trial < 400 * kStressScale && !HasFailure(); ++trial) {
    for (uint32_t h = 0; h < 3; ++h) start(h);
    std::deque<std::function<void()>> queue[3];
    std::vector<uint64_t> results;

    for (uint32_t h = 0; h < 3; ++h) hosts[h]->put(A, 7);
    const auto add = [&](uint64_t order, uint32_t plan, uint32_t first, uint32_t second) {
      const uint64_t one = handle(static_cast<uint32_t>(10 + 2 * order));
      const uint64_t two = handle(static_cast<uint32_t>(11 + 2 * order));
      results.insert(results.end(), {one, two});
      for (const uint32_t h : {first, second}) {
        queue[h].push_back([=, this] { hosts[h]->run(order, plan, {A}, {one, two}); });
      }
    };
    const auto add_some = [&](uint64_t base) {
      for (uint64_t i = 0; i < 4; ++i) {
        const auto plan = static_cast<uint32_t>(random() % 3);
        const uint64_t order = base + i;
        if (plan < 2) {
          add(order, plan, 0, 2);
        } else {
          const uint64_t one = handle(static_cast<uint32_t>(10 + 2 * order));
          results.push_back(one);
          for (uint32_t h = 0; h < 3; ++h) {
            queue[h].push_back([=, this] { hosts[h]->run(order, 2, {A}, {one}); });
          }
        }
      }
    };
    const auto act = [&] {
      const uint32_t h = static_cast<uint32_t>(random() % 3);
      switch (random() % 4) {
        case 0:
          if (!queue[h].empty()) {
            queue[h].front()();
            queue[h].pop_front();
          }
          break;
        case 1:
          deliver(h);
          break;
        case 2:
          hosts[h]->executor.poll();
          break;
        default:
          clock.advance(static_cast<int64_t>(random() % 120));
          break;
      }
    };
    const uint64_t losses = 1 + random() % 3;  // each life of host 2 begins with orders of its own
    for (uint64_t life = 0; life < losses; ++life) {
      add_some(1 + 10 * life);
      for (uint64_t steps = random() % 60; steps != 0; --steps) act();
      // Survivors take all that was granted before they hear of the loss.
      for (uint32_t h = 0; h < 2; ++h) {
        for (auto& item : queue[h]) item();
        queue[h].clear();
      }
      queue[2].clear();
      lose();
      hosts[2]->put(A, 7);
    }
    add_some(1 + 10 * losses);
    while (!queue[0].empty() || !queue[1].empty() || !queue[2].empty()) act();
    settle();
    // Nothing is pending, and what came after the loss is well.
    for (uint32_t h = 0; h < 3; ++h) {
      EXPECT_EQ(hosts[h]->executor.stats().live_runs, 0u) << "host " << h;
      for (const auto& [key, text] : hosts[h]->link.failures) {
        EXPECT_EQ(text, kWhy);
        EXPECT_LT(Handle{key.second}.index(), 10u + 2 * (1 + 10 * losses));
      }
    }
    results.push_back(A);
    expect_survivors_empty(results);
  }
}

}  // namespace
}  // namespace pathways::test::test_hosts_lost
