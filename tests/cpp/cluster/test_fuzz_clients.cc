// TRUST-1 by mutation of what a client writes: whatever it writes into memory that the controller and the hosts read,
// nobody crashes, nothing is read or written out of bounds, and nobody else's results change. See fuzz.h for how long,
// and how to repeat a run. What hosts and the controller write: test_fuzz_records.cc.
//
//   Fuzz.ClientRecords    records of a client, beside one whose values are compared
//   Fuzz.ClientSegments   words of a client's block while controller and hosts work on it, beside the same
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "cluster/workload.h"
#include "fuzz.h"

namespace pathways::test::test_fuzz_clients {
namespace {

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
    fuzz_.must_reach(innocent_->compared());
    if (fuzz_.is_guided()) return;
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
    for (uint32_t h = 0; h < 2; ++h) sim_.host(h).attach_client(culprit_->id, view, view.futures().capacity());
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

FUZZ(ClientRecords) {
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

FUZZ(ClientSegments) {
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

}  // namespace
}  // namespace pathways::test::test_fuzz_clients
