/// MachineLink's receiving half: checks each frame, and puts what it carries into rings, futures and memory of this
/// machine.
#include <algorithm>
#include <string>

#include "base/status.h"
#include "link/machine_link.h"

namespace pathways {

void MachineLink::take(const FrameHeader& header, std::span<const std::byte> payload) {
  const bool is_home = end_ == End::kHome;
  if (header.kind == FrameKind::kPeer) return take_peer(header, payload);
  if (header.kind == FrameKind::kData) return take_data(header, payload);
  if (header.kind == FrameKind::kFromController && !is_home) return take_from_controller(header, payload);
  if (header.kind == FrameKind::kLease && !is_home) return take_lease(header, payload);
  if (header.kind == FrameKind::kToController && is_home) return take_to_controller(header, payload);
  if (header.kind == FrameKind::kLeaseBack && is_home) return take_lease_back(header, payload);
  refuse("a frame of kind " + std::to_string(static_cast<int>(header.kind)) + ", which this end does not take");
}

void MachineLink::take_from_controller(const FrameHeader& header, std::span<const std::byte> bytes) {
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
  move_times(record_in_, clock_());
  keep(host->to, record_in_);
}

void MachineLink::take_to_controller(const FrameHeader& header, std::span<const std::byte> bytes) {
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

void MachineLink::take_peer(const FrameHeader& header, std::span<const std::byte> payload) {
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

void MachineLink::take_lease(const FrameHeader& header, std::span<const std::byte> payload) {
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
  must_look_ = true;
  twin->second.memory.mirror(lease, hosts, 0);
}

void MachineLink::take_data(const FrameHeader& header, std::span<const std::byte> payload) {
  const auto data = first_of<DataFrame>(payload, "bytes of a block");
  payload = payload.subspan(sizeof data);
  if (end_ == End::kHome) {
    const bool is_lent = lent_.may_write(header.a, data.offset, data.lease, data.at, payload.size());
    if (!is_lent || !hub_.write(header.a, data.offset, data.at, payload)) ++stats_.dropped;
    return;
  }
  const auto twin = twins_.find(header.a);
  std::byte* to =
      twin == twins_.end() ? nullptr : twin->second.memory.bytes_of(data.offset, data.lease, data.at, payload.size());
  if (to == nullptr) {
    ++stats_.dropped;
    return;
  }
  std::memcpy(to, payload.data(), payload.size());
}

void MachineLink::take_lease_back(const FrameHeader& header, std::span<const std::byte> payload) {
  const auto back = first_of<LeaseBackFrame>(payload, "a lease back");
  const auto host = static_cast<uint32_t>(header.b);
  if (!lent_.take_back(header.a, back.offset, back.lease, host)) {
    ++stats_.dropped;
    return;
  }
  hub_.return_lease(header.a, back.offset, host);
}

bool MachineLink::flush() {
  bool has_overflow = false;
  for (auto& [number, host] : hosts_) {
    has_overflow = host.to.flush() || has_overflow;
    if (host.to_far.is_connected()) has_overflow = host.to_far.flush() || has_overflow;
  }
  return has_overflow;
}

}  // namespace pathways
