/// Link's receiving half: checks each frame, and puts what it carries into rings, futures and memory of this machine.
#include <algorithm>
#include <string>
#include <utility>

#include "base/status.h"
#include "link/link.h"

namespace pathways {
namespace {

constexpr uint64_t kLongestTripNs = 60'000'000'000;  ///< that can be: who is silent for so long is gone

[[noreturn]] void refuse(const std::string& why) { throw Error(Status::kInvalid, "a link brought " + why); }

template <typename T>
T first_of(std::span<const std::byte> payload, const char* what) {
  if (payload.size() < sizeof(T)) refuse(std::string(what) + " of " + std::to_string(payload.size()) + " bytes");
  return read_record<T>(payload);
}

}  // namespace

void Link::deliver(std::span<const std::byte> in) {
  std::vector<Relay> relays;
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) return;
    heard_at_ns_ = clock_();
    stats_.bytes_in += in.size();
    // What was cut off last time is completed first, as far as its frame goes.
    while (!in.empty() || !partial_.empty()) {
      if (!partial_.empty()) {
        size_t whole = sizeof(FrameHeader);
        if (partial_.size() >= whole) {
          whole = FrameWriter::room_for(read_record<FrameHeader>(partial_).bytes);
        }
        const size_t more = std::min(in.size(), whole - std::min(whole, partial_.size()));
        partial_.insert(partial_.end(), in.begin(), in.begin() + static_cast<std::ptrdiff_t>(more));
        in = in.subspan(more);
        if (partial_.size() < sizeof(FrameHeader)) break;
      }
      const std::span<const std::byte> from = partial_.empty() ? in : std::span<const std::byte>(partial_);
      if (from.size() < sizeof(FrameHeader)) {
        partial_.assign(from.begin(), from.end());
        break;
      }
      const auto header = read_record<FrameHeader>(from);
      const size_t whole = FrameWriter::room_for(header.bytes);
      if (whole > kMostFrame) refuse("a frame of " + std::to_string(header.bytes) + " bytes");
      if (from.size() < whole) {
        if (partial_.empty()) {
          partial_.assign(from.begin(), from.end());
          break;
        }
        if (in.empty()) break;
        continue;
      }
      take(header, from.subspan(sizeof header, header.bytes));
      if (partial_.empty()) {
        in = in.subspan(whole);
      } else {
        partial_.clear();
      }
    }
    flush();
    if (has_overflow_ || has_new_lease_) wake();  // the sender looks more often from now on
    has_new_lease_ = false;
    relays = std::move(relays_);
    relays_.clear();
  }
  for (const Relay& relay : relays) relay.to->enqueue(relay.header.kind, relay.header.a, relay.header.b, relay.payload);
}

void Link::take(const FrameHeader& header, std::span<const std::byte> payload) {
  if (header.reserved != 0) refuse("a frame with a wrong header");
  const bool is_home = end_ == End::kHome;
  switch (header.kind) {
    case FrameKind::kFromController:
      if (is_home) break;
      return take_from_controller(header, payload);
    case FrameKind::kToController:
      if (!is_home) break;
      return take_to_controller(header, payload);
    case FrameKind::kPeer:
      return take_peer(header, payload);
    case FrameKind::kLease:
      if (is_home) break;
      return take_lease(header, payload);
    case FrameKind::kData:
      return take_data(header, payload);
    case FrameKind::kLeaseBack:
      if (!is_home) break;
      return take_lease_back(header, payload);
    case FrameKind::kPing:
      (void)first_of<int64_t>(payload, "a ping");
      enqueue(FrameKind::kPong, 0, 0, payload.first(sizeof(int64_t)));
      return;
    case FrameKind::kPong: {
      // The other end may have written any number.
      const auto asked = static_cast<uint64_t>(first_of<int64_t>(payload, "a pong"));
      const uint64_t trip = static_cast<uint64_t>(clock_()) - asked;
      if (trip < kLongestTripNs) stats_.round_trip_ns = static_cast<int64_t>(trip);
      return;
    }
  }
  refuse("a frame of kind " + std::to_string(static_cast<int>(header.kind)) + ", which this end does not take");
}

void Link::take_from_controller(const FrameHeader& header, std::span<const std::byte> bytes) {
  const auto record = first_of<RecordHeader>(bytes, "a record");
  FarHost* host = host_of(header.a, header.b);
  if (host == nullptr) {
    ++stats_.dropped;
    return;
  }
  if (record.kind == RecordKind::kClientGone) {
    if (const auto twin = twins_.find(record.client); twin != twins_.end()) {
      twin->second.gone.insert(header.a);
      if (std::ranges::all_of(hosts_, [&](const auto& each) { return twin->second.gone.contains(each.first); })) {
        twins_.erase(twin);
      }
    }
  }
  record_in_.assign(bytes.begin(), bytes.end());
  move_deadline(record_in_, clock_());
  keep(host->to, record_in_);
}

void Link::take_to_controller(const FrameHeader& header, std::span<const std::byte> bytes) {
  const auto record = first_of<RecordHeader>(bytes, "a record");
  FarHost* host = host_of(header.a, header.b);
  if (host == nullptr) {
    ++stats_.dropped;
  } else if (record.kind != RecordKind::kFutureDone) {
    keep(host->to, bytes);
  } else if (!hub_.complete(bytes)) {
    refuse("a completion of " + std::to_string(bytes.size()) + " bytes that is none");
  }
}

void Link::take_peer(const FrameHeader& header, std::span<const std::byte> payload) {
  const auto source = first_of<FarHeader>(payload, "a record of a host to another");
  if (end_ == End::kHome) {
    // LINK-2: the source is of this link, and the destination in the incarnation that the source knows.
    const std::shared_ptr<Link> way = hub_.link_to(header.a, header.b);
    if (host_of(source.host, source.incarnation) == nullptr || way == nullptr || way.get() == this) {
      ++stats_.dropped;
      return;
    }
    relays_.push_back({way, header, {payload.begin(), payload.end()}});
  } else if (FarHost* host = host_of(header.a, header.b); host != nullptr && host->to_far.is_connected()) {
    keep(host->to_far, payload);
  } else {
    ++stats_.dropped;
  }
}

void Link::take_lease(const FrameHeader& header, std::span<const std::byte> payload) {
  const auto lease = first_of<LeaseFrame>(payload, "a lease");
  payload = payload.subspan(sizeof lease);
  const auto count = static_cast<uint32_t>(header.b);
  if (count == 0 || count > kMostLeases || payload.size() != count * sizeof(uint32_t)) {
    refuse("a lease to " + std::to_string(count) + " hosts in " + std::to_string(payload.size()) + " bytes");
  }
  std::vector<uint32_t> hosts(count);
  std::memcpy(hosts.data(), payload.data(), payload.size());
  const auto twin = twins_.find(header.a);
  if (twin == twins_.end()) {
    ++stats_.dropped;
    return;
  }
  has_new_lease_ = true;
  // What is not mirrored, because the client wrote nonsense, its hosts refuse.
  if (twin->second.arena.mirror(lease.offset, lease.bytes, hosts, lease.lease) && lease.token != 0) {
    twin->second.fetches[lease.token] = {lease.offset, lease.bytes, lease.lease, hosts.size()};
  }
}

void Link::take_data(const FrameHeader& header, std::span<const std::byte> payload) {
  const auto data = first_of<DataFrame>(payload, "bytes of a block");
  payload = payload.subspan(sizeof data);
  if (end_ == End::kHome) {
    const auto lent = lent_.find({header.a, data.offset});
    const bool is_lent = lent != lent_.end() && lent->second.lease == data.lease && lent->second.is_fetch &&
                         data.at <= lent->second.bytes && payload.size() <= lent->second.bytes - data.at;
    if (!is_lent || !hub_.write(header.a, data.offset, data.at, payload)) ++stats_.dropped;
    return;
  }
  const auto twin = twins_.find(header.a);
  std::byte* to =
      twin == twins_.end() ? nullptr : twin->second.arena.bytes_of(data.offset, data.lease, data.at, payload.size());
  if (to == nullptr) {
    ++stats_.dropped;
    return;
  }
  std::memcpy(to, payload.data(), payload.size());
}

void Link::take_lease_back(const FrameHeader& header, std::span<const std::byte> payload) {
  const auto back = first_of<LeaseBackFrame>(payload, "a lease back");
  const auto host = static_cast<uint32_t>(header.b);
  const auto lent = lent_.find({header.a, back.offset});
  if (lent == lent_.end() || lent->second.lease != back.lease || std::erase(lent->second.hosts, host) == 0) {
    ++stats_.dropped;
    return;
  }
  if (lent->second.hosts.empty()) lent_.erase(lent);
  hub_.return_lease(header.a, back.offset, host);
}

/// Writes a record to a ring, or keeps it until there is room (LINK-4).
void Link::keep(Outbox& box, std::span<const std::byte> bytes) {
  if (bytes.size() > box.max_record()) refuse("a record of " + std::to_string(bytes.size()) + " bytes");
  if (box.overflow_bytes() > kMostKept) throw Error(Status::kFull, "nobody reads the records that a link brings");
  box.send(static_cast<uint32_t>(bytes.size()), [&](std::byte* out) { std::memcpy(out, bytes.data(), bytes.size()); });
  ++stats_.records_in;
}

void Link::flush() {
  has_overflow_ = false;
  for (auto& [number, host] : hosts_) {
    has_overflow_ = host.to.flush() || has_overflow_;
    if (host.to_far.is_connected()) has_overflow_ = host.to_far.flush() || has_overflow_;
  }
}

}  // namespace pathways
