// pathways._native: the calls that are rare. This file lists the parts; each part registers itself in its own file.
#include "bind/bind.h"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Segments, plans, the controller and the simulation of the native core. The hot path is pathways._core.";
  pathways::bind::register_errors(m);
  pathways::bind::register_segments(m);
  pathways::bind::register_plans(m);
  pathways::bind::register_controller(m);
  pathways::bind::register_simulation(m);
  pathways::bind::register_stand_in(m);
  pathways::bind::register_link(m);
  pathways::bind::register_relays(m);
  pathways::bind::register_http2(m);
}
