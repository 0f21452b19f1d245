// Segments, and the blocks that processes share in them (csrc/messages/shared_segments.h).
#include <pybind11/stl.h>

#include <memory>

#include "bind/bind.h"
#include "host/pulse.h"
#include "messages/peer_records.h"
#include "messages/shared_segments.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace pathways::bind {

void register_segments(py::module_& m) {
  py::class_<Segment>(m, "Segment", "A block of memory: shared by file descriptor, or of this process alone.")
      .def_static(
          "create", [](const std::string& name, size_t nbytes) { return Segment::create(name, nbytes); }, "name"_a,
          "nbytes"_a, "Shared memory that the kernel frees with its last user.")
      .def_static(
          "attach", [](int fd) { return Segment::attach(fd); }, "fd"_a,
          "Maps the segment behind `fd` and takes the descriptor over.")
      .def_static(
          "heap", [](size_t nbytes) { return Segment::heap(nbytes); }, "nbytes"_a)
      .def_property_readonly(
          "fd", [](const Segment& s) { return s.fd(); }, "Its descriptor; -1 for this process alone.")
      .def("hide_from_children", &Segment::hide_from_children, "A forked child gets a private copy of it (FORK-1).")
      .def_property_readonly("nbytes", [](const Segment& s) { return s.size(); })
      .def_property_readonly("address", [](Segment& s) { return reinterpret_cast<size_t>(s.data()); })
      .def_property_readonly("controller_block",
                             [](Segment& s) { return reinterpret_cast<size_t>(ControllerBlock::attach(s)); })
      .def_property_readonly("host_block", [](Segment& s) { return reinterpret_cast<size_t>(HostBlock::attach(s)); })
      .def_property_readonly("client_block",
                             [](Segment& s) { return reinterpret_cast<size_t>(ClientBlock::attach(s)); })
      .def_property_readonly("status_block",
                             [](Segment& s) { return reinterpret_cast<size_t>(StatusBlock::attach(s)); })
      .def_property_readonly("bell",
                             [](Segment& s) { return reinterpret_cast<size_t>(&BellBlock::attach(s)->doorbell); });

  m.attr("LINK_RING_BYTES") = kLinkRingBytes;
  m.def(
      "controller_segment", [](bool shared) { return ControllerBlock::make(shared); }, "shared"_a = true,
      "What controller and hosts share: the controller's doorbell, and which hosts have records.");
  m.def(
      "status_segment", [](bool shared) { return StatusBlock::make(shared); }, "shared"_a = true,
      "The cluster's status and the text of its failure: whoever attaches it can only read.");
  m.def(
      "bell_segment", [](bool shared) { return BellBlock::make(shared); }, "shared"_a = true,
      "Where one client rings for the controller.");
  m.def(
      "set_distance",
      [](Segment& s, int64_t microseconds) { ControllerBlock::attach(s)->distance_ns = microseconds * 1000; },
      "controller_segment"_a, "microseconds"_a,
      "How long each record between controller and hosts shall be on its way. Before any other process attaches.");
  m.def(
      "host_segment",
      [](uint32_t host, uint32_t hosts, uint32_t ring_bytes, size_t arena_bytes, uint32_t peer_ring_bytes, bool shared,
         uint32_t link_ring_bytes, uint32_t first_peer) {
        const HostBlock::Sizes sizes{ring_bytes, peer_ring_bytes, arena_bytes, link_ring_bytes, first_peer};
        return HostBlock::make(host, hosts, sizes, shared);
      },
      "host"_a, "hosts"_a, "ring_bytes"_a = 1u << 20, "arena_bytes"_a = size_t{64} << 20,
      "peer_ring_bytes"_a = 1u << 16, "shared"_a = true, "link_ring_bytes"_a = 0, "first_peer"_a = 0,
      "All rings into and out of one host, and its arena. `hosts` of them, from `first_peer` on, share memory.");
  py::class_<Pulse>(m, "Pulse", "Counts up a word of a host's block until it is gone: see pulse.h.")
      .def(py::init([](Segment& host) { return std::make_unique<Pulse>(HostBlock::attach(host)); }), "host_segment"_a,
           py::keep_alive<1, 2>());
  m.def(
      "pulse_of", [](Segment& host) { return HostBlock::attach(host)->pulse.load(std::memory_order_relaxed); },
      "host_segment"_a, "How often a host's pulse has beaten.");
  m.def(
      "client_segment",
      [](uint32_t futures, uint32_t ring_bytes, size_t arena_bytes, bool shared) {
        // Within one process values are passed as they are, so the client needs no read-back area.
        return ClientBlock::make({futures, ring_bytes, arena_bytes, shared}, shared);
      },
      "futures"_a = 1u << 16, "ring_bytes"_a = 1u << 20, "arena_bytes"_a = size_t{64} << 20, "shared"_a = true,
      "A client's rings, its future table, its read-back area (when shared) and its arena. Made by the client's own "
      "process.");
  m.def(
      "arena_bytes_of", [](Segment& s) { return ClientView(s).arena().bytes(); }, "client_segment"_a,
      "The bytes of a client's arena, with its own header; 0 when there is none. Raises ValueError as futures_of "
      "does.");
  m.def(
      "futures_of", [](Segment& s) { return ClientView(s).futures().capacity(); }, "client_segment"_a,
      "How many futures the table of a client's segment has. Raises ValueError when the segment is malformed "
      "(TRUST-1).");
  m.def(
      "cluster_status",
      [](Segment& s) {
        const StatusBlock* block = StatusBlock::attach(s);
        const char* names[] = {"up", "failed", "closed"};
        const auto status = static_cast<uint32_t>(block->cluster_status());
        return py::make_tuple(names[std::min(status, 2u)], status == 0 ? std::string() : block->failure());
      },
      "status_segment"_a, "(\"up\" | \"failed\" | \"closed\", why)");
}

}  // namespace pathways::bind
