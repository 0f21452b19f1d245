/// MachineLink's sending half: what the rings and the leases have becomes frames.
#include <algorithm>
#include <string>

#include "base/status.h"
#include "link/machine_link.h"

namespace pathways {

/// Begins with another host each time, so that a host with much to say does not keep the others waiting.
void MachineLink::send_records(FrameWriter& to) {
  auto first = hosts_.lower_bound(next_host_);
  for (size_t i = 0; i < hosts_.size(); ++i) {
    if (first == hosts_.end()) first = hosts_.begin();
    auto& [number, host] = *first++;
    const bool is_done = pump_host(number, host, to) && pump_far(number, host, to);
    next_host_ = number + 1;
    if (!is_done) break;
  }
}

/// Sends what a host's ring has. False: there is no room for more.
bool MachineLink::pump_host(uint32_t number, FarHost& host, FrameWriter& to) {
  const bool is_home = end_ == End::kHome;
  const FrameKind kind = is_home ? FrameKind::kFromController : FrameKind::kToController;
  return pump(host.from, record_, [&](std::span<std::byte> record) {
    if (record.size() < sizeof(RecordHeader)) throw Error(Status::kInvalid, "a ring has a record without a header");
    if (!(is_home ? lease(number, record, to) : answer_fetch(record, to)) || !to.fits(record.size())) return false;
    if (is_home) move_times(record, -clock_());
    std::memcpy(to.begin(kind, number, host.incarnation, record.size()), record.data(), record.size());
    ++stats_.records_out;
    return true;
  });
}

/// The same for a host's records to hosts of other machines.
bool MachineLink::pump_far(uint32_t number, FarHost& host, FrameWriter& to) {
  if (!host.from_far.valid()) return true;
  return pump(host.from_far, record_, [&](std::span<std::byte> bytes) {
    if (bytes.size() < sizeof(FarHeader)) throw Error(Status::kInvalid, "a host wrote a record without a destination");
    if (!to.fits(bytes.size())) return false;
    const auto there = read_record<FarHeader>(bytes);
    const FarHeader source{number, host.incarnation};
    std::byte* at = to.begin(FrameKind::kPeer, there.host, there.incarnation, bytes.size());
    std::memcpy(at, &source, sizeof source);
    std::memcpy(at + sizeof source, bytes.data() + sizeof source, bytes.size() - sizeof source);
    ++stats_.records_out;
    return true;
  });
}

/// LINK-3: before the first record of a command that leases a block goes out, the lease and the bytes do. True: the
/// record may go.
bool MachineLink::lease(uint32_t number, std::span<const std::byte> bytes, FrameWriter& to) {
  const auto header = read_record<RecordHeader>(bytes);
  if (header.kind == RecordKind::kClientGone) lent_.remove_client(header.client);
  const auto command = leasing(bytes);
  if (!command) return true;
  const auto& [record, is_fetch, handle] = *command;
  // If it has gone out for another host, nothing is left to be done but to send the rest of its bytes.
  if (lent_.has(header.client, record.lease_at, handle, is_fetch)) return send_data(to);
  std::vector<uint32_t> here;
  for (const uint32_t host : hub_.group(record.group)) {
    if (hosts_.contains(host) && here.size() < kMostLeases) here.push_back(host);
  }
  if (here.empty()) here.push_back(number);
  const size_t hosts_bytes = here.size() * sizeof(uint32_t);
  if (!to.fits(sizeof(LeaseFrame) + hosts_bytes)) return false;
  const uint64_t lease = lent_.lease_out(header.client, record.lease_at, {handle, record.lease_bytes, is_fetch, here});
  const LeaseFrame frame{record.lease_at, record.lease_bytes, is_fetch ? record.token : 0, lease};
  std::byte* at =
      to.begin(FrameKind::kLease, header.client, static_cast<int32_t>(here.size()), sizeof frame + hosts_bytes);
  std::memcpy(at, &frame, sizeof frame);
  std::memcpy(at + sizeof frame, here.data(), hosts_bytes);
  if (!is_fetch && record.is_refused == 0) {
    data_ = {header.client, record.lease_at, record.lease_bytes, lease};
  }
  return send_data(to);
}

/// LINK-3: before the last completion of a fetch goes out, the bytes do.
bool MachineLink::answer_fetch(std::span<const std::byte> bytes, FrameWriter& to) {
  const auto header = read_record<RecordHeader>(bytes);
  const bool is_done = header.kind == RecordKind::kFutureDone && bytes.size() >= sizeof(FutureDoneRecord);
  if (!is_done && header.kind != RecordKind::kFailed) return true;
  const auto twin = twins_.find(header.client);
  const uint64_t token =
      is_done ? read_record<FutureDoneRecord>(bytes).handle : read_record<FailedRecord>(bytes).handle;
  if (twin == twins_.end() || !twin->second.memory.is_fetching(token)) return true;
  if (!to.fits(bytes.size())) return false;  // so that this is done once for the record
  if (const auto block = twin->second.memory.settle(token, is_done)) {
    data_ = {header.client, block->offset, block->bytes, block->lease};
  }
  return send_data(to);
}

bool MachineLink::read_block(const Block& block, std::span<std::byte> out) {
  if (end_ == End::kHome) return hub_.read(block.client, block.offset, block.at, out);
  const auto twin = twins_.find(block.client);
  if (twin == twins_.end()) return false;
  const std::byte* from = twin->second.memory.bytes_of(block.offset, block.lease, block.at, out.size());
  if (from != nullptr) std::memcpy(out.data(), from, out.size());
  return from != nullptr;
}

bool MachineLink::has_leases() const {
  return std::ranges::any_of(twins_, [](const auto& twin) { return twin.second.memory.has_leases(); });
}

void MachineLink::look() {
  for (auto& [client, twin] : twins_) {
    const bool is_sending = data_.has_value() && data_->client == client;
    for (const auto& block : twin.memory.take_returned(is_sending ? std::optional(data_->lease) : std::nullopt)) {
      const LeaseBackFrame frame{block.offset, block.lease};
      for (const uint32_t host : block.hosts) {
        enqueue(FrameKind::kLeaseBack, client, static_cast<int32_t>(host), std::as_bytes(std::span(&frame, 1)));
      }
    }
  }
}

}  // namespace pathways
