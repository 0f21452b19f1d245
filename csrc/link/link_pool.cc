#include "link/link_pool.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace pathways {
namespace {

constexpr std::chrono::nanoseconds kRetry =
    std::chrono::microseconds(200);  ///< for a ring of this machine that is full

}  // namespace

uint32_t LinkPool::add(const std::shared_ptr<Link>& link) {
  const std::lock_guard lock(mutex_);
  if (free_.empty() && next_slot_ == ReadyBitmap::kBits) throw Error(Status::kFull, "there are too many links");
  uint32_t slot = next_slot_;
  if (free_.empty()) {
    ++next_slot_;
  } else {
    slot = free_.back();
    free_.pop_back();
  }
  members_.emplace(slot, Member{link});
  return slot;
}

void LinkPool::remove(uint32_t slot) {
  const std::lock_guard lock(mutex_);
  const auto found = members_.find(slot);
  if (found == members_.end()) return;
  if (found->second.is_queued) std::erase(queue_, slot);
  std::erase_if(slot_of_host_, [&](const auto& each) { return each.second == slot; });
  members_.erase(found);
  free_.push_back(slot);
}

void LinkPool::add_host(uint32_t host, uint32_t slot) {
  const std::lock_guard lock(mutex_);
  slot_of_host_[host] = slot;
}

void LinkPool::remove_host(uint32_t host, uint32_t slot) {
  const std::lock_guard lock(mutex_);
  const auto found = slot_of_host_.find(host);
  if (found != slot_of_host_.end() && found->second == slot) slot_of_host_.erase(found);
}

/// POOL-1: the ticket comes first, then the marks are cleared, and then links are asked. So what is published later
/// either rings after the ticket, or is found.
void LinkPool::queue_marked() {
  ticket_ = hosts_.doorbell.ticket();
  marked_.clear();
  marked_hosts_.clear();
  links_.collect(&marked_);
  hosts_.bitmap.collect(&marked_hosts_);
  const int64_t now = clock_();
  const std::lock_guard lock(mutex_);
  for (const uint32_t host : marked_hosts_) {
    // A host that is not known yet marks its link when it is: see MachineLink::add_host.
    if (const auto found = slot_of_host_.find(host); found != slot_of_host_.end()) queue(found->second);
  }
  for (const uint32_t slot : marked_) queue(slot);
  for (const uint32_t slot : std::exchange(retry_, {})) queue(slot);
  if (now >= sweep_ns_) {
    for (const auto& [slot, member] : members_) queue(slot);
    sweep_ns_ = now + kSweep.count();
  }
}

void LinkPool::queue(uint32_t slot) {
  const auto found = members_.find(slot);
  if (found == members_.end() || found->second.is_queued || found->second.is_paused) return;
  found->second.is_queued = true;
  queue_.push_back(slot);
}

/// The link that is first in the queue, which it leaves; nullptr: none is there.
std::shared_ptr<Link> LinkPool::next(uint32_t* slot) {
  const std::lock_guard lock(mutex_);
  while (!queue_.empty()) {
    *slot = queue_.front();
    queue_.pop_front();
    Member& member = members_.at(*slot);
    member.is_queued = false;
    if (member.is_paused) continue;  // `resume` marks it
    if (auto link = member.link.lock()) return link;
  }
  return nullptr;
}

std::optional<LinkPool::Collected> LinkPool::collect(std::span<std::byte> out) {
  queue_marked();
  Collected collected;
  while (const std::shared_ptr<Link> link = next(&collected.slot)) {
    try {
      collected.bytes = link->collect(out);
    } catch (const Error& error) {
      collected.error = error.what();
      return collected;
    }
    if (collected.bytes != 0) {
      const std::lock_guard lock(mutex_);
      queue(collected.slot);  // POOL-1: until it has nothing. POOL-2: behind the others.
      return collected;
    }
    if (link->waits_for_room()) retry_.push_back(collected.slot);
  }
  return std::nullopt;
}

void LinkPool::wait(std::chrono::nanoseconds timeout) {
  if (!retry_.empty()) timeout = std::min(timeout, kRetry);
  timeout = std::min(timeout, std::chrono::nanoseconds(std::max<int64_t>(sweep_ns_ - clock_(), 0)));
  (void)hosts_.doorbell.wait(ticket_, timeout, SpinPolicy::adaptive());
}

void LinkPool::pause(uint32_t slot) {
  const std::lock_guard lock(mutex_);
  if (const auto found = members_.find(slot); found != members_.end()) found->second.is_paused = true;
}

void LinkPool::resume(uint32_t slot) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = members_.find(slot); found != members_.end()) found->second.is_paused = false;
  }
  mark(slot);
}

}  // namespace pathways
