// ForkHolds: keeps the blocks that forked children may still read. Use it beside an arena whose segment is hidden from
// children (Segment::hide_from_children).
//
// A forked child inherits its parent's views of blocks, and may read them at any later time. The child shares each page
// with the parent until one of them writes to it. So if the parent released a block and used it again, the child's
// array would change. Therefore a fork takes one more reference to each block that this process holds. The reference is
// released when the child and all of its descendants have ended. The parent knows this from a pipe: each of them holds
// the write end, and the kernel closes it when they end.
//
// FORK-1 (private)  a forked child reads in every block that its parent held what was there when it was forked. A child
//                   that closes descriptors which it did not open loses this guarantee.
//
// The references are taken inside fork() (pthread_atfork), where no other thread of Python runs. A process that is
// started without fork() (vfork and exec, posix_spawn) costs nothing.
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
  /// `arena` is owned by this process, and must outlive the holds. nullptr: nothing is ever held.
  explicit ForkHolds(Arena* arena);
  ~ForkHolds();
  ForkHolds(const ForkHolds&) = delete;
  ForkHolds& operator=(const ForkHolds&) = delete;

  /// Releases what was held for children that have ended. Costs one load while nothing is held.
  void settle() noexcept;
  /// The number of forks for which blocks are held; a stale snapshot.
  [[nodiscard]] std::uint32_t was_count() const noexcept { return count_.load(std::memory_order_relaxed); }

 private:
  struct Hold {
    int fd;  // read end of the pipe; negative: no pipe could be made, so the blocks are held for ever
    std::vector<std::uint64_t> offsets;
  };
  struct Registry;
  static Registry& registry();
  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();

  Arena* const arena_;
  std::vector<Hold> holds_;      // guarded by the registry's lock
  Atomic<std::uint32_t> count_;  // size of holds_
};

}  // namespace pathways
