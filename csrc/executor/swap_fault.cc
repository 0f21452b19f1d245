#include "executor/swap_fault.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pathways {
namespace {

constexpr uint32_t kHeldPolls = 256, kIdlePolls = 4;  // then the fault stops waiting for a second run

}  // namespace

void HeldRun::assign(const RunRecord& record, const uint64_t* words) {
  const size_t extra = words_behind(record) * sizeof(uint64_t);
  bytes_.resize(sizeof record + extra);
  std::memcpy(bytes_.data(), &record, sizeof record);
  if (extra != 0) std::memcpy(bytes_.data() + sizeof record, words, extra);
}

bool SwapFault::hold_back(const RunRecord& record, const uint64_t* words) {
  if (++counter_ % every_ != 0) return false;
  held_.assign(record, words);
  polls_ = 0;
  return true;
}

bool SwapFault::needs_held(const RunRecord& record, const uint64_t* words) const {
  const RunRecord& held = held_.record();
  const uint64_t* results = held_.words() + held.arguments;
  return held.header.client == record.header.client &&
         std::find_first_of(words, words + record.arguments, results, results + held.results) !=
             words + record.arguments;
}

bool SwapFault::is_overdue(bool is_idle) { return ++polls_ > (is_idle ? kIdlePolls : kHeldPolls); }

HeldRun SwapFault::take() { return std::exchange(held_, HeldRun{}); }

}  // namespace pathways
