// Measures a hop under real conditions: one process sends a record to another one, which waits as hosts and the
// controller wait.
//
// Two processes share the blocks of a controller and of one host. The asking process first sleeps and works for as long
// as a stage does, then sends a record with the time in it. The answering process sends back how long the record took,
// by the clock that both share. The pause decides what is measured: after a short pause the receiver still polls, after
// a long one it sleeps.
#include <pybind11/stl.h>
#include <time.h>

#include <algorithm>
#include <cstring>

#include "base/status.h"
#include "bind/bind.h"
#include "messages/outbox.h"
#include "messages/shared_segments.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace pathways::bind {
namespace {

constexpr std::chrono::seconds kPatience{10};

struct HopRecord {
  int64_t sent_ns;
  int64_t taken_ns;  ///< in the answer: how long the record took
};

/// Waits for one record. Meanwhile sends the records that the outbox keeps for later. Throws Error(kInvalid) when no
/// record comes within kPatience.
HopRecord receive(ByteRing::Consumer& inbox, Outbox& outbox, DoorbellWord& doorbell, int64_t* at) {
  const int64_t deadline = monotonic_ns() + std::chrono::nanoseconds(kPatience).count();
  while (true) {
    const uint32_t ticket = doorbell.ticket();
    const std::span<const std::byte> bytes = inbox.try_front();
    if (!bytes.empty()) {
      *at = monotonic_ns();
      HopRecord record;
      std::memcpy(&record, bytes.data(), sizeof record);
      inbox.pop();
      inbox.release();
      return record;
    }
    if (monotonic_ns() > deadline) throw Error(Status::kInvalid, "the other end of the hops says nothing");
    std::chrono::nanoseconds limit = kPatience;
    if (outbox.flush()) limit = std::chrono::nanoseconds(std::max<int64_t>(outbox.due() - monotonic_ns(), 0));
    (void)doorbell.wait(ticket, limit, SpinPolicy::serve_stream());
  }
}

void send(Outbox& outbox, const HopRecord& record) {
  outbox.send(sizeof record, [&](std::byte* out) { std::memcpy(out, &record, sizeof record); });
  outbox.flush();
}

/// Nanoseconds of each of `count` hops. Before each hop this process sleeps for `sleep_us`, then works for `work_us`.
std::vector<int64_t> ask(Segment& controller_segment, Segment& host_segment, uint32_t count, uint32_t sleep_us,
                         uint32_t work_us) {
  ControllerBlock* controller = ControllerBlock::attach(controller_segment);
  HostBlock* host = HostBlock::attach(host_segment);
  Outbox outbox(host->ring_from_controller(), &host->doorbell);
  outbox.set_distance(controller->distance_ns);
  if (controller->distance_ns != 0) precise_timers();
  auto inbox = host->ring_to_controller()->claim_consumer();
  std::vector<int64_t> taken;
  for (uint32_t i = 0; i < count; ++i) {
    if (sleep_us != 0) {
      const timespec pause{sleep_us / 1000000, static_cast<long>(sleep_us % 1000000) * 1000};
      ::nanosleep(&pause, nullptr);
    }
    const int64_t begin = monotonic_ns();
    while (monotonic_ns() < begin + int64_t{work_us} * 1000) {
    }
    int64_t at;
    send(outbox, {monotonic_ns(), 0});
    taken.push_back(receive(inbox, outbox, controller->doorbell, &at).taken_ns);
  }
  return taken;
}

void answer(Segment& controller_segment, Segment& host_segment, uint32_t count) {
  ControllerBlock* controller = ControllerBlock::attach(controller_segment);
  HostBlock* host = HostBlock::attach(host_segment);
  Outbox outbox(host->ring_to_controller(), &controller->doorbell, &controller->ready_bitmap, 0);
  auto inbox = host->ring_from_controller()->claim_consumer();
  for (uint32_t i = 0; i < count; ++i) {
    int64_t at;
    HopRecord record = receive(inbox, outbox, host->doorbell, &at);
    record.taken_ns = at - record.sent_ns;
    send(outbox, record);
  }
  while (outbox.flush()) thread_yield();
}

}  // namespace

void register_hops(py::module_& m) {
  m.def("ask_hops", &ask, "controller"_a, "host"_a, "count"_a, "sleep_us"_a, "work_us"_a,
        py::call_guard<py::gil_scoped_release>(),
        "Nanoseconds of `count` hops to the process that calls `echo_hops` on the same segments.");
  m.def("echo_hops", &answer, "controller"_a, "host"_a, "count"_a, py::call_guard<py::gil_scoped_release>(),
        "The other end of `ask_hops`.");
}

}  // namespace pathways::bind
