// The checker itself, on programs whose outcomes are known (litmus tests).
//   sees every interleaving, none twice   ModelChecker.CountsInterleavings
//   memory of each kind                   ModelChecker.StoreBuffering, .MessagePassing, .CoherenceOfOneAddress
//   races, deadlocks, endless spins       ModelChecker.Finds*
#include <set>

#include "expect.h"
#include "sync/atomic.h"

namespace pathways::model {
namespace {

struct Words {
  Atomic<std::uint32_t> x;
  Atomic<std::uint32_t> y;
  std::uint32_t seen[2] = {0, 0};
};

using Outcomes = std::set<std::pair<std::uint32_t, std::uint32_t>>;

/// What the two `seen` can be at the end of `build`'s program.
Outcomes outcomes(Memory memory, const std::function<void(Program&, Words&)>& build) {
  Outcomes all;
  const Result result = explore(memory, [&](Program& program) {
    auto& words = program.make<Words>();
    build(program, words);
    program.finally([&] { all.emplace(words.seen[0], words.seen[1]); });
  });
  EXPECT_EQ(result.error, "");
  EXPECT_TRUE(result.complete);
  return all;
}

std::uint64_t runs_of(int threads, int updates, bool same_word) {
  const Result result = explore(Memory::kInterleaved, [&](Program& program) {
    auto* words = static_cast<Atomic<std::uint32_t>*>(program.memory(256));
    for (int t = 0; t < threads; ++t) {
      auto& word = words[same_word ? 0 : 16 * t];
      program.thread([&word, updates] {
        for (int i = 0; i < updates; ++i) word.fetch_add(1, std::memory_order_relaxed);
      });
    }
    program.finally([words, threads, updates, same_word] {
      if (same_word) {
        require(words[0].load(std::memory_order_relaxed) == static_cast<std::uint32_t>(threads * updates), "sum");
      }
    });
  });
  EXPECT_EQ(result.error, "");
  return result.runs;
}

TEST(ModelChecker, CountsInterleavings) {
  EXPECT_EQ(runs_of(2, 1, true), 2U);
  EXPECT_EQ(runs_of(2, 3, true), 20U);  // 6! / (3! 3!)
  EXPECT_EQ(runs_of(3, 2, true), 90U);  // 6! / (2! 2! 2!)
  EXPECT_EQ(runs_of(2, 6, true), 924U);
  EXPECT_EQ(runs_of(3, 3, true), 1680U);
  EXPECT_EQ(runs_of(3, 3, false), 1U);  // independent: one order stands for all
}

TEST(ModelChecker, StoreBuffering) {
  const auto program = [](std::memory_order order) {
    return [order](Program& made, Words& words) {
      made.thread([&, order] {
        words.x.store(1, order);
        words.seen[0] = words.y.load(std::memory_order_acquire);
      });
      made.thread([&, order] {
        words.y.store(1, order);
        words.seen[1] = words.x.load(std::memory_order_acquire);
      });
    };
  };
  const Outcomes strong = {{0, 1}, {1, 0}, {1, 1}};
  const Outcomes weak = {{0, 0}, {0, 1}, {1, 0}, {1, 1}};
  EXPECT_EQ(outcomes(Memory::kInterleaved, program(std::memory_order_release)), strong);
  EXPECT_EQ(outcomes(Memory::kBuffered, program(std::memory_order_release)), weak);
  EXPECT_EQ(outcomes(Memory::kBuffered, program(std::memory_order_seq_cst)), strong);
}

TEST(ModelChecker, MessagePassing) {
  const auto program = [](std::memory_order order) {
    return [order](Program& made, Words& words) {
      made.thread([&, order] {
        words.x.store(1, std::memory_order_relaxed);
        words.y.store(1, order);
      });
      made.thread([&] {
        words.seen[0] = words.y.load(std::memory_order_acquire);
        words.seen[1] = words.x.load(std::memory_order_relaxed);
      });
    };
  };
  const Outcomes strong = {{0, 0}, {0, 1}, {1, 1}};
  const Outcomes weak = {{0, 0}, {0, 1}, {1, 0}, {1, 1}};
  EXPECT_EQ(outcomes(Memory::kInterleaved, program(std::memory_order_relaxed)), strong);
  EXPECT_EQ(outcomes(Memory::kBuffered, program(std::memory_order_relaxed)), weak);
  EXPECT_EQ(outcomes(Memory::kBuffered, program(std::memory_order_release)), strong);
}

TEST(ModelChecker, CoherenceOfOneAddress) {
  // Two stores of one thread to one address never change places, and a thread sees its own at once.
  const auto program = [](Program& made, Words& words) {
    made.thread([&] {
      words.x.store(1, std::memory_order_relaxed);
      words.x.store(2, std::memory_order_relaxed);
      require(words.x.load(std::memory_order_relaxed) == 2, "one's own store");
    });
    made.thread([&] {
      words.seen[0] = words.x.load(std::memory_order_relaxed);
      words.seen[1] = words.x.load(std::memory_order_relaxed);
    });
  };
  EXPECT_EQ(outcomes(Memory::kBuffered, program), (Outcomes{{0, 0}, {0, 1}, {0, 2}, {1, 1}, {1, 2}, {2, 2}}));
}

/// A writer publishes plain data by `publish`; the reader takes it by `consume`, after `hops` updates by another
/// thread.
void publish_data(Program& program, std::memory_order publish, std::memory_order consume, bool relay) {
  auto& words = program.make<Words>();
  program.thread([&, publish] {
    model_write(&words.seen[0]);
    words.x.store(1, publish);
  });
  if (relay) {
    program.thread([&] {  // a relaxed update continues the release sequence
      std::uint32_t one = 1;
      words.x.compare_exchange(one, 2, std::memory_order_relaxed, std::memory_order_relaxed);
    });
  }
  program.thread([&, consume, relay] {
    if (words.x.load(consume) == (relay ? 2U : 1U)) model_read(&words.seen[0]);
  });
}

TEST(ModelChecker, FindsRaces) {
  const auto acquire = std::memory_order_acquire;
  const auto release = std::memory_order_release;
  const auto relaxed = std::memory_order_relaxed;
  expect_holds([=](Program& program) { publish_data(program, release, acquire, false); });
  expect_holds([=](Program& program) { publish_data(program, release, acquire, true); });
  for (const Memory memory : {Memory::kInterleaved, Memory::kBuffered}) {
    expect_caught(memory, [=](Program& program) { publish_data(program, relaxed, acquire, false); }, "data race");
    expect_caught(memory, [=](Program& program) { publish_data(program, release, relaxed, false); }, "data race");
    expect_caught(memory, [=](Program& program) { publish_data(program, relaxed, acquire, true); }, "data race");
  }
  expect_caught(
      Memory::kInterleaved,
      [](Program& program) {  // what follows a release is not covered by it
        auto& words = program.make<Words>();
        program.thread([&] {
          words.x.store(1, std::memory_order_release);
          model_read(&words.seen[0]);
        });
        program.thread([&] {
          if (words.x.load(std::memory_order_acquire) == 1) model_write(&words.seen[0]);
        });
      },
      "data race");
}

TEST(ModelChecker, FindsDeadlocks) {
  expect_caught(
      Memory::kInterleaved,
      [](Program& program) {
        auto& words = program.make<Words>();
        program.thread([&] { futex_wait(words.x, 0, kNoDeadline); });
        program.thread([&] { futex_wake(words.x, 1); });  // perhaps before the other sleeps
      },
      "nobody can go on");
  expect_caught(
      Memory::kInterleaved,
      [](Program& program) {
        auto& words = program.make<Words>();
        program.thread([&] {
          while (words.x.load(std::memory_order_relaxed) == 0) cpu_relax();
        });
      },
      "nobody can go on");
}

TEST(ModelChecker, FindsEndlessSpins) {
  expect_caught(
      Memory::kInterleaved,
      [](Program& program) {
        auto& words = program.make<Words>();
        program.thread([&] {
          while (words.x.load(std::memory_order_relaxed) == 0) {
            if (words.y.load(std::memory_order_relaxed) == 1) break;  // says no cpu_relax()
          }
        });
        program.thread([&] { words.y.store(0, std::memory_order_relaxed); });
      },
      "spins for ever");
}

TEST(ModelChecker, ASpinSeesWhatChangedBetweenItsLookAndItsPause) {
  expect_holds([](Program& program) {
    auto& words = program.make<Words>();
    for (int me = 0; me < 2; ++me) {
      program.thread([&words, me] {
        auto& mine = me == 0 ? words.x : words.y;
        auto& other = me == 0 ? words.y : words.x;
        while (other.load(std::memory_order_acquire) == 0) {
          mine.store(1, std::memory_order_release);  // its own writes are no new value
          cpu_relax();
        }
        mine.store(1, std::memory_order_release);
      });
    }
  });
}

}  // namespace
}  // namespace pathways::model
