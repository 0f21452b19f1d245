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
  changed_bells_.push_back({slot, nullptr, nullptr, 0, true});
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

void LinkPool::add_bell(uint32_t slot, DoorbellWord* word, std::shared_ptr<const void> keep) {
  const std::lock_guard lock(mutex_);
  changed_bells_.push_back({slot, word, std::move(keep), 0});
}

void LinkPool::remove_bell(uint32_t slot, DoorbellWord* word) {
  const std::lock_guard lock(mutex_);
  changed_bells_.push_back({slot, word, nullptr, 0, true});
}

void LinkPool::change_bells() {
  std::vector<Bell> changed;
  {
    const std::lock_guard lock(mutex_);
    changed.swap(changed_bells_);
  }
  for (Bell& change : changed) {
    if (!change.is_over) {
      sleep_.add(change.word);
      change.ticket = change.word->ticket() - DoorbellWord::kStep;  // what was rung before counts, too
      bells_.push_back(std::move(change));
      continue;
    }
    for (auto bell = bells_.begin(); bell != bells_.end();) {
      if (bell->slot != change.slot || (change.word != nullptr && bell->word != change.word)) {
        ++bell;
        continue;
      }
      sleep_.remove(bell->word);
      bell = bells_.erase(bell);
      if (change.word != nullptr) break;  // it was added once for each time that it is removed
    }
  }
}

/// POOL-1: the tickets come first, then the marks are cleared, and then links are asked. So what is published later
/// either rings after the ticket, or is found.
void LinkPool::queue_marked() {
  change_bells();
  sleep_.draw();
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
  for (Bell& bell : bells_) {
    if (const uint32_t ticket = bell.word->ticket(); std::exchange(bell.ticket, ticket) != ticket) queue(bell.slot);
  }
  std::erase_if(retries_, [&](const Retry& each) {
    if (each.at_ns <= now) queue(each.slot);
    return each.at_ns <= now;
  });
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
  while ((collected.link = next(&collected.slot)) != nullptr) {
    Link* const link = collected.link.get();
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
    if (const auto again = link->again_in(); again != again.max()) {
      std::erase_if(retries_, [&](const Retry& each) { return each.slot == collected.slot; });
      retries_.push_back({collected.slot, clock_() + again.count()});
    }
  }
  return std::nullopt;
}

void LinkPool::wait(std::chrono::nanoseconds timeout) {
  const int64_t now = clock_();
  for (const Retry& each : retries_) {
    timeout = std::min(timeout, std::max(kRetry, std::chrono::nanoseconds(each.at_ns - now)));
  }
  timeout = std::min(timeout, std::chrono::nanoseconds(std::max<int64_t>(sweep_ns_ - now, 0)));
  (void)sleep_.wait(timeout, SpinPolicy::adaptive());
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
