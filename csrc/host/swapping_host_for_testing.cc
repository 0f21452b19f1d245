#include "host/swapping_host_for_testing.h"

#include <algorithm>

#include "messages/records.h"

namespace pathways {
namespace {

constexpr uint32_t kHeldPolls = 256, kIdlePolls = 4;  // then the fault stops waiting for a second run

const uint64_t* words_of(std::span<const std::byte> record) {
  return reinterpret_cast<const uint64_t*>(record.data() + sizeof(RunRecord));
}

}  // namespace

void RunSwap::take(std::span<const std::byte> record) {
  const bool is_run = read_record<RecordHeader>(record).kind == RecordKind::kRun;
  if (is_run && held_.empty() && ++counter_ % every_ == 0) {
    held_.assign(record.begin(), record.end());
    polls_ = 0;
    return;
  }
  if (!is_run || (!held_.empty() && needs_held(record))) release();
  take_(record);
  release();
}

/// Whether this run takes a result of the run that is held back.
bool RunSwap::needs_held(std::span<const std::byte> record) const {
  const auto run = read_record<RunRecord>(record), held = read_record<RunRecord>(held_);
  const uint64_t *words = words_of(record), *results = words_of(held_) + held.arguments;
  return held.header.client == run.header.client &&
         std::find_first_of(words, words + run.arguments, results, results + held.results) != words + run.arguments;
}

void RunSwap::poll(bool is_idle) {
  if (++polls_ > (is_idle ? kIdlePolls : kHeldPolls)) release();
}

void RunSwap::release() {
  if (held_.empty()) return;
  const std::vector<std::byte> record = std::exchange(held_, {});
  take_(record);
}

}  // namespace pathways
