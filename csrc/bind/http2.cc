// The server's end of an HTTP/2 connection at a socket (csrc/http2/socket_connection.h).
#include <pybind11/pybind11.h>

#include <chrono>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bind/bind.h"
#include "http2/hpack.h"
#include "http2/socket_connection.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace pathways::bind {
namespace {

using http2::Event;
using http2::SocketConnection;

py::object fields_of(const Event& event) {
  py::list fields;
  for (const http2::Header& each : event.fields)
    fields.append(py::make_tuple(py::bytes(each.name), py::bytes(each.value)));
  return std::move(fields);
}

/// What has happened: (kind, call, the fields of a call or a message).
///
/// A process may end while a thread waits here. Python then ends the thread when it takes its lock again, by unwinding,
/// which no destructor may do: so the lock is given and taken by hand.
py::object receive(SocketConnection& connection) {
  std::vector<Event> events;
  bool goes_on = false;
  std::exception_ptr wrong;
  PyThreadState* state = PyEval_SaveThread();
  try {
    goes_on = connection.receive(events);
  } catch (const std::exception&) {
    wrong = std::current_exception();
  }
  PyEval_RestoreThread(state);
  if (wrong) std::rethrow_exception(wrong);
  if (!goes_on) return py::none();
  py::list told;
  for (const Event& event : events) {
    py::object what = py::none();
    if (event.kind == Event::Kind::kCall) what = fields_of(event);
    if (event.kind == Event::Kind::kMessage) what = py::bytes(event.message);
    told.append(py::make_tuple(static_cast<int>(event.kind), event.call, what));
  }
  return std::move(told);
}

/// The fields of a whole header block; None: it is malformed, or they are too many bytes.
py::object decode(http2::HeaderDecoder& decoder, const py::bytes& block) {
  const auto text = static_cast<std::string_view>(block);
  const auto fields = decoder.decode(std::as_bytes(std::span(text)));
  if (!fields) return py::none();
  py::list found;
  for (const http2::Header& each : *fields) found.append(py::make_tuple(py::bytes(each.name), py::bytes(each.value)));
  return std::move(found);
}

std::chrono::milliseconds ms_of(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

std::unique_ptr<SocketConnection> make(int descriptor, size_t calls, size_t message_bytes, size_t room_bytes,
                                       double begin_s, double idle_s, double silent_s, double answer_s) {
  return std::make_unique<SocketConnection>(
      descriptor, http2::Limits{calls, message_bytes, room_bytes},
      http2::Patience{ms_of(begin_s), ms_of(idle_s), ms_of(silent_s), ms_of(answer_s)});
}

}  // namespace

void register_http2(py::module_& m) {
  // Answers are short, and written without waiting: Python's lock is kept.
  py::class_<SocketConnection> connection(m, "Http2Connection", "Calls of gRPC at a socket: see socket_connection.h.");
  connection
      .def(py::init(&make), "descriptor"_a, py::kw_only(), "calls"_a, "message_bytes"_a, "room_bytes"_a, "begin_s"_a,
           "idle_s"_a, "silent_s"_a, "answer_s"_a, "Takes the descriptor over.")
      .def("receive", &receive, "Waits, then [(kind, call, fields or message)]; None: the connection is over.")
      .def("wake", &SocketConnection::wake, "`receive` returns. Any thread, as all below.")
      .def("end", &SocketConnection::end, "Ends the connection; `receive` tells it.")
      .def(
          "respond",
          [](SocketConnection& self, uint32_t call, const py::bytes& message) {
            return self.respond(call, static_cast<std::string_view>(message));
          },
          "call"_a, "message"_a, "Sends a message; returns how many bytes of the call are not written.")
      .def("finish", &SocketConnection::finish, "call"_a, "code"_a = 0, "text"_a = "", "Ends a call.")
      .def("resume", &SocketConnection::resume, "call"_a, "The call's client may send.")
      .def("hold", &SocketConnection::hold, "call"_a, "It may send no more for now.")
      .def_property_readonly("why", &SocketConnection::why, "Why it is over.");
  py::class_<http2::HeaderDecoder>(m, "Http2Fields", "The header fields of a connection: see hpack.h.")
      .def(py::init<size_t>(), "most_bytes"_a)
      .def("decode", &decode, "block"_a, "[(name, value)] of a whole block, as bytes; None: it is malformed.");
  const std::pair<const char*, Event::Kind> kinds[] = {{"CALL", Event::Kind::kCall},
                                                       {"MESSAGE", Event::Kind::kMessage},
                                                       {"END", Event::Kind::kEnd},
                                                       {"RESET", Event::Kind::kReset},
                                                       {"ROOM", Event::Kind::kRoom}};
  for (const auto& [name, kind] : kinds) connection.attr(name) = static_cast<int>(kind);
}

}  // namespace pathways::bind
