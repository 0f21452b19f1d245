// A client whose library does what no correct one does, beside an innocent client: nothing of it runs, or lies on a
// device, that the ledger does not count.
//
//   MEM-6   Accounting.*
//   OWN-1   Accounting.*: the culprit is evicted, with the reason, and the innocent client's run is granted
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "controller/played.h"
#include "support.h"

namespace pathways::test::test_accounting {
namespace {

constexpr GroupId kFirst = 1;  // host 0
constexpr uint32_t kGood = 5;  // plans
constexpr uint32_t kBad = 7;

/// One device of 1000 bytes. Plan `kGood` is client 0's. Client 1 is the culprit, and plan `kBad` is its own.
struct Accounting : Cluster {
  Accounting() : Cluster(64, 2, {1000}, PolicyKind::kFifo, false, std::chrono::milliseconds(250), true) {
    set = controller->add_space_set({0});
    controller->register_plan(kGood, 0, kFirst);
    controller->set_plan_memory(kGood, memory_of(0, 10));
    controller->register_plan(kBad, 1, kFirst);
    join();
  }
  ~Accounting() override { controller.reset(); }  // before the culprit's memory

  /// A plan with one result, which takes `bytes`.
  PlanMemory memory_of(uint32_t client, uint64_t bytes) const {
    return {client, "a plan", {}, {{0, bytes, 0}}, {{kFirst, set, bytes, -1, -1}}, {}};
  }
  void join() {
    number = next_number++;
    bad.reset();
    memories.push_back(std::make_unique<RawClient>());
    controller->add_client(number, memories.back()->block);
    bad = std::make_unique<Client>(Client::Options{number, 64}, memories.back()->block, block);
    pass();
  }
  uint64_t run(Client& client, uint32_t plan, uint32_t results = 1) {
    std::vector<uint64_t> made(results);
    EXPECT_EQ(client.submit({plan, kFirst, std::vector<uint32_t>(results, 1u)}, {}, made.data()), Status::kOk);
    return results == 0 ? 0 : made[0];
  }
  uint64_t put(Client& client, uint64_t bytes, SpaceSetId where) {
    Handle handle;
    EXPECT_EQ(client.allocate(1, &handle), Status::kOk);
    EXPECT_EQ(client.command(CommandKind::kPut, kFirst, handle, {}, {}, where, bytes), Status::kOk);
    return handle.raw;
  }
  void drop(Client& client, uint32_t plan) {
    EXPECT_EQ(client.command(CommandKind::kBackend, kFirst, {}, Handle{plan}, {}), Status::kOk);
  }
  /// The first results of the runs that the first host was granted since the last call, by client.
  std::multimap<uint32_t, uint64_t> granted() {
    std::multimap<uint32_t, uint64_t> found;
    for (auto bytes = hosts[0]->next(); !bytes.empty(); bytes = hosts[0]->next()) {
      if (read_record<RecordHeader>(bytes).kind != RecordKind::kRun) continue;
      const auto record = read_record<RunRecord>(bytes);
      uint64_t result = 0;
      if (record.results != 0) std::memcpy(&result, bytes.data() + sizeof record + record.arguments * 8, 8);
      found.emplace(record.header.client, result);
      hosts[0]->done(record);
    }
    hosts[0]->inbox.release();
    return found;
  }
  void send(const auto& record, uint64_t word);
  /// The culprit is gone for `why`, and no run of it was granted but `runs`; the innocent client's next run is granted.
  void expect_evicted(const std::string& why, size_t runs = 0) {
    for (int i = 0; i < 4; ++i) pass();
    bad->poll_inbox();
    EXPECT_NE(bad->cluster_failure().find(why), std::string::npos) << bad->cluster_failure();
    EXPECT_EQ(controller->stats().clients, 1u) << why;
    run(*good, kGood);
    pass();
    const auto found = granted();
    EXPECT_EQ(found.count(number), runs);
    EXPECT_EQ(found.count(0), 1u);
    pass();
    EXPECT_TRUE(is_up()) << block->failure();
    EXPECT_EQ(good->cluster_status(), ClusterStatus::kUp);
    EXPECT_EQ(controller->stats().live_bytes.front(), 10u) << "the innocent client's result, and nothing else";
  }

  SpaceSetId set = 0;
  uint32_t number = 1, next_number = 1;
  std::vector<std::unique_ptr<RawClient>> memories;
  std::unique_ptr<Client> bad;
};

TEST_F(Accounting, ARunBeforeItsMemoryIsKnown) {  // its library never waits until the program is compiled
  run(*bad, kBad);
  expect_evicted("plan 7, whose memory is not known");
}

TEST_F(Accounting, ARunOfAPlanThatWasDropped) {
  controller->set_plan_memory(kBad, memory_of(1, 100));
  run(*bad, kBad);
  drop(*bad, kBad);
  run(*bad, kBad);
  expect_evicted("plan 7, which its client has dropped", 1);
}

TEST_F(Accounting, ARunOfADroppedPlanBehindAHeldRecord) {  // the drop itself has not come into the order
  controller->set_plan_memory(kBad, memory_of(1, 100));
  put(*good, 950, set);
  pass();
  run(*bad, kBad);
  pass();
  ASSERT_EQ(controller->stats().held, 1u);
  drop(*bad, kBad);
  run(*bad, kBad);
  for (int i = 0; i < 4; ++i) pass();
  bad->poll_inbox();
  EXPECT_NE(bad->cluster_failure().find("plan 7, which its client has dropped"), std::string::npos);
  EXPECT_EQ(granted().count(number), 0u);
  EXPECT_EQ(controller->stats().live_bytes.front(), 950u);
}

TEST_F(Accounting, ARunWithOtherResultsThanItsPlans) {
  controller->set_plan_memory(kBad, memory_of(1, 100));
  for (const uint32_t results : {0u, 2u, 17u}) {
    SCOPED_TRACE(results);
    if (number != 1) {
      controller->register_plan(kBad + number, number, kFirst);
      controller->set_plan_memory(kBad + number, memory_of(number, 100));
    }
    run(*bad, number == 1 ? kBad : kBad + number, results);
    for (int i = 0; i < 4; ++i) pass();
    bad->poll_inbox();
    const std::string why =
        "0 arguments and " + std::to_string(results) + " results, but the plan has 0 arguments and 1";
    EXPECT_NE(bad->cluster_failure().find(why), std::string::npos) << bad->cluster_failure();
    EXPECT_EQ(granted().count(number), 0u);
    join();
  }
}

/// Its hosts could not get their parts of it.
TEST_F(Accounting, ARunWithOtherArgumentsThanItsPlans) {
  PlanMemory memory = memory_of(1, 100);
  memory.argument_groups = {kFirst};
  controller->set_plan_memory(kBad, memory);
  run(*bad, kBad);
  for (int i = 0; i < 4; ++i) pass();
  bad->poll_inbox();
  EXPECT_NE(bad->cluster_failure().find("has 0 arguments and 1 results, but the plan has 1"), std::string::npos)
      << bad->cluster_failure();
  EXPECT_EQ(granted().count(number), 0u);
}

/// Sends a record with one word behind it, as no client of ours would.
void Accounting::send(const auto& record, uint64_t word) {
  bad.reset();
  {
    auto ring = memories.back()->block->ring_to_controller()->claim_producer();
    auto room = ring.try_reserve(sizeof record + sizeof word);
    ASSERT_FALSE(room.empty());
    std::memcpy(room.data(), &record, sizeof record);
    std::memcpy(room.data() + sizeof record, &word, sizeof word);
    ring.publish();
  }
  bad = std::make_unique<Client>(Client::Options{number, 8}, memories.back()->block, block);
}

TEST_F(Accounting, HandlesThatTheLedgerHasNoPlaceFor) {
  for (const Handle handle : {Handle::make(1u << 20, 1), Handle::make(5, 0), Handle{}}) {
    for (const auto kind : {CommandKind{0}, CommandKind::kPut, CommandKind::kTask, CommandKind::kRename}) {
      SCOPED_TRACE(::testing::Message() << handle.raw << " " << static_cast<int>(kind));
      if (kind == CommandKind{0}) {
        controller->register_plan(kBad + number, number, kFirst);
        controller->set_plan_memory(kBad + number, memory_of(number, 100));
        send(RunRecord{{RecordKind::kRun, 0, 1}, 1, 0, kBad + number, kFirst, 0, 1}, handle.raw);
      } else if (kind == CommandKind::kRename) {
        send(CommandRecord{{RecordKind::kCommand, 6, 1}, 0, 0, kFirst, 8}, handle.raw);
        // A pair is two words; the first word alone renames nothing.
        pass();
        EXPECT_EQ(controller->stats().clients, 2u);
        const Handle there{put(*bad, 100, set)};
        const uint64_t pair[] = {handle.raw, there.raw};
        ASSERT_EQ(bad->command(kind, kFirst, {}, {}, std::as_bytes(std::span(pair))), Status::kOk);
      } else {
        send(CommandRecord{{RecordKind::kCommand, static_cast<uint16_t>(kind), 1}, handle.raw, 0, kFirst, 8, 100, set},
             0);
      }
      for (int i = 0; i < 4; ++i) pass();
      bad->poll_inbox();
      EXPECT_NE(bad->cluster_failure().find("out of range"), std::string::npos) << bad->cluster_failure();
      EXPECT_EQ(controller->stats().live_bytes.front(), 0u);
      EXPECT_EQ(granted().count(number), 0u);
      join();
    }
  }
}

TEST_F(Accounting, TheHostIsToldWhatIsBooked) {  // by the controller, whatever the client writes
  CommandRecord put{
      {RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kPut), 1}, Handle::make(3, 1).raw, 0, kFirst, 8};
  put.space_devices = ~uint64_t{0};
  send(put, 0);  // it is booked nowhere
  pass();
  EXPECT_EQ(read_record<CommandRecord>(hosts[0]->next()).space_devices, 0u);
  put.space_devices = 0;
  put.space_set = set;
  send(put, 0);
  pass();
  EXPECT_NE(read_record<CommandRecord>(hosts[0]->next()).space_devices, 0u);
  for (const SpaceSetId each : {set, SpaceSetId{1}}) {  // two hosts of three devices
    MemoryLedger ledger({1, 1, 1, 1, 1, 1, 1, 1}, 6, 2);
    ASSERT_EQ(ledger.add_space_set({0, 2, 3}), 0u);
    ASSERT_EQ(ledger.add_space_set({7, 5, 4, 6}), 1u);  // the last two are hosts' memory for transfers
    EXPECT_EQ(ledger.devices_of(each, 0), each == 0 ? 0b101u : 0u);
    EXPECT_EQ(ledger.devices_of(each, 1), each == 0 ? 0b001u : 0b110u);
    EXPECT_EQ(ledger.devices_of(kNoSpaceSet, 0), 0u);
  }
}

/// Whatever a client does with its plans and whatever waits: a run that a host gets is counted.
TEST_F(Accounting, RunsAtRandom) {
  std::mt19937_64 random(20);
  const auto below = [&](uint64_t n) { return static_cast<uint32_t>(random() % n); };
  uint32_t plan = 100;
  uint64_t counted = 0, evicted = 0;
  controller->remove_client(number);
  for (int round = 0; round < 300 * kStressScale; ++round) {
    SCOPED_TRACE(round);
    struct Known {
      bool has_memory = false, is_dropped = false;
    };
    std::map<uint32_t, Known> plans;
    std::map<uint64_t, bool> is_sound;  // by first result
    bool is_out = false;                // it has sent what no correct client sends
    join();
    for (int step = 0; step < 24; ++step) {
      switch (below(6)) {
        case 0: {
          controller->register_plan(++plan, number, kFirst);
          plans[plan].has_memory = below(8) != 0;
          if (plans[plan].has_memory) controller->set_plan_memory(plan, memory_of(number, 50 + below(200)));
          break;
        }
        case 1:
          if (!plans.empty()) {
            const auto at = std::next(plans.begin(), below(plans.size()));
            if (at->second.is_dropped || below(3) != 0) break;
            drop(*bad, at->first);
            at->second.is_dropped = true;
          }
          break;
        case 2:
          put(*bad, below(300), set);
          break;
        default:
          if (!plans.empty()) {
            const auto at = std::next(plans.begin(), below(plans.size()));
            const bool sound = at->second.has_memory && !at->second.is_dropped;
            is_sound[run(*bad, at->first)] = sound && !is_out;
            is_out = is_out || !sound;
          }
      }
      if (below(3) == 0) pass();
    }
    for (int i = 0; i < 3; ++i) pass();
    for (const auto& [client, result] : granted()) {
      if (client != number) continue;
      ++counted;
      ASSERT_TRUE(is_sound[result]) << "a run that the ledger does not count reached a host";
    }
    pass();
    EXPECT_LE(controller->stats().live_bytes.front(), 1000u);
    bad->poll_inbox();
    EXPECT_EQ(!bad->cluster_failure().empty(), is_out) << bad->cluster_failure();
    if (is_out) {
      ++evicted;
    } else {
      controller->remove_client(number);
    }
    (void)granted();
    pass();
    EXPECT_EQ(controller->stats().live_bytes.front(), 0u);
    EXPECT_EQ(controller->stats().clients, 1u);
  }
  EXPECT_GT(counted, 100u);
  EXPECT_GT(evicted, 20u);
}

}  // namespace
}  // namespace pathways::test::test_accounting
