/// The functions by which each file of csrc/bind registers its classes and functions with the module.
#pragma once

#include <pybind11/pybind11.h>

namespace pathways::bind {

void register_errors(pybind11::module_& m);
void register_segments(pybind11::module_& m);
void register_plans(pybind11::module_& m);
void register_controller(pybind11::module_& m);
void register_simulation(pybind11::module_& m);
void register_stand_in(pybind11::module_& m);
void register_link(pybind11::module_& m);
void register_relays(pybind11::module_& m);
void register_http2(pybind11::module_& m);

}  // namespace pathways::bind
