#include "controller/client_removal.h"

namespace pathways {

void ClientRemoval::remove(uint32_t id) {
  if (ClientState* client = clients_.find(id)) forget(*client);
  grants_.announce_gone(id);
}

/// Drops what the client has waiting, and releases the memory of its buffers for entries that come behind its end.
void ClientRemoval::forget(ClientState& client) {
  clients_.forget(client);  // from here on nothing is written to its memory
  inbox_.forget(client);
  queue_.forget(client);
  ledger_.release_all(client);
  grants_.drop_all_of(client.id);
  ledger_.forget_plans_of(client.id);
  clients_.erase(client);
}

uint32_t ClientRemoval::evict_faulty() {
  clients_.clear_faults();
  uint32_t done = 0;
  for (size_t i = 0; i < clients_.count();) {
    ClientState& client = *clients_.all()[i];
    if (client.fault.empty()) {
      ++i;
    } else {
      evict(client);  // this removes it from the list
      ++done;
    }
  }
  return done;
}

/// OWN-1: evicts this client alone, and sends it the reason.
void ClientRemoval::evict(ClientState& client) {
  clients_.tell_eviction(client);
  hosts_.flush();
  clients_.flush();
  remove(client.id);
}

}  // namespace pathways
