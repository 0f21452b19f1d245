// Translates errors of the native library into Python's: kInvalid into ValueError, kNoMemory into MemoryError, all
// others into RuntimeError.
#include "base/status.h"
#include "bind/bind.h"

namespace py = pybind11;

namespace pathways::bind {

void register_errors(py::module_&) {
  py::register_local_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const Error& error) {
      PyObject* kind = PyExc_RuntimeError;
      if (error.status() == Status::kInvalid) kind = PyExc_ValueError;
      if (error.status() == Status::kNoMemory) kind = PyExc_MemoryError;
      PyErr_SetString(kind, error.what());
    }
  });
}

}  // namespace pathways::bind
