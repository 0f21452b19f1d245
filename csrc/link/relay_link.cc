#include "link/relay_link.h"

#include <utility>

#include "base/status.h"
#include "link/link_pool.h"

namespace pathways {

std::shared_ptr<RelayLink> RelayHub::open(uint32_t number) {
  auto link = std::make_shared<RelayLink>(shared_from_this(), number, clock_);
  if (pool_ != nullptr) link->join(pool_);
  const std::lock_guard lock(mutex_);
  links_[number] = link;
  return link;
}

std::shared_ptr<RelayLink> RelayHub::open_trunk() { return open(kTrunk); }

std::shared_ptr<RelayLink> RelayHub::open_branch(uint32_t number) { return open(number); }

std::shared_ptr<RelayLink> RelayHub::find(uint32_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = links_.find(number);
  return found == links_.end() ? nullptr : found->second.lock();
}

std::optional<uint32_t> RelayHub::number_of(const std::string& machine) {
  const std::lock_guard lock(mutex_);
  const auto found = expected_.find(machine);
  return found == expected_.end() ? std::nullopt : std::optional(found->second);
}

void RelayHub::expect(uint32_t number, std::string machine) {
  const std::lock_guard lock(mutex_);
  expected_[std::move(machine)] = number;
}

void RelayHub::ended(uint32_t number) {
  const std::lock_guard lock(mutex_);
  std::erase_if(expected_, [&](const auto& each) { return each.second == number; });
  links_.erase(number);
  asked_.erase(number);
  ended_.push_back(number);
}

std::vector<uint32_t> RelayHub::take_ended() {
  const std::lock_guard lock(mutex_);
  return std::exchange(ended_, {});
}

void RelayHub::end(uint32_t number) {
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(expected_, [&](const auto& each) { return each.second == number; });
    asked_.erase(number);
    if (links_.erase(number) == 0) return;
  }
  if (const auto trunk = find(kTrunk)) (void)trunk->enqueue(FrameKind::kEnd, number, 0, {});
}

void RelayHub::asked(uint32_t number) {
  const std::lock_guard lock(mutex_);
  asked_.insert(number);
}

void RelayHub::answered(uint32_t number) {
  const std::lock_guard lock(mutex_);
  asked_.erase(number);
  if (until_ns_ == 0) until_ns_ = clock_() + kGathers.count();
}

/// For how long the answers that wait for the head should wait for others. Who answers later is waited for no more.
std::chrono::nanoseconds RelayHub::gathers(int64_t now_ns) {
  const std::lock_guard lock(mutex_);
  if (!asked_.empty() && now_ns < until_ns_) return std::chrono::nanoseconds(until_ns_ - now_ns);
  if (until_ns_ != 0) asked_.clear();
  until_ns_ = 0;
  return {};
}

std::chrono::nanoseconds RelayLink::gathers(int64_t now_ns) {
  return number_ == RelayHub::kTrunk ? relay_->gathers(now_ns) : std::chrono::nanoseconds(0);
}

void RelayLink::take(const FrameHeader& header, std::span<const std::byte> payload) {
  const bool is_trunk = number_ == RelayHub::kTrunk;
  if (header.kind == FrameKind::kCarried) {
    if (!is_trunk && header.a != number_) refuse("a frame of another machine");
    if (is_trunk) {
      relay_->asked(header.a);
    } else {
      relay_->answered(header.a);
    }
    if (const auto to = relay_->find(is_trunk ? header.a : RelayHub::kTrunk)) {
      pass(*to, header, payload);
    } else {
      ++stats_.dropped;
    }
  } else if (header.kind == FrameKind::kExpect && is_trunk) {
    if (payload.size() > kLongestName) refuse("a name of " + std::to_string(payload.size()) + " bytes");
    relay_->expect(header.a, {reinterpret_cast<const char*>(payload.data()), payload.size()});
  } else if (header.kind == FrameKind::kEnd && is_trunk) {
    relay_->ended(header.a);
  } else {
    refuse("a frame of kind " + std::to_string(static_cast<int>(header.kind)) + ", which a relay does not take");
  }
}

void RelayLink::pass(RelayLink& to, const FrameHeader& header, std::span<const std::byte> payload) {
  const bool is_trunk = number_ == RelayHub::kTrunk;
  if (!to.enqueue(header.kind, header.a, header.b, payload, is_trunk ? nullptr : this)) {
    throw Error(Status::kFull, "it brought more than the head takes");
  }
  ++stats_.records_in;
  if (to.queued_bytes() <= kMostWaiting) return;
  {
    const std::lock_guard lock(to.held_mutex_);
    if (!to.held_.insert(header.a).second) return;
  }
  (void)enqueue(FrameKind::kHold, header.a, 1, {});
  to.wake();  // it may have been collected meanwhile
}

/// All that waited here is on its way: those that were held go on.
void RelayLink::send_records(FrameWriter&) {
  std::set<uint32_t> held;
  {
    const std::lock_guard lock(held_mutex_);
    held = std::exchange(held_, {});
  }
  for (const uint32_t machine : held) {
    const auto from = relay_->find(number_ == RelayHub::kTrunk ? machine : RelayHub::kTrunk);
    if (from != nullptr) (void)from->enqueue(FrameKind::kHold, machine, 0, {});
  }
}

}  // namespace pathways
