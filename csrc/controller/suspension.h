/// Suspended clients: their records wait, their runs end, and commands are sent in their name.
///
/// The controller process (pathways/controller/suspend.py) calls these, one after the other, through the Controller: a
/// client is suspended, it becomes quiet, its buffers are offloaded; later they are restored and the client resumes.
/// State: ClientState::is_suspended, which Inbox and AdmissionQueue read. Each call does nothing when the client is
/// gone.
///
/// MEM-1: an offloaded client's buffers do not count against the devices' budgets.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "controller/admission_queue.h"
#include "controller/clients.h"
#include "controller/controller_options.h"
#include "controller/grants.h"
#include "controller/host_rings.h"
#include "controller/memory_ledger.h"
#include "messages/records.h"

namespace pathways {

class Suspension {
 public:
  Suspension(const ControllerOptions& options, const HostRings& hosts, Clients& clients, MemoryLedger& ledger,
             Grants& grants, AdmissionQueue& queue, ControllerStats& stats)
      : options_(options),
        hosts_(hosts),
        clients_(clients),
        ledger_(ledger),
        grants_(grants),
        queue_(queue),
        stats_(stats) {}

  // See the Controller's methods of these names.
  void suspend(uint32_t client);
  void resume(uint32_t client);
  bool is_quiet(uint32_t client) const;
  void offload(uint32_t client) { ledger_.offload(client); }
  std::string restore(uint32_t client);
  void command_for(uint32_t client, CommandKind kind, std::span<const std::byte> payload);

 private:
  const ControllerOptions& options_;
  const HostRings& hosts_;
  Clients& clients_;
  MemoryLedger& ledger_;
  Grants& grants_;
  AdmissionQueue& queue_;
  ControllerStats& stats_;
};

}  // namespace pathways
