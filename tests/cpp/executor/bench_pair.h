// BenchPair: two BenchHosts of one modelled clock that send each other what their links hold.
//
// Threading: single-threaded.
#pragma once

#include <gtest/gtest.h>

#include "executor/bench_host.h"

namespace pathways::test {

struct BenchPair : ::testing::Test {
  ModelClock clock{ModelClock::Kind::kVirtual};
  BenchHost zero{clock, 0}, one{clock, 1};

  BenchHost& host(uint32_t number) { return number == 0 ? zero : one; }
  /// Hands the oldest message of `from` to the host that it is for. False: there is none.
  bool deliver(BenchHost& from) {
    if (from.link.outgoing.empty()) return false;
    const auto message = from.link.outgoing.front();
    from.link.outgoing.pop_front();
    message.deliver(host(message.host).executor);
    return true;
  }
  /// Lets time pass, polls and delivers until nothing that takes less than 50 us is under way.
  void settle() {
    for (int round = 0; round < 50; ++round) {
      clock.advance(1000);
      zero.poll();
      one.poll();
      while (deliver(zero) || deliver(one)) {
      }
    }
  }
};

}  // namespace pathways::test
