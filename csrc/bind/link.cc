// The links between machines (csrc/link).
#include <pybind11/stl.h>

#include <unistd.h>

#include <memory>
#include <optional>

#include "bind/bind.h"
#include "link/carrier.h"
#include "link/client_link_at_client.h"
#include "link/client_link_at_head.h"
#include "link/link_pool.h"
#include "link/machine_link.h"
#include "messages/shared_segments.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace pathways::bind {
namespace {

std::span<std::byte> bytes_of(const py::buffer_info& info) {
  if (info.ndim != 1 || info.strides[0] != info.itemsize) throw Error(Status::kInvalid, "expected a plain buffer");
  return {static_cast<std::byte*>(info.ptr), static_cast<size_t>(info.size * info.itemsize)};
}

/// Taking Python's lock again costs more than copying so many bytes, as the other threads of links want it, too.
constexpr py::ssize_t kCopiedWithLock = py::ssize_t{64} << 10;

/// A mapping of its own, which may be used for longer than Python keeps the segment.
Segment own(const Segment& segment) { return Segment::attach(::dup(segment.fd())); }

}  // namespace

void register_link(py::module_& m) {
  py::class_<LinkHub, std::shared_ptr<LinkHub>>(m, "LinkHub", "What the links of one machine share: see link_hub.h.")
      .def(py::init<uint64_t>(), "most_received"_a = UINT64_MAX)
      .def(
          "add_client",
          [](LinkHub& hub, uint32_t client, Segment& block, const std::shared_ptr<Link>& link) {
            auto mapped = std::make_shared<Segment>(own(block));  // until remove_client
            const ClientView view(*mapped);
            hub.add_client(client, view, std::move(mapped), link);
          },
          "client"_a, "segment"_a, "link"_a = nullptr,
          "A client, until remove_client. `link`: it is on another machine, and `segment` is its twin.")
      .def("remove_client", &LinkHub::remove_client, "client"_a)
      .def("add_group", &LinkHub::add_group, "group"_a, "hosts"_a, "The hosts of a group of the controller's.")
      .def(
          "open_link",
          [](LinkHub& hub, bool is_head, const std::shared_ptr<LinkPool>& pool) {
            const auto end = is_head ? MachineLink::End::kHead : MachineLink::End::kAgent;
            return MachineLink::open(hub, end, monotonic_ns, pool);
          },
          "is_head"_a, "pool"_a = nullptr, py::keep_alive<0, 1>(),
          "A new link to a machine with hosts, or, if not `is_head`, to the controller's. `pool`: its sender collects "
          "from the link.")
      .def(
          "open_client_link",
          [](LinkHub& hub, Segment& twin, Segment& bell, Segment& status, const std::shared_ptr<LinkPool>& pool) {
            auto link = std::make_shared<ClientLinkAtHead>(hub, own(twin), own(bell), own(status));
            link->join(pool);
            return link;
          },
          "twin"_a, "bell_segment"_a, "status_segment"_a, "pool"_a, py::keep_alive<0, 1>(),
          "A new link to a client on another machine. `twin`: a fresh client's segment, which stands for the "
          "client's.");

  py::class_<LinkPool, std::shared_ptr<LinkPool>>(m, "LinkPool", "Links that one thread sends for: see link_pool.h.")
      .def(py::init<>())
      .def(
          "collect",
          [](LinkPool& pool, const py::buffer& out, double seconds) -> std::optional<py::tuple> {
            const py::buffer_info info = out.request(true);
            auto found = pool.collect(bytes_of(info));
            if (!found) {
              {
                const py::gil_scoped_release unlocked;
                pool.wait(std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9)));
              }
              found = pool.collect(bytes_of(info));
            }
            if (!found) return std::nullopt;
            return py::make_tuple(std::move(found->link), found->bytes, found->error);
          },
          "out"_a, "seconds"_a,
          "Writes what the next link has into the buffer: (the link, the bytes written, why it is broken). None: no "
          "link had anything for so long, or `wake` was called.")
      .def("wake", &LinkPool::wake, "Makes `collect` return.")
      .def("pause", &LinkPool::pause, "slot"_a, "The link is not asked until `resume`.")
      .def("resume", &LinkPool::resume, "slot"_a);

  py::class_<Link, std::shared_ptr<Link>> link(m, "Link",
                                               "One end of the connection between two machines: see link.h.");
  py::class_<MachineLink, Link, std::shared_ptr<MachineLink>>(m, "MachineLink", "See machine_link.h.")
      .def(
          "add_host",
          [](MachineLink& link, uint32_t host, int32_t incarnation, Segment& block, Segment& controller) {
            struct Mapped {
              Segment block, controller;
            };
            // Mappings of the link's own: it may use them for longer than Python keeps the segments.
            auto mapped = std::make_shared<Mapped>(own(block), own(controller));
            link.add_host(host, incarnation, HostView(mapped->block), ControllerBlock::attach(mapped->controller),
                          mapped);
          },
          "host"_a, "incarnation"_a, "segment"_a, "controller_segment"_a, py::call_guard<py::gil_scoped_release>(),
          "Head: the twin of a host of the other machine. Agent: a host of this machine.")
      .def("remove_host", &MachineLink::remove_host, "host"_a, py::call_guard<py::gil_scoped_release>(),
           "Nothing of the host is collected or delivered any more.")
      .def("twin_client", &MachineLink::twin_client, "client"_a, "arena_bytes"_a,
           "Agent: the segment that stands for that of a client of the controller's machine.");
  py::class_<ClientLinkAtHead, Link, std::shared_ptr<ClientLinkAtHead>>(m, "ClientLinkAtHead",
                                                                        "See client_link_at_head.h.");
  py::class_<ClientLinkAtClient, Link, std::shared_ptr<ClientLinkAtClient>>(m, "ClientLinkAtClient",
                                                                            "See client_link_at_client.h.")
      .def(py::init([](Segment& client, Segment& bell, Segment& status, const std::shared_ptr<LinkPool>& pool) {
             auto link = std::make_shared<ClientLinkAtClient>(own(client), own(bell), StatusBlock::attach(status));
             link->join(pool);
             return link;
           }),
           "client_segment"_a, "bell_segment"_a, "status_segment"_a, "pool"_a, py::keep_alive<1, 4>(),
           "A new link to the controller's machine, for a client of this one. Raises ValueError for wrong segments.")
      .def("fail", &ClientLinkAtClient::fail, "why"_a, "Tells the client that the cluster is gone.");
  link.def(
          "collect",
          [](Link& link, const py::buffer& out) {
            const py::buffer_info info = out.request(true);
            return link.collect(bytes_of(info));
          },
          "out"_a, "Writes what is ready into the buffer; returns the bytes written.")
      .def(
          "deliver",
          [](Link& link, const py::buffer& in) {
            const py::buffer_info info = in.request();
            std::optional<py::gil_scoped_release> unlocked;
            const bool needs_lock = dynamic_cast<Carrier*>(&link) != nullptr;  // for each message that it opens
            if (info.size > kCopiedWithLock && !needs_lock) unlocked.emplace();
            link.deliver(bytes_of(info));
          },
          "data"_a, "Takes bytes of the other end. Raises ValueError or RuntimeError when it broke the protocol.")
      .def("wake", &Link::wake, "Makes the pool ask this link.")
      .def_property_readonly("slot", &Link::slot, "Its number in its pool.")
      .def("close", &Link::close, py::call_guard<py::gil_scoped_release>(), "Ends the link.")
      .def("stats", [](Link& link) {
        const Link::Stats now = link.stats();
        return py::dict("bytes_out"_a = now.bytes_out, "bytes_in"_a = now.bytes_in, "records_out"_a = now.records_out,
                        "records_in"_a = now.records_in, "dropped"_a = now.dropped,
                        "round_trip_ns"_a = now.round_trip_ns, "heard_ns"_a = now.heard_ns,
                        "clock_ahead_ns"_a = now.clock_ahead_ns, "kept"_a = now.kept, "most_kept"_a = now.most_kept);
      });
}

}  // namespace pathways::bind
