// The whole control path on modelled devices, measured: what `pathways bench scale` prints.
#include "bind/bind.h"
#include "runtime/client.h"
#include "simulate/scale.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace pathways::bind {

void register_simulation(py::module_& m) {
  m.def(
      "simulate",
      [](uint32_t hosts, uint32_t devices, uint32_t calls, uint32_t batch, uint32_t repeats) {
        ScaleReport r;
        {
          const py::gil_scoped_release unlock;
          r = measure_scale({hosts, hosts * devices, calls, batch, repeats});
        }
        return py::dict(
            "hosts"_a = r.hosts, "shards"_a = r.shards, "calls"_a = r.calls, "batch"_a = r.batch,
            "repeats"_a = r.repeats, "client_ns_per_call"_a = r.client_call_ns,
            "client_ns_per_call_in_cluster"_a = r.client_call_in_cluster_ns,
            "client_ns_per_release"_a = r.client_release_ns, "sequencer_ns_per_host_run"_a = r.controller_ns,
            "sequencer_out_ns"_a = r.controller_out_ns, "sequencer_in_ns"_a = r.controller_in_ns,
            "host_ns_per_run"_a = r.host_ns, "host_ns_per_launch"_a = r.host_launch_ns,
            "buffer_bytes"_a = r.bytes_per_buffer, "client_plan_bytes"_a = sizeof(ProgramRef) + sizeof(uint32_t),
            "host_plan_bytes"_a = r.plan_bytes_per_host, "plan_nodes"_a = r.plan_nodes,
            "run_bytes_per_host"_a = r.run_bytes_per_host, "run_bytes_controller"_a = r.run_bytes_controller,
            "messages_per_host_run"_a = r.messages_per_host_run, "resident_bytes"_a = r.resident_bytes);
      },
      "hosts"_a, "devices"_a, "calls"_a = 2, "batch"_a = 32, "repeats"_a = 0,
      "Costs of the control path with `devices` modelled devices on each of `hosts` hosts: medians in CPU nanoseconds, "
      "sizes in bytes. Raises ValueError for options out of range.");
}

}  // namespace pathways::bind
