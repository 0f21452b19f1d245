#include "controller/client_records.h"

#include <algorithm>

namespace pathways {
namespace {

constexpr size_t kMostFailureText = 1024;

std::vector<std::byte> failure_command(uint32_t client, Handle handle, GroupId group, std::string_view text) {
  const auto count = static_cast<uint32_t>(std::min(text.size(), kMostFailureText));
  const CommandRecord command{{RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kFail), client},
                              handle.raw,
                              0,
                              group,
                              count,
                              0,
                              kNoSpaceSet,
                              0};
  std::vector<std::byte> out(sizeof command + padded(count));
  std::memcpy(out.data(), &command, sizeof command);
  std::memcpy(out.data() + sizeof command, text.data(), count);
  return out;
}

}  // namespace

std::vector<std::byte> release_command(uint32_t client, GroupId group, std::span<const uint64_t> handles) {
  CommandRecord command{};
  command.header = {RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kRelease), client};
  command.group = group;
  command.bytes = static_cast<uint32_t>(handles.size_bytes());
  std::vector<std::byte> bytes(sizeof command + command.bytes);
  std::memcpy(bytes.data(), &command, sizeof command);
  if (!handles.empty()) std::memcpy(bytes.data() + sizeof command, handles.data(), command.bytes);
  return bytes;
}

std::vector<std::vector<std::byte>> failure_commands(uint32_t client, std::span<const std::byte> bytes,
                                                     const PlanMemory* memory, std::string_view text) {
  std::vector<std::vector<std::byte>> commands;
  if (!is_run(bytes)) {
    const auto record = read_record<CommandRecord>(bytes);
    commands.push_back(failure_command(client, Handle{record.handle}, record.group, text));
    return commands;
  }
  const uint32_t results = read_record<RunRecord>(bytes).results;
  if (memory == nullptr || memory->results.size() != results) return commands;
  for (uint32_t i = 0; i < results; ++i) {
    commands.push_back(failure_command(client, Handle{result_of(bytes, i)}, memory->results[i].group, text));
  }
  return commands;
}

std::vector<std::byte> controller_command(uint32_t client, CommandKind kind, std::span<const std::byte> payload) {
  const auto bytes = static_cast<uint32_t>(payload.size());
  const CommandRecord command{
      {RecordKind::kCommand, static_cast<uint16_t>(kind), client}, 0, 0, 0, bytes, 0, kNoSpaceSet, 0};
  std::vector<std::byte> record(sizeof command + padded(bytes));
  std::memcpy(record.data(), &command, sizeof command);
  if (bytes != 0) std::memcpy(record.data() + sizeof command, payload.data(), bytes);
  return record;
}

}  // namespace pathways
