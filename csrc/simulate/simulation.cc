#include "simulate/simulation.h"

#include <map>

#include "base/check.h"
#include "host/swapping_host_for_testing.h"

namespace pathways {
namespace {

constexpr std::chrono::microseconds kModelPoll{50};  // how often a host checks whether a modelled step has ended
constexpr std::chrono::milliseconds kHostLook{20};

}  // namespace

Simulation::Simulation(const SimulationOptions& options) : options_(options), clock_(options.clock) {
  PW_CHECK(options.hosts >= 1);
  controller_segment_ = ControllerBlock::make(false);
  controller_block_ = ControllerBlock::attach(controller_segment_);
  std::vector<HostView> blocks;
  for (uint32_t h = 0; h < options.hosts; ++h) {
    host_segments_.push_back(
        HostBlock::make(h, options.hosts, {options.ring_bytes, options.peer_ring_bytes, 0}, false));
    blocks.push_back(HostBlock::attach(host_segments_.back()));
  }
  Controller::Options controller{.window = options.window, .budgets = options.budgets, .grace = options.grace};
  controller.policy = options.policy;
  controller.clock = options.time;
  controller_ = std::make_unique<Controller>(std::move(controller), controller_block_, blocks);
  Host::Options host_options{
      .devices = options.devices, .quirks = {.max_in_flight = options.max_in_flight}, .clock = options.time};
  // In virtual time a host's step does all the work there is, however slow the machine is.
  if (options.clock == ModelClock::Kind::kVirtual) host_options.longest_step = std::chrono::hours(1);
  for (uint32_t h = 0; h < options.hosts; ++h) {
    host_options.host = h;
    backends_.push_back(std::make_unique<ModelledBackend>(
        ModelledBackend::Options{h, options.devices, options.step_ns, options.transfer_ns}, clock_,
        options.pair_gangs ? &fabric_ : nullptr));
    if (options.swapping_host == h) {
      hosts_.push_back(std::make_unique<SwappingHostForTesting>(options.swap_every, host_options, blocks,
                                                                controller_block_, *backends_.back()));
    } else {
      hosts_.push_back(std::make_unique<Host>(host_options, blocks, controller_block_, *backends_.back()));
    }
  }
}

Simulation::~Simulation() {
  stop();
  for (ClientSlot& slot : clients_) slot.client.reset();
  hosts_.clear();
  controller_.reset();
}

// ---------------------------------------------------------------------------------------------- clients, programs

Client& Simulation::add_client() {
  ClientSlot slot;
  slot.segment = ClientBlock::make({options_.futures, options_.client_ring_bytes, 0}, false);
  slot.block = ClientBlock::attach(slot.segment);
  const auto id = static_cast<uint32_t>(clients_.size());
  for (auto& host : hosts_) host->attach_client(id, slot.block, ClientView(slot.block).futures().capacity());
  controller_->add_client(id, slot.block);
  slot.client =
      std::make_unique<Client>(Client::Options{.id = id, .window = options_.client_window, .clock = options_.time},
                               slot.block, controller_block_);
  clients_.push_back(std::move(slot));
  return *clients_.back().client;
}

void Simulation::remove_client(uint32_t id) {
  controller_->remove_client(id);
  clients_.at(id).client.reset();
}

GroupId Simulation::add_group(std::vector<uint32_t> hosts) {
  controller_->add_group(next_group_, std::move(hosts));
  return next_group_++;
}

/// The devices of all slices of a program, numbered through the cluster.
std::vector<HostDevice> Simulation::devices_of(const ModelledProgram& program) const {
  std::vector<HostDevice> devices;
  for (const ModelledSlice& slice : program.slices()) {
    for (const uint32_t host : slice.hosts) {
      for (uint32_t device = 0; device < options_.devices; ++device) {
        if ((slice.devices >> device & 1) != 0) devices.push_back({host, host * options_.devices + device});
      }
    }
  }
  return devices;
}

const Simulation::Program& Simulation::add_program(ModelledProgram program, bool compiled,
                                                   std::optional<uint32_t> client) {
  auto entry = std::make_unique<Program>();
  entry->hosts = program.hosts();
  entry->ref.plan = static_cast<uint32_t>(programs_.size());
  entry->ref.group = add_group(entry->hosts);
  entry->ref.result_parts = program.result_parts();
  std::vector<uint32_t> communicators;
  for (const ModelledSlice& slice : program.slices()) {
    communicators.push_back(options_.pair_gangs && slice.hosts.size() > 1 ? fabric_.add_communicator(slice.hosts)
                                                                          : Fabric::kNoCommunicator);
  }
  if (client) controller_->register_plan(entry->ref.plan, *client, entry->ref.group, devices_of(program));
  if (options_.own_handles) {
    std::vector<GroupId> groups;
    for (const ModelledSlice& slice : program.slices()) groups.push_back(add_group(slice.hosts));
    PlanMemory memory;
    memory.client = client.value();
    for (const uint32_t value : program.results()) memory.results.push_back({groups[program.slice_of(value)]});
    auto& argument_groups = memory.argument_groups.emplace();
    for (const uint32_t value : program.arguments()) argument_groups.push_back(groups[program.slice_of(value)]);
    controller_->set_plan_memory(entry->ref.plan, std::move(memory));
  }
  for (const uint32_t h : entry->hosts) {
    Plan plan = Plan::parse(program.plan_of(h, options_.devices, options_.own_handles));
    backends_[h]->learn(entry->ref.plan, plan, program.communicators_of(h, communicators));
    hosts_[h]->add_plan(entry->ref.plan, std::move(plan));
    if (compiled) hosts_[h]->set_compiled(entry->ref.plan, std::nullopt);
  }
  entry->program = std::move(program);
  programs_.push_back(std::move(entry));
  return *programs_.back();
}

void Simulation::set_compiled(const Program& program, const std::optional<std::string>& error) {
  for (const uint32_t h : program.hosts) hosts_[h]->set_compiled(program.ref.plan, error);
}

// ---------------------------------------------------------------------------------------------------------- steps

uint32_t Simulation::step() {
  uint32_t done = controller_->step();
  for (auto& host : hosts_) done += host->step();
  for (ClientSlot& slot : clients_) {
    if (slot.client) slot.client->poll_inbox();
  }
  clock_.advance(1000);
  return done;
}

uint32_t Simulation::step(std::mt19937_64& random) {
  const uint64_t who = random() % (hosts_.size() + clients_.size() + 1);
  clock_.advance(static_cast<int64_t>(random() % 1000));
  if (who == 0) return controller_->step();
  if (who <= hosts_.size()) return hosts_[who - 1]->step();
  ClientSlot& slot = clients_[who - hosts_.size() - 1];
  if (slot.client) slot.client->poll_inbox();
  return 0;
}

bool Simulation::is_idle() {
  if (!controller_->is_idle()) return false;
  for (auto& host : hosts_) {
    if (!host->executor().is_idle()) return false;
  }
  return true;
}

bool Simulation::run_until_idle(uint32_t most) {
  uint32_t quiet = 0;
  for (uint32_t round = 0; round < most; ++round) {
    quiet = step() == 0 && is_idle() ? quiet + 1 : 0;
    if (quiet == 3) return true;
  }
  return false;
}

// -------------------------------------------------------------------------------------------------------- threads

void Simulation::start() {
  PW_CHECK(threads_.empty());
  stopping_.store(false);
  controller_->start();
  for (uint32_t h = 0; h < hosts_.size(); ++h) threads_.emplace_back([this, h] { host_loop(h); });
}

void Simulation::stop() {
  if (threads_.empty()) return;
  stopping_.store(true);
  for (auto& host : hosts_) host->ring();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  controller_->stop();
}

void Simulation::host_loop(uint32_t index) {
  Host& host = *hosts_[index];
  const SpinPolicy spin = SpinPolicy::adaptive();
  std::vector<Value> watched;
  try {
    while (!stopping_.load(std::memory_order_acquire)) {
      const uint32_t ticket = host.ticket();
      if (host.step() != 0) continue;
      host.executor().watched(&watched);
      (void)host.wait(ticket, watched.empty() ? std::chrono::nanoseconds(kHostLook) : kModelPoll, spin);
    }
  } catch (const std::exception& error) {
    controller_->fail("host " + std::to_string(index) + " stopped: " + error.what());
  }
}

// ----------------------------------------------------------------------------------------------------------- sums

uint64_t Simulation::live_values() const {
  uint64_t sum = 0;
  for (const auto& backend : backends_) sum += backend->live_values();
  return sum;
}

uint64_t Simulation::order_violations() const {
  uint64_t sum = 0;
  for (const auto& backend : backends_) sum += backend->order_violations();
  return sum;
}

uint64_t Simulation::live_objects() {
  uint64_t sum = 0;
  for (auto& host : hosts_) sum += host->executor().stats().objects;
  return sum;
}

uint64_t Simulation::open_receives() const {
  uint64_t sum = 0;
  for (const auto& backend : backends_) sum += backend->open_receives();
  return sum;
}

}  // namespace pathways
