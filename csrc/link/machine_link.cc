/// What both directions of a MachineLink share: its hosts and clients. machine_link_collect.cc and
/// machine_link_deliver.cc have the rest.
#include "link/machine_link.h"

#include <unistd.h>

#include <utility>

#include "base/status.h"
#include "link/link_pool.h"

namespace pathways {

std::shared_ptr<MachineLink> MachineLink::open(LinkHub& hub, End end, Clock clock, std::shared_ptr<LinkPool> pool) {
  auto link = std::make_shared<MachineLink>(hub, end, clock);
  if (pool != nullptr) link->join(std::move(pool));
  return link;
}

MachineLink::MachineLink(LinkHub& hub, End end, Clock clock) : Link(clock), hub_(hub), end_(end) {}

void MachineLink::add_host(uint32_t number, int32_t incarnation, const HostView& block, ControllerBlock* controller,
                           std::shared_ptr<const void> keep) {
  remove_host(number);
  FarHost host{std::move(keep), incarnation, {}, {}, {}, {}, nullptr};
  if (end_ == End::kHead) {
    host.from = block.inbox();
    host.to = Outbox(block.outgoing(), &controller->doorbell, &controller->ready_bitmap, number);
  } else {
    host.from = block.from_host();
    host.to = Outbox(block.to_host(), block.doorbell());
    if (block.to_link().is_there()) {
      host.from_far = block.to_link().consumer();
      host.to_far = Outbox(block.from_link().producer(), block.doorbell());
    }
    host.bell = &controller->doorbell;
  }
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) throw Error(Status::kClosed, "the link is closed");
    if (pool_ != nullptr && end_ == End::kAgent) pool_->add_bell(slot_, host.bell, host.keep);
    hosts_.insert_or_assign(number, std::move(host));
  }
  if (end_ == End::kHead) hub_.add_destination(number, incarnation, shared_from_this());
  if (pool_ != nullptr && end_ == End::kHead) pool_->add_host(number, slot_);
  wake();
}

void MachineLink::remove_host(uint32_t number) {
  if (end_ == End::kHead) hub_.remove_destination(number, this);
  {
    const std::lock_guard lock(mutex_);
    const auto found = hosts_.find(number);
    if (found == hosts_.end()) return;  // another link may have its number in the pool by now
    forget_in_pool(number, found->second);
    hosts_.erase(found);
    lent_.remove_host(number);  // LINK-2
    if (end_ == End::kHead && data_.has_value() && lent_.find(data_->number) == nullptr) data_.reset();
    if (end_ == End::kAgent && hosts_.empty()) {  // the hosts of an agent start anew together, with new twins
      twins_.clear();
      data_.reset();
    }
  }
  wake();
}

Segment MachineLink::twin_client(uint32_t client, size_t arena_bytes) {
  const std::lock_guard lock(mutex_);
  auto found = twins_.find(client);
  if (found == twins_.end()) {
    const ClientBlock::Sizes sizes{64, ByteRing::kMinCapacity, arena_bytes, false};
    found = twins_.emplace(client, Twin{FarBlocks(ClientBlock::make(sizes, true), SIZE_MAX)}).first;
  }
  return Segment::attach(::dup(found->second.memory.segment().fd()));
}

void MachineLink::forget() {
  for (const auto& [number, host] : hosts_) {
    if (end_ == End::kHead) hub_.remove_destination(number, this);
    forget_in_pool(number, host);
  }
  hosts_.clear();
  twins_.clear();
}

void MachineLink::forget_in_pool(uint32_t number, const FarHost& host) {
  if (pool_ == nullptr) return;
  if (end_ == End::kHead) {
    pool_->remove_host(number, slot_);
  } else {
    pool_->remove_bell(slot_, host.bell);
  }
}

MachineLink::FarHost* MachineLink::host_of(uint32_t host, int32_t incarnation) {
  const auto found = hosts_.find(host);
  return found == hosts_.end() || found->second.incarnation != incarnation ? nullptr : &found->second;
}

}  // namespace pathways
