// TRUST-1 by mutation of what hosts and the controller send: whatever record comes, who reads it ends with an error or
// goes on; it reads and writes nothing out of bounds. See fuzz.h for how long, and how to repeat a run.
//
//   Fuzz.HostRecords        records of a host, to the controller: they are ours, so the cluster may fail
//   Fuzz.PeerRecords        records of a host, to another, on the same machine or on another one
//   Fuzz.OrdersToHosts      records of the controller, to a host
//   Fuzz.RecordsToClients   records of the controller, to a client
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "controller/played.h"
#include "fuzz.h"
#include "host/host.h"
#include "messages/peer_records.h"
#include "simulate/program.h"

namespace pathways::test::test_fuzz_records {
namespace {

FUZZ(HostRecords) {
  struct Scenery : Cluster {
    void TestBody() override {}
  };
  auto cluster = std::make_unique<Scenery>();
  while (fuzz.next()) {
    (void)cluster->submit();
    try {
      cluster->pass();
      for (auto& host : cluster->hosts) {
        RunRecord run{};
        const auto bytes = host->next();
        if (bytes.size() >= sizeof run) std::memcpy(&run, bytes.data(), sizeof run);
        const RunDoneRecord done{{RecordKind::kRunDone, 0, 0}, run.tag, 0, 0, host->host, 0};
        const FailedRecord failed{{RecordKind::kFailed, 0, 0}, 1, 8, 0};
        std::vector<std::byte> record(fuzz.below(2) == 0 ? sizeof done : sizeof failed + 8);
        record.size() == sizeof done ? std::memcpy(record.data(), &done, sizeof done)
                                     : std::memcpy(record.data(), &failed, sizeof failed);
        if (fuzz.below(2) == 0) fuzz.mutate(record, 1000);
        if (record.empty()) continue;
        host->outbox.send(static_cast<uint32_t>(record.size()),
                          [&](std::byte* out) { std::memcpy(out, record.data(), record.size()); });
        host->outbox.flush();
      }
      cluster->pass();
      if (cluster->is_up() && cluster->good->in_flight() < 6) continue;
    } catch (const Error&) {  // hosts are ours: the cluster fails, and says why
    }
    cluster = std::make_unique<Scenery>();
  }
}

/// What a host tells people, a line for each closed channel, is not shown meanwhile; what a sanitizer tells is.
class Quiet {
 public:
  Quiet() : nowhere_(std::fopen("/dev/null", "w")), shown_(std::exchange(stderr, nowhere_)) {}
  ~Quiet() {
    stderr = shown_;
    std::fclose(nowhere_);
  }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  FILE* nowhere_;
  FILE* shown_;
};

FUZZ(PeerRecords) {
  const Quiet quiet;
  /// Host 0, which sends a value to host 1 and receives one; the test is the controller, host 1, and the link between
  /// them if host 1 is on another machine.
  struct OneOfTwo {
    explicit OneOfTwo(bool is_far) : is_far(is_far) {
      const uint32_t here = program.add_slice({{0}, 1}), there = program.add_slice({{1}, 1});
      const uint32_t sent = program.add_transfer(program.add_call(here, {}), there);
      program.add_result(program.add_transfer(program.add_call(there, {sent}), here));
      const Plan plan = Plan::parse(program.plan_of(0, 1));
      const std::vector<uint32_t> none(2, Fabric::kNoCommunicator);
      backend.learn(0, plan, program.communicators_of(0, none));
      backend.bound_sends(receive);
      host.add_plan(0, Plan::parse(program.plan_of(0, 1)));
      host.set_compiled(0, std::nullopt);
      host.attach_client(0, ClientView(client), ClientView(client).futures().capacity());
      orders = HostBlock::attach(segments[0])->ring_from_controller()->claim_producer();
      const HostView own(segments[0]);
      ring = is_far ? own.from_link().ring() : HostBlock::attach(segments[0])->ring_from(1);
      from_peer = ring->claim_producer();
      to_peer = is_far ? own.to_link().consumer() : HostBlock::attach(segments[1])->ring_from(0)->claim_consumer();
    }
    std::array<Segment, 2> both() const {
      const HostBlock::Sizes sizes{1u << 17, 1u << 12, 0, is_far ? 1u << 12 : 0};
      return {HostBlock::make(0, 2, sizes, false), HostBlock::make(1, 2, sizes, false)};
    }
    const bool is_far;
    ModelClock clock{ModelClock::Kind::kVirtual};
    ModelledProgram program;
    ModelledBackend backend{{0, 1, 0, 0}, clock, nullptr};
    uint64_t receive[4] = {};
    Segment controller = ControllerBlock::make(false), client = ClientBlock::make({64, 4096, 1u << 14}, false);
    std::array<Segment, 2> segments = both();
    Host host{Host::Options{},
              {HostView(segments[0]), is_far ? HostView() : HostView(segments[1])},
              ControllerBlock::attach(controller),
              backend,
              {5, 5}};
    ByteRing* ring;  ///< from the peer
    ByteRing::Producer orders, from_peer;
    ByteRing::Consumer to_peer;
    uint64_t order = 0, heard = 0;
  };
  auto one = std::make_unique<OneOfTwo>(true);
  uint64_t done = 0, closed = 0;
  const auto put = [](ByteRing::Producer& ring, std::span<const std::byte> bytes) {
    if (bytes.empty() || bytes.size() > ring.max_record()) return;
    const auto room = ring.try_reserve(static_cast<uint32_t>(bytes.size()));
    if (!room.empty()) std::memcpy(room.data(), bytes.data(), bytes.size());
    ring.publish();
  };
  while (fuzz.next()) {
    if (one->order < 400) {
      const RunRecord run{{RecordKind::kRun, 0, 0}, ++one->order, one->order, 0, 0, 0, 1};
      const uint64_t result = Handle::make(static_cast<uint32_t>(one->order % 60), 1).raw;
      std::vector<std::byte> bytes(sizeof run + 8);
      std::memcpy(bytes.data(), &run, sizeof run);
      std::memcpy(bytes.data() + sizeof run, &result, 8);
      put(one->orders, bytes);
    }
    one->host.step();
    // What host 1 would say of each of the last runs, in either order of the two, and sometimes something else.
    std::vector<std::byte> record;
    const uint64_t order = one->order - std::min<uint64_t>(one->order - 1, fuzz.below(3));
    const auto node = static_cast<uint32_t>(fuzz.below(5));
    if (fuzz.below(8) == 0) {
      const auto outcome = static_cast<uint16_t>(fuzz.below(4));
      const PeerRecord told{RecordKind::kDecision, outcome, node, order, 0, 0};
      record.resize(sizeof told);
      std::memcpy(record.data(), &told, sizeof told);
    } else if (fuzz.below(6) == 0) {  // of an exchange of rows, of which its runs have none
      const auto kind = fuzz.below(2) == 0 ? RecordKind::kExchangeReport : RecordKind::kExchangeDecision;
      const PeerRecord said{kind, 0, node, order, 0, 8};
      record.resize(sizeof said + 8);
      std::memcpy(record.data(), &said, sizeof said);
    } else if (fuzz.below(12) == 0) {
      const PeerRecord written{RecordKind::kExchangeWritten, 0, node, order, 0, 0};
      record.resize(sizeof written);
      std::memcpy(record.data(), &written, sizeof written);
    } else if (fuzz.below(2) == 0) {
      const PeerRecord post{RecordKind::kReceiveReady, 0, node, order, 0, 8};
      const auto slot = reinterpret_cast<uint64_t>(&one->receive[fuzz.below(4)]);
      record.resize(sizeof post + 8);
      std::memcpy(record.data(), &post, sizeof post);
      std::memcpy(record.data() + sizeof post, &slot, 8);
    } else {
      const bool has_failed = fuzz.below(4) == 0;
      const PeerRecord arrived{RecordKind::kReceiveDone, has_failed, node, order, 0, has_failed ? 8u : 0u};
      record.resize(sizeof arrived + arrived.bytes, std::byte{'x'});
      std::memcpy(record.data(), &arrived, sizeof arrived);
    }
    const PeerHeader from{1, one->is_far && fuzz.below(8) == 0 ? 4 : 5};
    const auto* header = reinterpret_cast<const std::byte*>(&from);
    record.insert(record.begin(), header, header + sizeof from);
    if (fuzz.below(3) == 0) fuzz.mutate(record, 1000);
    try {
      put(one->from_peer, record);
      if (fuzz.below(64) == 0) fuzz.mutate(std::span(reinterpret_cast<std::byte*>(one->ring), 512));  // the ring itself
      for (int i = 0; i < 3; ++i) one->host.step();
      std::vector<std::byte> scratch;
      for (; !one->to_peer.try_take(scratch).empty(); one->to_peer.pop()) ++one->heard;
      if (fuzz.below(16) != 0) continue;
    } catch (const Error&) {  // the test's own end of a ring that it has mutated
    }
    // Whatever was said: what was granted ends.
    done += one->host.executor().stats().launches;
    one->host.executor().close_peer(1, "gone");
    for (int i = 0; i < 50; ++i) one->host.step();
    EXPECT_TRUE(one->host.executor().is_idle());
    closed += one->heard;
    one = std::make_unique<OneOfTwo>(fuzz.below(2) == 0);
  }
  fuzz.must_reach(done);
  fuzz.must_reach(closed);
}

FUZZ(OrdersToHosts) {
  struct OneHost {
    OneHost() {
      program.add_result(program.add_call(program.add_slice({{0}, 1}), {}));
      const Plan plan = Plan::parse(program.plan_of(0, 1));
      backend.learn(0, plan, program.communicators_of(0, std::vector<uint32_t>{Fabric::kNoCommunicator}));
      host.add_plan(0, Plan::parse(program.plan_of(0, 1)));
      host.set_compiled(0, std::nullopt);
      host.attach_client(0, ClientView(client), ClientView(client).futures().capacity());
      ring = HostBlock::attach(segment)->ring_from_controller()->claim_producer();
    }
    ModelClock clock{ModelClock::Kind::kVirtual};
    ModelledProgram program;
    ModelledBackend backend{{0, 1, 0, 0}, clock, nullptr};
    Segment controller = ControllerBlock::make(false), segment = HostBlock::make(0, 1, {1u << 14, 0, 0}, false),
            client = ClientBlock::make({64, 4096, 1u << 14}, false);
    Host host{Host::Options{}, {HostView(segment)}, ControllerBlock::attach(controller), backend};
    ByteRing::Producer ring;
  };
  auto one = std::make_unique<OneHost>();
  uint64_t order = 0;
  while (fuzz.next()) {
    std::vector<std::byte> record(sizeof(RunRecord) + 8);
    switch (fuzz.below(3)) {
      case 0: {
        const RunRecord run{{RecordKind::kRun, 0, 0}, 1, ++order, 0, 0, 0, 1};
        const uint64_t result = Handle::make(static_cast<uint32_t>(fuzz.below(8)), 1).raw;
        std::memcpy(record.data(), &run, sizeof run);
        std::memcpy(record.data() + sizeof run, &result, 8);
        break;
      }
      case 1: {
        const CommandRecord command{
            {RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kRelease), 0}, 0, 0, 0, 8};
        record.resize(sizeof command + 8);
        std::memcpy(record.data(), &command, sizeof command);
        break;
      }
      default: {
        const HostLostRecord lost{{RecordKind::kHostLost, 0, 0}, 1, 1, 0};
        record.resize(sizeof lost + 8);
        std::memcpy(record.data(), &lost, sizeof lost);
      }
    }
    if (fuzz.below(2) == 0) fuzz.mutate(record, 1000);
    CommandRecord command{};  // what modelled devices believe
    if (record.size() >= sizeof command) std::memcpy(&command, record.data(), sizeof command);
    const bool is_believed = command.header.kind == RecordKind::kCommand &&
                             (command.header.detail == static_cast<uint16_t>(CommandKind::kFetch) ||
                              command.header.detail == static_cast<uint16_t>(CommandKind::kPut));
    try {
      if (!record.empty() && !is_believed) {
        const auto room = one->ring.try_reserve(static_cast<uint32_t>(record.size()));
        if (!room.empty()) std::memcpy(room.data(), record.data(), record.size());
        one->ring.publish();
      }
      one->host.step();
      if (order % 512 != 511) continue;
    } catch (const Error&) {  // the host ends, and says why
    }
    one = std::make_unique<OneHost>();
  }
}

FUZZ(RecordsToClients) {
  Segment controller = ControllerBlock::make(false);
  while (fuzz.next()) {
    Segment segment = ClientBlock::make({64, 4096, 1u << 14}, false);
    ClientBlock* block = ClientBlock::attach(segment);
    Client client({0, 8}, block, ControllerBlock::attach(controller));
    uint64_t result = 0;
    ASSERT_EQ(client.submit({5, 0, {1}}, {}, &result), Status::kOk);
    auto ring = block->ring_from_controller()->claim_producer();
    for (int i = 0; i < 8; ++i) {
      std::vector<std::byte> record(sizeof(FailedRecord) + 16);
      const FailedRecord failed{{RecordKind::kFailed, 0, 0}, result, 16, 0};
      const ReclaimRecord reclaim{{RecordKind::kReclaim, 0, 0}, 1, 0, 1};
      fuzz.below(2) == 0 ? std::memcpy(record.data(), &failed, sizeof failed)
                         : std::memcpy(record.data(), &reclaim, sizeof reclaim);
      fuzz.mutate(record, 1000);
      if (record.empty()) continue;
      const auto room = ring.try_reserve(static_cast<uint32_t>(record.size()));
      if (room.empty()) break;
      std::memcpy(room.data(), record.data(), record.size());
      ring.publish();
    }
    try {
      client.poll_inbox();
    } catch (const Error&) {
    }
  }
}

}  // namespace
}  // namespace pathways::test::test_fuzz_records
