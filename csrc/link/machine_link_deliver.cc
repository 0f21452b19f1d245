/// MachineLink's receiving half: checks each frame, and puts what it carries into rings, futures and memory of this
/// machine.
#include <algorithm>
#include <string>

#include "base/status.h"
#include "link/machine_link.h"
#include "messages/peer_records.h"
#include "sync/ring_block.h"

namespace pathways {
namespace {

constexpr uint32_t kMostPeerRecord = RingBlock::longest(kLinkRingBytes);

}  // namespace

void MachineLink::take(const FrameHeader& header, std::span<const std::byte> payload) {
  const bool is_head = end_ == End::kHead;
  if (header.kind == FrameKind::kPeer) return take_peer(header, payload);
  if (header.kind == FrameKind::kData) return take_data(header, payload);
  if (header.kind == FrameKind::kFromController && !is_head) return take_from_controller(header, payload);
  if (header.kind == FrameKind::kBlock && !is_head) return take_block(header, payload);
  if (header.kind == FrameKind::kToController && is_head) return take_to_controller(header, payload);
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
  if (const auto command = leasing(bytes)) {
    const auto twin = twins_.find(record.client);
    const uint64_t at = twin == twins_.end() ? 0 : twin->second.memory.place(command->record.lease_at);
    set_lease(record_in_, at, command->record.lease_bytes);
  }
  keep(host->to, record_in_);
}

void MachineLink::take_to_controller(const FrameHeader& header, std::span<const std::byte> bytes) {
  const auto record = first_of<RecordHeader>(bytes, "a record");
  FarHost* host = host_of(header.a, header.b);
  if (host == nullptr) {
    ++stats_.dropped;
    return;
  }
  const bool is_done = record.kind == RecordKind::kFutureDone;
  if (is_done && !is_completion(bytes)) {
    refuse("a completion of " + std::to_string(bytes.size()) + " bytes that is none");
  }
  const bool is_answer = is_done || (record.kind == RecordKind::kFailed && bytes.size() >= sizeof(FailedRecord));
  if (is_answer && !answers(header.a, *host, bytes)) {  // LINK-2
    ++stats_.dropped;
  } else if (is_done) {
    hub_.complete(bytes);
  } else {
    keep(host->to, bytes);
  }
}

void MachineLink::take_peer(const FrameHeader& header, std::span<const std::byte> payload) {
  const auto source = first_of<PeerHeader>(payload, "a record of a host to another");
  if (end_ == End::kHead) {
    // LINK-2: the source is of this link, and the destination in the incarnation that the source knows.
    const std::shared_ptr<Link> way = hub_.link_to(header.a, header.b);
    if (host_of(source.host, source.epoch) == nullptr || way == nullptr || way.get() == this) {
      ++stats_.dropped;
      return;
    }
    // The other machine's link must not break by it (LINK-4).
    if (std::string why = unsound_peer_record(payload.subspan(sizeof source)); !why.empty()) refuse(why);
    if (payload.size() > kMostPeerRecord) refuse("a record of " + std::to_string(payload.size()) + " bytes to a host");
    relays_.push_back({way, header, {payload.begin(), payload.end()}});
  } else if (FarHost* host = host_of(header.a, header.b); host != nullptr && host->to_far.is_connected()) {
    keep_from_peer(*host, source, payload);
  } else {
    ++stats_.dropped;
  }
}

/// Who says more than the host reads says nothing any more: the host closes the channel from it, and the link goes on.
void MachineLink::keep_from_peer(FarHost& host, const PeerHeader& source, std::span<const std::byte> record) {
  const auto silenced = host.silenced.find(source.host);
  if (silenced != host.silenced.end() && silenced->second == source.epoch) {
    ++stats_.dropped;
  } else if (host.to_far.overflow_bytes() <= kMostKept) {
    keep(host.to_far, record);
  } else {
    host.silenced[source.host] = source.epoch;
    host.to_far.send(sizeof source, [&](std::byte* out) { std::memcpy(out, &source, sizeof source); });  // PEER-1
  }
}

void MachineLink::take_block(const FrameHeader& header, std::span<const std::byte> payload) {
  const auto block = first_of<BlockFrame>(payload, "a block");
  payload = payload.subspan(sizeof block);
  const auto count = static_cast<uint32_t>(header.b);
  if (count == 0 || count > kMostHosts || payload.size() != count * sizeof(BlockHost)) {
    refuse("a block for " + std::to_string(count) + " hosts in " + std::to_string(payload.size()) + " bytes");
  }
  std::vector<uint32_t> hosts;
  for (size_t at = 0; at != payload.size(); at += sizeof(BlockHost)) {
    const auto host = read_record<BlockHost>(payload.subspan(at));
    if (host_of(host.number, host.incarnation) != nullptr) hosts.push_back(host.number);  // LINK-2
  }
  const auto twin = twins_.find(header.a);
  if (twin == twins_.end() || hosts.empty() || !twin->second.memory.add(block, hosts, 0, hosts.size())) {
    ++stats_.dropped;
  }
}

void MachineLink::take_data(const FrameHeader& header, std::span<const std::byte> payload) {
  const auto data = first_of<DataFrame>(payload, "bytes of a block");
  payload = payload.subspan(sizeof data);
  bool is_taken = false;
  if (end_ == End::kHead) {
    const LentBlocks::Lent* lent = lent_.writable(header.a, data.number, data.at, payload.size());
    is_taken = lent != nullptr && hub_.write(header.a, lent->offset, data.at, payload);
  } else if (const auto twin = twins_.find(header.a); twin != twins_.end()) {
    is_taken = twin->second.memory.write(data.number, data.at, payload);
  }
  if (!is_taken) ++stats_.dropped;
}

/// The host's part of a future is over, if it has one, and so is its lease of a fetch (by value). False: it has none.
bool MachineLink::answers(uint32_t number, FarHost& host, std::span<const std::byte> bytes) {
  const auto header = read_record<RecordHeader>(bytes);
  uint64_t future = 0;
  if (header.kind == RecordKind::kFutureDone) {
    future = read_record<FutureDoneRecord>(bytes).handle;
  } else if (header.kind == RecordKind::kFailed && bytes.size() >= sizeof(FailedRecord)) {
    future = read_record<FailedRecord>(bytes).handle;
  }
  if (future == 0 || !host.awaited.take(header.client, Handle{future})) return false;
  const uint64_t block = lent_.number_of(header.client, future, true);
  if (LentBlocks::Lent* lent = lent_.find(block); lent != nullptr && std::erase(lent->hosts, number) != 0) {
    hub_.return_lease(header.client, lent->offset, number);
    lent_.end_if_over(block);
  }
  return true;
}

bool MachineLink::flush() {
  bool has_overflow = false;
  for (auto& [number, host] : hosts_) {
    has_overflow = host.to.flush() || has_overflow;
    if (host.to_far.is_connected()) has_overflow = host.to_far.flush() || has_overflow;
  }
  return has_overflow;
}

void MachineLink::add_kept(Stats& now) const {
  for (const auto& [number, host] : hosts_) {
    add_box(now, host.to);
    if (host.to_far.is_connected()) add_box(now, host.to_far);
  }
}

}  // namespace pathways
