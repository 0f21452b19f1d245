/// The controller's half of suspended clients: their records wait, their runs end, and commands are sent in their name.
#include <cstring>

#include "controller/controller.h"

namespace pathways {

void Controller::suspend(uint32_t id) {
  run_mail([this, id] {
    if (Client* client = client_of(id)) client->is_suspended = true;
  });
}

void Controller::resume(uint32_t id) {
  run_mail([this, id] {
    if (Client* client = client_of(id)) client->is_suspended = false;
    admission_version_ = UINT64_MAX;  // so that its held records are tried again
  });
}

bool Controller::is_quiet(uint32_t id) {
  bool is_quiet = true;
  run_mail([&] {
    if (const Client* client = client_of(id)) is_quiet = client->in_flight == 0;
  });
  return is_quiet;
}

void Controller::offload(uint32_t id) {
  run_mail([&] { admission_.offload(id); });
}

std::string Controller::restore(uint32_t id) {
  std::string refused;
  run_mail([&] {
    SpaceId worst = 0;
    if (admission_.restore(id, &worst)) return;
    const std::string space =
        worst < options_.spaces.size() ? options_.spaces[worst] : "memory space " + std::to_string(worst);
    refused = "ResourceExhaustedError: client " + std::to_string(id) + "'s buffers find no room on " + space +
              " beside the " + std::to_string(admission_.live(worst)) + " of " +
              std::to_string(admission_.budget(worst)) + " bytes that others hold or run there; try again later";
  });
  return refused;
}

void Controller::command_for(uint32_t id, CommandKind kind, std::vector<std::byte> payload) {
  run_mail([&] {
    Client* client = client_of(id);
    if (client == nullptr) return;
    const auto bytes = static_cast<uint32_t>(payload.size());
    const CommandRecord command{
        {RecordKind::kCommand, static_cast<uint16_t>(kind), id}, 0, 0, 0, bytes, 0, kNoSpaceSet, 0};
    std::vector<std::byte> record(sizeof command + padded(bytes));
    std::memcpy(record.data(), &command, sizeof command);
    if (bytes != 0) std::memcpy(record.data() + sizeof command, payload.data(), bytes);
    ++stats_.commands;
    // One entry per host: a lost host gets the command when it is back, and no other host waits for it (ERR-2).
    for (uint32_t h = 0; h < hosts_.size(); ++h) submit_record(*client, record, kOneHost | h, EntryKind::kCommand, 0);
  });
}

}  // namespace pathways
