// memory/fork_holds.h
//   FORK-1   a child reads what was there when it was forked     ForkHolds.AChildReadsWhatItsParentHad
//   FORK-1   kept until the child and its children are gone      ForkHolds.KeptForGrandchildren
//            only what this process holds, and no leases          ForkHolds.KeepsWhatIsHeldHere
#include "memory/fork_holds.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>

#include "memory/arena.h"
#include "memory/segment.h"
#include "support.h"

namespace pathways::test::test_fork_holds {
namespace {

using namespace std::chrono_literals;

/// Two processes tell each other when to go on.
struct Turn {
  Turn() { EXPECT_EQ(::pipe(ends), 0); }
  void give() const { EXPECT_EQ(::write(ends[1], "x", 1), 1); }
  void take() const {
    char byte = 0;
    EXPECT_EQ(::read(ends[0], &byte, 1), 1);
  }
  int ends[2] = {-1, -1};
};

class ForkHoldsTest : public ::testing::Test {
 protected:
  ForkHoldsTest() { segment_.hide_from_children(); }

  std::uint64_t block(std::size_t bytes, int fill) {
    std::uint64_t offset = 0;
    EXPECT_EQ(arena_->allocate(bytes, &offset), Status::kOk);
    std::memset(arena_->at(offset), fill, bytes);
    return offset;
  }
  void wait_settled(ForkHolds& holds) {
    while (holds.was_count() != 0) {
      holds.settle();
      ::usleep(1000);
    }
  }
  static int status_of(pid_t child) {
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return status;
  }

  test::Watchdog watchdog_{"ForkHolds"};
  Segment segment_ = Segment::create("fork-holds", 1 << 20);
  Arena* arena_ = Arena::create(segment_.data(), segment_.size());
};

TEST_F(ForkHoldsTest, AChildReadsWhatItsParentHad) {
  ForkHolds holds(arena_);
  const std::uint64_t mine = block(100'000, 1);
  const std::byte* view = arena_->at(mine);
  const Turn turn;
  const pid_t child = ::fork();
  if (child == 0) {
    turn.take();
    int wrong = 0;
    for (int i = 0; i < 100'000; ++i) wrong += view[i] == std::byte{1} ? 0 : 1;
    ::_exit(wrong == 0 ? 0 : 1);
  }
  EXPECT_EQ(holds.was_count(), 1U);
  arena_->release(mine);
  holds.settle();
  for (int i = 0; i < 8; ++i) block(100'000, 2);  // they would have lain there
  turn.give();
  EXPECT_EQ(status_of(child), 0);
  wait_settled(holds);
  EXPECT_EQ(block(100'000, 3), mine);
  arena_->validate();
}

TEST_F(ForkHoldsTest, KeptForGrandchildren) {
  ForkHolds holds(arena_);
  const std::uint64_t mine = block(1000, 1);
  const Turn turn;
  const pid_t child = ::fork();
  if (child == 0) {
    if (::fork() == 0) {
      turn.take();
      ::_exit(0);
    }
    ::_exit(0);
  }
  EXPECT_EQ(status_of(child), 0);
  arena_->release(mine);
  holds.settle();
  EXPECT_EQ(holds.was_count(), 1U);
  EXPECT_EQ(arena_->was_references(mine), 1U);
  turn.give();
  wait_settled(holds);
  EXPECT_EQ(arena_->bytes_in_use(), 0U);
}

TEST_F(ForkHoldsTest, KeepsWhatIsHeldHere) {
  ForkHolds holds(arena_);
  ForkHolds none(nullptr);
  const Turn turn;
  const auto fork_one = [&] {
    const pid_t child = ::fork();
    if (child == 0) {
      turn.take();
      ::_exit(static_cast<int>(holds.was_count()));  // a child keeps nothing itself
    }
    return child;
  };
  const pid_t first = fork_one();
  EXPECT_EQ(holds.was_count(), 0U);
  const std::uint64_t held = block(64, 1), leased = block(64, 1);
  arena_->lease_out(leased, 1, 1);
  arena_->release(leased);  // a host has it, and nobody here
  const pid_t second = fork_one();
  EXPECT_EQ(holds.was_count(), 1U);
  EXPECT_EQ(arena_->was_references(held), 2U);
  EXPECT_EQ(arena_->was_references(leased), 1U);
  turn.give();
  turn.give();
  EXPECT_EQ(status_of(first), 0);
  EXPECT_EQ(status_of(second), 0);
  wait_settled(holds);
  none.settle();
  EXPECT_EQ(arena_->was_references(held), 1U);
}

}  // namespace
}  // namespace pathways::test::test_fork_holds
