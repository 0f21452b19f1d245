// Measures the whole control path on modelled devices, and models the hosts of other machines, for benchmarks/scale.
#include <pybind11/stl.h>

#include <cstring>
#include <string>
#include <tuple>

#include "base/status.h"
#include "bind/bind.h"
#include "simulate/controller_cost.h"
#include "simulate/exchange_count.h"
#include "simulate/modelled_host.h"
#include "simulate/scale.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace pathways::bind {
namespace {

using LaunchTuple = std::tuple<uint64_t, std::vector<uint32_t>, bool>;  // as pathways.plan.memory_profile.sizes_of

void register_modelled_host(py::module_& m) {
  py::class_<ModelledHost>(m, "ModelledHost", "A host with modelled devices: see csrc/simulate/modelled_host.h.")
      .def(py::init([](uint32_t number, uint32_t devices, uint64_t device_bytes,
                       const std::map<uint32_t, Segment*>& blocks, Segment& controller,
                       const std::vector<int32_t>& epochs) {
             std::map<uint32_t, HostView> views;
             for (const auto& [host, segment] : blocks) views.emplace(host, HostView(*segment));
             return std::make_unique<ModelledHost>(number, devices, device_bytes, views,
                                                   ControllerBlock::attach(controller), epochs);
           }),
           "number"_a, "devices"_a, "device_bytes"_a, "segments"_a, "controller_segment"_a, "epochs"_a,
           py::keep_alive<1, 5>(), py::keep_alive<1, 6>(),
           "`segments`: of the hosts of its machine, by number. `epochs`: of all hosts of the cluster; -1: it is not "
           "there.")
      .def(
          "add_plan",
          [](ModelledHost& host, uint32_t plan, const std::string& block, uint32_t client, std::vector<uint64_t> values,
             const std::vector<LaunchTuple>& launches) {
            PlanSizes sizes{std::move(values), {}};
            for (const auto& [temporary, donated, moves] : launches) {
              sizes.launches.push_back({temporary, donated, moves});
            }
            std::vector<std::byte> bytes(block.size());
            std::memcpy(bytes.data(), block.data(), block.size());
            host.add_plan(plan, std::move(bytes), client, std::move(sizes));
          },
          "plan"_a, "block"_a, "client"_a, "value_bytes"_a, "launches"_a,
          "Registers a plan, compiled. Raises ValueError when it is malformed.")
      .def(
          "attach_client",
          [](ModelledHost& host, uint32_t client, Segment& twin, uint32_t futures) {
            host.attach_client(client, ClientView(twin), futures);
          },
          "client"_a, "twin"_a, "futures"_a, py::keep_alive<1, 3>(), "Starts to take a client's work.")
      .def("open_peer", &ModelledHost::open_peer, "peer"_a, "epoch"_a, "loss"_a,
           "A peer beyond the link, see Host::open_peer.")
      .def_property_readonly("launches", &ModelledHost::launches)
      .def("step", &ModelledHost::step, "Does all that can be done now; returns the records and completions handled.");
}

}  // namespace

void register_simulation(py::module_& m) {
  register_modelled_host(m);
  m.def(
      "simulate",
      [](uint32_t hosts, uint32_t shards, uint32_t calls, uint32_t batch, uint32_t repeats) {
        ScaleReport r;
        {
          const py::gil_scoped_release unlock;
          r = measure_scale({hosts, shards, calls, batch, repeats});
        }
        return py::dict("hosts"_a = r.hosts, "shards"_a = r.shards, "calls"_a = r.calls, "batch"_a = r.batch,
                        "repeats"_a = r.repeats, "client_call_ns"_a = r.client_call_ns,
                        "client_call_in_cluster_ns"_a = r.client_call_in_cluster_ns,
                        "client_release_ns"_a = r.client_release_ns, "controller_ns"_a = r.controller_ns,
                        "controller_out_ns"_a = r.controller_out_ns, "controller_in_ns"_a = r.controller_in_ns,
                        "host_ns"_a = r.host_ns, "host_launch_ns"_a = r.host_launch_ns,
                        "bytes_per_buffer"_a = r.bytes_per_buffer, "plan_nodes"_a = r.plan_nodes,
                        "plan_bytes_per_host"_a = r.plan_bytes_per_host, "run_bytes_per_host"_a = r.run_bytes_per_host,
                        "run_bytes_controller"_a = r.run_bytes_controller,
                        "messages_per_host_run"_a = r.messages_per_host_run, "resident_bytes"_a = r.resident_bytes);
      },
      "hosts"_a, "shards"_a, "calls"_a = 2, "batch"_a = 32, "repeats"_a = 0,
      "Costs of the control path with `shards` modelled devices on `hosts` hosts: medians in CPU nanoseconds, sizes in "
      "bytes. Raises ValueError for options out of range.");
  m.def(
      "simulate_policy",
      [](uint32_t hosts, uint32_t devices, uint32_t clients, const std::string& policy, uint32_t runs,
         uint32_t repeats) {
        if (policy != "fifo" && policy != "share") {
          throw Error(Status::kInvalid, "policy: expected 'fifo' or 'share', got '" + policy + "'");
        }
        ControllerCost cost;
        {
          const py::gil_scoped_release unlock;
          const PolicyKind kind = policy == "fifo" ? PolicyKind::kFifo : PolicyKind::kShare;
          cost = measure_controller({hosts, devices, clients, kind, runs, repeats});
        }
        return py::dict("ns"_a = cost.ns, "runs"_a = cost.runs, "charged"_a = cost.charged, "repeats"_a = cost.repeats);
      },
      "hosts"_a, "devices"_a, "clients"_a, "policy"_a, "runs"_a = 16, "repeats"_a = 0,
      "The controller's time per host and run: policy, admission, order and messages. Raises ValueError for options "
      "out "
      "of range.");
  m.def(
      "count_exchange",
      [](uint32_t shards, uint32_t shards_per_host, uint32_t rows, uint64_t seed) {
        ExchangeCount count;
        {
          const py::gil_scoped_release unlock;
          count = count_exchange({shards, shards_per_host, rows, seed});
        }
        return py::dict("hosts"_a = count.hosts, "pairs"_a = count.pairs, "records"_a = count.records,
                        "words"_a = count.words);
      },
      "shards"_a, "shards_per_host"_a = 1, "rows"_a = 2, "seed"_a = 1,
      "Records of one exchange of rows between two slices of modelled hosts. Raises ValueError for options out of "
      "range.");
}

}  // namespace pathways::bind
