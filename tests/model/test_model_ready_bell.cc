// Every interleaving of writers who mark what they have published, and of the reader who looks only where a mark is.
//   READY-1, POOL-1   ModelReadyBell.*: nothing that was published is missed; the reader sleeps only when it has all
//   (the checker itself)   ModelBrokenReadyBell.*: each order that somebody could get wrong
#include <vector>

#include "expect.h"
#include "messages/ready_bell.h"

namespace pathways::model {
namespace {

constexpr auto kForever = std::chrono::nanoseconds::max();

/// How the reader or the writers differ from csrc/link/link_pool.cc and csrc/messages/ready_bell.h.
enum class Mistake { kNone, kTicketAfterMarks, kAsksOnce, kMarksFirst, kRingsFirst, kSummaryFirst };

/// What one writer has published: so many records. (A ring, in short.)
struct Published {
  Atomic<std::uint32_t> count;
};

template <Mistake kMistake>
void publish(ReadyBell& bell, Published& ring, std::uint32_t bit, std::uint32_t count) {
  if constexpr (kMistake == Mistake::kMarksFirst) {
    bell.mark(bit);
    ring.count.store(count, std::memory_order_release);
  } else if constexpr (kMistake == Mistake::kRingsFirst) {
    ring.count.store(count, std::memory_order_release);
    bell.doorbell.ring();
    bell.bitmap.mark(bit);
  } else if constexpr (kMistake == Mistake::kSummaryFirst) {
    ring.count.store(count, std::memory_order_release);
    bell.bitmap.summary[bit / 64 / 64].fetch_or(uint64_t{1} << (bit / 64 % 64), std::memory_order_acq_rel);
    bell.bitmap.words[bit / 64].fetch_or(uint64_t{1} << (bit % 64), std::memory_order_acq_rel);
    bell.doorbell.ring();
  } else {
    ring.count.store(count, std::memory_order_release);
    bell.mark(bit);
  }
}

/// Writers publish `each` records with the bits given; the reader takes all of them.
template <Mistake kMistake>
void mark_and_collect(Program& program, std::vector<std::uint32_t> bits, std::uint32_t each) {
  auto& bell = program.make<ReadyBell>();
  auto* rings = static_cast<Published*>(program.memory(bits.size() * sizeof(Published)));
  for (std::size_t w = 0; w < bits.size(); ++w) {
    program.thread([&bell, rings, bits, w, each] {
      for (std::uint32_t i = 1; i <= each; ++i) publish<kMistake>(bell, rings[w], bits[w], i);
    });
  }
  program.thread([&bell, rings, bits, each] {
    std::vector<std::uint32_t> marked, taken(bits.size());
    std::uint32_t left = each * static_cast<std::uint32_t>(bits.size());
    for (;;) {
      std::uint32_t ticket = bell.doorbell.ticket();
      marked.clear();
      bell.bitmap.collect(&marked);
      if constexpr (kMistake == Mistake::kTicketAfterMarks) ticket = bell.doorbell.ticket();
      for (const std::uint32_t bit : marked) {
        for (std::size_t w = 0; w < bits.size(); ++w) {
          if (bits[w] != bit) continue;
          const std::uint32_t found = rings[w].count.load(std::memory_order_acquire);
          const std::uint32_t take = kMistake == Mistake::kAsksOnce && found > taken[w] ? 1 : found - taken[w];
          taken[w] += take;
          left -= take;
        }
      }
      if (left == 0) return;
      require(bell.doorbell.wait(ticket, kForever, SpinPolicy::sleep_at_once()) == Status::kOk,
              "a wait for ever ends by a ring");
    }
  });
}

TEST(ModelReadyBell, OneWriterTwice) {
  expect_holds([](Program& program) { mark_and_collect<Mistake::kNone>(program, {3}, 2); });
}
TEST(ModelReadyBell, TwoWritersInOneWord) {
  expect_holds([](Program& program) { mark_and_collect<Mistake::kNone>(program, {3, 4}, 1); });
}
TEST(ModelReadyBell, TwoWritersInTwoWords) {
  expect_holds([](Program& program) { mark_and_collect<Mistake::kNone>(program, {3, 64}, 1); });
}
TEST(ModelReadyBell, TwoWritersFarApart) {
  expect_holds([](Program& program) { mark_and_collect<Mistake::kNone>(program, {3, 64 * 64}, 1); });
}

template <Mistake kMistake>
void expect_missed(std::vector<std::uint32_t> bits, std::uint32_t each) {
  expect_caught(
      Memory::kInterleaved, [&](Program& program) { mark_and_collect<kMistake>(program, bits, each); }, "lost wake-up");
}
TEST(ModelBrokenReadyBell, CatchesATicketAfterTheMarks) { expect_missed<Mistake::kTicketAfterMarks>({3}, 1); }
TEST(ModelBrokenReadyBell, CatchesALinkThatIsAskedOnce) { expect_missed<Mistake::kAsksOnce>({3}, 2); }
TEST(ModelBrokenReadyBell, CatchesAMarkBeforeTheRecord) { expect_missed<Mistake::kMarksFirst>({3}, 1); }
TEST(ModelBrokenReadyBell, CatchesABellBeforeTheMark) { expect_missed<Mistake::kRingsFirst>({3}, 1); }
TEST(ModelBrokenReadyBell, CatchesASummaryBeforeItsWord) { expect_missed<Mistake::kSummaryFirst>({3, 4}, 1); }

}  // namespace
}  // namespace pathways::model
