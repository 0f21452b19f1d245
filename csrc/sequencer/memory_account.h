/// The account of one budget: that of each memory space of a class (sequencer/admission.h), or one client's quota there
/// (sequencer/client_memory.h). What the sums mean, and why the space then never holds more than its budget, is said in
/// admission.h (MEM-1, MEM-2).
///
///   live     bytes of the blocks alive after everything admitted so far
///   eager    bytes that admitted runs not yet over may take before their position in the order
///   height   the greatest peak reservation of the admitted runs not yet over, without their own eager bytes
///
/// Invariant: `top_` is the greatest height in `peaks_`, and `peaks_` is sorted by number from `first_` on.
///
/// Pure: no thread, no clock, no I/O. Threading: one thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"

namespace pathways {

inline constexpr uint64_t kUnlimited = uint64_t{1} << 62;  ///< a budget that nothing reaches

enum class Verdict : uint8_t {
  kFits,   ///< it fits now
  kBusy,   ///< it fits when earlier runs are over
  kHeld,   ///< it fits only when blocks are released
  kNever,  ///< it does not fit an empty memory space
};

class MemoryAccount {
 public:
  explicit MemoryAccount(uint64_t budget = 0) : budget_(std::min(budget, kUnlimited)) {}

  uint64_t budget() const { return budget_; }
  void set_budget(uint64_t bytes) { budget_ = std::min(bytes, kUnlimited); }
  uint64_t live() const { return live_; }
  /// The most that was admitted at any time.
  uint64_t high_water() const { return high_water_; }

  /// Whether a run fits. Needs are bounded by what a plan can hold, far below 2^62: sums do not wrap.
  Verdict judge(uint64_t peak, uint64_t eager, bool is_claimed = false) const {
    if (peak + eager > budget_) return Verdict::kNever;
    if (live_ + peak + eager > budget_) return Verdict::kHeld;
    const uint64_t height = std::max(this->height(), live_ + peak);
    if (is_claimed || height + eager_ + eager > budget_) return Verdict::kBusy;
    return Verdict::kFits;
  }
  /// Whether a block fits that is made at once, before the runs that were admitted.
  Verdict judge_early(uint64_t bytes, bool is_claimed = false) const {
    if (bytes > budget_) return Verdict::kNever;
    if (live_ + bytes > budget_) return Verdict::kHeld;
    if (is_claimed || std::max(height(), live_) + eager_ + bytes > budget_) return Verdict::kBusy;
    return Verdict::kFits;
  }

  void enter(uint64_t peak, uint64_t eager, uint64_t number) {
    eager_ += eager;
    const int64_t height = static_cast<int64_t>(live_ + peak) - raised_;
    top_ = peaks().empty() ? height : std::max(top_, height);
    peaks_.push_back({number, height});
    look();
  }
  void leave(uint64_t eager, uint64_t number) {
    PW_DCHECK(eager_ >= eager);
    eager_ -= eager;
    const int64_t height = take_peak(number);
    const auto left = peaks();
    if (height < top_ || left.empty()) return;
    int64_t top = left.front().height;
    for (const Peak& peak : left) {
      top = std::max(top, peak.height);
      if (top == top_) break;
    }
    top_ = top;
  }

  /// A block is alive. `is_early`: it is made at once; else the peak reservation of its run covers it, less what the
  /// run takes over.
  void add(uint64_t bytes, bool is_early) {
    live_ += bytes;
    if (!is_early) return;
    raised_ += static_cast<int64_t>(bytes);
    look();
  }
  void remove(uint64_t bytes) {
    PW_DCHECK(live_ >= bytes);
    live_ -= bytes;
  }

  void validate() const {
    int64_t top = INT64_MIN;
    uint64_t before = 0;
    for (const Peak& peak : peaks()) {
      PW_CHECK(before < peak.number);
      before = peak.number;
      top = std::max(top, peak.height);
    }
    PW_CHECK(peaks().empty() || top == top_);
  }

 private:
  /// The height that a run not yet over reserves. Runs may end out of order, because they do more work on other spaces.
  struct Peak {
    uint64_t number;
    int64_t height;  ///< less `raised_` when the run was admitted
  };
  std::span<const Peak> peaks() const { return std::span(peaks_).subspan(first_); }
  /// Removes a reservation, and returns its height. Usually it is the oldest.
  int64_t take_peak(uint64_t number) {
    const auto begin = peaks_.begin() + static_cast<std::ptrdiff_t>(first_);
    const auto at = std::find_if(begin, peaks_.end(), [&](const Peak& peak) { return peak.number == number; });
    PW_CHECK(at != peaks_.end());
    const int64_t height = at->height;
    if (at == begin) {
      ++first_;
    } else {
      peaks_.erase(at);
    }
    if (2 * first_ >= peaks_.size()) {  // so that each reservation moves once on average
      peaks_.erase(peaks_.begin(), peaks_.begin() + static_cast<std::ptrdiff_t>(first_));
      first_ = 0;
    }
    return height;
  }
  uint64_t height() const { return peaks().empty() ? live_ : static_cast<uint64_t>(top_ + raised_); }
  void look() { high_water_ = std::max(high_water_, std::max(height(), live_) + eager_); }

  uint64_t budget_;
  uint64_t live_ = 0;
  uint64_t eager_ = 0;
  int64_t raised_ = 0;  ///< bytes of early blocks so far: they add to the height of every run that is not over
  uint64_t high_water_ = 0;
  std::vector<Peak> peaks_;  ///< from `first_` on; a vector, because a deque without elements takes 600 bytes
  size_t first_ = 0;
  int64_t top_ = 0;
};

}  // namespace pathways
