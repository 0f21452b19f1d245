// The controller as Python starts it: on a native thread of its own, or stepped by an embedded client.
#include "runtime/controller.h"

#include <pybind11/stl.h>

#include <map>

#include "bind/bind.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace pathways::bind {
namespace {

/// A controller with the segments it works in, which must outlive it.
struct BoundController {
  BoundController(py::object controller_segment, const std::vector<py::object>& host_segments,
                  std::vector<uint32_t> islands, uint32_t window, bool sequential)
      : controller_memory(std::move(controller_segment)), host_memory(host_segments) {
    std::vector<HostBlock*> hosts;
    for (const py::object& segment : host_memory) hosts.push_back(HostBlock::attach(segment.cast<Segment&>()));
    Controller::Options options;
    options.window = window;
    options.islands = std::move(islands);
    options.sequential = sequential;
    core = std::make_unique<Controller>(std::move(options), ControllerBlock::attach(controller_memory.cast<Segment&>()),
                                        std::move(hosts));
  }

  py::object controller_memory;
  std::vector<py::object> host_memory;
  std::map<uint32_t, py::object> client_memory;
  std::unique_ptr<Controller> core;  // last: goes first
};

py::dict stats_dict(const ControllerStats& s) {
  return py::dict("runs"_a = s.runs, "granted"_a = s.granted, "retired"_a = s.retired, "dropped"_a = s.dropped,
                  "notes"_a = s.notes, "records_out"_a = s.records_out, "passes"_a = s.passes, "clients"_a = s.clients,
                  "waiting"_a = s.waiting, "gangs"_a = s.gangs);
}

}  // namespace

void register_controller(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<BoundController>(m, "Controller", "The sequencer and its rings.")
      .def(py::init<py::object, const std::vector<py::object>&, std::vector<uint32_t>, uint32_t, bool>(), "segment"_a,
           "hosts"_a, "islands"_a = std::vector<uint32_t>{}, "window"_a = 256, "sequential"_a = false)
      .def(
          "add_group",
          [](BoundController& c, uint32_t group, std::vector<uint32_t> hosts) {
            c.core->add_group(group, std::move(hosts));
          },
          "group"_a, "hosts"_a, "Who is meant by a group number. Group 0 is all hosts.")
      .def(
          "add_plan",
          [](BoundController& c, uint32_t plan, const std::vector<std::pair<bool, std::vector<uint32_t>>>& nodes) {
            std::vector<ProgramNode> program;
            for (const auto& [is_call, hosts] : nodes) {
              program.push_back({static_cast<uint32_t>(program.size()), is_call, hosts});
            }
            c.core->add_plan(plan, std::move(program));
          },
          "plan"_a, "nodes"_a,
          "Sequential dispatch only: per node of a program, in order, whether it is a call, and whom it concerns.")
      .def(
          "add_client",
          [](BoundController& c, uint32_t client, py::object segment) {
            c.core->add_client(client, ClientBlock::attach(segment.cast<Segment&>()));
            c.client_memory[client] = std::move(segment);
          },
          "client"_a, "segment"_a)
      .def(
          "remove_client",
          [](BoundController& c, uint32_t client) {
            {
              const py::gil_scoped_release unlock;
              c.core->remove_client(client);
            }
            c.client_memory.erase(client);
          },
          "client"_a, "OWN-1: drops what the client has waiting; the hosts free what it owned.")
      .def("step", [](BoundController& c) { return c.core->step(); })
      .def(
          "start", [](BoundController& c) { c.core->start(); }, unlocked)
      .def(
          "stop", [](BoundController& c) { c.core->stop(); }, unlocked)
      .def(
          "fail", [](BoundController& c, const std::string& text) { c.core->fail(text); }, "message"_a, unlocked)
      .def(
          "close", [](BoundController& c) { c.core->close(); }, unlocked)
      .def("stats", [](BoundController& c) { return stats_dict(c.core->stats()); })
      .def_property_readonly("address", [](BoundController& c) { return reinterpret_cast<size_t>(c.core.get()); });
}

}  // namespace pathways::bind
