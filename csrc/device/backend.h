/// Backend: the three seams of one host: its devices, how bytes come and go, and what clients ask beside runs. Often
/// one object implements all three.
#pragma once

#include <concepts>

#include "device/client_work.h"
#include "device/device.h"
#include "device/mover.h"

namespace pathways {

struct Backend {
  Backend(Device& its_device, Mover& its_mover, ClientWork& its_work)
      : device(its_device), mover(its_mover), work(its_work) {}
  template <std::derived_from<Device> All>
  Backend(All& all) : Backend(all, all, all) {}

  Device& device;
  Mover& mover;
  ClientWork& work;
};

}  // namespace pathways
