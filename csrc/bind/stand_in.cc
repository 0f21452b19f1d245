// A stand-in for a computation: it takes the computation's wall time but uses no core. It is an XLA FFI handler, which
// the hosts register.
//
// Why: where processes share few cores, real computations would compete with the runtime that is being measured; the
// stand-in sleeps.
#include <pybind11/pybind11.h>
#include <xla/ffi/api/ffi.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <mutex>

#include "bind/bind.h"
#include "sync/atomic.h"

namespace py = pybind11;
namespace ffi = xla::ffi;

namespace pathways::bind {
namespace {

/// Sleeps until `deadline_ns` on CLOCK_MONOTONIC, the clock of monotonic_ns().
void sleep_until(int64_t deadline_ns) {
  precise_timers();
  const timespec deadline{deadline_ns / 1000000000, deadline_ns % 1000000000};
  while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, nullptr) == EINTR) {
  }
}

std::mutex device;  ///< a process's one device, for steps that hold it

/// Takes one float32 array, and returns the same array `microseconds` later. With `holds_device`, the steps of several
/// threads take their time one after the other.
ffi::Error sleep_and_copy(ffi::AnyBuffer in, ffi::Result<ffi::AnyBuffer> out, int64_t microseconds, bool holds_device) {
  std::unique_lock<std::mutex> hold(device, std::defer_lock);
  if (holds_device) hold.lock();
  const int64_t begin = monotonic_ns();
  if (in.element_type() != ffi::F32 || out->element_type() != ffi::F32 || in.element_count() != out->element_count()) {
    return ffi::Error::InvalidArgument("pathways_stand_in takes and gives a float32 array of one size");
  }
  if (in.untyped_data() != out->untyped_data()) std::memcpy(out->untyped_data(), in.untyped_data(), in.size_bytes());
  if (microseconds > 0) sleep_until(begin + microseconds * 1000);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(stand_in, sleep_and_copy,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int64_t>("microseconds")
                           .Attr<bool>("holds_device"));

}  // namespace

void register_stand_in(py::module_& m) {
  m.def(
      "stand_in_handler", [] { return py::capsule(reinterpret_cast<void*>(stand_in), "xla._CUSTOM_CALL_TARGET"); },
      "The XLA FFI handler that sleeps, for jax.ffi.register_ffi_target on the CPU platform.");
}

}  // namespace pathways::bind
