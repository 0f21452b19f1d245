/// Timestamp: a step of a run, which a message or a piece of work belongs to; and Summary: what a path does to it.
///
/// A timestamp is a run, and how often each loop around the step has gone round. Two timestamps of one run are ordered
/// when no counter of the first is greater. Timestamps of two runs are never ordered, so no run waits for another. A
/// program of nested loops uses one counter per level; a counter outside of its loop is 0.
///
/// Source of the model: Murray et al., "Naiad: a timely dataflow system", SOSP 2013, section 2.3.
///
/// Threading: values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pathways {

inline constexpr size_t kLoopLevels = 4;

struct Timestamp {
  uint64_t run = 0;
  std::array<uint32_t, kLoopLevels> counters{};

  bool operator==(const Timestamp&) const = default;
  /// This one is not later than `other`.
  bool is_before_or_at(const Timestamp& other) const {
    if (run != other.run) return false;
    for (size_t i = 0; i < kLoopLevels; ++i) {
      if (counters[i] > other.counters[i]) return false;
    }
    return true;
  }
};

/// Each counter is kept and raised by `add`, or it is set to `add`.
class Summary {
 public:
  /// Changes nothing.
  Summary() { keeps_.fill(true); }
  /// The way back to a loop's start: one more round of the loop at `level`.
  static Summary next_round(size_t level);
  /// The way into the loop at `level`, or out of it: its counter is 0.
  static Summary boundary(size_t level);

  Timestamp apply(const Timestamp& time) const;
  /// This one, then `next`.
  Summary then(const Summary& next) const;
  /// For each timestamp, this one gives none that is later than what `other` gives.
  bool is_before_or_at(const Summary& other) const;
  /// Some counter is kept and raised, so that nothing comes twice at one timestamp.
  bool advances() const;
  bool operator==(const Summary&) const = default;

 private:
  std::array<bool, kLoopLevels> keeps_{};
  std::array<uint32_t, kLoopLevels> add_{};
};

/// Adds `item` to a set of which no item is before another. Returns false if some item is before it, or equal.
template <typename T>
bool add_to_antichain(std::vector<T>& items, const T& item) {
  for (const T& other : items) {
    if (other.is_before_or_at(item)) return false;
  }
  std::erase_if(items, [&](const T& other) { return item.is_before_or_at(other); });
  items.push_back(item);
  return true;
}

}  // namespace pathways
