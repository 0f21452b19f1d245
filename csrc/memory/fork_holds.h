// ForkHolds: keeps the blocks that forked children may still read. Use it beside an arena whose segment is hidden from
// children (Segment::hide_from_children).
//
// A forked child inherits its parent's views of blocks, and reads them for as long as it likes. Its pages are the
// parent's until somebody writes to them. So if the parent gave a block back and used it again, the child's array would
// change. Therefore a fork takes one reference more to each block that this process holds, and gives it back when the
// child is gone, and every child of that child: each of them has the write end of a pipe, which the kernel closes.
//
// FORK-1 (private)  a forked child reads in every block that its parent held what was there when it was forked. A child
//                   that closes descriptors it did not open gives this up.
//
// The references are taken inside fork() (pthread_atfork), where no other thread of Python runs; a process that is
// started otherwise (vfork and exec, posix_spawn) costs nothing.
//
// Threading: any thread; a lock inside.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/arena.h"
#include "sync/atomic.h"

namespace pathways {

class ForkHolds {
 public:
  /// `arena`, of this process's own, must outlive the holds; nullptr: nothing is ever held.
  explicit ForkHolds(Arena* arena);
  ~ForkHolds();
  ForkHolds(const ForkHolds&) = delete;
  ForkHolds& operator=(const ForkHolds&) = delete;

  /// Gives back what was held for children that are gone. One load while there are none.
  void settle() noexcept;
  /// Forks for which something is held; a stale snapshot.
  [[nodiscard]] std::uint32_t was_count() const noexcept { return count_.load(std::memory_order_relaxed); }

 private:
  struct Hold {
    int fd;  // read end of the pipe; negative: there was none to be had, so it is held for ever
    std::vector<std::uint64_t> offsets;
  };
  struct Registry;
  static Registry& registry();
  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();

  Arena* const arena_;
  std::vector<Hold> holds_;      // guarded by the registry's lock
  Atomic<std::uint32_t> count_;  // of holds_
};

}  // namespace pathways
