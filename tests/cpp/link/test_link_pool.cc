// Links that one thread sends for.
//
//   POOL-1   LinkPool.NothingIsMissed, LinkPool.AMarkBeforeItsHostIsKnown, LinkPool.FullRings
//   POOL-2   LinkPool.WhoHadFramesGoesBehindTheOthers
#include <atomic>
#include <set>
#include <thread>

#include "link/link_ends.h"
#include "link/link_pool.h"

namespace pathways::test::test_link_pool {
namespace {

Bytes numbered(uint64_t number) { return joined(RunDoneRecord{{RecordKind::kRunDone, 0, 0}, number, 1, 1, 0}); }
uint64_t number_of(const Bytes& record) { return read_record<RunDoneRecord>(record).tag; }

/// The pool's clock: after the first sweep it goes back, so that no other sweep comes, and a mark or a ring that is
/// missed is missed for ever.
std::atomic<int64_t> pool_clock_ns{0};
int64_t pool_clock() { return pool_clock_ns.load(); }
constexpr int64_t kHourNs = 3'600'000'000'000;

/// A machine with one host, whose link is in a pool at the head.
struct PooledMachine {
  PooledMachine(LinkHub& head, const std::shared_ptr<LinkPool>& pool, Segment& head_controller, uint32_t host)
      : head_controller(head_controller), host(host) {
    at_head = MachineLink::open(head, MachineLink::End::kHead, monotonic_ns, pool);
    here = MachineLink::open(hub, MachineLink::End::kAgent);
  }
  ~PooledMachine() {
    at_head->close();
    here->close();
  }
  /// The host's rings, new ones each time.
  void start(int32_t incarnation) {
    twin = std::make_shared<Segment>(HostBlock::make(host, 1, Machine::kSizes, false));
    own = std::make_shared<Segment>(HostBlock::make(host, 1, Machine::kSizes, false));
    at_head->add_host(host, incarnation, HostView(*twin), ControllerBlock::attach(head_controller), twin);
    here->add_host(host, incarnation, HostView(*own), ControllerBlock::attach(agent_controller), own);
    inbox = HostView(*own).inbox();
  }

  Segment& head_controller;
  const uint32_t host;
  LinkHub hub;
  Segment agent_controller = ControllerBlock::make(false);
  std::shared_ptr<MachineLink> at_head, here;
  std::shared_ptr<Segment> twin, own;
  ByteRing::Consumer inbox;
};

struct PooledHead {
  explicit PooledHead(uint32_t machines) {
    pool_clock_ns.store(kHourNs);
    for (uint32_t m = 0; m < machines; ++m) {
      // Hosts and slots have different numbers.
      this->machines.push_back(std::make_unique<PooledMachine>(hub, pool, controller_segment, machines - 1 - m));
      this->machines.back()->start(0);
      pool->resume(this->machines.back()->at_head->slot());
    }
    EXPECT_EQ(send_all().size(), machines);  // the first pings
    pool_clock_ns.store(0);
  }
  PooledMachine& at_slot(uint32_t slot) {
    return **std::ranges::find_if(machines, [&](const auto& each) { return each->at_head->slot() == slot; });
  }
  Outbox outbox(PooledMachine& to) {
    return {HostView(*to.twin).to_host(), &pool->hosts().doorbell, &pool->hosts().bitmap, to.host};
  }
  /// Everything that the pool has, to its machine; returns the slots that had something, in their order.
  std::vector<uint32_t> send_all() {
    std::vector<uint32_t> slots;
    while (auto found = pool->collect(buffer)) {
      EXPECT_EQ(found->error, "");
      at_slot(found->slot).here->deliver(std::span(buffer).first(found->bytes));
      slots.push_back(found->slot);
    }
    return slots;
  }

  std::shared_ptr<LinkPool> pool = std::make_shared<LinkPool>(pool_clock);
  Segment controller_segment = ControllerBlock::make(false);
  LinkHub hub;
  std::vector<std::unique_ptr<PooledMachine>> machines;
  Bytes buffer = Bytes(size_t{1} << 20);
};

void send(Outbox& outbox, uint64_t number) {
  const Bytes record = numbered(number);
  outbox.send(static_cast<uint32_t>(record.size()),
              [&](std::byte* to) { std::memcpy(to, record.data(), record.size()); });
}

TEST(LinkPool, OnlyTheMarkedLinkIsAsked) {
  PooledHead head(3);
  Outbox outbox = head.outbox(*head.machines[1]);
  send(outbox, 5);
  (void)outbox.flush();
  EXPECT_EQ(head.send_all(), std::vector<uint32_t>{head.machines[1]->at_head->slot()});
  EXPECT_EQ(number_of(next(head.machines[1]->inbox)), 5U);
  EXPECT_TRUE(head.send_all().empty());
}

TEST(LinkPool, AMarkBeforeItsHostIsKnown) {
  PooledHead head(2);
  PooledMachine& machine = *head.machines[0];
  machine.at_head->remove_host(machine.host);
  Outbox outbox = head.outbox(machine);
  send(outbox, 6);
  (void)outbox.flush();
  EXPECT_TRUE(head.send_all().empty());
  machine.at_head->add_host(machine.host, 0, HostView(*machine.twin), ControllerBlock::attach(head.controller_segment),
                            machine.twin);
  EXPECT_EQ(head.send_all().size(), 1U);
  EXPECT_EQ(number_of(next(machine.inbox)), 6U);
}

TEST(LinkPool, APausedLinkIsNotAsked) {
  PooledHead head(2);
  PooledMachine& machine = *head.machines[0];
  Outbox outbox = head.outbox(machine);
  head.pool->pause(machine.at_head->slot());
  send(outbox, 7);
  (void)outbox.flush();
  EXPECT_TRUE(head.send_all().empty());
  head.pool->resume(machine.at_head->slot());
  EXPECT_EQ(head.send_all().size(), 1U);
  EXPECT_EQ(number_of(next(machine.inbox)), 7U);
}

TEST(LinkPool, WhoHadFramesGoesBehindTheOthers) {
  PooledHead head(3);
  std::vector<Outbox> outboxes;
  for (auto& machine : head.machines) {
    outboxes.push_back(head.outbox(*machine));
    send(outboxes.back(), 1);
    (void)outboxes.back().flush();
  }
  const auto first = head.pool->collect(head.buffer);
  ASSERT_TRUE(first.has_value());
  head.at_slot(first->slot).here->deliver(std::span(head.buffer).first(first->bytes));
  Outbox& again = outboxes[static_cast<size_t>(
      std::ranges::find_if(head.machines, [&](const auto& each) { return each->at_head->slot() == first->slot; }) -
      head.machines.begin())];
  send(again, 2);
  (void)again.flush();
  const auto slots = head.send_all();
  ASSERT_EQ(slots.size(), 3U);
  EXPECT_EQ(slots.back(), first->slot);
}

TEST(LinkPool, AClosedLinkLeaves) {
  PooledHead head(2);
  PooledMachine& machine = *head.machines[0];
  const uint32_t slot = machine.at_head->slot();
  machine.at_head->close();
  head.pool->mark(slot);
  EXPECT_TRUE(head.send_all().empty());
  auto successor = MachineLink::open(head.hub, MachineLink::End::kHead, monotonic_ns, head.pool);
  EXPECT_EQ(successor->slot(), slot);    // the number is free again
  EXPECT_TRUE(head.send_all().empty());  // a new link is paused
  head.pool->resume(slot);
  const auto found = head.pool->collect(head.buffer);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->slot, slot);
  successor->close();
}

TEST(LinkPool, ALinkThatWaitsForItsTurnIsClosed) {
  PooledHead head(2);
  for (auto& machine : head.machines) {
    Outbox outbox = head.outbox(*machine);
    send(outbox, 1);
    (void)outbox.flush();
  }
  const auto first = head.pool->collect(head.buffer);
  ASSERT_TRUE(first.has_value());
  for (auto& machine : head.machines) {
    if (machine->at_head->slot() != first->slot) machine->at_head->close();
  }
  EXPECT_TRUE(head.send_all().empty());
}

TEST(LinkPool, ALinkThatBrokeIsNamed) {
  PooledHead head(2);
  PooledMachine& machine = *head.machines[1];
  const Bytes payload(size_t{1} << 19);
  for (uint64_t sent = 0; sent <= Link::kMostKept + (1U << 20); sent += payload.size()) {
    machine.at_head->enqueue(FrameKind::kPeer, 0, 0, payload);
  }
  const Link::Stats full = machine.at_head->stats();
  EXPECT_GT(full.kept, Link::kMostKept);
  EXPECT_LE(full.kept, full.most_kept);
  const auto found = head.pool->collect(head.buffer);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->slot, machine.at_head->slot());
  EXPECT_NE(found->error.find("does not read"), std::string::npos);
}

/// What came in for a ring of the head that is full goes on when the controller has read it, though nobody marks the
/// link.
TEST(LinkPool, FullRings) {
  const Watchdog watchdog("a full ring at the head");
  PooledHead head(1);
  PooledMachine& machine = *head.machines[0];
  Bytes buffer(size_t{1} << 20);
  ByteRing::Producer outgoing = HostView(*machine.own).outgoing();
  ByteRing::Consumer reports = HostView(*machine.twin).from_host();
  uint64_t sent = 0;
  for (; sent < 4000; ++sent) {
    const Bytes record = numbered(sent);
    const auto room = outgoing.try_reserve(static_cast<uint32_t>(record.size()));
    if (room.empty()) {
      const size_t count = machine.here->collect(buffer);
      ASSERT_NE(count, 0U);
      machine.at_head->deliver(std::span(buffer).first(count));
      --sent;
      continue;
    }
    std::memcpy(room.data(), record.data(), record.size());
    outgoing.publish();
  }
  while (const size_t count = machine.here->collect(buffer)) {
    machine.at_head->deliver(std::span(buffer).first(count));
  }
  ASSERT_GT(sent, 2000U);  // more than the ring takes
  for (uint64_t expected = 0; expected < sent;) {
    (void)head.send_all();
    if (machine.at_head->again_in() == 0ns) head.pool->wait(std::chrono::hours(1));  // until it is worth another look
    uint64_t got = 0;
    for (Bytes record = next(reports); !record.empty(); record = next(reports), ++got) {
      ASSERT_EQ(number_of(record), expected++);
    }
    ASSERT_NE(got, 0U);
  }
}

/// A controller writes to hosts in bursts, a sender sends, connections stop and go on, hosts start anew, and links
/// wake.
TEST(LinkPool, NothingIsMissed) {
  const Watchdog watchdog("the sender of a pool");
  constexpr uint32_t kMachines = 5;
  constexpr uint64_t kRecords = 3000 * kStressScale;
  PooledHead head(kMachines);
  std::atomic<bool> is_over{false};
  std::vector<uint64_t> read(kMachines, 0);
  std::atomic<uint64_t> all_read{0};
  std::thread sender([&] {
    Bytes buffer(size_t{1} << 20);
    while (!is_over.load()) {
      const auto found = head.pool->collect(buffer);
      if (!found) {
        head.pool->wait(std::chrono::hours(1));  // only a mark ends it
        continue;
      }
      ASSERT_EQ(found->error, "");
      PooledMachine& machine = head.at_slot(found->slot);
      machine.here->deliver(std::span(buffer).first(found->bytes));
      for (Bytes record = next(machine.inbox); !record.empty(); record = next(machine.inbox)) {
        ASSERT_EQ(number_of(record), read[machine.host]++);
        all_read.fetch_add(1);
      }
    }
  });
  std::thread disturber([&] {
    std::mt19937_64 random(seed() + 1);
    while (!is_over.load()) {
      const uint32_t slot = head.machines[random() % kMachines]->at_head->slot();
      head.pool->pause(slot);
      head.machines[random() % kMachines]->at_head->wake();
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
      head.pool->resume(slot);
    }
  });

  std::mt19937_64 random(seed());
  std::vector<Outbox> outboxes;
  for (auto& machine : head.machines) outboxes.push_back(head.outbox(*machine));
  std::vector<uint64_t> sent(kMachines, 0);
  uint64_t all_sent = 0;
  while (all_sent < kRecords) {
    for (uint64_t burst = random() % 20; burst != 0; --burst) {
      const size_t m = random() % kMachines;
      send(outboxes[m], sent[m]++);
      ++all_sent;
    }
    for (Outbox& each : outboxes) (void)each.flush();
    // Often to a sender that sleeps.
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  }
  bool is_flushed = false;
  while (!is_flushed) {
    is_flushed = true;
    for (Outbox& each : outboxes) is_flushed = !each.flush() && is_flushed;
  }
  while (all_read.load() < all_sent) std::this_thread::sleep_for(100us);
  is_over.store(true);
  head.pool->wake();
  disturber.join();
  head.pool->wake();
  sender.join();
  for (auto& machine : head.machines) EXPECT_EQ(read[machine->host], sent[kMachines - 1 - machine->host]);
}

}  // namespace
}  // namespace pathways::test::test_link_pool
