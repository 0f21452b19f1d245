#include "link/client_link_at_client.h"

#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "link/link_hub.h"

namespace pathways {
namespace {

constexpr uint32_t kSelf = 0;  // the only client of this link

}  // namespace

ClientLinkAtClient::ClientLinkAtClient(Segment client, Segment bell, StatusBlock* status, Clock clock)
    : Link(clock, /*is_home=*/false),
      client_(std::move(client)),
      bell_segment_(std::move(bell)),
      view_(client_),
      status_(status),
      records_(view_.from_client()),
      cancels_(view_.cancels()),
      to_client_(view_.to_client(), &view_.futures().doorbell()) {
  add_bell(&BellBlock::attach(bell_segment_)->doorbell, nullptr);
}

void ClientLinkAtClient::fail(std::string_view why) {
  const std::lock_guard lock(mutex_);
  if (status_->cluster_status() == ClusterStatus::kUp) status_->set_status(ClusterStatus::kFailed, why);
  view_.futures().doorbell().ring();
}

// ---------------------------------------------------------------------------------------------------------- collect

void ClientLinkAtClient::send_records(FrameWriter& to) {
  for (const ClientRing ring : {ClientRing::kCancels, ClientRing::kRecords}) {
    ByteRing::Consumer& from = ring == ClientRing::kRecords ? records_ : cancels_;
    const bool is_done =
        pump(from, record_, [&](std::span<std::byte> record) { return send_record(ring, record, to); });
    if (!is_done) return;
  }
}

bool ClientLinkAtClient::send_record(ClientRing ring, std::span<std::byte> record, FrameWriter& to) {
  if (record.size() < sizeof(RecordHeader)) throw Error(Status::kInvalid, "a client wrote a record without a header");
  if (ring == ClientRing::kRecords && !credit_.may_send(record.size())) return false;
  if (!lease(record, to) || !to.fits(record.size())) return false;
  move_times(record, -clock_());
  std::memcpy(to.begin(FrameKind::kFromClient, static_cast<uint32_t>(ring), 0, record.size()), record.data(),
              record.size());
  if (ring == ClientRing::kRecords) credit_.sent(record.size());
  ++stats_.records_out;
  return true;
}

/// LINK-3: before a command that leases a block goes out, the lease and the bytes do. True: the record may go.
bool ClientLinkAtClient::lease(std::span<const std::byte> bytes, FrameWriter& to) {
  const auto command = leasing(bytes);
  if (!command) return true;
  const auto& [record, is_fetch, handle] = *command;
  if (lent_.has(kSelf, record.lease_at, handle, is_fetch)) return send_data(to);  // the record found no room before
  if (!to.fits(sizeof(LeaseFrame) + sizeof record.lease_stamp)) return false;
  const uint64_t lease = lent_.lease_out(kSelf, record.lease_at, {handle, record.lease_bytes, is_fetch, {}});
  const LeaseFrame frame{record.lease_at, record.lease_bytes, is_fetch ? record.token : 0, lease};
  std::byte* at = to.begin(FrameKind::kLease, record.group, 0, sizeof frame + sizeof record.lease_stamp);
  std::memcpy(at, &frame, sizeof frame);
  std::memcpy(at + sizeof frame, &record.lease_stamp, sizeof record.lease_stamp);
  if (!is_fetch) data_ = {kSelf, record.lease_at, record.lease_bytes, lease};
  return send_data(to);
}

bool ClientLinkAtClient::read_block(const Block& block, std::span<std::byte> out) {
  if (!view_.arena().is_there()) return false;
  const std::byte* from = view_.arena().find(block.offset, block.at + out.size());
  if (from != nullptr) std::memcpy(out.data(), from + block.at, out.size());
  return from != nullptr;
}

// ---------------------------------------------------------------------------------------------------------- deliver

void ClientLinkAtClient::take(const FrameHeader& header, std::span<const std::byte> payload) {
  switch (header.kind) {
    case FrameKind::kToClient:
      (void)first_of<RecordHeader>(payload, "a record");
      credit_.received(payload.size());
      return keep(to_client_, payload);
    case FrameKind::kFutureDone:
      if (!complete_future(view_, payload)) break;
      return;
    case FrameKind::kRetired:
      return view_.tell_retired(first_of<uint64_t>(payload, "a count of runs"));
    case FrameKind::kStatus:
      return take_status(header, payload);
    case FrameKind::kData:
      return take_data(payload);
    case FrameKind::kLeaseBack:
      return take_lease_back(payload);
    case FrameKind::kCredit:
      credit_.credit(first_of<uint64_t>(payload, "a credit"));
      must_look_ = true;
      return;
    default:
      break;
  }
  refuse("a frame of kind " + std::to_string(static_cast<int>(header.kind)) + ", which no client takes");
}

void ClientLinkAtClient::take_status(const FrameHeader& header, std::span<const std::byte> payload) {
  if (header.a > static_cast<uint32_t>(ClusterStatus::kClosed)) refuse("a status that there is not");
  status_->is_traced.store(header.b != 0 ? 1 : 0, std::memory_order_relaxed);
  const auto status = static_cast<ClusterStatus>(header.a);
  if (status == ClusterStatus::kUp || status_->cluster_status() != ClusterStatus::kUp) return;
  status_->set_status(status, {reinterpret_cast<const char*>(payload.data()), payload.size()});
  view_.futures().doorbell().ring();
}

void ClientLinkAtClient::take_data(std::span<const std::byte> payload) {
  const auto data = first_of<DataFrame>(payload, "bytes of a block");
  payload = payload.subspan(sizeof data);
  const bool is_lent =
      view_.arena().is_there() && lent_.may_write(kSelf, data.offset, data.lease, data.at, payload.size());
  std::byte* to = is_lent ? view_.arena().find(data.offset, data.at + payload.size()) : nullptr;
  if (to == nullptr) {
    ++stats_.dropped;
    return;
  }
  std::memcpy(to + data.at, payload.data(), payload.size());
}

void ClientLinkAtClient::take_lease_back(std::span<const std::byte> payload) {
  const auto back = first_of<LeaseBackFrame>(payload, "a lease back");
  payload = payload.subspan(sizeof back);
  if (payload.size() % sizeof(uint32_t) != 0) refuse("a lease back with half a host");
  if (!lent_.take_back_all(kSelf, back.offset, back.lease) || !view_.arena().is_there()) {
    ++stats_.dropped;
    return;
  }
  for (size_t at = 0; at < payload.size(); at += sizeof(uint32_t)) {
    const auto host = read_record<uint32_t>(payload.subspan(at));
    (void)(host < Arena::kBorrowers ? view_.arena().return_lease(back.offset, host)
                                    : view_.arena().release(back.offset));
  }
}

bool ClientLinkAtClient::flush() {
  // SYNC client/delivered: as in Clients::flush(); the records are there, and the doorbell rings after it.
  const bool has_overflow =
      to_client_.flush([&](uint64_t count) { view_.delivered().store(count, std::memory_order_release); });
  if (credit_.should_tell(to_client_.overflow_bytes())) {
    enqueue_word(FrameKind::kCredit, credit_.tell(to_client_.overflow_bytes()));
  }
  return has_overflow;
}

}  // namespace pathways
