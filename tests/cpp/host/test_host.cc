// A host between its rings: what it registers, what it says to its peers, and what it does when a ring is full.
//
//   PLAN-4   Plans.RefusedAtOnce: plans of other hosts, or that need rings which are not there
//   (posts)  Peers.LongPosts: a receive-ready message longer than a record travels in pieces
//   ERR-2    Peers.LostAndReplaced: at any moment of a run across; the next runs are as with new rings
//   PEER-1   Peers.NonsenseClosesTheChannel
//   GANG-1   Attached.HandlesAreRefusedByTheNumberThatTheHostWasGiven: so all hosts refuse the same runs
//   OWN-1    Leaving.*: a client's memory is used until the order has passed its end, and never after
//   GANG-2   Peers.HearWhatWasSaidToThemDuringALaunch: when their rings were full, too
//   (full)   Peers.FullRings: nobody rings when a ring has room again, so the host looks by itself
#include "host/host.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <numeric>

#include "controller/controller.h"
#include "executor/stub_backend.h"
#include "messages/peer_records.h"
#include "simulate/simulation.h"
#include "support.h"

namespace pathways::test::test_host {
namespace {

/// Receives want `width` pieces from each source; sends write down what they were told.
class WideBackend final : public StubBackend {
 public:
  explicit WideBackend(size_t width) : width_(width) {}
  Status launch(const NodeContext&, std::span<const Value>, std::span<Value> outputs) override {
    for (Value& output : outputs) output = this;
    ++launches;
    if (in_launch) in_launch();
    return Status::kOk;
  }
  Value placeholder(const NodeContext&, uint32_t) override { return this; }
  Status transfer(const NodeContext&, Value, Value* output) override {
    *output = this;
    return Status::kOk;
  }
  Status begin_receive(const NodeContext& context, std::vector<ReceiveBuffers>* receives) override {
    std::vector<uint64_t> offsets(width_);
    std::iota(offsets.begin(), offsets.end(), context.order * 100000);
    receives->push_back({0, offsets});
    return Status::kOk;
  }
  void send(const NodeContext& context, Value, std::span<const ReceiveBuffers> posts, uint64_t,
            std::span<SendState> states) override {
    for (size_t p = 0; p < posts.size(); ++p) {
      states[p] = SendState::kDone;
      const std::vector<uint64_t>& offsets = posts[p].offsets;
      EXPECT_EQ(posts[p].source, 1u);
      if (offsets.empty()) continue;  // the other one has closed the channel
      EXPECT_EQ(offsets.size(), width_);
      for (size_t i = 0; i < offsets.size(); ++i) EXPECT_EQ(offsets[i], context.order * 100000 + i);
      ++sends;
    }
  }
  Status finish_receive(const NodeContext&, Value* output) override {
    *output = this;
    ++received;
    return Status::kOk;
  }
  void abandon_receive(const NodeContext&) override { ++abandoned; }
  void forget_client(uint32_t client) override { gone.push_back(client); }
  std::string_view last_error() const override { return "not here"; }

  uint32_t sends = 0, received = 0, abandoned = 0, launches = 0;
  std::function<void()> in_launch;
  std::vector<uint32_t> gone;

 private:
  size_t width_;
};

struct TwoHosts {
  explicit TwoHosts(size_t width, uint32_t peer_ring_bytes = 4096, bool gangs_block = false)
      : backends{WideBackend(width), WideBackend(width)} {
    std::vector<HostView> blocks;
    for (uint32_t h = 0; h < 2; ++h) {
      segments.push_back(HostBlock::make(h, 2, {1u << 16, peer_ring_bytes, 0}, false));
      blocks.push_back(HostBlock::attach(segments.back()));
    }
    block = ControllerBlock::attach(controller_segment);
    controller = std::make_unique<Controller>(Controller::Options{1024, {}}, block, blocks);
    for (uint32_t h = 0; h < 2; ++h) {
      hosts.push_back(std::make_unique<Host>(Host::Options{.host = h, .quirks = {0, gangs_block, gangs_block}}, blocks,
                                             block, backends[h]));
      hosts[h]->attach_client(0, client_block, futures());
    }
    controller->add_client(0, client_block);
    client = std::make_unique<Client>(Client::Options{0, 1024}, client_block, block);
  }
  uint32_t futures() const { return ClientView(client_block).futures().capacity(); }
  /// A call on host 0 whose value goes to host 1.
  ModelledProgram program() {
    ModelledProgram program;
    const uint32_t from = program.add_slice({{0}, 1}), to = program.add_slice({{1}, 1});
    program.add_result(program.add_transfer(program.add_call(from, {}), to));
    return program;
  }

  /// Puts a record into the ring from one host to another, as if the first had written it.
  void inject(uint32_t from, uint32_t to, std::span<const std::byte> bytes) {
    ByteRing* ring = HostBlock::attach(segments[to])->ring_from(from);
    ring->reset_roles();
    ByteRing::Producer producer = ring->claim_producer();
    const auto room = producer.try_reserve(static_cast<uint32_t>(bytes.size()));
    std::memcpy(room.data(), bytes.data(), bytes.size());
    producer.publish();
    HostBlock::attach(segments[to])->doorbell.ring();
  }

  Segment controller_segment = ControllerBlock::make(false);
  Segment client_segment = ClientBlock::make({2048, 1u << 17, 0}, false);
  ControllerBlock* block;
  ClientBlock* client_block = ClientBlock::attach(client_segment);
  WideBackend backends[2];
  std::vector<Segment> segments;
  std::unique_ptr<Controller> controller;
  std::vector<std::unique_ptr<Host>> hosts;
  std::unique_ptr<Client> client;
};

TEST(Plans, RefusedAtOnce) {
  TwoHosts cluster(1);
  Host& host = *cluster.hosts[0];
  const auto plan = [&](uint32_t number, uint32_t devices) {
    return Plan::parse(PlanBuilder(number, devices, 0).finish());
  };
  EXPECT_THROW(host.add_plan(1, plan(1, 1)), Error);
  EXPECT_THROW(host.add_plan(1, plan(0, 2)), Error);
  host.add_plan(1, plan(0, 1));
  EXPECT_THROW(host.add_plan(1, plan(0, 1)), Error);
  PlanBuilder far(0, 1, 1);
  PlanBuilder::Node node;
  node.kind = NodeKind::kTransfer;
  node.outputs = {0};
  node.sources = {2};
  node.devices = 1;
  far.add(node);
  EXPECT_THROW(host.add_plan(2, Plan::parse(far.finish())), Error);
  PlanBuilder tells(0, 1, 0);
  tells.add(PlanBuilder::Choice{0, 1, 1, kNoValue, 2, kNoPredicate, 0, {2}});
  EXPECT_THROW(host.add_plan(2, Plan::parse(tells.finish())), Error);
  TwoHosts lonely(1, 0);  // no rings between hosts
  EXPECT_THROW(lonely.hosts[0]->add_plan(0, Plan::parse(lonely.program().plan_of(0, 1))), Error);
}

void play(TwoHosts& cluster, uint32_t runs, bool one_at_a_time) {
  for (uint32_t h = 0; h < 2; ++h) {
    cluster.hosts[h]->add_plan(0, Plan::parse(cluster.program().plan_of(h, 1)));
    cluster.hosts[h]->set_compiled(0, std::nullopt);
  }
  cluster.controller->add_group(1, {0, 1});
  for (uint32_t i = 0; i < runs; ++i) {
    uint64_t result = 0;
    ASSERT_EQ(cluster.client->submit({0, 1, {1}}, {}, &result), Status::kOk);
    while (one_at_a_time && cluster.client->poll(Handle{result}) != FutureState::kReady) {
      cluster.controller->step();
      for (auto& host : cluster.hosts) host->step();
    }
  }
  while (cluster.client->in_flight() != 0) {
    cluster.controller->step();
    for (auto& host : cluster.hosts) host->step();
  }
  EXPECT_EQ(cluster.backends[0].sends, runs);
  EXPECT_EQ(cluster.backends[1].received, runs);
  EXPECT_EQ(cluster.backends[1].abandoned, 0u);
}

TEST(Leaving, MemoryIsUsedUntilTheOrderSaysSo) {
  const Watchdog watchdog("a client that leaves hosts which are behind");
  TwoHosts cluster(1);
  play(cluster, 1, true);
  uint64_t result = 0;
  ASSERT_EQ(cluster.client->submit({0, 1, {1}}, {}, &result), Status::kOk);
  cluster.controller->step();
  cluster.controller->remove_client(0);
  for (uint32_t h = 0; h < 2; ++h) {
    EXPECT_EQ(cluster.hosts[h]->attached_clients(), 1u);
    EXPECT_TRUE(cluster.backends[h].gone.empty());
  }
  for (int i = 0; i < 20; ++i) {
    for (auto& host : cluster.hosts) host->step();
  }
  EXPECT_EQ(cluster.backends[1].received, 2u);  // what was granted ran, on both
  for (uint32_t h = 0; h < 2; ++h) {
    EXPECT_EQ(cluster.hosts[h]->attached_clients(), 0u);
    EXPECT_EQ(cluster.backends[h].gone, std::vector<uint32_t>{0});
    EXPECT_TRUE(cluster.hosts[h]->executor().is_idle());
  }
}

TEST(Leaving, AttachedTooLate) {
  TwoHosts cluster(1);
  Host& host = *cluster.hosts[0];
  host.step();
  cluster.controller->remove_client(3);
  host.step();
  EXPECT_EQ(cluster.backends[0].gone, std::vector<uint32_t>{3});
  host.attach_client(3, ClientView(), 64);  // its memory is not even looked at
  host.step();
  EXPECT_EQ(cluster.backends[0].gone, (std::vector<uint32_t>{3, 3}));
  EXPECT_EQ(host.attached_clients(), 1u);
}

/// GANG-1: all hosts go by the controller's number, which the client cannot change between two hosts' attaches.
TEST(Attached, HandlesAreRefusedByTheNumberThatTheHostWasGiven) {
  TwoHosts cluster(1);
  play(cluster, 1, true);
  for (const auto& host : cluster.hosts) host->attach_client(0, cluster.client_block, 0);
  uint64_t result = 0;
  ASSERT_EQ(cluster.client->submit({0, 1, {1}}, {}, &result), Status::kOk);
  while (cluster.client->in_flight() != 0) {
    cluster.controller->step();
    for (const auto& host : cluster.hosts) host->step();
  }
  cluster.client->poll_inbox();
  EXPECT_EQ(cluster.client->poll(Handle{result}), FutureState::kFailed);
  EXPECT_NE(cluster.client->error_of(Handle{result}).find("a result's handle is out of range"), std::string::npos);
}

TEST(Peers, LongPosts) {
  const Watchdog watchdog("hosts that post much");
  for (const size_t width : {1u, 200u, 250u, 251u, 252u, 5000u}) {
    TwoHosts cluster(width);
    play(cluster, 5, true);
  }
}

TEST(Peers, LostAndReplaced) {
  const Watchdog watchdog("hosts that are lost");
  for (const uint32_t lost : {0u, 1u}) {
    for (int moment = 0; moment < 12; ++moment) {
      TwoHosts cluster(300);
      Host& survivor = *cluster.hosts[1 - lost];
      play(cluster, 1, true);
      uint64_t before[8], after = 0;
      for (uint64_t& result : before) ASSERT_EQ(cluster.client->submit({0, 1, {1}}, {}, &result), Status::kOk);
      cluster.controller->step();
      for (int i = 0; i < moment; ++i) {
        cluster.controller->step();
        cluster.hosts[static_cast<size_t>(i + moment / 6) % 2]->step();
      }
      cluster.hosts[lost]->executor().clear();
      Segment fresh = HostBlock::make(lost, 2, {1u << 16, 4096, 0}, false);
      HostBlock* block = HostBlock::attach(fresh);
      survivor.open_peer(lost, block, 1, 1);
      survivor.step();
      EXPECT_EQ(survivor.peers_replaced(), 0u);  // not before it has heard of the loss
      EXPECT_EQ(cluster.controller->lose_hosts({lost}, "HostLostError: gone"), 1u);
      for (int i = 0; i < 20; ++i) survivor.step();
      EXPECT_EQ(survivor.peers_replaced(), 1u);
      cluster.controller->step();
      cluster.client->poll_inbox();
      EXPECT_EQ(cluster.client->in_flight(), 0u);
      for (const uint64_t result : before) {
        if (cluster.client->poll(Handle{result}) == FutureState::kReady) continue;
        ASSERT_EQ(cluster.client->poll(Handle{result}), FutureState::kFailed) << lost << " at " << moment;
        EXPECT_EQ(cluster.client->error_of(Handle{result}), "HostLostError: gone");
      }
      cluster.hosts[lost].reset();
      std::vector<HostView> blocks(2);
      blocks[lost] = block;
      blocks[1 - lost] = HostBlock::attach(cluster.segments[1 - lost]);
      std::vector<int32_t> epochs(2);
      epochs[lost] = 1;
      cluster.hosts[lost] =
          std::make_unique<Host>(Host::Options{.host = lost}, blocks, cluster.block, cluster.backends[lost], epochs);
      cluster.hosts[lost]->attach_client(0, cluster.client_block, cluster.futures());
      cluster.hosts[lost]->add_plan(0, Plan::parse(cluster.program().plan_of(lost, 1)));
      cluster.hosts[lost]->set_compiled(0, std::nullopt);
      cluster.controller->restore_host(lost, block);
      cluster.segments[lost] = std::move(fresh);
      for (int i = 0; i < 20; ++i) {
        ASSERT_EQ(cluster.client->submit({0, 1, {1}}, {}, &after), Status::kOk);
        while (cluster.client->in_flight() != 0) {
          cluster.controller->step();
          for (auto& host : cluster.hosts) host->step();
        }
        cluster.client->poll_inbox();
        EXPECT_EQ(cluster.client->poll(Handle{after}), FutureState::kReady) << cluster.client->error_of(Handle{after});
      }
    }
  }
}

TEST(Peers, FullRings) {
  const Watchdog watchdog("hosts with full rings");
  TwoHosts cluster(300);
  play(cluster, 500, false);
  // With a record held back, a sleep without end lasts a moment.
  const uint32_t ticket = cluster.hosts[1]->ticket();
  EXPECT_EQ(cluster.hosts[1]->wait(ticket, 1ms, SpinPolicy::sleep_at_once()), Status::kTimeout);
}

TEST(Peers, LooksAgainWhileHeldUp) {
  const Watchdog watchdog("a host whose peer reads slowly");
  TwoHosts cluster(300);
  for (uint32_t h = 0; h < 2; ++h) {
    cluster.hosts[h]->add_plan(0, Plan::parse(cluster.program().plan_of(h, 1)));
    cluster.hosts[h]->set_compiled(0, std::nullopt);
  }
  cluster.controller->add_group(1, {0, 1});
  for (uint32_t i = 0; i < 10; ++i) {
    uint64_t result = 0;
    ASSERT_EQ(cluster.client->submit({0, 1, {1}}, {}, &result), Status::kOk);
  }
  cluster.controller->step();
  for (int i = 0; i < 4; ++i) cluster.hosts[1]->step();  // ten posts of 2.4 KB do not fit 4 KiB
  const uint32_t ticket = cluster.hosts[1]->ticket();
  EXPECT_EQ(cluster.hosts[1]->wait(ticket, std::chrono::nanoseconds::max(), SpinPolicy::sleep_at_once()),
            Status::kTimeout);
  while (cluster.client->in_flight() != 0) {
    cluster.controller->step();
    for (auto& host : cluster.hosts) host->step();
  }
}

TEST(Peers, HearWhatWasSaidToThemDuringALaunch) {
  const Watchdog watchdog("a host that waits in a launch for one that reads slowly");
  TwoHosts cluster(300, 4096, true);
  ModelledProgram gang;
  gang.add_result(gang.add_call(gang.add_slice({{0, 1}, 1}), {}));
  for (uint32_t h = 0; h < 2; ++h) {
    cluster.hosts[h]->add_plan(0, Plan::parse(cluster.program().plan_of(h, 1)));
    cluster.hosts[h]->add_plan(1, Plan::parse(gang.plan_of(h, 1)));
    cluster.hosts[h]->set_compiled(0, std::nullopt);
    cluster.hosts[h]->set_compiled(1, std::nullopt);
  }
  cluster.controller->add_group(1, {0, 1});
  const uint32_t transfers = 10;  // whose posts of 2.4 KB do not fit 4 KiB
  for (uint32_t i = 0; i < transfers; ++i) {
    uint64_t result = 0;
    ASSERT_EQ(cluster.client->submit({0, 1, {1}}, {}, &result), Status::kOk);
  }
  uint64_t result = 0;
  ASSERT_EQ(cluster.client->submit({1, 1, {1}}, {}, &result), Status::kOk);
  cluster.controller->step();
  // Host 1 launches its part of the gang, and stays in it until host 0 has launched the other: behind all its sends.
  cluster.backends[1].in_launch = [&] {
    while (cluster.backends[0].launches != transfers + 1) cluster.hosts[0]->step();
    EXPECT_EQ(cluster.backends[0].sends, transfers);
  };
  while (cluster.client->in_flight() != 0) {
    cluster.hosts[1]->step();
    cluster.hosts[0]->step();
    cluster.controller->step();
  }
  EXPECT_EQ(cluster.backends[1].launches, 1u);
  EXPECT_EQ(cluster.backends[1].received, transfers);
}

TEST(Peers, NonsenseClosesTheChannel) {
  const Watchdog watchdog("hosts that hear nonsense");
  const auto record_of = [](const auto& record, size_t bytes) {
    std::vector<std::byte> data(sizeof(PeerHeader) + bytes);  // of host 0, in epoch 0
    std::memcpy(data.data() + sizeof(PeerHeader), &record, std::min(bytes, sizeof record));
    return data;
  };
  const auto from = [](PeerHeader sender) {
    std::vector<std::byte> data(sizeof sender);
    std::memcpy(data.data(), &sender, sizeof sender);
    return data;
  };
  const PeerRecord post{RecordKind::kReceiveReady, 0, 0, 1, 0, 8};
  const auto make = [](auto record, auto change) {
    change(record);
    return record;
  };
  const PeerRecord arrival{RecordKind::kReceiveDone, 0, 0, 77, 0, 0};
  const PeerRecord decision{RecordKind::kDecision, 0, 0, 77, 0, 0};
  const std::vector<std::pair<std::vector<std::byte>, std::string>> nonsense{
      {std::vector<std::byte>(4), "a record is shorter than its header"},
      {from({0, 0}), "more of its records wait than are taken"},
      {from({0, 1}), "a record is of host 0 in epoch 1, who does not come this way"},
      {from({1, 0}), "a record is of host 1"},
      {from({7, 0}), "a record is of host 7"},
      {record_of(PeerRecord{static_cast<RecordKind>(99), 0, 0, 0, 0, 0}, sizeof post), "of kind 99"},
      {record_of(post, 8), "a record is shorter than its header"},
      {record_of(post, sizeof post), "a receive-ready record has 24 bytes, expected 32"},
      {record_of(make(post, [](auto& r) { r.bytes = 0xffffffff; }), sizeof post), "expected 4294967320"},
      {record_of(arrival, sizeof arrival), "a receive-done record for node 0 of run 77"},
      {record_of(make(arrival, [](auto& r) { r.bytes = 1u << 31; }), sizeof arrival),
       "a receive-done record has 24 bytes"},
      {record_of(make(arrival, [](auto& r) { r.detail = 3; }), sizeof arrival), "an unknown outcome"},
      {record_of(make(decision, [](auto& r) { r.bytes = 1; }), sizeof decision),
       "a decision has 24 bytes, expected 32"},
      {record_of(make(decision, [](auto& r) { r.detail = 3; }), sizeof decision), "an unknown outcome"},
  };
  for (const auto& [bytes, text] : nonsense) {
    TwoHosts cluster(1);
    for (uint32_t h = 0; h < 2; ++h) {
      cluster.hosts[h]->add_plan(0, Plan::parse(cluster.program().plan_of(h, 1)));
      cluster.hosts[h]->set_compiled(0, std::nullopt);
    }
    cluster.controller->add_group(1, {0, 1});
    cluster.inject(0, 1, bytes);
    for (uint32_t round = 0; round < 2; ++round) {  // a run that is under way, and one after
      uint64_t result = 0;
      ASSERT_EQ(cluster.client->submit({0, 1, {1}}, {}, &result), Status::kOk);
      while (cluster.client->in_flight() != 0) {
        cluster.controller->step();
        for (auto& host : cluster.hosts) host->step();
        cluster.client->poll_inbox();
      }
      EXPECT_EQ(cluster.client->poll(Handle{result}), FutureState::kFailed);
      EXPECT_NE(cluster.client->error_of(Handle{result}).find("the channel from host 0 was closed"), std::string::npos);
      EXPECT_NE(cluster.client->error_of(Handle{result}).find(text), std::string::npos)
          << cluster.client->error_of(Handle{result});
    }
    EXPECT_LE(cluster.backends[1].abandoned, 2u);  // room that the peer may still write to is not given to others
    EXPECT_EQ(cluster.backends[1].received, 0u);
  }
}

}  // namespace
}  // namespace pathways::test::test_host
