// TRUST-1 by mutation: whatever a process writes into memory that another one reads, nobody crashes, nothing is read or
// written out of bounds, and nobody else's results change. See fuzz.h for how long, and how to repeat a run.
//
//   Fuzz.ClientRecords    records of a client, beside one whose values are compared
//   Fuzz.ClientSegments   words of a client's block while controller and hosts work on it, beside the same
//   Fuzz.Blocks           headers, when somebody attaches
//   Fuzz.HostRecords      records of a host, to the controller: they are ours, so the cluster may fail
//   Fuzz.PeerRecords      records of a host, to another
//   Fuzz.OrdersToHosts    records of the controller, to a host
//   Fuzz.RecordsToClients    records of the controller, to a client
//   Fuzz.Plans, Fuzz.CopyPlans, Fuzz.NetworkTransfer   encoded plans, copy plans, chunks from other machines
#include <cstdio>
#include <deque>
#include <utility>

#include "cluster/workload.h"
#include "controller/played.h"
#include "executor/network_transfer.h"
#include "fuzz.h"

namespace pathways::test {
namespace {

constexpr int kTargets = 10;

/// Slices for two hosts of two devices, an innocent client, and a culprit that is replaced when it was evicted.
class Scene {
 public:
  explicit Scene(Fuzzer& fuzz) : fuzz_(fuzz), sim_(options()) {
    sim_.add_client();
    stage_ = make_stage(sim_, {{{0}, 1}, {{1}, 3}, {{0, 1}, 1}}, 6, 6, fuzz.draw());
    own_ = make_stage(sim_, {{{0}, 1}, {{1}, 3}, {{0, 1}, 1}}, 6, 6, fuzz.draw());
    for (const auto* program : stage_.programs)
      sim_.controller().register_plan(program->ref.plan, 0, program->ref.group);
    innocent_ = std::make_unique<Workload>(sim_, stage_, 0, fuzz.draw(), Workload::Rates{20, 40, 30, 15, 0});
    (void)sim_.run_until_idle();
  }
  ~Scene() {
    replace();
    bool is_over = false;
    for (int i = 0; i < 20000 && !is_over; ++i) {
      is_over = innocent_->finish();
      step();
    }
    EXPECT_TRUE(is_over) << "what the innocent client has under way does not end";
    EXPECT_EQ(sim_.controller_block()->cluster_status(), ClusterStatus::kUp) << sim_.controller_block()->failure();
    EXPECT_EQ(innocent_->wrong(), 0u);
    EXPECT_EQ(innocent_->failed(), 0u);
    EXPECT_GT(innocent_->compared(), 0u);
    std::printf("  beside it: %llu values compared\n", static_cast<unsigned long long>(innocent_->compared()));
  }

  /// The culprit, which is in.
  struct Culprit {
    explicit Culprit(uint32_t number)
        : id(number),
          segment(ClientBlock::make({256, 1u << 14, 1u << 14}, false)),
          block(ClientBlock::attach(segment)) {
      ring = block->ring_to_controller()->claim_producer();
      cancels = block->ring_of_cancels()->claim_producer();
    }
    uint32_t id;
    Segment segment;
    ClientBlock* block;
    ByteRing::Producer ring, cancels;
    std::span<std::byte> bytes() { return {segment.data(), segment.size()}; }
  };
  Culprit& culprit() {
    if (sim_.controller().stats().clients < 2) replace();
    return *culprit_;
  }
  /// A record as a well-behaved client would send it.
  std::vector<std::byte> good_record(Culprit& from) {
    std::vector<std::byte> out;
    const auto add = [&](const auto& part) {
      const auto* bytes = reinterpret_cast<const std::byte*>(&part);
      out.insert(out.end(), bytes, bytes + sizeof part);
    };
    const auto handle = [&] {
      return Handle::make(static_cast<uint32_t>(fuzz_.below(24)), 1 + static_cast<uint32_t>(fuzz_.below(3))).raw;
    };
    const uint32_t slice = static_cast<uint32_t>(fuzz_.below(own_.groups.size()));
    switch (fuzz_.below(7)) {
      case 0:
      case 1:
      case 2: {
        const Simulation::Program& program = *own_.programs[fuzz_.below(own_.programs.size())];
        const auto arguments = static_cast<uint32_t>(program.program.arguments().size());
        const auto results = static_cast<uint32_t>(program.program.results().size());
        const bool is_wanted = fuzz_.below(4) == 0, is_late = fuzz_.below(8) == 0;
        RunRecord run{
            {RecordKind::kRun, 0, from.id}, ++tag_, 0, program.ref.plan, program.ref.group, arguments, results};
        run.header.detail = static_cast<uint16_t>((is_wanted ? kRunWanted : 0) | (is_late ? kRunHasDeadline : 0));
        add(run);
        for (uint32_t i = 0; i < arguments + results; ++i) add(handle());
        if (is_wanted) add(fuzz_.draw());
        if (is_late) add(monotonic_ns() + static_cast<int64_t>(fuzz_.below(2000000)));
        break;
      }
      case 3: {
        add(CommandRecord{{RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kPut), from.id},
                          handle(),
                          0,
                          own_.groups[slice],
                          sizeof(ModelledBackend::Put)});
        add(ModelledBackend::Put{fuzz_.draw() | 1, own_.slices[slice].devices});
        break;
      }
      case 4: {
        add(CommandRecord{{RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kFetch), from.id},
                          handle(),
                          handle(),
                          own_.groups[slice],
                          sizeof(ModelledBackend::Fetch)});
        add(ModelledBackend::Fetch{fetched_});
        break;
      }
      case 5: {
        const auto count = static_cast<uint32_t>(fuzz_.below(5));
        add(CommandRecord{{RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kRelease), from.id},
                          0,
                          0,
                          own_.groups[slice],
                          count * 8});
        for (uint32_t i = 0; i < count; ++i) add(handle());
        break;
      }
      default: {
        static constexpr CommandKind kKinds[] = {CommandKind::kBackend, CommandKind::kTask, CommandKind::kRename};
        add(CommandRecord{{RecordKind::kCommand, static_cast<uint16_t>(kKinds[fuzz_.below(3)]), from.id},
                          handle(),
                          fuzz_.below(2) == 0 ? 0 : handle(),
                          own_.groups[slice],
                          16});
        add(handle());
        add(handle());
      }
    }
    return out;
  }
  /// What the modelled devices believe (real ones do not: tests/python/contract/test_trust.py) is put right.
  void keep_payload_true(std::vector<std::byte>& bytes) {
    CommandRecord command;
    if (bytes.size() < sizeof command) return;
    std::memcpy(&command, bytes.data(), sizeof command);
    if (command.header.kind != RecordKind::kCommand || command.bytes > bytes.size() - sizeof command) return;
    if (command.header.detail == static_cast<uint16_t>(CommandKind::kFetch) &&
        command.bytes == sizeof(ModelledBackend::Fetch)) {
      const ModelledBackend::Fetch fetch{fetched_};
      std::memcpy(bytes.data() + sizeof command, &fetch, sizeof fetch);
    }
    if (command.header.detail == static_cast<uint16_t>(CommandKind::kPut) &&
        command.bytes == sizeof(ModelledBackend::Put)) {
      const ModelledBackend::Put put{1, 1};
      std::memcpy(bytes.data() + sizeof command, &put, sizeof put);
    }
  }
  void cancel(Culprit& from) {
    const CancelRecord record{{RecordKind::kCancel, 0, from.id}, tag_ - fuzz_.below(4)};
    std::vector<std::byte> bytes(sizeof record);
    std::memcpy(bytes.data(), &record, sizeof record);
    if (fuzz_.below(4) == 0) fuzz_.mutate(bytes, 100);
    send(from.cancels, bytes);
  }
  void send(ByteRing::Producer& ring, std::span<const std::byte> bytes) {
    if (bytes.empty() || bytes.size() > ring.max_record()) return;
    std::span<std::byte> room;
    try {
      room = ring.try_reserve(static_cast<uint32_t>(bytes.size()));
    } catch (const Error&) {  // it scribbled on its own ring
    }
    if (room.empty()) return;
    std::memcpy(room.data(), bytes.data(), bytes.size());
    ring.publish();
  }
  void go_on() {
    for (int i = 0; i < 3; ++i) {
      (void)innocent_->act();
      step();
    }
  }

 private:
  static SimulationOptions options() {
    SimulationOptions options;
    options.hosts = 2;
    options.devices = 2;
    options.window = 32;
    return options;
  }
  /// Tasks end at once, each with what it is to make.
  void step() {
    sim_.step();
    for (uint32_t h = 0; h < 2; ++h) {
      const auto tasks = std::move(sim_.backend(h).tasks());
      sim_.backend(h).tasks().clear();
      for (const auto& task : tasks) {
        Value made = nullptr;
        if (task.value != nullptr) {
          sim_.backend(h).drop(task.value);
        } else if (fuzz_.below(2) == 0) {
          made = sim_.backend(h).make_value(fuzz_.draw());
        }
        sim_.host(h).task_done(task.number, made, made == nullptr ? 0 : 1, std::nullopt);
      }
    }
  }
  /// The culprit is gone for good before its memory is.
  void replace() {
    if (culprit_ != nullptr) {
      sim_.controller().remove_client(culprit_->id);
      for (int i = 0; i < 100000 && (sim_.host(0).attached_clients() > 1 || sim_.host(1).attached_clients() > 1); ++i) {
        sim_.step();
      }
      ASSERT_EQ(sim_.host(0).attached_clients(), 1u);
      ASSERT_EQ(sim_.host(1).attached_clients(), 1u);
    }
    culprit_ = std::make_unique<Culprit>(next_++);
    const ClientView view(culprit_->segment);
    for (uint32_t h = 0; h < 2; ++h) sim_.host(h).attach_client(culprit_->id, view);
    sim_.controller().add_client(culprit_->id, view);
    for (const auto* program : own_.programs) {
      sim_.controller().register_plan(program->ref.plan, culprit_->id, program->ref.group);
    }
    sim_.step();
  }

  Fuzzer& fuzz_;
  uint64_t fetched_[8] = {};
  std::unique_ptr<Culprit> culprit_;  // its memory goes last
  Simulation sim_;
  Stage stage_, own_;
  std::unique_ptr<Workload> innocent_;
  uint32_t next_ = 1;
  uint64_t tag_ = 0;
};

TEST(Fuzz, ClientRecords) {
  const Watchdog watchdog("fuzzed client records", 900s);
  Fuzzer fuzz("client records", kTargets);
  Scene scene(fuzz);
  while (fuzz.next()) {
    Scene::Culprit& culprit = scene.culprit();
    for (size_t i = fuzz.below(4); i != 0; --i) scene.send(culprit.ring, scene.good_record(culprit));
    std::vector<std::byte> record = scene.good_record(culprit);
    fuzz.mutate(record, 3000);
    scene.keep_payload_true(record);
    scene.send(culprit.ring, record);
    if (fuzz.below(8) == 0) scene.cancel(culprit);
    scene.go_on();
  }
}

TEST(Fuzz, ClientSegments) {
  const Watchdog watchdog("fuzzed client segments", 900s);
  Fuzzer fuzz("client segments", kTargets);
  Scene scene(fuzz);
  while (fuzz.next()) {
    Scene::Culprit& culprit = scene.culprit();
    for (size_t i = fuzz.below(3); i != 0; --i) scene.send(culprit.ring, scene.good_record(culprit));
    // Mostly what is read often: the header, the rings' positions, the table; not the payloads that modelled devices
    // believe.
    const auto* offsets = reinterpret_cast<const uint64_t*>(culprit.segment.data()) + 1;
    static thread_local uint64_t ring_at, back_at, table_at, read_at;
    if (culprit.block->magic == ClientBlock::kMagic && offsets[0] < culprit.segment.size() && offsets[0] >= 64) {
      ring_at = offsets[0], back_at = offsets[2], table_at = offsets[3], read_at = offsets[4];
    }
    const size_t size = culprit.segment.size();
    const size_t starts[] = {0, ring_at, back_at, back_at + sizeof(ByteRing), table_at, table_at, read_at, size - 8192};
    const size_t lengths[] = {sizeof(ClientBlock), sizeof(ByteRing), sizeof(ByteRing), 4096, 8192, 512, 1088, 8192};
    const size_t which = fuzz.below(std::size(starts));
    const size_t at = std::min(starts[which], size - 8);
    fuzz.mutate(culprit.bytes().subspan(at, std::min(lengths[which], size - at)));
    scene.go_on();
  }
}

TEST(Fuzz, Blocks) {
  Fuzzer fuzz("blocks", kTargets);
  Segment client = ClientBlock::make({64, 4096, 1u << 14}, false);
  Segment host = HostBlock::make(0, 3, {4096, 4096, 1u << 14}, false);
  Guarded memory(std::max(client.size(), host.size()));
  uint64_t taken = 0;
  while (fuzz.next()) {
    const bool is_client = fuzz.below(2) == 0;
    const Segment& from = is_client ? client : host;
    std::byte* at = memory.data() + memory.size() - from.size();
    std::memcpy(at, from.data(), from.size());
    const auto* offsets = reinterpret_cast<const uint64_t*>(from.data()) + (is_client ? 1 : 2);
    const size_t part = fuzz.below(3) == 0 ? 0 : offsets[fuzz.below(is_client ? 6 : 5)];
    if (part < from.size()) {
      fuzz.mutate(std::span(at + part, std::min<size_t>(from.size() - part, 256)));
    }
    if (fuzz.below(2) == 0) fuzz.mutate(std::span(at, sizeof(ClientBlock)));
    try {
      if (is_client) {
        const ClientView view(at, from.size());
        auto consumer = view.from_client();
        auto producer = view.to_client();
        (void)producer.try_reserve(64);
        std::vector<std::byte> scratch;
        for (int i = 0; i < 100 && !consumer.try_take(scratch).empty(); ++i) consumer.pop();
        const Handle handle = Handle::make(static_cast<uint32_t>(fuzz.odd_number()), 1);
        (void)view.futures().complete(handle);
        (void)view.futures().fail(handle);
        ReadBackSlot place;
        if (view.read_back().is_there() && view.read_back().begin_write(view.futures(), handle, &place)) {
          if (place.small != nullptr) std::memset(place.small, 1, ReadBackArea::kSmallBytes);
          if (place.large != nullptr) std::memset(place.large, 1, ReadBackArea::kLargeBytes);
          view.read_back().end_write(handle);
        }
        const uint64_t offset = fuzz.odd_number() & ~uint64_t{63}, bytes = fuzz.odd_number();
        if (std::byte* found = view.arena().is_there() ? view.arena().find(offset, bytes) : nullptr) {
          std::memset(found, 1, bytes);
        }
        if (view.arena().is_there()) (void)(view.arena().return_lease(offset, 3) || view.arena().release(offset));
      } else {
        const HostView view(at, from.size());
        for (uint32_t peer = 0; peer < view.peers() && peer < 16; ++peer) {
          auto consumer = view.from(peer).consumer();
          std::vector<std::byte> scratch;
          (void)consumer.try_take(scratch);
        }
        auto consumer = view.from_host();
        auto producer = view.to_host();
        (void)producer.try_reserve(100);
      }
      ++taken;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(taken, 0u);
}

TEST(Fuzz, HostRecords) {
  const Watchdog watchdog("fuzzed host records", 900s);
  Fuzzer fuzz("host records", kTargets);
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

TEST(Fuzz, PeerRecords) {
  const Quiet quiet;
  const Watchdog watchdog("fuzzed records of a peer", 900s);
  Fuzzer fuzz("peer records", kTargets);
  /// Host 0, which sends a value to host 1 and receives one; the test is the controller and host 1.
  struct OneOfTwo {
    OneOfTwo() {
      const uint32_t here = program.add_slice({{0}, 1}), there = program.add_slice({{1}, 1});
      const uint32_t sent = program.add_transfer(program.add_call(here, {}), there);
      program.add_result(program.add_transfer(program.add_call(there, {sent}), here));
      const Plan plan = Plan::parse(program.plan_of(0, 1));
      const std::vector<uint32_t> none(2, Fabric::kNoCommunicator);
      backend.learn(0, plan, program.communicators_of(0, none));
      backend.bound_sends(receive);
      host.add_plan(0, Plan::parse(program.plan_of(0, 1)));
      host.set_compiled(0, std::nullopt);
      host.attach_client(0, ClientView(client));
      orders = HostBlock::attach(segments[0])->ring_from_controller()->claim_producer();
      ring = HostBlock::attach(segments[0])->ring_from(1);
      from_peer = ring->claim_producer();
      to_peer = HostBlock::attach(segments[1])->ring_from(0)->claim_consumer();
    }
    static std::array<Segment, 2> both() {
      const HostBlock::Sizes sizes{1u << 14, 1u << 12, 0};
      return {HostBlock::make(0, 2, sizes, false), HostBlock::make(1, 2, sizes, false)};
    }
    ModelClock clock{ModelClock::Kind::kVirtual};
    ModelledProgram program;
    ModelledBackend backend{{0, 1, 0, 0}, clock, nullptr};
    uint64_t receive[4] = {};
    Segment controller = ControllerBlock::make(false), client = ClientBlock::make({64, 4096, 1u << 14}, false);
    std::array<Segment, 2> segments = both();
    Host host{
        {0, 1, 0, 64}, {HostView(segments[0]), HostView(segments[1])}, ControllerBlock::attach(controller), backend};
    ByteRing* ring;  ///< from the peer
    ByteRing::Producer orders, from_peer;
    ByteRing::Consumer to_peer;
    uint64_t order = 0, heard = 0;
  };
  auto one = std::make_unique<OneOfTwo>();
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
    if (fuzz.below(2) == 0) {
      const ReceiveReadyRecord post{{RecordKind::kReceiveReady, 0, 0}, order, node, 1, 1, 0};
      const auto slot = reinterpret_cast<uint64_t>(&one->receive[fuzz.below(4)]);
      record.resize(sizeof post + 8);
      std::memcpy(record.data(), &post, sizeof post);
      std::memcpy(record.data() + sizeof post, &slot, 8);
    } else {
      const bool has_failed = fuzz.below(4) == 0;
      const ReceiveDoneRecord arrived{
          {RecordKind::kReceiveDone, has_failed, 0}, order, node, 1, has_failed ? 8u : 0u, 0};
      record.resize(sizeof arrived + arrived.bytes, std::byte{'x'});
      std::memcpy(record.data(), &arrived, sizeof arrived);
    }
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
    one->host.executor().lose_peer(1, "gone", Executor::LostPeer::kAlive);
    for (int i = 0; i < 50; ++i) one->host.step();
    EXPECT_TRUE(one->host.executor().is_idle());
    closed += one->heard;
    one = std::make_unique<OneOfTwo>();
  }
  EXPECT_GT(done, 0u);
  EXPECT_GT(closed, 0u);
}

TEST(Fuzz, OrdersToHosts) {
  const Watchdog watchdog("fuzzed orders", 900s);
  Fuzzer fuzz("orders to hosts", kTargets);
  struct OneHost {
    OneHost() {
      program.add_result(program.add_call(program.add_slice({{0}, 1}), {}));
      const Plan plan = Plan::parse(program.plan_of(0, 1));
      backend.learn(0, plan, program.communicators_of(0, std::vector<uint32_t>{Fabric::kNoCommunicator}));
      host.add_plan(0, Plan::parse(program.plan_of(0, 1)));
      host.set_compiled(0, std::nullopt);
      host.attach_client(0, ClientView(client));
      ring = HostBlock::attach(segment)->ring_from_controller()->claim_producer();
    }
    ModelClock clock{ModelClock::Kind::kVirtual};
    ModelledProgram program;
    ModelledBackend backend{{0, 1, 0, 0}, clock, nullptr};
    Segment controller = ControllerBlock::make(false), segment = HostBlock::make(0, 1, {1u << 14, 0, 0}, false),
            client = ClientBlock::make({64, 4096, 1u << 14}, false);
    Host host{{0, 1, 0, 64}, {HostView(segment)}, ControllerBlock::attach(controller), backend};
    ByteRing::Producer ring;
  };
  auto one = std::make_unique<OneHost>();
  uint64_t order = 0;
  while (fuzz.next()) {
    std::vector<std::byte> record(sizeof(RunRecord) + 8);
    switch (fuzz.below(4)) {
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
      case 2: {
        const HostLostRecord lost{{RecordKind::kHostLost, 0, 0}, 1, 1, 0};
        record.resize(sizeof lost + 8);
        std::memcpy(record.data(), &lost, sizeof lost);
        break;
      }
      default: {
        const GoRecord go{{RecordKind::kGo, 0, 0}, order, 0, 0};
        record.resize(sizeof go);
        std::memcpy(record.data(), &go, sizeof go);
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

TEST(Fuzz, RecordsToClients) {
  Fuzzer fuzz("records to clients", kTargets);
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

TEST(Fuzz, Plans) {
  Fuzzer fuzz("plans", kTargets);
  std::vector<std::vector<std::byte>> good;
  for (uint64_t i = 0; i < 8; ++i) {
    const auto program = make_random_program({{{0}, 1}, {{1}, 3}, {{0, 1}, 1}}, 8, {0, 1, 2}, fuzz.draw());
    for (uint32_t h : {0u, 1u}) good.push_back(program.plan_of(h, 2));
  }
  uint64_t taken = 0;
  while (fuzz.next()) {
    std::vector<std::byte> bytes = good[fuzz.below(good.size())];
    fuzz.mutate(bytes, bytes.size() + 64);
    try {
      const Plan plan = Plan::parse(std::vector<std::byte>(bytes));
      uint64_t sum = 0;  // what a host reads of it
      for (const NodeRecord& node : plan.nodes()) {
        for (const auto& list : {plan.inputs(node), plan.outputs(node), plan.sources(node), plan.destinations(node)}) {
          for (const uint32_t number : list) sum += number;
        }
        for (const uint32_t value : plan.outputs(node)) {
          for (const uint32_t consumer : plan.consumers(value)) sum += plan.node(consumer).input_count;
          for (const uint32_t result : plan.results_of(value)) sum += result;
        }
      }
      ++taken;
      EXPECT_LT(plan.nodes().size(), bytes.size()) << sum;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(taken, 0u);
}

/// A copy plan that is right: rectangles of 2 sources into 2 blocks.
std::vector<uint64_t> good_copy_plan(Fuzzer& fuzz) {
  const uint64_t rows = 1 + fuzz.below(8), row = 1 + fuzz.below(40);
  return {
      0,  2, rows * row * 2, 64, 2, rows * row * 3, 64, 2, 0, 0, 0, row, row, 1, rows, row * 2, row * 3, 1, 1, 8, 16,
      16, 0};
}

TEST(Fuzz, CopyPlans) {
  Fuzzer fuzz("copy plans", kTargets);
  uint64_t taken = 0;
  while (fuzz.next()) {
    std::vector<uint64_t> words = good_copy_plan(fuzz);
    for (size_t i = fuzz.below(4); i != 0; --i)
      words[fuzz.below(words.size())] = fuzz.below(3) ? fuzz.below(130) : fuzz.odd_number();
    if (fuzz.below(8) == 0) words.resize(fuzz.below(words.size() + 4));
    try {
      const CopyPlan copy_plan = CopyPlan::parse(words);
      std::vector<std::vector<std::byte>> sources, blocks;
      std::vector<const std::byte*> from;
      std::vector<std::byte*> to;
      const auto make = [](auto& all, auto& at, uint64_t bytes) {
        if (bytes > 1u << 20) return false;
        all.emplace_back(bytes);
        at.push_back(all.back().data());
        return true;
      };
      bool fits = copy_plan.bytes() < 1u << 22;
      for (const uint64_t bytes : copy_plan.source_bytes()) fits = fits && make(sources, from, bytes);
      for (const uint64_t bytes : copy_plan.block_bytes()) fits = fits && make(blocks, to, bytes);
      if (!fits) continue;
      std::vector<std::byte> packed(copy_plan.bytes());
      CopyWalk in(copy_plan), out(copy_plan);
      EXPECT_EQ(gather(in, from, packed), copy_plan.bytes());
      scatter(out, to, packed);
      EXPECT_TRUE(in.is_over() && out.is_over());
      ++taken;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(taken, 0u);
}

TEST(Fuzz, NetworkTransfer) {
  Fuzzer fuzz("network transfers", kTargets);
  uint64_t taken = 0;
  while (fuzz.next()) {
    const auto copy_plan = std::make_shared<const CopyPlan>(CopyPlan::parse(good_copy_plan(fuzz)));
    std::vector<std::byte> sources[2] = {pattern(copy_plan->source_bytes()[0], 1),
                                         pattern(copy_plan->source_bytes()[1], 2)};
    OutgoingTransfer outgoing(7, 1, 0, copy_plan, {sources[0].data(), sources[1].data()});
    std::vector<std::byte> message(outgoing.room());
    message.resize(outgoing.pack(message));
    if (fuzz.below(3) != 0) fuzz.mutate(message, message.size() + 64);
    std::vector<std::byte> blocks[2] = {std::vector<std::byte>(copy_plan->block_bytes()[0]),
                                        std::vector<std::byte>(copy_plan->block_bytes()[1])};
    IncomingTransfer incoming({blocks[0].data(), blocks[1].data()}, {blocks[0].size(), blocks[1].size()});
    try {
      std::span<const std::byte> left(message);
      while (!left.empty() && !incoming.is_over()) {
        const auto [chunk, bytes] = first_chunk(left);
        incoming.take(chunk);
        left = left.subspan(bytes);
      }
      taken += incoming.is_over() ? 1u : 0u;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(taken, 0u);
}

}  // namespace
}  // namespace pathways::test
