// A stand-in for a computation: it takes the computation's wall time but uses no core. It is an XLA FFI handler, which
// the hosts register.
//
// Why: where processes share few cores, real computations would compete with the runtime that is being measured; the
// stand-in sleeps. The handler uses XLA's FFI as plain C structures (xla/ffi/api/c_api.h of OpenXLA, version 0.3; XLA
// keeps supporting old versions). This file declares the parts that it uses, so that the build needs no jaxlib headers.
#include <pybind11/pybind11.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>

#include "bind/bind.h"
#include "sync/atomic.h"

namespace py = pybind11;

namespace pathways::bind {
namespace {

struct FfiExtension {
  size_t struct_size;
  int32_t type;
  FfiExtension* next;
};
constexpr int32_t kMetadataExtension = 1;

struct FfiVersion {
  size_t struct_size;
  FfiExtension* extensions;
  int32_t major, minor;
};

struct FfiMetadata {
  size_t struct_size;
  FfiVersion version;
  uint32_t traits;
  int64_t state_type;
};

struct FfiMetadataExtension {
  FfiExtension base;
  FfiMetadata* metadata;
};

struct FfiBuffer {
  size_t struct_size;
  FfiExtension* extensions;
  int32_t dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};
constexpr int32_t kFloat32 = 11;

struct FfiScalar {
  int32_t dtype;
  void* value;
};
constexpr int32_t kInt64 = 5;

struct FfiValues {  // arguments and results
  size_t struct_size;
  FfiExtension* extensions;
  int64_t count;
  int32_t* types;
  void** values;
};

struct FfiAttributes {
  size_t struct_size;
  FfiExtension* extensions;
  int64_t count;
  int32_t* types;
  void** names;
  void** values;
};
constexpr int32_t kScalarAttribute = 3;

struct FfiErrorArguments {
  size_t struct_size;
  FfiExtension* extensions;
  const char* message;
  int32_t code;
};
constexpr int32_t kInvalidArgument = 3;

struct FfiApi {
  size_t struct_size;
  FfiExtension* extensions;
  FfiVersion version;
  const void* internal;
  void* (*create_error)(FfiErrorArguments*);
};

struct FfiCallFrame {
  size_t struct_size;
  FfiExtension* extensions;
  const FfiApi* api;
  void* context;
  int32_t stage;
  FfiValues arguments, results;
  FfiAttributes attributes;
};
constexpr int32_t kExecute = 3;
static_assert(sizeof(FfiBuffer) == 48 && sizeof(FfiValues) == 40 && sizeof(FfiAttributes) == 48);
static_assert(offsetof(FfiCallFrame, arguments) == 40 && offsetof(FfiCallFrame, attributes) == 120);

size_t elements(const FfiBuffer& buffer) {
  size_t count = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) count *= static_cast<size_t>(buffer.dims[i]);
  return count;
}

/// Sleeps until `deadline_ns` on CLOCK_MONOTONIC, the clock of monotonic_ns().
void sleep_until(int64_t deadline_ns) {
  precise_timers();
  const timespec deadline{deadline_ns / 1000000000, deadline_ns % 1000000000};
  while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, nullptr) == EINTR) {
  }
}

/// Takes one float32 array, and returns the same array `microseconds` (an int64 attribute) later.
void* stand_in(FfiCallFrame* frame) {
  if (frame->extensions != nullptr && frame->extensions->type == kMetadataExtension) {
    FfiMetadata& metadata = *reinterpret_cast<FfiMetadataExtension*>(frame->extensions)->metadata;
    metadata.version = {sizeof(FfiVersion), nullptr, 0, 3};
    metadata.traits = 0;
    return nullptr;
  }
  if (frame->stage != kExecute) return nullptr;
  const int64_t begin = monotonic_ns();
  const auto refuse = [&](const char* why) {
    FfiErrorArguments error{sizeof(FfiErrorArguments), nullptr, why, kInvalidArgument};
    return frame->api->create_error(&error);
  };
  if (frame->arguments.count != 1 || frame->results.count != 1) {
    return refuse("pathways_stand_in takes one array and gives one");
  }
  const auto& in = *static_cast<const FfiBuffer*>(frame->arguments.values[0]);
  const auto& out = *static_cast<const FfiBuffer*>(frame->results.values[0]);
  if (in.dtype != kFloat32 || out.dtype != kFloat32 || elements(in) != elements(out)) {
    return refuse("pathways_stand_in takes and gives a float32 array of one size");
  }
  if (frame->attributes.count != 1 || frame->attributes.types[0] != kScalarAttribute) {
    return refuse("pathways_stand_in has one attribute, microseconds");
  }
  const auto& scalar = *static_cast<const FfiScalar*>(frame->attributes.values[0]);
  if (scalar.dtype != kInt64) return refuse("pathways_stand_in's microseconds are an int64");
  int64_t microseconds;
  std::memcpy(&microseconds, scalar.value, sizeof microseconds);
  if (in.data != out.data) std::memcpy(out.data, in.data, elements(in) * sizeof(float));
  if (microseconds > 0) sleep_until(begin + microseconds * 1000);
  return nullptr;
}

}  // namespace

void register_stand_in(py::module_& m) {
  m.def(
      "stand_in_handler", [] { return py::capsule(reinterpret_cast<void*>(&stand_in), "xla._CUSTOM_CALL_TARGET"); },
      "The XLA FFI handler that sleeps, for jax.ffi.register_ffi_target on the CPU platform.");
}

}  // namespace pathways::bind
