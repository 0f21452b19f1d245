// The controller for Python, which starts it on a native thread of its own, or steps it in an embedded client.
#include "controller/controller.h"

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <map>

#include "bind/bind.h"
#include "link/link_pool.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace pathways::bind {
namespace {

/// `CompositeStep::Kind`, where a loop that is decided, and of these one that runs ahead, are kinds of their own.
enum class StepKind : uint8_t { kRun, kLoop, kEnd, kDecided, kAhead };

/// The segments that a controller uses.
struct Memory {
  py::object controller, status;
  std::shared_ptr<LinkPool> pool;
  std::vector<py::object> hosts;
  std::map<uint32_t, std::pair<py::object, py::object>> clients{};  ///< by client: its block, and its bell
};

/// A controller, and its segments, which outlive it: they are the first base.
struct BoundController : Memory, Controller {
  BoundController(Memory memory, Options options)
      : Memory(std::move(memory)),
        Controller(std::move(options), ControllerBlock::attach(controller.cast<Segment&>()), views(),
                   status.is_none() ? nullptr : StatusBlock::attach(status.cast<Segment&>())) {}

  std::vector<HostView> views() const {
    std::vector<HostView> found;
    for (const py::object& segment : hosts) {
      found.push_back(segment.is_none() ? HostView() : HostView(segment.cast<Segment&>()));
    }
    return found;
  }
};

py::dict stats_dict(const ControllerStats& s) {
  return py::dict("runs"_a = s.runs, "granted"_a = s.granted, "retired"_a = s.retired, "dropped"_a = s.dropped,
                  "late"_a = s.late, "commands"_a = s.commands, "records_out"_a = s.records_out, "passes"_a = s.passes,
                  "clients"_a = s.clients, "waiting"_a = s.waiting, "gangs"_a = s.gangs, "held"_a = s.held,
                  "unread"_a = s.unread, "refused"_a = s.refused, "live_bytes"_a = s.live_bytes,
                  "high_water"_a = s.high_water, "charged"_a = s.charged);
}

py::dict use_dict(const ClientUse& u) {
  return py::dict("client"_a = u.client, "device_ns"_a = u.device_ns, "in_flight"_a = u.in_flight, "held"_a = u.held,
                  "has_unread"_a = u.has_unread, "memory"_a = u.memory, "is_waiting"_a = u.is_waiting,
                  "tasks"_a = u.tasks);
}

}  // namespace

void register_controller(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::native_enum<StepKind>(m, "StepKind", "enum.Enum", "A kind of a composite's steps.")
      .value("RUN", StepKind::kRun)
      .value("LOOP", StepKind::kLoop)
      .value("END", StepKind::kEnd)
      .value("DECIDED", StepKind::kDecided)
      .value("AHEAD", StepKind::kAhead)
      .finalize();
  py::enum_<PolicyKind>(m, "Policy", "Which client's run is next.")
      .value("fifo", PolicyKind::kFifo)
      .value("share", PolicyKind::kShare)
      .value("priority", PolicyKind::kPriority);
  py::class_<ClientLimits>(m, "ClientLimits", "What a client may have, and how it shares devices: 0 is the default.")
      .def(py::init([](double weight, int32_t priority, uint64_t memory, bool waits, uint64_t runs, uint64_t bytes) {
             ClientLimits limits{.weight = weight, .priority = priority};
             if (memory != 0) limits.memory = memory;
             limits.at_quota = waits ? AtQuota::kWait : AtQuota::kRefuse;
             if (runs != 0) limits.runs = runs;
             if (bytes != 0) limits.bytes = bytes;
             return limits;
           }),
           "weight"_a = 1.0, "priority"_a = 0, "memory"_a = 0, "waits"_a = false, "runs"_a = 0, "bytes"_a = 0);
  py::class_<BoundController>(m, "Controller", "The sequencer and its rings.")
      .def(py::init([](py::object segment, std::vector<py::object> hosts, uint32_t window,
                       std::vector<uint64_t> budgets, std::vector<std::string> spaces, py::object status,
                       PolicyKind policy, uint32_t devices, uint32_t host_ring_bytes, bool asks_for_room,
                       bool ends_hosts_with_faults, std::shared_ptr<LinkPool> pool) {
             ReadyBell* readers = pool == nullptr ? nullptr : &pool->hosts();
             return std::make_unique<BoundController>(
                 Memory{std::move(segment), std::move(status), std::move(pool), std::move(hosts)},
                 Controller::Options{.window = window,
                                     .budgets = std::move(budgets),
                                     .spaces = std::move(spaces),
                                     .devices = devices,
                                     .host_ring_bytes = host_ring_bytes,
                                     .knows_plans = true,
                                     .policy = policy,
                                     .asks_for_room = asks_for_room,
                                     .readers = readers,
                                     .ends_hosts_with_faults = ends_hosts_with_faults});
           }),
           "segment"_a, "hosts"_a, "window"_a = 256, "budgets"_a = std::vector<uint64_t>{},
           "spaces"_a = std::vector<std::string>{}, "status"_a = py::none(), "policy"_a = PolicyKind::kFifo,
           "devices"_a = UINT32_MAX, "host_ring_bytes"_a = 0, "asks_for_room"_a = false,
           "ends_hosts_with_faults"_a = false, "pool"_a = nullptr,
           "`hosts`: their segments; None: it comes later, and counts as lost. `budgets`: bytes of memory by memory "
           "space: devices, then hosts' memory for transfers; `spaces`: their names, where they are not numbers. "
           "`status`: the segment that clients read. `devices`: so many of the memory spaces are devices. "
           "`host_ring_bytes`: of the rings of hosts that come later. "
           "`ends_hosts_with_faults`: who starts the hosts calls `take_faults`. `pool`: all hosts are on other "
           "machines, and its links read the rings to them.")
      .def("add_space_set", &Controller::add_space_set, "spaces"_a, unlocked,
           "The number of memory spaces that hold buffers together.")
      .def(
          "take_faults",
          [](BoundController& c) {
            std::vector<std::pair<uint32_t, std::string>> found;
            for (auto& fault : c.take_faults()) found.emplace_back(fault.host, std::move(fault.what));
            return found;
          },
          "By host: what made no sense, since the last call. Nothing more of these hosts is read.")
      .def("set_budget", &Controller::set_budget, "spaces"_a, "bytes"_a, unlocked, "Bytes on each of these spaces.")
      .def(
          "set_plan_memory",
          [](BoundController& c, uint32_t plan, uint32_t client, const std::string& name, const std::string& biggest,
             const std::vector<std::tuple<uint32_t, uint64_t, uint64_t>>& needs,
             const std::vector<std::tuple<uint32_t, uint32_t, uint64_t, int32_t, int32_t>>& results,
             std::vector<uint32_t> donated, std::optional<std::vector<uint32_t>> argument_groups) {
            PlanMemory memory{client, name, biggest, {}, {}, std::move(donated), std::move(argument_groups)};
            for (const auto& [space, peak, eager] : needs) memory.needs.push_back({space, peak, eager});
            for (const auto& [group, set, bytes, argument, same_as] : results) {
              memory.results.push_back({group, set, bytes, argument, same_as});
            }
            c.set_plan_memory(plan, std::move(memory));
          },
          "plan"_a, "client"_a, "name"_a, "biggest"_a, "needs"_a, "results"_a, "donated"_a,
          "argument_groups"_a = py::none(), unlocked,
          "What runs of a plan take: `needs` are (space, peak, eager), `results` (group, space set, bytes, argument, "
          "same as). `argument_groups`: the hosts that hold each argument; without it each host gets all handles.")
      .def("add_group", &Controller::add_group, "group"_a, "hosts"_a,
           "Who is meant by a group number. Group 0 is all hosts.")
      .def(
          "register_plan",
          [](BoundController& c, uint32_t plan, uint32_t client, uint32_t group,
             const std::vector<std::pair<uint32_t, uint32_t>>& devices) {
            std::vector<HostDevice> used;
            for (const auto& [host, device] : devices) used.push_back({host, device});
            c.register_plan(plan, client, group, std::move(used));
          },
          "plan"_a, "client"_a, "group"_a, "devices"_a = std::vector<std::pair<uint32_t, uint32_t>>{},
          "TRUST-1: whose plan it is, and whose hosts its runs go to. `devices`: (host, device) that its runs use.")
      .def(
          "register_composite",
          [](BoundController& c, uint32_t number, uint32_t client, const std::string& name, uint32_t group,
             uint32_t arguments, uint32_t values, uint32_t parallel, std::vector<uint32_t> donated,
             std::vector<uint32_t> results,
             const std::vector<std::tuple<StepKind, uint64_t, std::vector<uint32_t>, std::vector<uint32_t>>>& steps) {
            Composite composite{
                name, client, group, arguments, values, parallel, std::move(donated), std::move(results), {}};
            for (const auto& [kind, number_of, inputs, outputs] : steps) {
              using Kind = CompositeStep::Kind;
              CompositeStep step;
              step.is_ahead = kind == StepKind::kAhead;
              step.is_decided = step.is_ahead || kind == StepKind::kDecided;
              step.kind = kind == StepKind::kRun ? Kind::kRun : kind == StepKind::kEnd ? Kind::kEnd : Kind::kLoop;
              if (step.kind == CompositeStep::Kind::kRun) {
                step.plan = static_cast<uint32_t>(number_of);
              } else {
                step.count = step.is_decided && number_of == 0 ? UINT64_MAX : number_of;
              }
              step.inputs = inputs;
              step.outputs = outputs;
              composite.steps.push_back(std::move(step));
            }
            c.register_composite(number, std::move(composite));
          },
          "number"_a, "client"_a, "name"_a, "group"_a, "arguments"_a, "values"_a, "parallel"_a, "donated"_a,
          "results"_a, "steps"_a, unlocked,
          "A program with loops; see csrc/loops/composite.h. `steps`: (kind, plan or count, inputs, outputs). The "
          "count of a loop that is decided is the most iterations that it may have; 0: any number.")
      .def(
          "add_client",
          [](BoundController& c, uint32_t client, py::object segment, py::object bell, const ClientLimits& limits,
             bool is_elsewhere) {
            DoorbellWord* word = bell.is_none() ? nullptr : &BellBlock::attach(bell.cast<Segment&>())->doorbell;
            c.add_client(client, ClientView(segment.cast<Segment&>()), word, limits,
                         is_elsewhere ? ClientPlace::kElsewhere : ClientPlace::kHere);
            c.clients[client] = {std::move(segment), std::move(bell)};
          },
          "client"_a, "segment"_a, "bell"_a = py::none(), "limits"_a = ClientLimits{}, "is_elsewhere"_a = false,
          "`bell`: the segment where it rings. `is_elsewhere`: its futures are on another machine. Raises ValueError "
          "when its segment or its limits make no sense.")
      .def("limit", &Controller::limit, "client"_a, "limits"_a, unlocked, "Replaces a client's limits.")
      .def(
          "clients",
          [](BoundController& c) {
            std::vector<ClientUse> found;
            {
              const py::gil_scoped_release unlock;
              found = c.client_uses();
            }
            py::list made;
            for (const ClientUse& each : found) made.append(use_dict(each));
            return made;
          },
          "What each client has and does now.")
      .def(
          "remove_client",
          [](BoundController& c, uint32_t client) {
            {
              const py::gil_scoped_release unlock;
              c.remove_client(client);
            }
            c.clients.erase(client);
          },
          "client"_a, "OWN-1: drops what the client has waiting; the hosts free what it owned.")
      .def("lose_hosts", &Controller::lose_hosts, "hosts"_a, "text"_a, unlocked,
           "ERR-2: these hosts' processes have ended: what they had fails with `text`. The number of this loss.")
      .def(
          "restore_host",
          [](BoundController& c, uint32_t host, py::object segment, const std::vector<uint32_t>& gone) {
            const HostView block(segment.cast<Segment&>());
            {
              const py::gil_scoped_release unlock;
              c.restore_host(host, block, gone);
            }
            c.hosts.at(host) = std::move(segment);
          },
          "host"_a, "segment"_a, "gone"_a = std::vector<uint32_t>{},
          "ERR-2: a lost host's successor, with a segment of its own, takes part from now on. `gone`: clients that it "
          "may know, and that were removed before.")
      .def("take_forgotten", &Controller::take_forgotten, unlocked,
           "Plans that nothing in the order names any more, each told once.")
      .def("suspend", &Controller::suspend, "client"_a, unlocked, "Takes no further record of the client's.")
      .def("resume", &Controller::resume, "client"_a, unlocked)
      .def("offload", &Controller::offload, "client"_a, unlocked, "Its buffers left the devices.")
      .def("restore", &Controller::restore, "client"_a, unlocked, "They are to come back; why they cannot, or nothing.")
      .def(
          "room_requests",
          [](BoundController& c, const std::vector<uint32_t>& suspended) {
            std::vector<RoomRequest> found;
            {
              const py::gil_scoped_release unlock;
              found = c.room_requests(suspended);
            }
            py::list made;
            for (const RoomRequest& each : found) made.append(py::make_tuple(each.client, each.has_room, each.holders));
            return made;
          },
          "suspended"_a, "SUSP-2: (client, whether it is suspended and would fit, who holds memory where it waits).")
      .def("refuse_room", &Controller::refuse_room, "client"_a, unlocked, "SUSP-2: nobody can make room for it.")
      .def("is_quiet", &Controller::is_quiet, "client"_a, unlocked,
           "Whether every run that was taken from the client is over.")
      .def(
          "command_for",
          [](BoundController& c, uint32_t client, uint16_t kind, std::string_view payload) {
            const auto bytes = std::as_bytes(std::span(payload));
            c.command_for(client, static_cast<CommandKind>(kind), {bytes.begin(), bytes.end()});
          },
          "client"_a, "kind"_a, "payload"_a, unlocked, "A command to all hosts, as if the client had sent it.")
      .def("step", &Controller::step)
      .def("start", &Controller::start, unlocked)
      .def("stop", &Controller::stop, unlocked)
      .def("fail", &Controller::fail, "message"_a, unlocked)
      .def("close", &Controller::close, unlocked)
      .def("start_trace", &Controller::start_trace, "capacity"_a, unlocked,
           "Traces the order, in memory for so many runs.")
      .def("stop_trace", &Controller::stop_trace, unlocked)
      .def(
          "take_trace",
          [](BoundController& c) {
            OrderTrace::Ring::Taken taken;
            {
              const py::gil_scoped_release unlock;
              taken = c.take_trace();
            }
            const size_t bytes = taken.records.size() * sizeof(OrderTraceRecord);
            return py::make_tuple(py::bytes(reinterpret_cast<const char*>(taken.records.data()), bytes), taken.dropped);
          },
          "The records of the trace so far (dispatch/order_trace.h), and how many were dropped.")
      .def(
          "stats", [](BoundController& c, uint32_t hosts) { return stats_dict(c.stats(hosts)); },
          "hosts"_a = UINT32_MAX, "What it counts; by host and by memory space: of the first so many hosts.")
      .def_property_readonly("address",
                             [](BoundController& c) { return reinterpret_cast<size_t>(static_cast<Controller*>(&c)); });
}

}  // namespace pathways::bind
