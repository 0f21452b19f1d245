#include "ledger/client_records.h"

namespace pathways {
namespace {

constexpr size_t kMostFailureText = 1024;

std::vector<std::byte> command(uint32_t client, CommandKind kind, uint64_t handle, GroupId group,
                               std::span<const std::byte> payload) {
  const auto bytes = static_cast<uint32_t>(payload.size());
  const CommandRecord record{
      {RecordKind::kCommand, static_cast<uint16_t>(kind), client}, handle, 0, group, bytes, 0, kNoSpaceSet, 0};
  std::vector<std::byte> out(bytes_of(record));
  std::memcpy(out.data(), &record, sizeof record);
  if (bytes != 0) std::memcpy(out.data() + sizeof record, payload.data(), bytes);
  return out;
}

}  // namespace

std::vector<std::byte> release_command(uint32_t client, GroupId group, std::span<const uint64_t> handles) {
  return command(client, CommandKind::kRelease, 0, group, std::as_bytes(handles));
}

std::vector<std::byte> controller_command(uint32_t client, CommandKind kind, std::span<const std::byte> payload) {
  return command(client, kind, 0, 0, payload);
}

std::vector<std::vector<std::byte>> failure_commands(uint32_t client, std::span<const std::byte> bytes,
                                                     const PlanMemory* memory, std::string_view text) {
  const auto payload = std::as_bytes(std::span(text.substr(0, kMostFailureText)));
  std::vector<std::vector<std::byte>> commands;
  if (!is_run(bytes)) {
    const auto record = read_record<CommandRecord>(bytes);
    commands.push_back(command(client, CommandKind::kFail, record.handle, record.group, payload));
    return commands;
  }
  const uint32_t results = read_record<RunRecord>(bytes).results;
  if (memory == nullptr || memory->results.size() != results) return commands;
  for (uint32_t i = 0; i < results; ++i) {
    commands.push_back(command(client, CommandKind::kFail, result_of(bytes, i), memory->results[i].group, payload));
  }
  return commands;
}

}  // namespace pathways
