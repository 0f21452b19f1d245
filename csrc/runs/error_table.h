/// ErrorTable: the texts of the errors of one host's runs, by number, and the launches that failed.
///
/// A run keeps the number of an error for each value that failed, so a text is kept once, however many values fail with
/// it (ERR-1). Error 0 is no error. The table keeps the newest texts only.
///
/// Used by every part of the executor that fails values. Threading: the executor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

namespace pathways {

/// The error of what a node would have made that was not taken (csrc/plan/branches.h). It has no text, and no result of
/// a client has it (PLAN-5).
inline constexpr uint32_t kDead = 0xffffffffu;

class ErrorTable {
 public:
  /// Returns the number of the new error, never 0.
  uint32_t add(std::string text);
  std::string_view text(uint32_t error) const;

  /// The launch of this age has failed with `error`.
  void launch_failed(uint64_t age, uint32_t error);
  /// The error of the launch of this age, if it is known to have failed; else 0. Whatever takes its outputs, in other
  /// runs too, fails with this error (ERR-1), although XLA gives another text for it.
  uint32_t of_launch(uint64_t age) const;
  void forget_launches() { launches_.clear(); }

  /// For debug builds and tests.
  void validate() const;

 private:
  static constexpr size_t kTextsKept = 4096;
  static constexpr size_t kLaunchesKept = 256;

  std::deque<std::string> texts_;  ///< the newest; error n is texts_[n - first_]
  uint32_t first_ = 1;
  std::deque<std::pair<uint64_t, uint32_t>> launches_;  ///< the last launches that failed, by age, and their errors
};

}  // namespace pathways
