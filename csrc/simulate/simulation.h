/// A whole cluster in one process: controller, hosts with modelled devices, clients.
///
/// There are two ways to run it. `step`: one thread steps all parts, in turn, or in a seeded random order, so that
/// interleavings are explored and can be repeated. `start`: the controller and each host have a thread of their own.
///
/// Threading: one thread builds and steps; after `start`, each client is used by one thread at a time.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "client/client.h"
#include "controller/controller.h"
#include "host/host.h"
#include "memory/segment.h"
#include "simulate/modelled_device.h"
#include "simulate/program.h"

namespace pathways {

struct SimulationOptions {
  uint32_t hosts = 1;
  uint32_t devices = 1;   ///< per host
  uint32_t window = 256;  ///< most runs that are granted to a host and not yet done there
  uint32_t client_window = 1024;
  uint32_t max_in_flight = 0;  ///< most launches under way per device; 0: no limit
  int64_t step_ns = 0;
  int64_t transfer_ns = 0;
  ModelClock::Kind clock = ModelClock::Kind::kVirtual;  ///< of the devices
  Clock time = monotonic_ns;                            ///< of the controller, the hosts and the clients
  bool pair_gangs = true;                               ///< a Fabric checks the gangs
  PolicyKind policy = PolicyKind::kFifo;
  std::vector<uint64_t> budgets = {};  ///< bytes per memory space of the controller's ledger
  std::chrono::nanoseconds grace = std::chrono::milliseconds(250);  ///< ControllerOptions::grace
  uint32_t ring_bytes = 1u << 16;
  uint32_t peer_ring_bytes = 1u << 14;
  uint32_t futures = 1u << 12;
  uint32_t client_ring_bytes = 1u << 16;
  std::optional<uint32_t> swapping_host = {};  ///< it swaps each `swap_every`-th pair of runs
  uint32_t swap_every = 3;
  bool own_handles = false;  ///< each host of a run gets only its own handles; every program has its client
};

class Simulation {
 public:
  /// A program that is registered on all its hosts.
  struct Program {
    ModelledProgram program;
    ProgramRef ref;
    std::vector<uint32_t> hosts;
  };

  explicit Simulation(const SimulationOptions& options);
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  Client& add_client();
  Client& client(uint32_t id) { return *clients_.at(id).client; }
  /// OWN-1. Returns when the controller and the hosts no longer access the client's memory.
  void remove_client(uint32_t id);
  /// Registers a program on its hosts. Only before `start`. The reference lives as long as the simulation. `client`:
  /// only this client may run it, and the policy knows its devices; none: any client may, whenever it comes.
  const Program& add_program(ModelledProgram program, bool compiled = true,
                             std::optional<uint32_t> client = std::nullopt);
  void set_compiled(const Program& program, const std::optional<std::string>& error = std::nullopt);
  /// Adds a group of hosts for puts and fetches, beside the groups of the programs.
  GroupId add_group(std::vector<uint32_t> hosts);

  Controller& controller() { return *controller_; }
  Host& host(uint32_t index) { return *hosts_[index]; }
  ModelledBackend& backend(uint32_t index) { return *backends_[index]; }
  Fabric& fabric() { return fabric_; }
  ModelClock& clock() { return clock_; }
  ControllerBlock* controller_block() { return controller_block_; }
  const SimulationOptions& options() const { return options_; }

  /// One step of the controller, of each host and of each client; advances a virtual clock. Returns the number of
  /// things done.
  uint32_t step();
  /// One step of the controller, a host or a client, chosen at random.
  uint32_t step(std::mt19937_64& random);
  /// Steps until nothing is left to do. Returns false when that takes more than `most` rounds.
  bool run_until_idle(uint32_t most = 100000);
  bool is_idle();

  void start();
  void stop();

  // Sums over all hosts, for tests. Call them only while no thread runs.
  uint64_t live_values() const;
  uint64_t order_violations() const;
  uint64_t live_objects();
  uint64_t open_receives() const;

 private:
  struct ClientSlot {
    Segment segment;
    ClientBlock* block = nullptr;
    std::unique_ptr<Client> client;
  };
  std::vector<HostDevice> devices_of(const ModelledProgram& program) const;
  void host_loop(uint32_t index);

  const SimulationOptions options_;
  ModelClock clock_;
  Fabric fabric_;
  Segment controller_segment_;
  ControllerBlock* controller_block_ = nullptr;
  std::vector<Segment> host_segments_;
  std::vector<std::unique_ptr<ModelledBackend>> backends_;
  std::vector<ClientSlot> clients_;  ///< by id; segments outlive the hosts
  std::unique_ptr<Controller> controller_;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::vector<std::unique_ptr<Program>> programs_;
  GroupId next_group_ = 1;
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;
};

}  // namespace pathways
