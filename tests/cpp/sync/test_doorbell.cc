// sync/doorbell.h
//   PARK-1 no lost wake-up     Doorbell.RingBeforeWaitIsSeen, Doorbell.EveryWaiterWakes, Doorbell.PingPongStress,
//                              Doorbell.AcrossProcesses, Doorbell.KilledWaiterCostsOneWake; all interleavings:
//                              tests/model
//                              of several doorbells: Bells.*
//   time   a wait that nobody rings ends          Doorbell.TimesOut
//          who waits in turns polls for a turn    TurnSpin.PollsLongerAfterAShortWait
#include "sync/doorbell.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <new>
#include <thread>
#include <vector>

#include "support.h"
#include "sync/bell_set.h"

namespace pathways::test::test_doorbell {
namespace {

using namespace std::chrono_literals;
constexpr auto kForever = std::chrono::nanoseconds::max();

TEST(Doorbell, RingBeforeWaitIsSeen) {
  DoorbellWord bell{};
  const std::uint32_t ticket = bell.ticket();
  bell.ring();
  EXPECT_EQ(bell.wait(ticket, kForever, SpinPolicy::sleep_at_once()), Status::kOk);
  EXPECT_EQ(bell.wait(ticket, 0ns, SpinPolicy::sleep_at_once()), Status::kOk);
}

TEST(Doorbell, TimesOut) {
  DoorbellWord bell{};
  const std::uint32_t ticket = bell.ticket();
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(bell.wait(ticket, 20ms, SpinPolicy::sleep_at_once()), Status::kTimeout);
  EXPECT_GE(std::chrono::steady_clock::now() - start, 20ms);
  EXPECT_EQ(bell.wait(ticket, 1us, SpinPolicy::adaptive()), Status::kTimeout);
  EXPECT_EQ(bell.wait(ticket, 0ns, SpinPolicy::sleep_at_once()), Status::kTimeout);
  EXPECT_EQ(bell.wait(ticket, -1ns, SpinPolicy::sleep_at_once()), Status::kTimeout);
  EXPECT_EQ(bell.ticket(), ticket) << "a sleeper's bit is no ring";
}

TEST(TurnSpin, PollsLongerAfterAShortWait) {
  TurnSpin turns;
  const auto polls_ns = [&] { return turns.policy().yield_ns; };
  const std::uint32_t usual = SpinPolicy::serve_stream().yield_ns;
  EXPECT_EQ(polls_ns(), usual) << "nothing is known yet";
  turns.waited(TurnSpin::kTurn);
  EXPECT_EQ(polls_ns(), usable_cores() > 1 ? TurnSpin::kTurn.count() : usual);
  turns.waited(TurnSpin::kTurn + 1ns);
  EXPECT_EQ(polls_ns(), usual) << "the work has become rare";
}

TEST(Doorbell, SequenceWraps) {
  DoorbellWord bell{};
  bell.word.store(0xfffffffe, std::memory_order_relaxed);
  const std::uint32_t ticket = bell.ticket();
  bell.ring();
  EXPECT_EQ(bell.ticket(), 0U);
  EXPECT_EQ(bell.wait(ticket, kForever, SpinPolicy::sleep_at_once()), Status::kOk);
}

TEST(Doorbell, EveryWaiterWakes) {
  const test::Watchdog watchdog("EveryWaiterWakes");
  DoorbellWord bell{};
  std::atomic<int> asleep{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&] {
      const std::uint32_t ticket = bell.ticket();
      asleep.fetch_add(1);
      EXPECT_EQ(bell.wait(ticket, kForever, SpinPolicy::sleep_at_once()), Status::kOk);
    });
  }
  while (asleep.load() != 4) std::this_thread::yield();
  std::this_thread::sleep_for(5ms);  // most are in the kernel now
  bell.ring();
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_FALSE(bell.was_parked());
}

void ping_pong(SpinPolicy spin, int rounds) {
  DoorbellWord bells[2] = {};
  std::atomic<int> turn{0};
  const auto play = [&](int me) {
    for (int i = 0; i < rounds; ++i) {
      for (;;) {
        const std::uint32_t ticket = bells[me].ticket();
        if (turn.load(std::memory_order_acquire) == me) break;
        EXPECT_EQ(bells[me].wait(ticket, kForever, spin), Status::kOk);
      }
      turn.store(1 - me, std::memory_order_release);
      bells[1 - me].ring();
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
}

TEST(Doorbell, PingPongStress) {
  const test::Watchdog watchdog("PingPongStress");
  ping_pong(SpinPolicy::sleep_at_once(), 300 * test::kStressScale);
  ping_pong(SpinPolicy::adaptive(), 300 * test::kStressScale);
}

TEST(Doorbell, AcrossProcesses) {
  const Segment segment = Segment::create("doorbell-test", 4096);
  auto* bells = new (segment.data()) DoorbellWord[2]{};
  auto* turn = new (segment.data() + 1024) Atomic<std::uint32_t>(0);
  constexpr int kRounds = 500;
  const auto play = [&](std::uint32_t me) {
    for (int i = 0; i < kRounds; ++i) {
      for (;;) {
        const std::uint32_t ticket = bells[me].ticket();
        if (turn->load(std::memory_order_acquire) == me) break;
        if (bells[me].wait(ticket, 30s, SpinPolicy::sleep_at_once()) != Status::kOk) return 1;
      }
      turn->store(1 - me, std::memory_order_release);
      bells[1 - me].ring();
    }
    return 0;
  };
  test::Child child([&] { return play(1); });
  const test::Watchdog watchdog("AcrossProcesses");
  EXPECT_EQ(play(0), 0);
  EXPECT_EQ(child.wait(), 0);
}

TEST(Doorbell, KilledWaiterCostsOneWake) {
  const Segment segment = Segment::create("doorbell-test", 4096);
  auto* bell = new (segment.data()) DoorbellWord{};
  test::Child child([&] {
    static_cast<void>(bell->wait(bell->ticket(), kForever, SpinPolicy::sleep_at_once()));
    return 0;
  });
  const test::Watchdog watchdog("KilledWaiterCostsOneWake");
  while (!bell->was_parked()) std::this_thread::yield();
  child.kill();
  EXPECT_TRUE(bell->was_parked());
  bell->ring();
  EXPECT_FALSE(bell->was_parked());
}

// A sleeper on many doorbells: no ring of any of them is lost (PARK-1), by the kernel's own wait or by relays.
void any_of_them_wakes(bool can_wait_on_many) {
  const test::Watchdog watchdog("bells");
  std::vector<DoorbellWord> words(150);  // more than the kernel waits on at once
  BellSet bells(&words[0], can_wait_on_many);
  for (DoorbellWord& word : words) bells.add(&word);
  bells.draw();
  EXPECT_EQ(bells.wait(20ms, SpinPolicy::sleep_at_once()), Status::kTimeout);
  for (const std::size_t at : {std::size_t{0}, std::size_t{1}, words.size() - 1}) {
    bells.draw();
    std::thread ringer([&] {
      std::this_thread::sleep_for(5ms);
      words[at].ring();
    });
    EXPECT_EQ(bells.wait(kForever, SpinPolicy::sleep_at_once()), Status::kOk) << at;
    ringer.join();
    bells.draw();
    words[at].ring();
    EXPECT_EQ(bells.wait(kForever, SpinPolicy::sleep_at_once()), Status::kOk) << at;
  }
  for (std::size_t i = 1; i < words.size(); ++i) bells.remove(&words[i]);
  bells.draw();
  words[7].ring();
  EXPECT_EQ(bells.wait(1ms, SpinPolicy::sleep_at_once()), Status::kTimeout);
}

void nothing_is_lost(bool can_wait_on_many) {
  const test::Watchdog watchdog("bells under stress");
  constexpr std::uint64_t kRounds = 3000 * std::uint64_t{test::kStressScale};
  constexpr std::size_t kRingers = 3;
  std::vector<DoorbellWord> words(kRingers + 1);
  std::array<std::atomic<std::uint64_t>, kRingers> asked{}, answered{};
  BellSet bells(&words[0], can_wait_on_many);
  for (DoorbellWord& word : words) bells.add(&word);
  std::vector<std::thread> ringers;
  for (std::size_t r = 0; r < kRingers; ++r) {
    ringers.emplace_back([&, r] {
      std::mt19937_64 random(test::seed() + r);
      for (std::uint64_t i = 1; i <= kRounds; ++i) {
        asked[r].store(i, std::memory_order_release);
        words[r + 1].ring();
        while (answered[r].load(std::memory_order_acquire) != i) thread_yield();
        for (std::uint64_t k = random() % 64; k != 0; --k) cpu_relax();
      }
    });
  }
  const auto is_over = [&] {
    return std::all_of(answered.begin(), answered.end(), [](const auto& a) { return a.load() == kRounds; });
  };
  while (!is_over()) {
    bells.draw();
    bool did = false;
    for (std::size_t r = 0; r < kRingers; ++r) {
      const std::uint64_t now = asked[r].load(std::memory_order_acquire);
      if (answered[r].load(std::memory_order_relaxed) == now) continue;
      answered[r].store(now, std::memory_order_release);
      did = true;
    }
    // No end to the wait: a lost ring hangs, and the watchdog says so.
    if (did || is_over()) continue;
    EXPECT_EQ(bells.wait(kForever, SpinPolicy::sleep_at_once()), Status::kOk);
  }
  for (std::thread& ringer : ringers) ringer.join();
}

TEST(Bells, AnyOfThemWakesByTheKernel) { any_of_them_wakes(true); }
TEST(Bells, AnyOfThemWakesByRelays) { any_of_them_wakes(false); }
TEST(Bells, NothingIsLostByTheKernel) { nothing_is_lost(true); }
TEST(Bells, NothingIsLostByRelays) { nothing_is_lost(false); }

}  // namespace
}  // namespace pathways::test::test_doorbell
