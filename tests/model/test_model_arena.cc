// Every interleaving of the arena's reference counts and returned list.
//   ARENA-2 counted   ModelArena.*
//   ARENA-5 leased     ModelArena.LeasesEndInAnyOrder, ModelArena.ReclaimedBesideReturned
#include "expect.h"
#include "memory/arena.h"

namespace pathways::model {
namespace {

Arena& make_arena(Program& program, int blocks) {
  const std::size_t bytes = Arena::min_bytes() + static_cast<std::size_t>(blocks - 1) * 128;
  return *Arena::create(program.memory(bytes), bytes);
}

std::uint64_t allocate(Arena& arena) {
  std::uint64_t offset = 0;
  require(arena.allocate(64, &offset) == Status::kOk, "there is room");
  return offset;
}

TEST(ModelArena, TwoReleasesOfOneBlock) {
  expect_holds([](Program& program) {
    Arena& arena = make_arena(program, 1);
    const std::uint64_t offset = allocate(arena);
    arena.retain(offset);
    for (int t = 0; t < 2; ++t) {
      program.thread([&arena, offset] {
        model_read(arena.at(offset));
        arena.release(offset);
      });
    }
    program.thread([&arena] {
      std::uint64_t again = 0;
      if (arena.allocate(64, &again) == Status::kOk) model_write(arena.at(again));  // a race if anybody still reads
    });
    program.finally([&arena] { arena.validate(); });
  });
}

TEST(ModelArena, TwoBlocksComeBack) {
  expect_holds([](Program& program) {
    Arena& arena = make_arena(program, 2);
    for (int t = 0; t < 2; ++t) {
      const std::uint64_t offset = allocate(arena);
      program.thread([&arena, offset] {
        model_write(arena.at(offset));
        arena.release(offset);
      });
    }
    program.thread([&arena] {
      std::uint64_t again = 0;
      if (arena.allocate(64, &again) == Status::kOk) model_write(arena.at(again));
    });
    program.finally([&arena] { arena.validate(); });
  });
}

TEST(ModelArena, LeasesEndInAnyOrder) {
  expect_holds([](Program& program) {
    Arena& arena = make_arena(program, 1);
    const std::uint64_t offset = allocate(arena);
    arena.lease_out(offset, 0b11, 1);
    arena.release(offset);
    for (unsigned borrower = 0; borrower < 2; ++borrower) {
      program.thread([&arena, offset, borrower] {
        model_read(arena.at(offset));
        arena.return_lease(offset, borrower);
      });
    }
    program.thread([&arena] {
      std::uint64_t again = 0;
      if (arena.allocate(64, &again) == Status::kOk) model_write(arena.at(again));
    });
    program.finally([&arena] {
      require(arena.bytes_in_use() == 0 || arena.bytes_in_use() == 128, "it came back once");
      arena.validate();
    });
  });
}

TEST(ModelArena, ReclaimedBesideReturned) {
  // Borrower 1 is dead, 0 returns meanwhile: the block comes back exactly once, and may be lent anew.
  expect_holds([](Program& program) {
    Arena& arena = make_arena(program, 1);
    const std::uint64_t offset = allocate(arena);
    arena.lease_out(offset, 0b11, 1);
    arena.release(offset);
    program.thread([&arena, offset] {
      model_read(arena.at(offset));
      arena.return_lease(offset, 0);
    });
    program.thread([&arena] {  // the owner
      arena.reclaim(1, 1);
      std::uint64_t again = 0;
      if (arena.allocate(64, &again) != Status::kOk) return;
      model_write(arena.at(again));
      arena.lease_out(again, 0b10, 2);
      arena.reclaim(1, 1);
      require(arena.was_references(again) == 2, "a lease to the successor stands");
    });
    program.finally([&arena] { arena.validate(); });
  });
}

}  // namespace
}  // namespace pathways::model
