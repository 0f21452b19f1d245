#include "memory/fork_holds.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>

#include "base/status.h"

namespace pathways {

/// Never destroyed, because a fork may happen while the process ends.
struct ForkHolds::Registry {
  std::mutex mutex;  // held during a fork
  std::vector<ForkHolds*> all;
  std::vector<int> write_ends;  // non-empty during a fork only
};

ForkHolds::Registry& ForkHolds::registry() {
  static auto* const registry = new Registry;
  return *registry;
}

void ForkHolds::before_fork() {
  Registry& known = registry();
  known.mutex.lock();
  for (ForkHolds* holds : known.all) {
    std::vector<std::uint64_t> offsets = holds->arena_->retain_held();
    if (offsets.empty()) continue;
    int ends[2] = {-1, -1};
    if (::pipe2(ends, O_CLOEXEC) == 0) known.write_ends.push_back(ends[1]);
    holds->holds_.push_back({ends[0], std::move(offsets)});
    holds->count_.store(static_cast<std::uint32_t>(holds->holds_.size()), std::memory_order_relaxed);
  }
}

void ForkHolds::after_fork_in_parent() {
  Registry& known = registry();
  for (const int fd : known.write_ends) ::close(fd);
  known.write_ends.clear();
  known.mutex.unlock();
}

/// The write ends stay open as long as the child lives. The child must not release the references of the parent.
void ForkHolds::after_fork_in_child() {
  Registry& known = registry();
  for (ForkHolds* holds : known.all) {
    for (const Hold& hold : holds->holds_) {
      if (hold.fd >= 0) ::close(hold.fd);
    }
    holds->holds_.clear();
    holds->count_.store(0, std::memory_order_relaxed);
  }
  known.all.clear();
  known.write_ends.clear();
  known.mutex.unlock();
}

ForkHolds::ForkHolds(Arena* arena) : arena_(arena) {
  if (arena == nullptr) return;
  static const int registered = ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  if (registered != 0) throw_errno(Status::kNoMemory, "ForkHolds: pthread_atfork", registered);
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  known.all.push_back(this);
}

ForkHolds::~ForkHolds() {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  std::erase(known.all, this);
  for (const Hold& hold : holds_) {
    if (hold.fd >= 0) ::close(hold.fd);
  }
}

void ForkHolds::settle() noexcept {
  if (was_count() == 0) return;
  const std::lock_guard lock(registry().mutex);
  std::erase_if(holds_, [this](const Hold& hold) {
    pollfd end{hold.fd, POLLIN, 0};
    if (hold.fd < 0 || ::poll(&end, 1, 0) == 0) return false;
    ::close(hold.fd);
    for (const std::uint64_t offset : hold.offsets) arena_->release(offset);
    return true;
  });
  count_.store(static_cast<std::uint32_t>(holds_.size()), std::memory_order_relaxed);
}

}  // namespace pathways
