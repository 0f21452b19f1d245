// Records that AdmissionQueue refuses: what their client and the hosts hear of it.
#include <cstring>
#include <vector>

#include "controller/admission_queue.h"
#include "controller/refusals.h"
#include "ledger/client_records.h"

namespace pathways {

/// MEM-3: fails the results of the record; nothing else is disturbed.
void AdmissionQueue::refuse(ClientState& client, std::span<const std::byte> bytes, const Judgement& judgement) {
  ++stats_.refused;
  if (is_run(bytes)) {
    const PlanMemory& memory = *ledger_.memory_of(read_record<RunRecord>(bytes).plan);
    uint64_t wanted = 0;
    const SpaceClasses& classes = ledger_.admission().classes();
    for (const ClassNeed& need : memory.by_class.at(classes)) {
      if (need.id == classes.class_of(judgement.worst)) wanted = need.peak + need.eager;
    }
    clients_.run_over(client);
    fail_results(client, bytes,
                 refusal_text(options_, ledger_, client.id, "a run of program '" + memory.name + "'", memory.biggest,
                              wanted, judgement));
    return;
  }
  auto record = read_record<CommandRecord>(bytes);
  const std::string text =
      refusal_text(options_, ledger_, client.id, "a buffer put", {}, record.space_bytes, judgement);
  if (static_cast<CommandKind>(record.header.detail) == CommandKind::kPut) {
    record.is_refused = 1;
    std::vector<std::byte> command(bytes.begin(), bytes.end());
    std::memcpy(command.data(), &record, sizeof record);
    grants_.submit(client, command, record.group, EntryKind::kCommand, 0);
  }
  fail_results(client, bytes, text);
}

/// Refuses a run whose cancel came before the run, or that was read after its deadline: the run gets no place in the
/// order.
void AdmissionQueue::refuse_unordered(ClientState& client, std::span<const std::byte> run, std::string_view text,
                                      uint16_t detail) {
  ++stats_.dropped;
  clients_.run_over(client);
  fail_results(client, run, text, detail);
}

/// Fails the results of a record that gets no place in the order, at the client and on the hosts.
void AdmissionQueue::fail_results(ClientState& client, std::span<const std::byte> bytes, std::string_view text,
                                  uint16_t detail) {
  clients_.tell_results(client, bytes, text, detail);
  fail_on_hosts(client, bytes, text);
}

/// Fails the results on the hosts that would hold them (ERR-1).
void AdmissionQueue::fail_on_hosts(ClientState& client, std::span<const std::byte> bytes, std::string_view text) {
  const PlanMemory* memory = is_run(bytes) ? ledger_.memory_of(read_record<RunRecord>(bytes).plan) : nullptr;
  for (const std::vector<std::byte>& command : failure_commands(client.id, bytes, memory, text)) {
    grants_.submit(client, command, read_record<CommandRecord>(command).group, EntryKind::kCommand, 0);
  }
  release_donated(client, bytes, memory);
}

/// A run that gets no place in the order does not take over its donated arguments either, and its client has forgotten
/// them: it sends no release of a donated buffer (FUT-3).
void AdmissionQueue::release_donated(ClientState& client, std::span<const std::byte> run, const PlanMemory* memory) {
  const std::vector<uint64_t> handles = donated_by(run, memory);
  if (handles.empty()) return;
  client.lost.donated(handles);
  order_command(client, release_command(client.id, read_record<RunRecord>(run).group, handles));
}

/// Fails the results of a run on those hosts that are there. A successor has no buffer that such a run could name, and
/// the client's later runs on these results are refused as well.
void AdmissionQueue::fail_on_survivors(ClientState& client, std::span<const std::byte> run, std::string_view text) {
  const PlanMemory* memory = ledger_.memory_of(read_record<RunRecord>(run).plan);
  for (const std::vector<std::byte>& command : failure_commands(client.id, run, memory, text)) {
    const auto members = grants_.hosts_of(read_record<CommandRecord>(command).group);
    for (const uint32_t host : std::vector<uint32_t>(members.begin(), members.end())) {
      if (!grants_.is_lost(host)) grants_.submit(client, command, kOneHost | host, EntryKind::kCommand, 0);
    }
  }
  release_donated(client, run, memory);
}

void AdmissionQueue::take_lost(ClientState& client, std::span<const std::byte> run, std::string_view text) {
  if (!client.held.empty()) {
    hold(client, run);
    drop_held(client, read_record<RunRecord>(run).tag, text);
    return;
  }
  ++stats_.dropped;
  clients_.run_over(client);
  clients_.tell_results(client, run, text);
  fail_on_survivors(client, run, text);
}

}  // namespace pathways
