#include "ledger/lost_buffers.h"

#include "ledger/client_records.h"

namespace pathways {

LossText LostBuffers::named_by(std::span<const std::byte> record) const {
  const auto find = [&](uint64_t handle) {
    const auto found = lost_.find(handle);
    return found == lost_.end() ? nullptr : found->second;
  };
  if (lost_.empty()) return nullptr;
  if (!is_run(record)) {
    const bool reads = is_command(record, CommandKind::kFetch) || is_command(record, CommandKind::kTask);
    return reads && !makes_buffer(record) ? find(read_record<CommandRecord>(record).handle) : nullptr;
  }
  const uint32_t arguments = read_record<RunRecord>(record).arguments;
  for (uint32_t i = 0; i < arguments; ++i) {
    if (LossText why = find(argument_of(record, i)); why != nullptr) return why;
  }
  return nullptr;
}

void LostBuffers::follow(std::span<const std::byte> record, const LossText& why) {
  if (why != nullptr && is_run(record)) {
    for (const uint64_t result : results_of(record)) lost_[result] = why;
    return;
  }
  if (lost_.empty() || is_run(record)) return;
  const uint64_t bytes = read_record<CommandRecord>(record).bytes;
  const auto word = [&](uint64_t at) { return word_at(record, sizeof(CommandRecord) + at); };
  if (is_command(record, CommandKind::kRelease)) {
    for (uint64_t at = 0; at + sizeof(Handle) <= bytes; at += sizeof(Handle)) lost_.erase(word(at));
  } else if (is_command(record, CommandKind::kRename)) {
    for (uint64_t at = 0; at + 2 * sizeof(Handle) <= bytes; at += 2 * sizeof(Handle)) {
      const uint64_t name = word(at);
      const auto fresh = lost_.find(word(at + sizeof(Handle)));
      if (fresh == lost_.end()) {
        lost_.erase(name);
        continue;
      }
      LossText moved = fresh->second;
      lost_.erase(fresh);
      lost_[name] = std::move(moved);
    }
  }
}

}  // namespace pathways
