// Hosts that are lost and come back, between a client and a controller; the test plays the hosts.
//
//   ERR-2    all of it: what fails, what waits, what goes on, and what a successor is told
//   GANG-1   Loss.NoBreach: a lost host's gangs are missed by nobody
//   ORD-1    Loss.SurvivorsHearOfItInTheOrder
//   OWN-1    Loss.AClientLeavesMeanwhile, Loss.WhatItWasLentComesBack
//   ARENA-5  Loss.WhatItWasLentComesBack
#include "controller/played_loss.h"
#include "support.h"

namespace pathways::test::test_controller_loss {
namespace {

TEST_F(Loss, PendingFuturesFailAndReadyOnesDoNot) {
  const uint64_t ready = put(3), pending = put(3), elsewhere = put(1), token = fetch(ready, 3);
  pass();
  complete(ready);
  lose(1);
  pass();
  EXPECT_EQ(state(ready), FutureState::kReady);
  EXPECT_EQ(why(pending), kWhy);
  EXPECT_EQ(why(token), kWhy);
  EXPECT_EQ(state(elsewhere), FutureState::kPending);
  EXPECT_TRUE(is_up());
}

TEST_F(Loss, WhatItWasLentComesBack) {
  Arena* arena = good_memory.block->client_arena();
  const auto lease_out = [&](GroupId group, uint64_t borrowers) {
    Lease lease{0, borrowers, 0};
    EXPECT_EQ(arena->allocate(100, &lease.offset), Status::kOk);
    Handle handle;
    EXPECT_EQ(good->allocate(1, &handle), Status::kOk);
    EXPECT_EQ(good->command(CommandKind::kPut, group, handle, {}, {}, kNoSpaceSet, 0, lease), Status::kOk);
    pass();
    return lease.offset;
  };
  const uint64_t heard = lease_out(2, 0b11), elsewhere = lease_out(1, 0b01), given_back = lease_out(3, 0b10);
  arena->return_lease(given_back, 1);
  for (int i = 0; i < 3; ++i) submit(3);
  pass();
  const uint64_t waiting = lease_out(3, 0b10);  // the window is 2: the put waits behind the third run
  lose(1);
  pass();
  good->poll_inbox();
  EXPECT_EQ(arena->was_references(heard), 2u);  // our own, and host 0
  EXPECT_EQ(arena->was_references(elsewhere), 2u);
  EXPECT_EQ(arena->was_references(given_back), 1u);
  EXPECT_EQ(arena->was_references(waiting), 2u);  // the successor hears of it
  restore(1);
  pass();
  (void)hosts[1]->next_run();
  EXPECT_EQ(hosts[1]->next_kind(), RecordKind::kCommand);
  lose(1);
  pass();
  good->poll_inbox();
  EXPECT_EQ(arena->was_references(waiting), 1u);
}

TEST_F(Loss, APlanIsForgottenWhenTheOrderHasPassedItsCommand) {
  const auto forget = [&](GroupId group, uint64_t plan) {
    EXPECT_EQ(good->command(CommandKind::kBackend, group, {}, Handle{plan}, {}), Status::kOk);
    pass();
  };
  for (int i = 0; i < 3; ++i) submit(3);  // the window is 2
  pass();
  forget(3, 41);
  forget(1, 42);
  EXPECT_EQ(controller->take_forgotten(), (std::vector<uint32_t>{42}));
  lose(1);
  pass();
  EXPECT_TRUE(controller->take_forgotten().empty());  // the third run may name it, and goes to the successor
  restore(1);
  pass();
  EXPECT_EQ(hosts[1]->next_kind(), RecordKind::kRun);
  EXPECT_EQ(hosts[1]->next_kind(), RecordKind::kCommand);
  EXPECT_EQ(hosts[1]->next_kind(), RecordKind{});  // what others forgot is not told again
  EXPECT_EQ(controller->take_forgotten(), (std::vector<uint32_t>{41}));
}

TEST_F(Loss, GrantedRunsAreOverAndGiveTheirCreditBack) {
  const uint64_t result = submit(3);
  pass();
  (void)hosts[1]->next_run();
  EXPECT_EQ(good->in_flight(), 1u);
  lose(1);
  pass();
  EXPECT_EQ(good->in_flight(), 0u);
  EXPECT_EQ(why(result), kWhy);
}

TEST_F(Loss, WaitingEntriesRunOnTheSuccessor) {
  std::vector<uint64_t> results;
  for (int i = 0; i < 4; ++i) results.push_back(submit(3));
  const uint64_t waiting_put = put(3);
  fetch(results[0], 3);
  pass();  // the window is 2: two wait, and the put and the fetch behind them
  lose(1);
  results.push_back(submit(3));  // submitted while it is lost
  pass();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(why(results[static_cast<size_t>(i)]), kWhy);
  for (int i = 2; i < 5; ++i) EXPECT_EQ(state(results[static_cast<size_t>(i)]), FutureState::kPending);
  EXPECT_EQ(state(waiting_put), FutureState::kPending);
  EXPECT_EQ(controller->stats().waiting, 5u);
  restore(1);
  pass();
  const RunRecord third = hosts[1]->next_run();
  EXPECT_EQ(third.order, 3u);
  EXPECT_EQ(hosts[1]->next_run().order, 4u);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(hosts[1]->next_kind(), RecordKind::kCommand);
  EXPECT_TRUE(hosts[1]->next().empty());
  hosts[1]->done(third);
  pass();
  EXPECT_EQ(hosts[1]->next_run().order, 7u);
}

TEST_F(Loss, OthersGoOn) {
  submit(3);
  pass();
  lose(1);
  pass();
  EXPECT_EQ(hosts[0]->next_kind(), RecordKind::kHostLost);
  for (int i = 0; i < 3; ++i) {
    submit(3);  // piles up
    submit(1);
    pass();
    hosts[0]->done(hosts[0]->next_run());
  }
  pass();
  EXPECT_EQ(good->in_flight(), 3u);
}

TEST_F(Loss, SurvivorsHearOfItInTheOrder) {
  submit(2);
  pass();
  lose(1);
  submit(1);
  pass();
  EXPECT_EQ(hosts[0]->next_run().order, 1u);
  const auto bytes = hosts[0]->next();
  HostLostRecord record;
  ASSERT_GE(bytes.size(), sizeof record);
  std::memcpy(&record, bytes.data(), sizeof record);
  EXPECT_TRUE(record.header.kind == RecordKind::kHostLost && record.hosts == 1 && record.loss == 1);
  uint32_t number;
  std::memcpy(&number, bytes.data() + sizeof record, sizeof number);
  EXPECT_EQ(number, 1u);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()) + sizeof record + 8, record.bytes), kWhy);
  EXPECT_EQ(hosts[0]->next_run().order, 2u);
  EXPECT_EQ(hosts[2]->next_kind(), RecordKind::kHostLost);
}

TEST_F(Loss, NoBreach) {
  submit(2);
  submit(2);
  pass();
  hosts[1]->done(hosts[1]->next_run(), 2, 2);
  lose(1);  // its last words are heard
  hosts[0]->done(hosts[0]->next_run(), 2, 2);
  hosts[0]->done(hosts[0]->next_run(), 2, 2);
  pass();
  EXPECT_TRUE(is_up());
  EXPECT_EQ(good->in_flight(), 0u);
  EXPECT_EQ(controller->stats().gangs[1], 2u);
  restore(1);
  EXPECT_EQ(controller->stats().gangs[1], 0u);
  submit(2);
  pass();
  EXPECT_EQ(hosts[0]->next_kind(), RecordKind::kHostLost);
  hosts[0]->done(hosts[0]->next_run(), 2, 2);
  hosts[1]->done(hosts[1]->next_run(), 0, 2);
  EXPECT_THROW(pass(), Error);  // and it is checked again
}

TEST_F(Loss, RunsAcrossIslandsHoldNobodyUp) {
  submit(3);
  submit(3);
  PlanMemory memory;
  memory.results.push_back({2, kNoSpaceSet, 0, -1, -1});
  controller->set_plan_memory(6, memory);
  uint64_t across = 0;
  ASSERT_EQ(good->submit({6, 2, {2}}, {}, &across), Status::kOk);
  const uint64_t behind = submit(1);  // wait for host 1's window, and behind that
  pass();
  EXPECT_TRUE(hosts[0]->next().empty());
  lose(1);
  pass();
  EXPECT_EQ(why(across), kWhy);
  EXPECT_EQ(controller->stats().dropped, 1u);
  EXPECT_EQ(hosts[0]->next_kind(), RecordKind::kHostLost);
  // In the place of the run, so that what comes behind fails by the same words (ERR-1).
  const auto failed = hosts[0]->next();
  CommandRecord command{};
  std::memcpy(&command, failed.data(), std::min(failed.size(), sizeof command));
  EXPECT_TRUE(command.header.detail == static_cast<uint16_t>(CommandKind::kFail) && command.handle == across);
  EXPECT_EQ(hosts[0]->next_run().order, 4u);
  EXPECT_EQ(state(behind), FutureState::kPending);
  // A run across, submitted now, waits with its client; another client's work does not wait for it.
  RawClient raw;
  Client other({1, 8}, raw.block, block);
  controller->add_client(1, raw.block);
  const uint64_t later = submit(2);
  pass();
  uint64_t result = 0;
  ASSERT_EQ(other.submit({5, 1, {1}}, {}, &result), Status::kOk);
  pass();
  const RunRecord others = hosts[0]->next_run();
  EXPECT_EQ(others.header.client, 1u);
  hosts[0]->done(others);
  restore(1);
  pass();
  EXPECT_EQ(hosts[1]->next_run().order, hosts[0]->next_run().order);
  EXPECT_EQ(state(later), FutureState::kPending);
  controller->remove_client(1);
}

TEST_F(Loss, OfARunAcrossOnlyWhatLiesThereFails) {
  PlanMemory memory;
  memory.results = {{1, kNoSpaceSet, 0, -1, -1}, {3, kNoSpaceSet, 0, -1, -1}};
  controller->set_plan_memory(5, memory);
  uint64_t granted[2] = {}, waiting[2] = {}, results[2] = {};
  ASSERT_EQ(good->submit({5, 2, {1, 1}}, {}, granted), Status::kOk);
  ASSERT_EQ(good->submit({5, 2, {1, 1}}, {}, results), Status::kOk);
  ASSERT_EQ(good->submit({5, 2, {1, 1}}, {}, waiting), Status::kOk);
  pass();
  lose(1);
  pass();
  EXPECT_EQ(state(granted[0]), FutureState::kPending);  // its host says what becomes of it
  EXPECT_EQ(why(granted[1]), kWhy);
  EXPECT_EQ(why(waiting[0]), kWhy);  // no host ever will
  EXPECT_EQ(why(waiting[1]), kWhy);
}

TEST_F(Loss, MemoryOfWhatIsLostIsFree) {
  controller.reset();
  for (uint32_t h = 0; h < 3; ++h) hosts[h] = std::make_unique<PlayedHost>(h, 3, block);
  good.reset();
  good_memory = RawClient();
  good = std::make_unique<Client>(Client::Options{0, 8}, good_memory.block, block);
  Controller::Options options;
  options.budgets = {100};
  controller = std::make_unique<Controller>(options, block,
                                            std::vector<HostView>{hosts[0]->block, hosts[1]->block, hosts[2]->block});
  controller->add_group(3, {1});
  controller->add_client(0, good_memory.block);
  const SpaceSetId set = controller->add_space_set({0});
  const auto put_bytes = [&](uint64_t bytes) {
    Handle handle;
    EXPECT_EQ(good->allocate(1, &handle), Status::kOk);
    EXPECT_EQ(good->command(CommandKind::kPut, 3, handle, {}, {}, set, bytes), Status::kOk);
    return handle.raw;
  };
  const uint64_t old = put_bytes(80);
  pass();
  EXPECT_EQ(controller->stats().live_bytes[0], 80u);
  lose(1);
  EXPECT_EQ(controller->stats().live_bytes[0], 0u);
  const uint64_t next = put_bytes(80);
  pass();
  EXPECT_EQ(controller->stats().live_bytes[0], 80u);
  good->release(Handle{old}, 3, uint64_t{1} << 30);  // again is nothing
  pass();
  EXPECT_EQ(controller->stats().live_bytes[0], 80u);
  restore(1);
  EXPECT_EQ(hosts[1]->next_kind(), RecordKind::kCommand);
  EXPECT_EQ(state(next), FutureState::kPending);
}

TEST_F(Loss, ASuccessorHearsTheDefinitionsFirst) {
  const auto define = [&](GroupId group, const char* text, uint64_t number) {
    ASSERT_EQ(good->command(CommandKind::kBackend, group, Handle{number}, {}, std::as_bytes(std::span{text, 8})),
              Status::kOk);
  };
  define(3, "D old   ", 1);
  define(3, "E over  ", 0);  // a command that is done with when it was heard
  define(3, "D first ", 1);
  define(1, "D other ", 2);
  define(3, "D second", 3);
  submit(3);
  submit(3);
  submit(3);
  define(3, "D late  ", 4);  // still waits when the host is lost
  pass();
  lose(1);
  restore(1);
  const auto text = [&] {
    const auto bytes = hosts[1]->next();
    return bytes.size() < sizeof(CommandRecord) + 8
               ? std::string()
               : std::string(reinterpret_cast<const char*>(bytes.data()) + sizeof(CommandRecord), 8);
  };
  EXPECT_EQ(text(), "D first ");
  EXPECT_EQ(text(), "D second");
  EXPECT_EQ(hosts[1]->next_run().order, 8u);
  EXPECT_EQ(text(), "D late  ");
  EXPECT_TRUE(hosts[1]->next().empty());
  lose(1);
  restore(1);
  for (const char* want : {"D first ", "D second", "D late  "}) EXPECT_EQ(text(), want);
}

TEST_F(Loss, AClientLeavesMeanwhile) {
  RawClient memory;
  {
    Client leaves({1, 8}, memory.block, block);
    controller->add_client(1, memory.block);
    uint64_t results[4] = {};
    for (uint64_t& result : results) ASSERT_EQ(leaves.submit({5, 3, {1}}, {}, &result), Status::kOk);
    pass();
    lose(1);
    controller->remove_client(1);
  }
  memory = RawClient();
  EXPECT_EQ(controller->stats().dropped, 2u);
  pass();
  for (const uint32_t h : {0u, 2u}) {
    EXPECT_EQ(hosts[h]->next_kind(), RecordKind::kHostLost);
    EXPECT_EQ(hosts[h]->next_kind(), RecordKind::kClientGone);
  }
  EXPECT_TRUE(controller->is_idle());  // it may never come back, so nothing waits for it
  restore(1, {1});
  pass();
  EXPECT_EQ(hosts[1]->next_kind(), RecordKind::kClientGone);
  EXPECT_TRUE(hosts[1]->next().empty());
}

TEST_F(Loss, WhatTheControllerSaysForAClientConcernsNoLostHost) {
  lose(1);
  controller->command_for(0, CommandKind::kOffload, {});
  pass();
  for (const uint32_t h : {0u, 2u}) {
    EXPECT_EQ(hosts[h]->next_kind(), RecordKind::kHostLost);
    EXPECT_EQ(hosts[h]->next_kind(), RecordKind::kCommand);
  }
  EXPECT_TRUE(controller->is_idle());
  restore(1);
  pass();
  EXPECT_TRUE(hosts[1]->next().empty());
}

TEST_F(Loss, TwoHostsAndAgain) {
  const uint64_t first = submit(2);
  pass();
  EXPECT_EQ(controller->lose_hosts({0, 1}, kWhy), 1u);
  pass();
  EXPECT_EQ(why(first), kWhy);
  EXPECT_EQ(good->in_flight(), 0u);
  const uint64_t second = submit(2);
  pass();
  EXPECT_EQ(controller->stats().waiting, 1u);  // all its hosts are lost: it waits in its place
  EXPECT_THROW(controller->lose_hosts({1}, kWhy), Error);
  EXPECT_THROW(controller->restore_host(2, hosts[2]->block), Error);
  losses = 1;
  restore(0);
  pass();
  EXPECT_TRUE(hosts[0]->next().empty());
  lose(0);
  pass();
  EXPECT_EQ(state(second), FutureState::kPending);
  restore(0);
  restore(1);
  pass();
  const RunRecord run = hosts[0]->next_run();
  hosts[0]->done(run);
  hosts[1]->done(hosts[1]->next_run());
  pass();
  EXPECT_EQ(good->in_flight(), 0u);
  EXPECT_TRUE(controller->is_idle());
}

TEST_F(Loss, WhileItRuns) {
  const Watchdog watchdog("losses beside a running controller");
  controller->start();
  for (int i = 0; i < 20; ++i) {
    const uint64_t result = submit(3);
    lose(1);
    restore(1);
    while (state(result) == FutureState::kPending) {  // it was granted before the loss, or it is now
      const auto bytes = hosts[1]->next();
      if (bytes.empty()) continue;
      RunRecord record;
      std::memcpy(&record, bytes.data(), sizeof record);
      complete(result);
      hosts[1]->done(record);
    }
    good->forget(Handle{result});
  }
  while (good->in_flight() != 0) std::this_thread::yield();
  controller->stop();
}

}  // namespace

/// A host without a block at the start counts as lost: what needs it waits until it comes.
TEST(AbsentHosts, ComeLater) {
  Segment controller_segment = ControllerBlock::make(false);
  ControllerBlock* block = ControllerBlock::attach(controller_segment);
  PlayedHost first(0, 2, block), second(1, 2, block);
  Controller::Options options{.budgets = std::vector<uint64_t>(2 * 3 + 3, 100), .devices = 2 * 3};
  options.host_ring_bytes = 4096;
  options.clock = test_clock;
  EXPECT_EQ(options.name_of_space(3), "device 3 of host 1");
  EXPECT_EQ(options.name_of_space(8), "host 2's memory for transfers");
  RawClient memory;
  Client client(Client::Options{.id = 0, .window = 8, .clock = test_clock}, memory.block, block);
  Controller controller(std::move(options), block, {HostView(first.block), HostView(), HostView()});
  controller.add_group(1, {0});
  controller.add_group(2, {0, 1});
  controller.add_client(0, memory.block);
  const auto pass = [&] {
    while (controller.step() != 0) {
    }
  };
  uint64_t result = 0;
  ASSERT_EQ(client.submit({5, 1, {1}}, {}, &result), Status::kOk);
  ASSERT_EQ(client.submit({5, 2, {2}}, {}, &result), Status::kOk);
  pass();
  first.done(first.next_run());
  pass();
  EXPECT_TRUE(first.next().empty()) << "its gang is not whole";
  EXPECT_THROW(controller.lose_hosts({1}, "again"), Error);
  controller.restore_host(1, HostView(second.block));
  pass();
  EXPECT_EQ(first.next_run().tag, second.next_run().tag);
  EXPECT_EQ(controller.stats(2).gangs.size(), 2u);
  EXPECT_EQ(controller.stats(2).live_bytes.size(), 2 * 2 + 2u) << "of the first two hosts";
  EXPECT_EQ(controller.stats().live_bytes.size(), 2 * 3 + 3u);
}

}  // namespace pathways::test::test_controller_loss
