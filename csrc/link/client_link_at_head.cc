#include "link/client_link_at_head.h"

#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "link/lent_blocks.h"
#include "link/link_pool.h"

namespace pathways {
namespace {

constexpr size_t kMostUnnamed = 16;  // the other end names a block before it sends the next

}  // namespace

ClientLinkAtHead::ClientLinkAtHead(LinkHub& hub, Segment twin, Segment bell, Segment status, Clock clock)
    : Link(clock),
      hub_(hub),
      blocks_(std::move(twin), kMostUnnamed),
      bell_segment_(std::move(bell)),
      status_segment_(std::move(status)),
      view_(const_cast<std::byte*>(blocks_.segment().data()), blocks_.segment().size()),
      status_(StatusBlock::attach(status_segment_)) {
  auto* block = reinterpret_cast<ClientBlock*>(const_cast<std::byte*>(blocks_.segment().data()));
  DoorbellWord* controller = &BellBlock::attach(bell_segment_)->doorbell;
  records_ = Outbox(block->ring_to_controller(), controller);
  cancels_ = Outbox(block->ring_of_cancels(), controller);
  inbox_ = block->ring_from_controller()->claim_consumer();
}

void ClientLinkAtHead::joined() {
  auto mapped = std::make_shared<Segment>(Segment::attach(::dup(blocks_.segment().fd())));  // the pool's own
  DoorbellWord* bell = &ClientView(*mapped).futures().doorbell();
  pool_->add_bell(slot_, bell, std::move(mapped));
}

// ---------------------------------------------------------------------------------------------------------- collect

void ClientLinkAtHead::send_records(FrameWriter& to) {
  send_status(to);
  send_retired(to);
  send_blocks_over(to);
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

/// What the controller tells the client concerns its blocks here, too.
void ClientLinkAtHead::hear(std::span<const std::byte> record) {
  const auto kind = read_record<RecordHeader>(record).kind;
  if (kind == RecordKind::kFailed && record.size() >= sizeof(FailedRecord)) {
    if (const uint64_t number = blocks_.fail(read_record<FailedRecord>(record).handle)) over_.push_back(number);
  } else if (kind == RecordKind::kReclaim && record.size() >= sizeof(ReclaimRecord)) {
    const auto reclaim = read_record<ReclaimRecord>(record);
    if (reclaim.stamp == 0) return;
    for (const uint64_t number : blocks_.reclaim(reclaim.host, reclaim.stamp)) over_.push_back(number);
  }
}

void ClientLinkAtHead::send_status(FrameWriter& to) {
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

void ClientLinkAtHead::send_retired(FrameWriter& to) {
  uint64_t retired = view_.retired().load(std::memory_order_relaxed);
  if (retired != sent_retired_ && to.fits(sizeof retired)) {
    std::memcpy(to.begin(FrameKind::kRetired, 0, 0, sizeof retired), &retired, sizeof retired);
    sent_retired_ = retired;
  }
  // SYNC client/wanted: as Client::wait_room() does, so the next run that is over rings, or was seen here.
  view_.wanted().store(sent_retired_ + 1, std::memory_order_seq_cst);
  if (view_.retired().load(std::memory_order_seq_cst) != sent_retired_) wake();
}

void ClientLinkAtHead::send_blocks_over(FrameWriter& to) {
  while (!over_.empty() && to.fits(sizeof(uint64_t))) {
    std::memcpy(to.begin(FrameKind::kBlockOver, 0, 0, sizeof(uint64_t)), &over_.back(), sizeof(uint64_t));
    over_.pop_back();
  }
  const KeptFrame kept = blocks_.kept();
  if (kept == sent_kept_ || !to.fits(sizeof kept)) return;
  std::memcpy(to.begin(FrameKind::kKept, 0, 0, sizeof kept), &kept, sizeof kept);
  sent_kept_ = kept;
}

/// LINK-3: before the last completion of a fetch goes out, the bytes do.
bool ClientLinkAtHead::precede(std::span<const std::byte> frame, FrameWriter& to) {
  if (!send_data(to)) return false;
  const auto header = read_record<FrameHeader>(frame);
  if (header.kind != FrameKind::kFutureDone || frame.size() > to.left()) return true;
  const auto record = read_record<FutureDoneRecord>(frame.subspan(sizeof header));
  if (auto block = blocks_.settle_whole(record.handle)) data_ = {0, block->number, std::move(block->pieces)};
  return send_data(to);
}

bool ClientLinkAtHead::read_block(const Block& block, uint64_t at, std::span<std::byte> out) {
  return blocks_.read(block.number, at, out);
}

void ClientLinkAtHead::sent(const Block& block) {
  blocks_.end(block.number);
  over_.push_back(block.number);
}

/// The client may wait for memory that is in use here.
bool ClientLinkAtHead::must_look_soon() const { return received_bytes_ != 0 || blocks_.is_trimming(); }

// ---------------------------------------------------------------------------------------------------------- deliver

void ClientLinkAtHead::take(const FrameHeader& header, std::span<const std::byte> payload) {
  if (header.kind == FrameKind::kFromClient && header.a <= static_cast<uint32_t>(ClientRing::kCancels)) {
    take_record(static_cast<ClientRing>(header.a), payload);
  } else if (header.kind == FrameKind::kBlock) {
    take_block(header, payload);
  } else if (header.kind == FrameKind::kData) {
    take_data(payload);
  } else if (header.kind == FrameKind::kCredit) {
    credit_.credit(first_of<uint64_t>(payload, "a credit"));
    must_look_ = true;
  } else {
    refuse("a frame of kind " + std::to_string(static_cast<int>(header.kind)) + ", which no client may send");
  }
}

void ClientLinkAtHead::take_record(ClientRing ring, std::span<const std::byte> record) {
  (void)first_of<RecordHeader>(record, "a record");
  record_in_.assign(record.begin(), record.end());
  move_times(record_in_, clock_());
  if (const auto command = leasing(record_in_)) {
    const uint64_t number = command->record.lease_at, at = blocks_.place(number);
    set_lease(record_in_, at, command->record.lease_bytes);
    if (at == 0 && command->is_fetch) {
      over_.push_back(number);
      must_look_ = true;
    }
  }
  keep(ring == ClientRing::kRecords ? records_ : cancels_, record_in_);
  if (ring == ClientRing::kRecords) credit_.received(record.size());
}

void ClientLinkAtHead::take_block(const FrameHeader& header, std::span<const std::byte> payload) {
  const auto block = first_of<BlockFrame>(payload, "a block");
  const auto stamp = first_of<uint64_t>(payload.subspan(sizeof block), "the stamp of a lease");
  must_look_ = true;
  std::vector<uint32_t> hosts = hub_.group(header.a);
  if (hosts.size() > kMostHosts) hosts.clear();
  const bool may_take = hub_.has_room_for(block.bytes, received_bytes_, *this);
  if (!blocks_.add(block, hosts, stamp, 1, may_take)) ++stats_.dropped;
  count_received(blocks_.kept().in_use);
}

void ClientLinkAtHead::take_data(std::span<const std::byte> payload) {
  const auto data = first_of<DataFrame>(payload, "bytes of a block");
  if (!blocks_.write(data.number, data.at, payload.subspan(sizeof data))) ++stats_.dropped;
}

void ClientLinkAtHead::look(int64_t now_ns) {
  blocks_.look(now_ns);
  count_received(blocks_.kept().in_use);
}

void ClientLinkAtHead::count_received(uint64_t bytes) {
  hub_.count_received(bytes, std::exchange(received_bytes_, bytes));
}

bool ClientLinkAtHead::flush() {
  const bool has_cancels = cancels_.flush(), has_records = records_.flush();
  if (credit_.should_tell(records_.overflow_bytes())) {
    enqueue_word(FrameKind::kCredit, credit_.tell(records_.overflow_bytes()));
  }
  return has_cancels || has_records;
}

void ClientLinkAtHead::add_kept(Stats& now) const {
  add_box(now, records_);
  add_box(now, cancels_);
}

}  // namespace pathways
