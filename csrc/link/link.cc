/// What both directions of a link share: its hosts and clients, and its life. collect.cc and deliver.cc have the rest.
#include "link/link.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/status.h"

namespace pathways {

std::shared_ptr<Link> Link::open(LinkHub& hub, End end, int64_t (*clock)()) {
  return std::make_shared<Link>(hub, end, clock);
}

Link::Link(LinkHub& hub, End end, int64_t (*clock)()) : hub_(hub), end_(end), clock_(clock), bells_(&bell_) {
  heard_at_ns_ = clock_();
}

Link::~Link() { close(); }

void Link::add_host(uint32_t number, int32_t incarnation, const HostView& block, ControllerBlock* controller,
                    std::shared_ptr<const void> keep) {
  remove_host(number);
  FarHost host{std::move(keep), incarnation, {}, {}, {}, {}, nullptr};
  if (end_ == End::kHome) {
    host.from = block.inbox();
    host.to = Outbox(block.outgoing(), &controller->doorbell, &controller->ready_bitmap, number);
    host.bell = block.doorbell();
  } else {
    host.from = block.from_host();
    host.to = Outbox(block.to_host(), block.doorbell());
    if (block.to_far().is_there()) {
      host.from_far = block.to_far().consumer();
      host.to_far = Outbox(block.from_far().producer(), block.doorbell());
    }
    host.bell = &controller->doorbell;
  }
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) throw Error(Status::kClosed, "the link is closed");
    bells_to_add_.push_back({host.bell, host.keep});
    hosts_.insert_or_assign(number, std::move(host));
  }
  if (end_ == End::kHome) hub_.add_destination(number, incarnation, shared_from_this());
  wake();
}

void Link::remove_host(uint32_t number) {
  if (end_ == End::kHome) hub_.remove_destination(number, this);
  {
    const std::lock_guard lock(mutex_);
    const auto found = hosts_.find(number);
    if (found == hosts_.end()) return;
    // The collecting thread may sleep on the doorbell now, and it alone may change the set of doorbells.
    bells_to_remove_.push_back({found->second.bell, found->second.keep});
    hosts_.erase(found);
    // LINK-2: what is still said about its leases counts no more.
    for (auto& [key, lent] : lent_) std::erase(lent.hosts, number);
    std::erase_if(lent_, [](const auto& each) { return each.second.hosts.empty(); });
    if (end_ == End::kAgent && hosts_.empty()) {  // the hosts of an agent start anew together, with new twins
      twins_.clear();
      data_.reset();
    }
  }
  wake();
}

void Link::apply_bells() {
  for (Bell& bell : bells_to_add_) {
    bells_.add(bell.word);
    rung_.push_back(std::move(bell));
  }
  bells_to_add_.clear();
  for (const Bell& bell : bells_to_remove_) {
    bells_.remove(bell.word);
    rung_.erase(std::ranges::find_if(rung_, [&](const Bell& each) { return each.word == bell.word; }));
  }
  bells_to_remove_.clear();
}

Segment Link::twin_client(uint32_t client, size_t arena_bytes) {
  const std::lock_guard lock(mutex_);
  auto found = twins_.find(client);
  if (found == twins_.end()) {
    const ClientBlock::Sizes sizes{64, ByteRing::kMinCapacity, arena_bytes, false};
    Segment segment = ClientBlock::make(sizes, true);
    const ArenaView view = ClientView(segment).arena();
    Arena* arena = ClientBlock::attach(segment)->client_arena();
    found = twins_.emplace(client, Twin{std::move(segment), ArenaTwin(arena, view.bytes()), {}, {}}).first;
  }
  return Segment::attach(::dup(found->second.segment.fd()));
}

void Link::close() {
  std::map<uint32_t, FarHost> hosts;
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) return;
    is_closed_ = true;
    apply_bells();
    hosts.swap(hosts_);
    twins_.clear();
  }
  for (const auto& [number, host] : hosts) {
    if (end_ == End::kHome) hub_.remove_destination(number, this);
  }
  for (const Bell& bell : rung_) bells_.remove(bell.word);
  rung_.clear();
}

Link::FarHost* Link::host_of(uint32_t host, int32_t incarnation) {
  const auto found = hosts_.find(host);
  return found == hosts_.end() || found->second.incarnation != incarnation ? nullptr : &found->second;
}

/// Puts a frame of this link, or of another one that relays, before what the rings have.
void Link::enqueue(FrameKind kind, uint32_t a, int32_t b, std::span<const std::byte> payload) {
  std::vector<std::byte> frame(FrameWriter::room_for(payload.size()));
  FrameWriter writer(frame);
  std::byte* to = writer.begin(kind, a, b, payload.size());
  if (!payload.empty()) std::memcpy(to, payload.data(), payload.size());
  {
    const std::lock_guard lock(queue_mutex_);
    is_overrun_ = is_overrun_ || queued_bytes_ > kMostKept;
    if (is_overrun_) return;
    queued_bytes_ += frame.size();
    queue_.push_back(std::move(frame));
  }
  wake();
}

Link::Stats Link::stats() {
  const std::lock_guard lock(mutex_);
  Stats now = stats_;
  now.heard_ns = clock_() - heard_at_ns_;
  return now;
}

}  // namespace pathways
