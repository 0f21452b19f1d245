// A whole cluster over links: a controller at the head, a machine for each host, and a client at the head or on one
// more machine. The hosts run random programs; every value is compared with that of a plain evaluation.
//
//   LINK-1   LinkedCluster.RandomPrograms, FarClientCluster.RandomPrograms
//   PEER-1   LinkedCluster.LostMachines, FarClientCluster.LostMachines: at any moment; what is ordered afterwards is
//            right again
#include <deque>
#include <map>
#include <memory>
#include <random>

#include "client/client.h"
#include "controller/controller.h"
#include "host/host.h"
#include "link/far_client.h"
#include "link/machine_link.h"
#include "simulate/program.h"
#include "support.h"

namespace pathways::test::test_link_cluster {
namespace {

using Bytes = std::vector<std::byte>;
constexpr uint32_t kHosts = 3, kPlans = 6;
constexpr HostBlock::Sizes kSizes{1u << 17, 4096, 0, 1u << 14};

/// A machine with one host, and its link.
struct Machine {
  Machine(LinkHub& head, uint32_t number, const std::vector<int32_t>& epochs, ControllerBlock* controller,
          const ModelClock& clock)
      : number(number),
        twin(HostBlock::make(number, kHosts, kSizes, false)),
        own(HostBlock::make(number, kHosts, kSizes, false)),
        backend({number, 1, 0, 0}, clock, nullptr) {
    const int32_t epoch = epochs[number];
    at_head = MachineLink::open(head, MachineLink::End::kHead);
    here = MachineLink::open(hub, MachineLink::End::kAgent);
    at_head->add_host(number, epoch, HostView(twin), controller);
    here->add_host(number, epoch, HostView(own), ControllerBlock::attach(controller_segment));
    std::vector<HostView> blocks(kHosts);
    blocks[number] = HostView(own);
    Host::Options options{.host = number};
    host = std::make_unique<Host>(options, blocks, ControllerBlock::attach(controller_segment), backend, epochs);
  }
  ~Machine() {
    host.reset();
    at_head->close();
    here->close();
  }

  void add_plan(uint32_t id, const ModelledProgram& program) {
    Plan plan = Plan::parse(program.plan_of(number, 1));
    backend.learn(id, plan, {});
    host->add_plan(id, std::move(plan));
    host->set_compiled(id, std::nullopt);
  }
  static void transmit(Link& from, Link& to, Bytes& wire, std::mt19937_64& random) {
    static Bytes buffer(size_t{1} << 20);
    const size_t count = from.collect(buffer);
    wire.insert(wire.end(), buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(count));
    const size_t most = random() % 4 == 0 ? random() % (wire.size() + 1) : wire.size();
    to.deliver(std::span(wire).first(most));
    wire.erase(wire.begin(), wire.begin() + static_cast<std::ptrdiff_t>(most));
  }

  const uint32_t number;
  Segment twin, own, controller_segment = ControllerBlock::make(false);
  Segment client = ClientBlock::make({64, 4096, 0, false}, false);  ///< stands for the client's block
  LinkHub hub;
  std::shared_ptr<MachineLink> at_head, here;
  Bytes out, in;
  ModelledBackend backend;
  std::unique_ptr<Host> host;
};

struct LinkedCluster : testing::Test {
  explicit LinkedCluster(bool is_client_far = false) {
    std::vector<HostView> blocks;
    for (uint32_t h = 0; h < kHosts; ++h) {
      start(h);
      blocks.emplace_back(machines[h]->twin);
    }
    controller = std::make_unique<Controller>(Controller::Options{1024, {}}, block, blocks);
    if (is_client_far) {
      far = std::make_unique<FarClient>(head, Client::Options{0, 64}, kClientSizes);
      controller->add_client(0, far->view(), far->bell(), {}, ClientPlace::kElsewhere);
      head.add_client(0, far->view(), nullptr, far->at_head);
      client_block = far->block();
    } else {
      controller->add_client(0, client_block);
      head.add_client(0, client_block);
      near = std::make_unique<Client>(Client::Options{0, 64}, client_block, block);
    }
    client = is_client_far ? &far->client : near.get();
    for (uint32_t plan = 0; plan < kPlans; ++plan) {
      // One argument at most, and slices of one host each: a modelled transfer between far hosts needs nothing else.
      programs.push_back(make_random_program({{{0}, 1}, {{1}, 1}, {{2}, 1}}, 8, {}, random()));
      refs.push_back({plan, plan + 1, programs[plan].result_parts(), {}});
      refs[plan].result_bytes.assign(refs[plan].result_parts.size(), 8);
      controller->add_group(plan + 1, programs[plan].hosts());
      for (const uint32_t h : programs[plan].hosts()) machines[h]->add_plan(plan, programs[plan]);
    }
  }
  ~LinkedCluster() override {
    near.reset();
    controller.reset();
    head.remove_client(0);
  }

  void start(uint32_t h) {
    machines[h] = std::make_unique<Machine>(head, h, epochs, block, clock);
    machines[h]->host->attach_client(0, ClientView(machines[h]->client), ClientView(client_block).futures().capacity());
  }
  /// One step of somebody.
  void step() {
    if (far != nullptr && random() % 4 == 0) {
      if (random() % 2 == 0)
        Machine::transmit(*far->at_head, *far->at_client, far->in, random);
      else
        Machine::transmit(*far->at_client, *far->at_head, far->out, random);
      return;
    }
    const uint64_t who = random() % (3 * kHosts + 2);
    clock.advance(1000);
    if (who == 0) {
      controller->step();
    } else if (who == 1) {
      client->poll_inbox();
    } else {
      Machine& machine = *machines[(who - 2) / 3];
      if ((who - 2) % 3 == 0) machine.host->step();
      if ((who - 2) % 3 == 1) Machine::transmit(*machine.at_head, *machine.here, machine.out, random);
      if ((who - 2) % 3 == 2) Machine::transmit(*machine.here, *machine.at_head, machine.in, random);
    }
  }
  struct Submitted {
    uint32_t plan;
    std::vector<uint64_t> results;
    std::vector<uint64_t> wanted;
  };
  bool submit() {
    const auto plan = static_cast<uint32_t>(random() % kPlans);
    Submitted run{plan, std::vector<uint64_t>(refs[plan].result_parts.size()), {}};
    if (run.results.size() > 64) return false;
    run.wanted = {run.results.size() == 64 ? ~uint64_t{0} : (uint64_t{1} << run.results.size()) - 1};
    if (run.results.empty()) run.wanted.clear();
    if (client->submit(refs[plan], {}, run.results.data(), run.wanted) != Status::kOk) return false;
    runs.push_back(std::move(run));
    return true;
  }
  /// Takes the runs that are over, from the first on. `why`: the only error that there may be.
  void check(const std::string& why = "") {
    ReadBackArea& area = *client_block->read_back_area();
    while (!runs.empty()) {
      const Submitted& run = runs.front();
      for (const uint64_t result : run.results) {
        if (client->poll(Handle{result}) == FutureState::kPending) return;
      }
      const std::vector<uint64_t> expected = programs[run.plan].evaluate(run.plan, {});
      for (size_t i = 0; i < run.results.size(); ++i) {
        const Handle result{run.results[i]};
        if (client->poll(result) == FutureState::kFailed) {
          ASSERT_FALSE(why.empty()) << client->error_of(result);
          ASSERT_EQ(client->error_of(result), why);
          ++failed;
        } else {
          uint64_t value = 0;
          std::memcpy(&value, area.slot(result, 8), sizeof value);
          if ((run.wanted[0] >> i & 1) != 0) {
            ASSERT_EQ(value, expected[i]);
            ++ready;
          }
        }
      }
      for (const uint64_t result : run.results) client->release(Handle{result}, run.plan + 1, 8);
      runs.pop_front();
    }
  }
  void finish(const std::string& why = "") {
    while (client->in_flight() != 0 || !runs.empty()) {
      step();
      check(why);
      if (HasFatalFailure()) return;
    }
  }

  void random_programs();
  void lost_machines();

  std::mt19937_64 random{seed()};
  ModelClock clock{ModelClock::Kind::kVirtual};
  Segment controller_segment = ControllerBlock::make(false);
  ControllerBlock* block = ControllerBlock::attach(controller_segment);
  static constexpr ClientBlock::Sizes kClientSizes{1024, 1u << 17, 1u << 16};
  Segment client_segment = ClientBlock::make(kClientSizes, false);
  ClientBlock* client_block = ClientBlock::attach(client_segment);
  LinkHub head;
  std::vector<int32_t> epochs = std::vector<int32_t>(kHosts, 1);
  std::vector<std::unique_ptr<Machine>> dead;
  std::unique_ptr<Machine> machines[kHosts];
  std::unique_ptr<Controller> controller;
  std::unique_ptr<FarClient> far;
  std::unique_ptr<Client> near;
  Client* client = nullptr;
  std::vector<ModelledProgram> programs;
  std::vector<ProgramRef> refs;
  std::deque<Submitted> runs;
  uint64_t ready = 0, failed = 0;
};

void LinkedCluster::random_programs() {
  const Watchdog watchdog("programs over links");
  for (int i = 0; i < 100 * kStressScale; ++i) {
    (void)submit();
    for (uint64_t steps = random() % 100; steps != 0; --steps) step();
    check();
    if (HasFatalFailure()) return;
  }
  finish();
  EXPECT_GT(ready, 100u);
  for (const auto& machine : machines) {
    EXPECT_EQ(machine->at_head->stats().dropped + machine->here->stats().dropped, 0u);
    EXPECT_TRUE(machine->host->executor().is_idle());
  }
}

void LinkedCluster::lost_machines() {
  const Watchdog watchdog("machines that are lost");
  const std::string why = "HostLostError: gone";
  for (uint64_t loss = 1; loss <= 8 * kStressScale; ++loss) {
    for (int i = 0; i < 10; ++i) (void)submit();
    for (uint64_t steps = random() % 300; steps != 0; --steps) step();
    // The machine is gone at once. What it has said may be on its way to the head, or to others behind the head.
    const auto lost = static_cast<uint32_t>(random() % kHosts);
    machines[lost]->at_head->close();
    machines[lost]->here->close();
    EXPECT_EQ(controller->lose_hosts({lost}, why), loss);
    ++epochs[lost];
    for (uint32_t h = 0; h < kHosts; ++h) {
      if (h != lost) machines[h]->host->open_peer(lost, HostView(), epochs[lost], loss);
    }
    dead.push_back(std::move(machines[lost]));  // others may still write to its memory
    start(lost);
    for (uint32_t plan = 0; plan < kPlans; ++plan) {
      const auto hosts = programs[plan].hosts();
      if (std::find(hosts.begin(), hosts.end(), lost) != hosts.end()) machines[lost]->add_plan(plan, programs[plan]);
    }
    // The others need not know of the loss yet. What the successor tells them then is kept (PEER-1).
    controller->restore_host(lost, HostView(machines[lost]->twin));
    finish(why);
    if (HasFatalFailure()) return;
    const uint64_t failed_before = failed;
    for (int i = 0; i < 5; ++i) (void)submit();
    finish(why);
    EXPECT_EQ(failed, failed_before);
  }
  EXPECT_GT(ready, 100u);
  EXPECT_GT(failed, 10u);
}

struct FarClientCluster : LinkedCluster {
  FarClientCluster() : LinkedCluster(true) {}
};

TEST_F(LinkedCluster, RandomPrograms) { random_programs(); }
TEST_F(FarClientCluster, RandomPrograms) {
  random_programs();
  EXPECT_EQ(far->at_head->stats().dropped + far->at_client->stats().dropped, 0u);
}
TEST_F(LinkedCluster, LostMachines) { lost_machines(); }
TEST_F(FarClientCluster, LostMachines) { lost_machines(); }

}  // namespace
}  // namespace pathways::test::test_link_cluster
