#include "simulate/controller_cost.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/status.h"
#include "simulate/simulation.h"

namespace pathways {
namespace {

constexpr uint32_t kMostUnderWay = 48;  // so that a batch fits into a host's ring of 4 KiB
constexpr uint64_t kResultBytes = 64, kBudget = 1u << 20;

double middle_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

SimulationOptions simulation_of(const ControllerCostOptions& options) {
  SimulationOptions setup;
  setup.hosts = options.hosts;
  setup.devices = options.devices;
  setup.pair_gangs = false;
  setup.ring_bytes = 4096;
  setup.peer_ring_bytes = 0;
  setup.futures = 1024;
  setup.policy = options.policy;
  setup.budgets.assign(size_t{options.hosts} * options.devices, kBudget);
  return setup;
}

/// Clients and their programs, on one cluster.
class Measured {
 public:
  explicit Measured(const ControllerCostOptions& options) : options_(options), sim_(simulation_of(options)) {
    ModelledSlice slice{{}, options.devices == 64 ? ~uint64_t{0} : (uint64_t{1} << options.devices) - 1};
    std::vector<SpaceId> spaces;
    for (uint32_t host = 0; host < options.hosts; ++host) slice.hosts.push_back(host);
    for (SpaceId space = 0; space < options.hosts * options.devices; ++space) spaces.push_back(space);
    const SpaceSetId set = sim_.controller().add_space_set(spaces);
    for (uint32_t i = 0; i < options.clients; ++i) {
      clients_.push_back(&sim_.add_client());
      ModelledProgram program;
      program.add_result(program.add_call(program.add_slice(slice), {}));
      programs_.push_back(&sim_.add_program(std::move(program), true, i));
      const ProgramRef& ref = programs_[i]->ref;
      PlanMemory memory;
      memory.client = i;
      memory.name = "measured";
      for (const SpaceId space : spaces) memory.needs.push_back({space, kResultBytes});
      memory.results.push_back({ref.group, set, kResultBytes});
      sim_.controller().set_plan_memory(ref.plan, std::move(memory));
    }
    PW_CHECK(sim_.run_until_idle());
  }

  /// Runs a batch of every client. Returns the time of the controller's passes, in ns.
  int64_t batch() {
    std::vector<std::vector<uint64_t>> results(clients_.size(), std::vector<uint64_t>(options_.runs));
    for (uint32_t run = 0; run < options_.runs; ++run) {
      for (size_t i = 0; i < clients_.size(); ++i) {
        PW_CHECK(clients_[i]->submit(programs_[i]->ref, {}, &results[i][run]) == Status::kOk);
      }
    }
    int64_t spent_ns = 0;
    const auto passes = [&] {
      for (;;) {
        const int64_t begin = monotonic_ns();
        if (sim_.controller().step() == 0) return;
        spent_ns += monotonic_ns() - begin;
      }
    };
    while (std::any_of(clients_.begin(), clients_.end(), [](const Client* each) { return each->in_flight() != 0; })) {
      passes();
      for (uint32_t host = 0; host < options_.hosts; ++host) {
        while (sim_.host(host).step() != 0) {
        }
      }
    }
    for (size_t i = 0; i < clients_.size(); ++i) {
      for (const uint64_t result : results[i]) {
        PW_CHECK(clients_[i]->poll(Handle{result}) == FutureState::kReady);
        clients_[i]->release(Handle{result}, programs_[i]->ref.group, options_.devices);
      }
      clients_[i]->flush();
    }
    PW_CHECK(sim_.run_until_idle());
    return spent_ns;
  }

  /// Runs that the policy has charged: 0 when it did not choose.
  uint64_t charged() { return sim_.controller().stats().charged; }

 private:
  const ControllerCostOptions options_;
  Simulation sim_;
  std::vector<Client*> clients_;
  std::vector<const Simulation::Program*> programs_;
};

}  // namespace

ControllerCost measure_controller(const ControllerCostOptions& options) {
  const uint64_t under_way = uint64_t{options.clients} * options.runs;
  if (options.hosts == 0 || options.devices == 0 || options.devices > kMaxLocalDevices || under_way == 0 ||
      under_way > kMostUnderWay) {
    throw Error(Status::kInvalid, "expected hosts, 1 to 64 devices of each, and 1 to " + std::to_string(kMostUnderWay) +
                                      " runs of all clients together, got " + std::to_string(options.hosts) +
                                      " hosts, " + std::to_string(options.devices) + " devices and " +
                                      std::to_string(under_way) + " runs");
  }
  Measured measured(options);
  ControllerCost cost;
  cost.repeats = options.repeats != 0 ? options.repeats : std::clamp(30000u / options.hosts, 7u, 1000u);
  for (uint32_t i = 0; i < std::clamp(2000u / options.hosts, 2u, 20u); ++i) (void)measured.batch();
  std::vector<double> each;
  const auto host_runs = static_cast<double>(under_way * options.hosts);
  for (uint32_t i = 0; i < cost.repeats; ++i) each.push_back(static_cast<double>(measured.batch()) / host_runs);
  cost.ns = middle_of(each);
  cost.runs = under_way * cost.repeats;
  cost.charged = measured.charged();
  return cost;
}

}  // namespace pathways
