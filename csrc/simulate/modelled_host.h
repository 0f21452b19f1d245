/// A host with modelled devices in the rings of a real cluster: its controller, its links and its clients are real.
///
/// `python -m benchmarks.scale.agents` has many of these in one process, each at the agent's end of a MachineLink. The
/// host is the real one (host/host.h), so it reads and writes what a host process reads and writes; only its devices
/// are modelled, and take no time. It has no thread and no arena: whoever delivers a link's bytes calls `step` after
/// it.
///
/// Threading: one thread, which owns the host.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "host/host.h"
#include "messages/shared_segments.h"
#include "simulate/fabric.h"
#include "simulate/modelled_device.h"

namespace pathways {

class ModelledHost {
 public:
  /// `blocks`: of the hosts of its machine, by number, its own among them; they and `controller` must stay mapped.
  /// `epochs`: of all hosts of the cluster, see host/peers.h. `device_bytes`: memory of each device.
  ModelledHost(uint32_t number, uint32_t devices, uint64_t device_bytes, const std::map<uint32_t, HostView>& blocks,
               ControllerBlock* controller, const std::vector<int32_t>& epochs);

  /// The plan is compiled at once. Throws Error(kInvalid) as Host::add_plan does.
  void add_plan(uint32_t id, std::vector<std::byte> block, uint32_t client, PlanSizes sizes);
  /// See Host::attach_client; `twin` must stay mapped for as long as this host is there.
  void attach_client(uint32_t client, const ClientView& twin, uint32_t futures) {
    host_.attach_client(client, twin, futures);
  }
  /// A peer beyond the machine's link: see Host::open_peer.
  void open_peer(uint32_t peer, int32_t epoch, uint64_t loss) { host_.open_peer(peer, HostView(), epoch, loss); }
  /// Does all that can be done now. Returns the number of records and completions handled.
  uint64_t step();
  uint64_t launches() const { return backend_.launches(); }

 private:
  ModelClock clock_{ModelClock::Kind::kReal};
  ModelledBackend backend_;
  Host host_;
};

}  // namespace pathways
