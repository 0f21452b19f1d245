/// The end of a client: everything of it leaves the controller, and the hosts are notified.
///
///   OWN-1  what the client has waiting is dropped, the memory of its buffers is released for entries that come behind
///          its end, and each host gets a notice behind everything of the client that it was granted. A client that
///          sent an invalid record, or whose ring is invalid, gets the reason first. Other clients notice nothing.
///
/// The Controller calls it: `remove` for a client that has left or died, `evict_faulty` in each pass that found a
/// fault. No state of its own.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstdint>

#include "controller/admission_queue.h"
#include "controller/clients.h"
#include "controller/grants.h"
#include "controller/host_rings.h"
#include "controller/inbox.h"
#include "controller/memory_ledger.h"

namespace pathways {

class ClientRemoval {
 public:
  ClientRemoval(HostRings& hosts, Clients& clients, MemoryLedger& ledger, Grants& grants, AdmissionQueue& queue,
                Inbox& inbox)
      : hosts_(hosts), clients_(clients), ledger_(ledger), grants_(grants), queue_(queue), inbox_(inbox) {}

  /// Also for a client that was never added: a host may have attached that client.
  void remove(uint32_t client);
  /// Removes all clients that are marked (Clients::fault), and returns their number.
  uint32_t evict_faulty();

 private:
  void forget(ClientState& client);
  void evict(ClientState& client);

  HostRings& hosts_;
  Clients& clients_;
  MemoryLedger& ledger_;
  Grants& grants_;
  AdmissionQueue& queue_;
  Inbox& inbox_;
};

}  // namespace pathways
