#include "simulate/modelled_host.h"

#include <utility>

namespace pathways {
namespace {

std::vector<HostView> by_number(const std::map<uint32_t, HostView>& blocks, size_t hosts) {
  std::vector<HostView> views(hosts);
  for (const auto& [number, block] : blocks) views.at(number) = block;
  return views;
}

Host::Options options_of(uint32_t number, uint32_t devices, uint64_t device_bytes) {
  Host::Options options;
  options.host = number;
  options.devices = devices;
  options.device_bytes = device_bytes;
  return options;
}

}  // namespace

ModelledHost::ModelledHost(uint32_t number, uint32_t devices, uint64_t device_bytes,
                           const std::map<uint32_t, HostView>& blocks, ControllerBlock* controller,
                           const std::vector<int32_t>& epochs)
    : backend_({.host = number, .devices = devices}, clock_, nullptr),
      host_(options_of(number, devices, device_bytes), by_number(blocks, epochs.size()), controller, backend_, epochs) {
}

void ModelledHost::add_plan(uint32_t id, std::vector<std::byte> block, uint32_t client, PlanSizes sizes) {
  Plan plan = Plan::parse(std::move(block));
  backend_.learn(id, plan, {});
  host_.add_plan(id, std::move(plan), client);
  host_.set_compiled(id, std::nullopt, std::move(sizes));
}

uint64_t ModelledHost::step() {
  uint64_t all = 0;
  while (const uint32_t done = host_.step()) all += done;
  return all;
}

}  // namespace pathways
