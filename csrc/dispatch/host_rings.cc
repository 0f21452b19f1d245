#include "dispatch/host_rings.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/status.h"

namespace pathways {

HostRings::HostRings(const ControllerBlock* block, std::span<const HostView> hosts, const ControllerOptions& options)
    : block_(block),
      readers_(options.readers),
      ends_hosts_with_faults_(options.ends_hosts_with_faults),
      clock_(options.clock),
      hosts_(hosts.size()) {
  if (hosts.empty() || hosts.size() > ReadyBitmap::kBits) {
    throw Error(Status::kInvalid, "a cluster has 1 to 65536 hosts, not " + std::to_string(hosts.size()));
  }
  if (options.host_ring_bytes != 0) max_record_ = RingBlock::longest(options.host_ring_bytes);
  for (uint32_t h = 0; h < hosts_.size(); ++h) {
    if (!hosts[h].is_there()) {
      hosts_[h].is_lost = true;
      ++lost_;
      continue;
    }
    hosts_[h].inbox = hosts[h].from_host();
    hosts_[h].outbox = outbox_to(h, hosts[h]);
    max_record_ = std::min(max_record_, hosts_[h].outbox.max_record());
  }
}

Outbox HostRings::outbox_to(uint32_t host, const HostView& block) const {
  Outbox outbox = readers_ == nullptr ? Outbox(block.to_host(), block.doorbell())
                                      : Outbox(block.to_host(), &readers_->doorbell, &readers_->bitmap, host);
  outbox.set_distance(block_->distance_ns, clock_);
  return outbox;
}

void HostRings::flush() {
  // A host whose ring is full stays in the list.
  std::erase_if(dirty_, [&](uint32_t h) { return !(hosts_[h].is_dirty = hosts_[h].outbox.flush()); });
}

std::chrono::nanoseconds HostRings::next_look() const {
  if (block_->distance_ns == 0) return kOverflowLook;
  precise_timers();
  int64_t due = 0;
  for (const uint32_t h : dirty_) {
    const int64_t own = hosts_[h].outbox.due();
    if (own != 0 && (due == 0 || own < due)) due = own;
  }
  const int64_t left = due - clock_();
  return left > 0 ? std::chrono::nanoseconds(left) : kOverflowLook;
}

void HostRings::fault(uint32_t h, std::string what) {
  if (!ends_hosts_with_faults_) throw Error(Status::kInvalid, what);
  hosts_[h].has_fault = true;
  const std::lock_guard lock(mutex_);
  faults_.push_back({h, std::move(what)});
  has_faults_.store(true, std::memory_order_relaxed);
}

std::vector<HostRings::Fault> HostRings::take_faults() {
  if (!has_faults_.load(std::memory_order_relaxed)) return {};
  const std::lock_guard lock(mutex_);
  has_faults_.store(false, std::memory_order_relaxed);
  return std::exchange(faults_, {});
}

void HostRings::lose(std::span<const uint32_t> hosts) {
  for (const uint32_t h : hosts) {
    Host& host = hosts_[h];
    host.is_lost = true;
    host.is_dirty = false;
    host.inbox = ByteRing::Consumer();
    host.outbox = Outbox();
    ++lost_;
  }
  std::erase_if(dirty_, [&](uint32_t h) { return hosts_[h].is_lost; });
  const std::lock_guard lock(mutex_);
  std::erase_if(faults_, [&](const Fault& fault) { return hosts_[fault.host].is_lost; });
}

void HostRings::restore(uint32_t h, const HostView& block) {
  Host& host = hosts_[h];
  host.inbox = block.from_host();
  host.outbox = outbox_to(h, block);
  host.is_lost = host.has_fault = false;
  --lost_;
  max_record_ = std::min(max_record_, host.outbox.max_record());
}

void HostRings::validate() const {
  uint32_t lost = 0;
  size_t dirty = 0;
  for (const Host& host : hosts_) {
    lost += host.is_lost ? 1U : 0U;
    dirty += host.is_dirty ? 1U : 0U;
    PW_CHECK(!host.is_lost || !host.is_dirty);
  }
  PW_CHECK(lost == lost_ && dirty == dirty_.size());
  for (const uint32_t h : dirty_) PW_CHECK(hosts_[h].is_dirty);
}

}  // namespace pathways
