#include "ledger/lost_buffers.h"

#include <utility>
#include <vector>

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
  if (lost_.empty()) return;
  if (is_command(record, CommandKind::kRelease)) {
    for (const uint64_t handle : handles_of(record)) lost_.erase(handle);
  } else if (is_command(record, CommandKind::kRename)) {
    const std::vector<uint64_t> pairs = handles_of(record);
    for (size_t at = 0; at + 2 <= pairs.size(); at += 2) name(pairs[at + 1], pairs[at]);
  }
}

void LostBuffers::take_back(std::span<const std::byte> record) {
  if (is_run(record)) {
    for (const uint64_t result : results_of(record)) lost_.erase(result);
    return;
  }
  lost_.erase(made_by(record));
  if (!is_command(record, CommandKind::kRename)) return;
  const std::vector<uint64_t> pairs = handles_of(record);
  for (size_t at = pairs.size() / 2 * 2; at != 0; at -= 2) name(pairs[at - 2], pairs[at - 1]);
}

void LostBuffers::name(uint64_t from, uint64_t to) {
  auto buffer = lost_.extract(from);
  lost_.erase(to);
  if (buffer.empty()) return;
  buffer.key() = to;
  lost_.insert(std::move(buffer));
}

}  // namespace pathways
