// HostPair: two BenchHosts of one modelled clock that send each other what their links hold. BenchPair: the same as a
// fixture.
//
// Threading: single-threaded.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <random>
#include <vector>

#include "executor/bench_host.h"

namespace pathways::test {

struct HostPair {
  ModelClock clock{ModelClock::Kind::kVirtual};
  BenchHost zero{clock, 0}, one{clock, 1};

  BenchHost& host(uint32_t number) { return number == 0 ? zero : one; }
  /// Host 0 calls, the value goes to host 1, which calls; results: on 0, on 1.
  void add_plans(uint32_t id = 0, bool compiled = true) {
    zero.add_plan(id, plan_of({0}, {call({0}, {1}), transfer(5, {1}, {}, {}, {1})}, {1, kNoValue}, 2, 0), compiled);
    one.add_plan(id, plan_of({kNoValue}, {transfer(5, {}, {0}, {0}, {}), call({0}, {1})}, {kNoValue, 1}, 2, 1));
  }
  /// Back again: host 1 calls, host 0 receives; the result is on 0.
  void add_plans_back(uint32_t id) {
    zero.add_plan(id, plan_of({kNoValue}, {transfer(5, {}, {0}, {1}, {}), call({0}, {1})}, {1}, 2, 0));
    one.add_plan(id, plan_of({0}, {call({0}, {1}), transfer(5, {1}, {}, {}, {0})}, {kNoValue}, 2, 1));
  }
  /// Hands the oldest message of `from` to the host that it is for. False: there is none.
  bool deliver(BenchHost& from) {
    if (from.link.outgoing.empty()) return false;
    const auto message = from.link.outgoing.front();
    from.link.outgoing.pop_front();
    message.deliver(host(message.host).executor);
    return true;
  }
  /// Lets time pass and polls, but delivers nothing.
  void pass(int rounds = 10) {
    for (int round = 0; round < rounds; ++round) {
      clock.advance(1000);
      zero.poll();
      one.poll();
    }
  }
  /// Lets time pass, polls and delivers until nothing that takes less than 50 us is under way.
  void settle() {
    for (int round = 0; round < 50; ++round) {
      pass(1);
      while (deliver(zero) || deliver(one)) {
      }
    }
  }
  void release(const std::vector<uint64_t>& handles) {
    for (const uint64_t h : handles) {
      zero.release(h);
      one.release(h);
    }
  }
  void expect_empty() {
    settle();
    zero.expect_empty();
    one.expect_empty();
  }
  /// Runs plan 0 on `value`, and plan 1 back, four times from order `base` on. Each host takes its runs and releases in
  /// their order, but when it does, when time passes, and when messages come, is drawn.
  void run_there_and_back(std::mt19937_64& random, uint64_t base, uint64_t value) {
    std::deque<std::function<void()>> queue[2];
    for (uint64_t i = 1; i <= 4; ++i) {
      const uint64_t there = handle(static_cast<uint32_t>(10 + i)), here = handle(static_cast<uint32_t>(20 + i));
      const uint64_t home = handle(static_cast<uint32_t>(30 + i));
      for (uint32_t h = 0; h < 2; ++h) {
        queue[h].push_back([=, this] { host(h).run(base + 2 * i, 0, {value}, {here, there}); });
        queue[h].push_back([=, this] { host(h).run(base + 2 * i + 1, 1, {there}, {home}); });
        queue[h].push_back([=, this] {
          for (const uint64_t each : {here, there, home}) host(h).release(each);
        });
      }
    }
    while (!queue[0].empty() || !queue[1].empty()) {
      const uint32_t h = random() % 2;
      switch (random() % 4) {
        case 0:
          if (!queue[h].empty()) {
            queue[h].front()();
            queue[h].pop_front();
          }
          break;
        case 1:
          deliver(host(h));
          break;
        case 2:
          host(h).executor.poll();
          host(h).executor.validate();
          break;
        default:
          clock.advance(static_cast<int64_t>(random() % 120));
          break;
      }
    }
    settle();
  }
};

struct BenchPair : ::testing::Test, HostPair {};

}  // namespace pathways::test
