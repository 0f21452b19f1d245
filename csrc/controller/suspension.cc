#include "controller/suspension.h"

#include <vector>

#include "controller/client_records.h"

namespace pathways {

void Suspension::suspend(uint32_t id) {
  if (ClientState* client = clients_.find(id)) client->is_suspended = true;
}

void Suspension::resume(uint32_t id) {
  if (ClientState* client = clients_.find(id)) client->is_suspended = false;
  queue_.retry_soon();  // so that its held records are tried again
}

bool Suspension::is_quiet(uint32_t id) const {
  const ClientState* client = clients_.find(id);
  return client == nullptr || client->credits.in_flight() == 0;
}

std::string Suspension::restore(uint32_t id) {
  SpaceId worst = 0;
  if (ledger_.restore(id, &worst)) return {};
  const Admission& admission = ledger_.admission();
  return "ResourceExhaustedError: client " + std::to_string(id) + "'s buffers find no room on " +
         options_.name_of_space(worst) + " beside the " + std::to_string(admission.live(worst)) + " of " +
         std::to_string(admission.budget(worst)) + " bytes that others hold or run there; try again later";
}

void Suspension::command_for(uint32_t id, CommandKind kind, std::span<const std::byte> payload) {
  ClientState* client = clients_.find(id);
  if (client == nullptr) return;
  const std::vector<std::byte> record = controller_command(id, kind, payload);
  ++stats_.commands;
  // One entry per host: a lost host gets the command when it is back, and no other host waits for it (ERR-2).
  for (uint32_t h = 0; h < hosts_.count(); ++h) {
    grants_.submit(*client, record, kOneHost | h, EntryKind::kCommand, 0);
  }
}

}  // namespace pathways
