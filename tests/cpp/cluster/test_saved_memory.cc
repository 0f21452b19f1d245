// What hosts keep for saves and make for restores is in the ledger until the save or restore is over: a real
// controller, real executors, and a backend that counts the bytes that it keeps.
//
//   MEM-7   SavedMemory.*: on each device, the hosts keep at most the bytes that the ledger books
//   MEM-3   SavedMemory.ARun*, SavedMemory.ASaveWhoseStepsWaitBehindARestore: what waits for a save ends
//   FLOW-1  SavedMemory.SavesWithoutEnd
#include "cluster/kept_memory.h"

namespace pathways::test::test_saved_memory {
namespace {

const Handle kA = Handle::make(1, 1), kB = Handle::make(2, 1), kC = Handle::make(3, 1);

struct SavedMemory : KeptMemory {};

TEST_F(SavedMemory, ASavedBufferIsReleased) {
  put(kA, kBoth);
  save(kA, kBoth);
  save(kA, kFirst, Handle::make(31, 1));
  release(kBoth, {kA});
  put(kA, kFirst, set_of(kFirst), kWorth / 10, {1, kWorth / 10});
  settle_but_saves();
  expect_counted();
  EXPECT_EQ(controller->stats().live_bytes[2], kWorth + innocent_bytes);
  EXPECT_EQ(controller->client_uses().back().tasks, 2u);
  EXPECT_TRUE(hosts[0]->end_task() && hosts[1]->end_task());
  settle_but_saves();
  EXPECT_EQ(controller->client_uses().back().tasks, 1u);
  EXPECT_EQ(controller->stats().live_bytes[2], kWorth + innocent_bytes);  // a block counts on all its hosts
  EXPECT_TRUE(hosts[0]->end_task());
  settle_but_saves();
  EXPECT_EQ(controller->stats().live_bytes[2], innocent_bytes);
  expect_counted();
  expect_kept_and_counted();
}

TEST_F(SavedMemory, ASavedBufferIsDonatedOrRenamedOver) {
  put(kA, kBoth);
  save(kA, kBoth);
  run(3, {kA}, kB);
  put(kC, kBoth);
  save(kB, kBoth, Handle::make(31, 1));
  rename(kBoth, kB, kC);
  settle_but_saves();
  expect_counted();
  expect_kept_and_counted();
}

TEST_F(SavedMemory, ASavedBufferIsNotThere) {  // each host says at once that the task is over
  put(kA, kFirst);
  save(kA, kBoth);
  save(kB, kBoth, Handle::make(31, 1));
  hosts[0]->backend.fail_values = 1;
  run(0, {}, kC);
  save(kC, kFirst, Handle::make(32, 1));
  release(kFirst, {kA, kC});
  settle();
  EXPECT_EQ(controller->client_uses().back().tasks, 0u);
  expect_kept_and_counted();
}

TEST_F(SavedMemory, ASaveDuringASuspension) {  // what it keeps stays on the devices
  put(kA, kBoth);
  save(kA, kBoth);
  save(kA, kBoth, Handle::make(31, 1));
  settle_but_saves();
  const auto booked = [&] { return controller->stats().live_bytes[0] - innocent_bytes; };
  const auto move = [&](CommandKind where) {
    controller->command_for(client, where, {});
    settle_but_saves();
  };
  for (int i = 0; i < 2; ++i) {
    controller->suspend(client);
    move(CommandKind::kOffload);
    controller->offload(client);
    expect_counted();
    EXPECT_EQ(booked(), kWorth);
    EXPECT_EQ(controller->restore(client), "");
    move(CommandKind::kRestore);
    controller->resume(client);
    expect_counted();
    EXPECT_EQ(booked(), 2 * kWorth);
  }
  settle();
  EXPECT_EQ(booked(), kWorth);
  expect_kept_and_counted();
}

TEST_F(SavedMemory, ARestoredBufferIsReleased) {  // its hosts make it all the same
  put(kA, kBoth, set_of(kBoth), kWorth, {1, kWorth}, CommandKind::kTask);
  release(kBoth, {kA});
  pass();
  pass();
  EXPECT_EQ(controller->stats().live_bytes[2], kWorth + innocent_bytes);
  settle();
  EXPECT_EQ(controller->stats().live_bytes[2], innocent_bytes);
  expect_kept_and_counted();
}

TEST_F(SavedMemory, ASaveOnALostHost) {
  controller->remove_client(0);
  innocent_bytes = 0;
  put(kA, kBoth);
  save(kA, kBoth);
  settle_but_saves();
  release(kBoth, {kA});
  lose(1, [&] {
    put(kB, kBoth);
    save(kB, kBoth, Handle::make(31, 1));  // the successor gets it
    settle_but_saves();
    lose(0, [] {});
  });
  settle_but_saves();
  expect_counted();
  EXPECT_EQ(controller->client_uses().back().tasks, 1u);
  expect_kept_and_counted();
}

TEST_F(SavedMemory, ARunWaitsForASave) {  // and the save goes on
  put(kA, kFirst, 900);
  save(kA, kFirst);
  release(kFirst, {kA});
  settle_but_saves();
  run(0, {}, kB);
  command(CommandKind::kTask, kFirst, {}, Handle::make(31, 1), {});  // "write"
  command(CommandKind::kBackend, kFirst, {}, {}, {});                // "the save is over"
  settle_but_saves();
  for (int i = 0; i < 20; ++i) {  // many graces
    let_pass(1ms);
    settle_but_saves();
  }
  EXPECT_EQ(controller->client_uses().back().held, 1u);
  EXPECT_EQ(hosts[0]->backend.commands, 1u);
  expect_counted();
  settle();
  EXPECT_EQ(controller->client_uses().back().held, 0u);
  EXPECT_EQ(controller->stats().refused, 0u);
  expect_kept_and_counted();
}

TEST_F(SavedMemory, ARunThatASaveDoesNotMakeRoomFor) {  // it is refused when the save is over
  put(kA, kFirst, 950);
  save(kA, kFirst);
  settle_but_saves();
  run(0, {}, kB);
  settle_but_saves();
  EXPECT_EQ(controller->client_uses().back().held, 1u);
  settle();
  for (int i = 0; i < 1000 && controller->client_uses().back().held != 0; ++i) {
    let_pass(1ms);
    settle();
  }
  EXPECT_EQ(controller->client_uses().back().held, 0u);
  EXPECT_EQ(controller->stats().refused, 1u);
  expect_kept_and_counted();
}

TEST_F(SavedMemory, ASaveWhoseStepsWaitBehindARestore) {  // the restore is refused, and the save goes on
  put(kA, kFirst, 900);
  save(kA, kFirst);
  release(kFirst, {kA});
  settle_but_saves();
  put(kB, kFirst, set_of(kFirst), kWorth, {1, kWorth}, CommandKind::kTask);
  command(CommandKind::kTask, kFirst, {}, Handle::make(31, 1), {});  // "write"
  settle_but_saves();
  EXPECT_EQ(controller->client_uses().back().held, 2u);
  for (int i = 0; i < 1000 && controller->client_uses().back().held != 0; ++i) {
    let_pass(1ms);
    settle_but_saves();
  }
  EXPECT_EQ(controller->client_uses().back().held, 0u);
  EXPECT_EQ(controller->stats().refused, 1u);
  expect_kept_and_counted();
}

TEST_F(SavedMemory, SavesWithoutEnd) {
  put(kA, kFirst);
  for (uint64_t i = 0; i <= kMostHolds && is_there(); ++i) {
    save(kA, kFirst, Handle::make(30, 1));
    if (i % 128 == 0) settle_but_saves();
  }
  settle_but_saves();
  EXPECT_FALSE(is_there());
  settle();
  leave();
}

}  // namespace
}  // namespace pathways::test::test_saved_memory
