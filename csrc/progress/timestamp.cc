#include "progress/timestamp.h"

#include "base/check.h"

namespace pathways {

Summary Summary::next_round(size_t level) {
  PW_CHECK(level < kLoopLevels);
  Summary summary;
  summary.add_[level] = 1;
  return summary;
}

Summary Summary::boundary(size_t level) {
  PW_CHECK(level < kLoopLevels);
  Summary summary;
  summary.keeps_[level] = false;
  return summary;
}

Timestamp Summary::apply(const Timestamp& time) const {
  Timestamp out = time;
  for (size_t i = 0; i < kLoopLevels; ++i) out.counters[i] = (keeps_[i] ? time.counters[i] : 0) + add_[i];
  return out;
}

Summary Summary::then(const Summary& next) const {
  Summary out;
  for (size_t i = 0; i < kLoopLevels; ++i) {
    out.keeps_[i] = keeps_[i] && next.keeps_[i];
    out.add_[i] = (next.keeps_[i] ? add_[i] : 0) + next.add_[i];
  }
  return out;
}

bool Summary::is_before_or_at(const Summary& other) const {
  for (size_t i = 0; i < kLoopLevels; ++i) {
    if ((keeps_[i] && !other.keeps_[i]) || add_[i] > other.add_[i]) return false;
  }
  return true;
}

bool Summary::advances() const {
  for (size_t i = 0; i < kLoopLevels; ++i) {
    if (keeps_[i] && add_[i] > 0) return true;
  }
  return false;
}

}  // namespace pathways
