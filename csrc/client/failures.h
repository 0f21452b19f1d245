/// Failures: why futures of this client have failed, and which of these failures nobody has read.
///
/// Nobody may wait for a result: it was deleted, or its run was submitted for its effect. So a failure that no one has
/// read is told when the last future that has it is released, as asyncio tells of exceptions that nobody retrieved.
///
///   UNREAD-1 (once)  A failure is told once, or never because its text was read. Futures that fail with one text,
///                    less than `kTogether` apart, are one failure: the results of a run, and what depends on them.
///   UNREAD-2 (late)  A future that was released before it failed has nobody who can read it: its failure counts.
///   UNREAD-3 (calm)  What the client has cancelled, and tokens of reads and tasks, are never told.
///
/// A call costs nothing here while nothing has failed. Threading: one thread at a time (Python's lock ensures it).
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/ids.h"

namespace pathways {

class Failures {
 public:
  static constexpr std::chrono::nanoseconds kTogether = std::chrono::milliseconds(500);
  static constexpr std::string_view kCancelled = "CancelledError";

  /// A failure that nobody has read: its text, and how many futures had it.
  struct Unread {
    std::string text;
    uint64_t futures = 0;
  };

  bool is_empty() const { return by_handle_.empty(); }
  /// A live future has failed. The first text of a future stays.
  void add(Handle handle, std::string text, int64_t now_ns);
  /// A future that was released has failed (UNREAD-2), unless it was a token.
  void add_released(Handle handle, std::string text, int64_t now_ns);
  /// The text; empty when there is none. From now on the failure counts as read.
  std::string read(Handle handle);
  /// The text; empty when there is none. It does not count as read by that.
  std::string text_of(Handle handle) const;
  /// From now on all failures with this text count as read.
  void mark_read(const std::string& text);
  /// A live future is released.
  void release(Handle handle);
  /// A token is released; `is_pending`: it may still fail.
  void forget(Handle token, bool is_pending);
  /// What is to be told now. `all`: also of futures that are still live, because the client ends.
  std::vector<Unread> take_unread(int64_t now_ns, bool all);

 private:
  static constexpr size_t kRemembered = 1024;  ///< of `settled_`: the newest

  struct Failure {
    std::string text;
    int64_t first_ns = 0;
    uint64_t live = 0;     ///< futures that are not released
    uint64_t futures = 0;  ///< all that had it
    bool is_read = false;
  };

  std::shared_ptr<Failure> failure_of(std::string text, int64_t now_ns);
  void settle(Handle handle);

  std::unordered_map<uint64_t, std::shared_ptr<Failure>> by_handle_;  ///< live futures
  std::unordered_map<std::string, std::shared_ptr<Failure>> recent_;  ///< by text: what a further future joins
  std::vector<std::shared_ptr<Failure>> over_;                        ///< no live future has them; still to be told
  /// Released futures of which a report says nothing new: their failure is known, as another host, or the client itself
  /// by a deadline, has told it; or they were tokens.
  std::deque<uint64_t> settled_;
};

}  // namespace pathways
