#include "link/client_link_at_home.h"

#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace pathways {

ClientLinkAtHome::ClientLinkAtHome(LinkHub& hub, Segment twin, Segment bell, Segment status, Clock clock)
    : Link(clock, /*is_home=*/true),
      hub_(hub),
      twin_(std::move(twin)),
      bell_segment_(std::move(bell)),
      status_segment_(std::move(status)),
      view_(const_cast<std::byte*>(twin_.segment().data()), twin_.segment().size()),
      status_(StatusBlock::attach(status_segment_)) {
  auto* block = reinterpret_cast<ClientBlock*>(const_cast<std::byte*>(twin_.segment().data()));
  DoorbellWord* controller = &BellBlock::attach(bell_segment_)->doorbell;
  records_ = Outbox(block->ring_to_controller(), controller);
  cancels_ = Outbox(block->ring_of_cancels(), controller);
  inbox_ = block->ring_from_controller()->claim_consumer();
  add_bell(&view_.futures().doorbell(), nullptr);
}

// ---------------------------------------------------------------------------------------------------------- collect

void ClientLinkAtHome::send_records(FrameWriter& to) {
  send_status(to);
  send_retired(to);
  pump(inbox_, record_, [&](std::span<std::byte> record) {
    if (!to.fits(record.size()) || !credit_.may_send(record.size())) return false;
    if (record.size() < sizeof(RecordHeader)) throw Error(Status::kInvalid, "a ring has a record without a header");
    hear(record);
    std::memcpy(to.begin(FrameKind::kToClient, 0, 0, record.size()), record.data(), record.size());
    credit_.sent(record.size());
    ++stats_.records_out;
    return true;
  });
}

/// What the controller tells the client concerns the twin, too.
void ClientLinkAtHome::hear(std::span<const std::byte> record) {
  const auto kind = read_record<RecordHeader>(record).kind;
  if (kind == RecordKind::kFailed && record.size() >= sizeof(FailedRecord)) {
    twin_.fail(read_record<FailedRecord>(record).handle);
  } else if (kind == RecordKind::kReclaim && record.size() >= sizeof(ReclaimRecord)) {
    const auto reclaim = read_record<ReclaimRecord>(record);
    if (reclaim.stamp != 0) twin_.reclaim(reclaim.host, reclaim.stamp);
  }
}

void ClientLinkAtHome::send_status(FrameWriter& to) {
  const auto status = static_cast<uint32_t>(status_->cluster_status());
  const uint32_t is_traced = status_->is_traced.load(std::memory_order_relaxed);
  if (status == sent_status_ && is_traced == sent_trace_) return;
  const std::string text = status_->failure();
  if (!to.fits(text.size())) return;
  std::byte* at = to.begin(FrameKind::kStatus, status, static_cast<int32_t>(is_traced), text.size());
  if (!text.empty()) std::memcpy(at, text.data(), text.size());
  sent_status_ = status;
  sent_trace_ = is_traced;
}

void ClientLinkAtHome::send_retired(FrameWriter& to) {
  uint64_t retired = view_.retired().load(std::memory_order_relaxed);
  if (retired != sent_retired_ && to.fits(sizeof retired)) {
    std::memcpy(to.begin(FrameKind::kRetired, 0, 0, sizeof retired), &retired, sizeof retired);
    sent_retired_ = retired;
  }
  // SYNC client/wanted: as Client::wait_room() does, so the next run that is over rings, or was seen here.
  view_.wanted().store(sent_retired_ + 1, std::memory_order_seq_cst);
  if (view_.retired().load(std::memory_order_seq_cst) != sent_retired_) wake();
}

/// LINK-3: before the last completion of a fetch goes out, the bytes do.
bool ClientLinkAtHome::precede(std::span<const std::byte> frame, FrameWriter& to) {
  if (!send_data(to)) return false;
  const auto header = read_record<FrameHeader>(frame);
  if (header.kind != FrameKind::kFutureDone || frame.size() > to.left()) return true;
  const auto record = read_record<FutureDoneRecord>(frame.subspan(sizeof header));
  if (const auto block = twin_.settle(record.handle, true)) data_ = {0, block->offset, block->bytes, block->lease};
  return send_data(to);
}

bool ClientLinkAtHome::read_block(const Block& block, std::span<std::byte> out) {
  const std::byte* from = twin_.bytes_of(block.offset, block.lease, block.at, out.size());
  if (from != nullptr) std::memcpy(out.data(), from, out.size());
  return from != nullptr;
}

void ClientLinkAtHome::look() {
  for (const auto& block : twin_.take_returned(data_ ? std::optional(data_->lease) : std::nullopt)) {
    const LeaseBackFrame frame{block.offset, block.lease};
    std::vector<std::byte> payload(sizeof frame + block.hosts.size() * sizeof(uint32_t));
    std::memcpy(payload.data(), &frame, sizeof frame);
    if (!block.hosts.empty()) {
      std::memcpy(payload.data() + sizeof frame, block.hosts.data(), payload.size() - sizeof frame);
    }
    enqueue(FrameKind::kLeaseBack, 0, 0, payload);
  }
}

// ---------------------------------------------------------------------------------------------------------- deliver

void ClientLinkAtHome::take(const FrameHeader& header, std::span<const std::byte> payload) {
  if (header.kind == FrameKind::kFromClient && header.a <= static_cast<uint32_t>(ClientRing::kCancels)) {
    take_record(static_cast<ClientRing>(header.a), payload);
  } else if (header.kind == FrameKind::kLease) {
    take_lease(header, payload);
  } else if (header.kind == FrameKind::kData) {
    take_data(payload);
  } else if (header.kind == FrameKind::kCredit) {
    credit_.credit(first_of<uint64_t>(payload, "a credit"));
    must_look_ = true;
  } else {
    refuse("a frame of kind " + std::to_string(static_cast<int>(header.kind)) + ", which no client may send");
  }
}

void ClientLinkAtHome::take_record(ClientRing ring, std::span<const std::byte> record) {
  (void)first_of<RecordHeader>(record, "a record");
  record_in_.assign(record.begin(), record.end());
  move_times(record_in_, clock_());
  keep(ring == ClientRing::kRecords ? records_ : cancels_, record_in_);
  if (ring == ClientRing::kRecords) credit_.received(record.size());
}

void ClientLinkAtHome::take_lease(const FrameHeader& header, std::span<const std::byte> payload) {
  const auto lease = first_of<LeaseFrame>(payload, "a lease");
  const auto stamp = first_of<uint64_t>(payload.subspan(sizeof lease), "the stamp of a lease");
  must_look_ = true;
  // A lease that the client took back from a host that was lost may still be here, at the same place.
  look();
  const std::vector<uint32_t> hosts = hub_.group(header.a);
  if (!hosts.empty() && hosts.size() <= kMostLeases) twin_.mirror(lease, hosts, stamp);
}

void ClientLinkAtHome::take_data(std::span<const std::byte> payload) {
  const auto data = first_of<DataFrame>(payload, "bytes of a block");
  payload = payload.subspan(sizeof data);
  std::byte* to = twin_.bytes_of(data.offset, data.lease, data.at, payload.size());
  if (to == nullptr) {
    ++stats_.dropped;
    return;
  }
  std::memcpy(to, payload.data(), payload.size());
}

bool ClientLinkAtHome::flush() {
  const bool has_cancels = cancels_.flush(), has_records = records_.flush();
  if (credit_.should_tell(records_.overflow_bytes())) {
    enqueue_word(FrameKind::kCredit, credit_.tell(records_.overflow_bytes()));
  }
  return has_cancels || has_records;
}

}  // namespace pathways
