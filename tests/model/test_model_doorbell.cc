// Every interleaving of the doorbell and the lock.
//   PARK-1 no lost wake-up   ModelDoorbell.*; the broken ones show that the checker would see one
#include "broken.h"
#include "expect.h"
#include "sync/doorbell.h"
#include "sync/futex_lock.h"

namespace pathways::model {
namespace {

constexpr auto kForever = std::chrono::nanoseconds::max();

struct Shared {
  Atomic<std::uint32_t> flags[2];
  int data[2] = {0, 0};
};

/// `waiters` threads wait until all `ringers` threads have published; each ringer publishes, then rings.
template <class Bell>
void publish_and_ring(Program& program, int waiters, int ringers) {
  auto& bell = program.make<Bell>();
  auto& shared = program.make<Shared>();
  for (int r = 0; r < ringers; ++r) {
    program.thread([&bell, &shared, r] {
      model_write(&shared.data[r]);
      shared.data[r] = 1;
      shared.flags[r].store(1, std::memory_order_release);
      bell.ring();
    });
  }
  for (int w = 0; w < waiters; ++w) {
    program.thread([&bell, &shared, ringers] {
      for (int r = 0; r < ringers;) {
        const std::uint32_t ticket = bell.ticket();
        if (shared.flags[r].load(std::memory_order_acquire) != 0) {
          model_read(&shared.data[r]);
          require(shared.data[r] == 1, "what was published is there");
          ++r;
          continue;
        }
        require(bell.wait(ticket, kForever, SpinPolicy::sleep_at_once()) == Status::kOk,
                "a wait for ever ends by a ring");
      }
    });
  }
}

TEST(ModelDoorbell, OneRingerOneWaiter) {
  expect_holds([](Program& program) { publish_and_ring<DoorbellWord>(program, 1, 1); });
}
TEST(ModelDoorbell, OneRingerTwoWaiters) {
  expect_holds([](Program& program) { publish_and_ring<DoorbellWord>(program, 2, 1); });
}
TEST(ModelDoorbell, TwoRingersOneWaiter) {
  expect_holds([](Program& program) { publish_and_ring<DoorbellWord>(program, 1, 2); });
}

/// The order is the other way round here: relaxed flags, so that only the doorbell orders the data.
TEST(ModelDoorbell, TheRingItselfPublishes) {
  expect_holds([](Program& program) {
    auto& bell = program.make<DoorbellWord>();
    auto& shared = program.make<Shared>();
    program.thread([&] {
      model_write(&shared.data[0]);
      shared.data[0] = 1;
      bell.ring();
    });
    program.thread([&] {
      require(bell.wait(0, kForever, SpinPolicy::sleep_at_once()) == Status::kOk, "rung");
      model_read(&shared.data[0]);
      require(shared.data[0] == 1, "what came before the ring is there");
    });
  });
}

TEST(ModelDoorbell, PingPong) {
  expect_holds([](Program& program) {
    auto* bells = static_cast<DoorbellWord*>(program.memory(2 * sizeof(DoorbellWord)));
    auto& turn = program.make<Atomic<std::uint32_t>>(0U);
    for (std::uint32_t me = 0; me < 2; ++me) {
      program.thread([bells, &turn, me] {
        for (int round = 0; round < 2; ++round) {
          for (;;) {
            const std::uint32_t ticket = bells[me].ticket();
            if (turn.load(std::memory_order_acquire) == me) break;
            require(bells[me].wait(ticket, kForever, SpinPolicy::sleep_at_once()) == Status::kOk, "rung");
          }
          turn.store(1 - me, std::memory_order_release);
          bells[1 - me].ring();
        }
      });
    }
  });
}

TEST(ModelDoorbell, CatchesALateTicket) {
  expect_caught(
      Memory::kInterleaved,
      [](Program& program) {
        auto& bell = program.make<DoorbellWord>();
        auto& flag = program.make<Atomic<std::uint32_t>>(0U);
        program.thread([&] {
          flag.store(1, std::memory_order_release);
          bell.ring();
        });
        program.thread([&] {
          while (flag.load(std::memory_order_acquire) == 0) {  // looks, and only then takes the ticket
            static_cast<void>(bell.wait(bell.ticket(), kForever, SpinPolicy::sleep_at_once()));
          }
        });
      },
      "lost wake-up");
}
TEST(ModelDoorbell, CatchesASeparateFlag) {
  // Two ringers are needed: the first, delayed between its steps, clears the flag of the waiter that the second owes.
  expect_caught(
      Memory::kInterleaved, [](Program& program) { publish_and_ring<broken::FlagDoorbell>(program, 1, 2); },
      "lost wake-up");
}
TEST(ModelDoorbell, CatchesAMissingStoreLoadOrder) {
  const auto program = [](Program& program) { publish_and_ring<broken::UnorderedDoorbell>(program, 1, 1); };
  EXPECT_TRUE(explore(Memory::kInterleaved, program).complete) << "invisible without store buffers";
  expect_caught(Memory::kBuffered, program, "lost wake-up");
}
TEST(ModelDoorbell, CatchesARelaxedRing) {
  expect_caught(
      Memory::kInterleaved,
      [](Program& program) {
        auto& bell = program.make<broken::RelaxedDoorbell>();
        auto& data = program.make<int>(0);
        program.thread([&] {
          model_write(&data);
          bell.ring();
        });
        program.thread([&] {
          while (bell.ticket() == 0) cpu_relax();
          model_read(&data);
        });
      },
      "data race");
}

template <class Lock>
void count_under_lock(Program& program, int threads, int rounds) {
  auto& lock = program.make<Lock>();
  auto& count = program.make<int>(0);
  for (int t = 0; t < threads; ++t) {
    program.thread([&lock, &count, rounds] {
      for (int i = 0; i < rounds; ++i) {
        lock.lock();
        model_read(&count);
        const int seen = count;
        model_write(&count);
        count = seen + 1;
        lock.unlock();
      }
    });
  }
  program.finally([&count, threads, rounds] { require(count == threads * rounds, "one holder at a time"); });
}

TEST(ModelLock, TwoThreads) {
  expect_holds([](Program& program) { count_under_lock<FutexLock>(program, 2, 2); });
}
TEST(ModelLock, ThreeThreads) {
  expect_holds([](Program& program) { count_under_lock<FutexLock>(program, 3, 1); });
}
TEST(ModelLock, CatchesForgottenSleepers) {
  expect_caught(
      Memory::kInterleaved, [](Program& program) { count_under_lock<broken::ForgetfulLock>(program, 3, 1); },
      "lost wake-up");
}

}  // namespace
}  // namespace pathways::model
