/// How the controller reads a client's record that Inbox has checked, and the commands that the controller makes
/// itself.
///
/// Pure functions. Each takes the bytes of a whole, valid record. Used by every class of the controller that looks into
/// a record.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "ledger/plan_memory.h"
#include "messages/records.h"
#include "sequencer/sequencer.h"
#include "sync/atomic.h"

namespace pathways {

inline bool is_run(std::span<const std::byte> bytes) {
  return read_record<RecordHeader>(bytes).kind == RecordKind::kRun;
}

inline bool is_command(std::span<const std::byte> bytes, CommandKind kind) {
  const auto header = read_record<RecordHeader>(bytes);
  return header.kind == RecordKind::kCommand && static_cast<CommandKind>(header.detail) == kind;
}

/// Whether a record is a command that makes the buffer `handle`.
inline bool makes_buffer(std::span<const std::byte> bytes) {
  return is_command(bytes, CommandKind::kPut) ||
         (is_command(bytes, CommandKind::kTask) && read_record<CommandRecord>(bytes).token == 0);
}

/// The handle of the buffer or of the token that a command makes; 0: it makes none.
inline uint64_t made_by(std::span<const std::byte> bytes) {
  const auto record = read_record<CommandRecord>(bytes);
  if (makes_buffer(bytes)) return record.handle;
  return is_command(bytes, CommandKind::kTask) || is_command(bytes, CommandKind::kFetch) ? record.token : 0;
}

/// The hold of a task that has its place in the order; 0: the record is no such task, or it has none.
inline uint64_t hold_of(std::span<const std::byte> bytes) {
  return is_command(bytes, CommandKind::kTask) ? read_record<CommandRecord>(bytes).hold : 0;
}

/// Whether a command is a step of a save or a restore that names no buffer.
inline bool is_step(std::span<const std::byte> bytes) {
  const auto record = read_record<CommandRecord>(bytes);
  return record.handle == 0 &&
         (is_command(bytes, CommandKind::kTask) || (is_command(bytes, CommandKind::kBackend) && record.token == 0));
}

/// The 8-byte word at `offset`.
inline uint64_t word_at(std::span<const std::byte> bytes, size_t offset) {
  uint64_t value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

/// The handles that a release or a rename names.
inline std::vector<uint64_t> handles_of(std::span<const std::byte> command) {
  std::vector<uint64_t> handles(read_record<CommandRecord>(command).bytes / sizeof(uint64_t));
  if (!handles.empty()) {
    std::memcpy(handles.data(), command.data() + sizeof(CommandRecord), handles.size() * sizeof(uint64_t));
  }
  return handles;
}

inline uint64_t argument_of(std::span<const std::byte> run, uint32_t index) {
  return word_at(run, sizeof(RunRecord) + index * sizeof(uint64_t));
}

inline uint64_t result_of(std::span<const std::byte> run, uint32_t index) {
  return argument_of(run, read_record<RunRecord>(run).arguments + index);
}

/// Handles of all results of a run.
inline std::vector<uint64_t> results_of(std::span<const std::byte> run) {
  const auto record = read_record<RunRecord>(run);
  std::vector<uint64_t> results(record.results);
  const std::byte* first = run.data() + sizeof record + size_t{record.arguments} * sizeof(uint64_t);
  if (record.results != 0) std::memcpy(results.data(), first, results.size() * sizeof(uint64_t));
  return results;
}

/// The arguments that a run donates. `memory`: of its plan; nullptr: not known.
inline std::vector<uint64_t> donated_by(std::span<const std::byte> run, const PlanMemory* memory) {
  std::vector<uint64_t> handles;
  if (memory == nullptr) return handles;
  for (const uint32_t position : memory->donated) {
    if (position < read_record<RunRecord>(run).arguments) handles.push_back(argument_of(run, position));
  }
  return handles;
}

/// The deadline of a run, by the controller's clock; 0: the record is no run, or the run has none.
inline int64_t deadline_of(std::span<const std::byte> bytes) {
  const auto header = read_record<RecordHeader>(bytes);
  int64_t at_ns = 0;
  if (header.kind == RecordKind::kRun && (header.detail & kRunHasDeadline) != 0) {
    std::memcpy(&at_ns, bytes.data() + bytes.size() - sizeof at_ns, sizeof at_ns);
  }
  return at_ns;
}

/// When the client says that it submitted a run, by its clock; 0: it does not say.
inline int64_t submitted_ns_of(std::span<const std::byte> run) {
  const auto detail = read_record<RecordHeader>(run).detail;
  if ((detail & kRunHasSubmitted) == 0) return 0;
  const size_t behind = (detail & kRunHasDeadline) != 0 ? 2 : 1;
  return static_cast<int64_t>(word_at(run, run.size() - behind * sizeof(uint64_t)));
}

/// The bytes of a client's record that its hosts do not get: the time at which the client submitted a run. It lies at
/// `at`, behind which only the deadline follows. `bytes` is 0 when the record has no such time.
struct ForControllerOnly {
  size_t at, bytes;
};
inline ForControllerOnly for_controller_only(const RecordHeader& header, size_t record_bytes) {
  if (header.kind != RecordKind::kRun || (header.detail & kRunHasSubmitted) == 0) return {record_bytes, 0};
  const size_t words = (header.detail & kRunHasDeadline) != 0 ? 2 : 1;
  if (record_bytes < words * sizeof(uint64_t)) return {record_bytes, 0};
  return {record_bytes - words * sizeof(uint64_t), sizeof(uint64_t)};
}

/// Whether a run's deadline has passed.
inline bool is_late(std::span<const std::byte> run, Clock clock) {
  const int64_t deadline = deadline_of(run);
  return deadline != 0 && deadline <= clock();
}

// ----------------------------------------------------------------------------- commands that the controller makes

std::vector<std::byte> release_command(uint32_t client, GroupId group, std::span<const uint64_t> handles);

/// Commands that fail the results of a record on the hosts that would hold them, so that whatever depends on them fails
/// with the same text (ERR-1). One command per result. `memory`: of the run's plan, else nullptr. Empty for a run whose
/// results' hosts are not known.
std::vector<std::vector<std::byte>> failure_commands(uint32_t client, std::span<const std::byte> record,
                                                     const PlanMemory* memory, std::string_view text);

/// A command that only the controller sends (kOffload, kRestore), in the name of a client.
std::vector<std::byte> controller_command(uint32_t client, CommandKind kind, std::span<const std::byte> payload);

}  // namespace pathways
