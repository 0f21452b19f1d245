// Relays, which carry the links of other machines (csrc/link/carrier.h, csrc/link/relay_link.h).
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "bind/bind.h"
#include "link/carrier.h"
#include "link/link_pool.h"
#include "link/relay_link.h"
#include "link/sealer.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace pathways::bind {
namespace {

/// Seals by two ciphers of the package `cryptography`, one for each direction. It takes Python's lock (sealer.h).
class PythonSealer final : public Sealer {
 public:
  PythonSealer(const py::object& sealing, const py::object& opening)
      : encrypt_(sealing.attr("encrypt")),
        decrypt_(opening.attr("decrypt")),
        wrong_(py::module_::import("cryptography.exceptions").attr("InvalidTag")) {}
  ~PythonSealer() override {
    const py::gil_scoped_acquire locked;
    encrypt_ = decrypt_ = wrong_ = py::object();
  }

  void seal(uint64_t number, std::span<std::byte> message) override {
    const py::gil_scoped_acquire locked;
    try {
      call(encrypt_, number, message.first(message.size() - kBytes), message);
    } catch (const py::error_already_set& error) {
      throw Error(Status::kFailed, "a message cannot be sealed: " + std::string(error.what()));
    }
  }

  bool open(uint64_t number, std::span<const std::byte> message, std::span<std::byte> out) override {
    const py::gil_scoped_acquire locked;
    try {
      call(decrypt_, number, message, out);
      return true;
    } catch (const py::error_already_set& error) {
      if (error.matches(wrong_)) return false;
      throw Error(Status::kFailed, "a message cannot be opened: " + std::string(error.what()));
    }
  }

 private:
  static py::bytes bytes_of(std::span<const std::byte> bytes) {
    return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }

  /// The nonce of 96 bits is the number, with the lowest byte first: no key has the same twice.
  static void call(const py::object& cipher, uint64_t number, std::span<const std::byte> in, std::span<std::byte> out) {
    std::byte nonce[12]{};
    std::memcpy(nonce, &number, sizeof number);
    const py::bytes result = cipher(bytes_of(nonce), bytes_of(in), py::none());
    const auto bytes = static_cast<std::string_view>(result);
    if (bytes.size() != out.size()) throw Error(Status::kFailed, "a cipher adds other bytes than a tag of 16");
    std::memcpy(out.data(), bytes.data(), bytes.size());
  }

  py::object encrypt_, decrypt_, wrong_;
};

}  // namespace

void register_relays(py::module_& m) {
  py::class_<Carrier, Link, std::shared_ptr<Carrier>>(m, "Carrier", "An end of a connection to a relay: see carrier.h.")
      .def(py::init([](const std::shared_ptr<LinkPool>& pool) {
             auto carrier = std::make_shared<Carrier>();
             if (pool != nullptr) carrier->join(pool);
             return carrier;
           }),
           "pool"_a = nullptr)
      .def(
          "add",
          [](Carrier& carrier, uint32_t number, const std::shared_ptr<Link>& link, const py::object& sealing,
             const py::object& opening, const std::string& machine) {
            carrier.add(number, link, std::make_shared<PythonSealer>(sealing, opening), machine);
          },
          "number"_a, "link"_a, "sealing"_a, "opening"_a, "machine"_a = "",
          "Carries a link without a pool. `sealing`, `opening`: an AESGCM each, for what it sends and gets. `machine`: "
          "the name that the relay gets to hear; empty: this is its own end.")
      .def("start", &Carrier::start, "number"_a, "Collects from this link, from now on.")
      .def("drop", &Carrier::drop, "number"_a, py::call_guard<py::gil_scoped_release>(), "Carries it no more.")
      .def("take_broken", &Carrier::take_broken, "The links that broke since the last call: (number, why).");

  py::class_<RelayLink, Link, std::shared_ptr<RelayLink>>(m, "RelayLink", "A relay's end: see relay_link.h.");
  py::class_<RelayHub, std::shared_ptr<RelayHub>>(m, "RelayHub", "What the links of a relay share: see relay_link.h.")
      .def(py::init<std::shared_ptr<LinkPool>>(), "pool"_a = nullptr)
      .def("open_trunk", &RelayHub::open_trunk, "The link to the head.")
      .def("open_branch", &RelayHub::open_branch, "number"_a, "A link to a machine, by the number that the head said.")
      .def("number_of", &RelayHub::number_of, "machine"_a, "The number of a machine that the head expects, or None.")
      .def("end", &RelayHub::end, "number"_a, "The branch is over: the head is told.")
      .def("take_ended", &RelayHub::take_ended, "Numbers that the head carries no more, since the last call.");
}

}  // namespace pathways::bind
