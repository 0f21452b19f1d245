// The controller for Python, which starts it on a native thread of its own, or steps it in an embedded client.
#include "controller/controller.h"

#include <pybind11/stl.h>

#include <map>

#include "bind/bind.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace pathways::bind {
namespace {

/// A controller, and the segments that it uses; these must outlive it.
struct BoundController {
  BoundController(py::object controller_segment, const std::vector<py::object>& host_segments,
                  std::vector<uint32_t> islands, uint32_t window, std::vector<uint64_t> budgets,
                  std::vector<std::string> spaces, bool sequential, py::object status_segment)
      : controller_memory(std::move(controller_segment)),
        status_memory(std::move(status_segment)),
        host_memory(host_segments) {
    std::vector<HostView> hosts;
    for (const py::object& segment : host_memory) hosts.emplace_back(segment.cast<Segment&>());
    Controller::Options options;
    options.window = window;
    options.islands = std::move(islands);
    options.budgets = std::move(budgets);
    options.spaces = std::move(spaces);
    options.sequential = sequential;
    options.knows_plans = true;
    core = std::make_unique<Controller>(
        std::move(options), ControllerBlock::attach(controller_memory.cast<Segment&>()), std::move(hosts),
        status_memory.is_none() ? nullptr : StatusBlock::attach(status_memory.cast<Segment&>()));
  }

  py::object controller_memory, status_memory;
  std::vector<py::object> host_memory;
  std::map<uint32_t, std::pair<py::object, py::object>> client_memory;  ///< by client: its block, and its bell
  std::unique_ptr<Controller> core;                                     // last member, so it is destroyed first
};

py::dict stats_dict(const ControllerStats& s) {
  return py::dict("runs"_a = s.runs, "granted"_a = s.granted, "retired"_a = s.retired, "dropped"_a = s.dropped,
                  "late"_a = s.late, "commands"_a = s.commands, "records_out"_a = s.records_out, "passes"_a = s.passes,
                  "clients"_a = s.clients, "waiting"_a = s.waiting, "gangs"_a = s.gangs, "held"_a = s.held,
                  "unread"_a = s.unread, "refused"_a = s.refused, "live_bytes"_a = s.live_bytes,
                  "high_water"_a = s.high_water);
}

}  // namespace

void register_controller(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<BoundController>(m, "Controller", "The sequencer and its rings.")
      .def(py::init<py::object, const std::vector<py::object>&, std::vector<uint32_t>, uint32_t, std::vector<uint64_t>,
                    std::vector<std::string>, bool, py::object>(),
           "segment"_a, "hosts"_a, "islands"_a = std::vector<uint32_t>{}, "window"_a = 256,
           "budgets"_a = std::vector<uint64_t>{}, "spaces"_a = std::vector<std::string>{}, "sequential"_a = false,
           "status"_a = py::none(),
           "`budgets`: bytes of memory by memory space, `spaces` their names: devices, then hosts' memory for "
           "transfers. "
           "`status`: the segment that clients read.")
      .def(
          "add_space_set",
          [](BoundController& c, std::vector<uint32_t> spaces) {
            const py::gil_scoped_release unlock;
            return c.core->add_space_set(std::move(spaces));
          },
          "spaces"_a, "The number of memory spaces that hold buffers together.")
      .def(
          "set_budget",
          [](BoundController& c, uint32_t space, uint64_t bytes) {
            const py::gil_scoped_release unlock;
            c.core->set_budget(space, bytes);
          },
          "space"_a, "bytes"_a)
      .def(
          "set_plan_memory",
          [](BoundController& c, uint32_t plan, uint32_t client, const std::string& name, const std::string& biggest,
             const std::vector<std::tuple<uint32_t, uint64_t, uint64_t>>& needs,
             const std::vector<std::tuple<uint32_t, uint32_t, uint64_t, int32_t, int32_t>>& results,
             std::vector<uint32_t> donated) {
            PlanMemory memory{client, name, biggest, {}, {}, std::move(donated)};
            for (const auto& [space, peak, eager] : needs) memory.needs.push_back({space, peak, eager});
            for (const auto& [group, set, bytes, argument, same_as] : results) {
              memory.results.push_back({group, set, bytes, argument, same_as});
            }
            const py::gil_scoped_release unlock;
            c.core->set_plan_memory(plan, std::move(memory));
          },
          "plan"_a, "client"_a, "name"_a, "biggest"_a, "needs"_a, "results"_a, "donated"_a,
          "What runs of a plan take: `needs` are (space, peak, eager), `results` (group, space set, bytes, argument, "
          "same as).")
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
          "register_plan",
          [](BoundController& c, uint32_t plan, uint32_t client, uint32_t group) {
            c.core->register_plan(plan, client, group);
          },
          "plan"_a, "client"_a, "group"_a, "TRUST-1: whose plan it is, and whose hosts its runs go to.")
      .def(
          "add_client",
          [](BoundController& c, uint32_t client, py::object segment, py::object bell) {
            DoorbellWord* word = bell.is_none() ? nullptr : &BellBlock::attach(bell.cast<Segment&>())->doorbell;
            c.core->add_client(client, ClientView(segment.cast<Segment&>()), word);
            c.client_memory[client] = {std::move(segment), std::move(bell)};
          },
          "client"_a, "segment"_a, "bell"_a = py::none(),
          "`bell`: the segment where it rings. Raises ValueError when its segment makes no sense.")
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
      .def(
          "lose_hosts",
          [](BoundController& c, std::vector<uint32_t> hosts, std::string text) {
            return c.core->lose_hosts(std::move(hosts), std::move(text));
          },
          "hosts"_a, "text"_a, unlocked,
          "ERR-2: these hosts' processes have ended: what they had fails with `text`. The number of this loss.")
      .def(
          "restore_host",
          [](BoundController& c, uint32_t host, py::object segment) {
            const HostView block(segment.cast<Segment&>());
            {
              const py::gil_scoped_release unlock;
              c.core->restore_host(host, block);
            }
            c.host_memory.at(host) = std::move(segment);
          },
          "host"_a, "segment"_a, "ERR-2: a lost host's successor, with a segment of its own, takes part from now on.")
      .def(
          "take_forgotten", [](BoundController& c) { return c.core->take_forgotten(); }, unlocked,
          "Plans that nothing in the order names any more, each told once.")
      .def(
          "suspend", [](BoundController& c, uint32_t client) { c.core->suspend(client); }, "client"_a, unlocked,
          "Takes no further record of the client's.")
      .def(
          "resume", [](BoundController& c, uint32_t client) { c.core->resume(client); }, "client"_a, unlocked)
      .def(
          "offload", [](BoundController& c, uint32_t client) { c.core->offload(client); }, "client"_a, unlocked,
          "Its buffers left the devices.")
      .def(
          "restore", [](BoundController& c, uint32_t client) { return c.core->restore(client); }, "client"_a, unlocked,
          "They are to come back; why they cannot, or nothing.")
      .def(
          "is_quiet", [](BoundController& c, uint32_t client) { return c.core->is_quiet(client); }, "client"_a,
          unlocked, "Whether every run that was taken from the client is over.")
      .def(
          "command_for",
          [](BoundController& c, uint32_t client, uint16_t kind, const py::bytes& payload) {
            const std::string_view view = payload;
            const auto* data = reinterpret_cast<const std::byte*>(view.data());
            std::vector<std::byte> copy(data, data + view.size());
            const py::gil_scoped_release unlock;
            c.core->command_for(client, static_cast<CommandKind>(kind), std::move(copy));
          },
          "client"_a, "kind"_a, "payload"_a, "A command to all hosts, as if the client had sent it.")
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
