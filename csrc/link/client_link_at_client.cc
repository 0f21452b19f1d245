#include "link/client_link_at_client.h"

#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "link/link_hub.h"
#include "link/link_pool.h"
#include "messages/leased_parts.h"

namespace pathways {
namespace {

constexpr uint32_t kSelf = 0;  // the only client of this link

}  // namespace

ClientLinkAtClient::ClientLinkAtClient(Segment client, Segment bell, StatusBlock* status, Clock clock)
    : Link(clock),
      client_(std::move(client)),
      bell_segment_(std::move(bell)),
      view_(client_),
      status_(status),
      records_(view_.from_client()),
      cancels_(view_.cancels()),
      to_client_(view_.to_client(), &view_.futures().doorbell()) {}

void ClientLinkAtClient::joined() {
  auto mapped = std::make_shared<Segment>(Segment::attach(::dup(bell_segment_.fd())));  // the pool's own
  DoorbellWord* bell = &BellBlock::attach(*mapped)->doorbell;
  pool_->add_bell(slot_, bell, std::move(mapped));
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

/// LINK-3: before a command that leases a block goes out, the block does. True: the record may go.
bool ClientLinkAtClient::lease(std::span<std::byte> bytes, FrameWriter& to) {
  const auto command = leasing(bytes);
  if (!command) return true;
  const auto& [record, is_fetch, handle] = *command;
  uint64_t block = lent_.number_of(kSelf, handle, is_fetch);
  if (block == 0 && !is_lent(record)) {
    set_lease(bytes, 0, record.lease_bytes);  // the hosts refuse it
    return true;
  }
  if (block == 0) {  // else the record found no room before
    const uint64_t size = leased_bytes(record);
    if (!to.fits(sizeof(BlockFrame) + sizeof record.lease_stamp)) return false;
    block = lent_.add({kSelf, handle, is_fetch, record.lease_at, size, record.lease_others, {kSelf}, {kSelf}});
    const BlockFrame frame{block, size, is_fetch ? record.token : 0};
    std::byte* at = to.begin(FrameKind::kBlock, record.group, 0, sizeof frame + sizeof record.lease_stamp);
    std::memcpy(at, &frame, sizeof frame);
    std::memcpy(at + sizeof frame, &record.lease_stamp, sizeof record.lease_stamp);
    lent_bytes_ += size;
    count_kept();
    if (!is_fetch) data_ = {kSelf, block, {{0, size}}};
  }
  if (!send_data(to) || !to.fits(bytes.size())) return false;
  set_lease(bytes, block, record.lease_bytes);
  if (LentBlocks::Lent* lent = lent_.find(block)) lent->awaited.clear();
  lent_.end_if_over(block);
  return true;
}

bool ClientLinkAtClient::read_block(const Block& block, uint64_t at, std::span<std::byte> out) {
  const LentBlocks::Lent* lent = lent_.find(block.number);
  if (lent == nullptr || !view_.arena().is_there()) return false;
  const std::byte* from = view_.arena().find(lent->offset, at + out.size());
  if (from != nullptr) std::memcpy(out.data(), from + at, out.size());
  return from != nullptr;
}

bool ClientLinkAtClient::is_lent(const CommandRecord& record) const {
  const ArenaView& arena = view_.arena();
  if (!arena.is_there()) return false;
  const uint64_t size = leased_bytes(record);
  return (record.lease_others == 0 ? arena.find_lent(record.lease_at, size) : arena.find(record.lease_at, size)) !=
         nullptr;
}

/// By value: a put's leases end here.
void ClientLinkAtClient::sent(const Block& block) {
  if (LentBlocks::Lent* lent = lent_.find(block.number)) {
    return_leases(*lent);
    lent->hosts.clear();
    lent_.end_if_over(block.number);
  }
}

void ClientLinkAtClient::return_leases(const LentBlocks::Lent& lent) {
  if (view_.arena().is_there()) (void)view_.arena().return_all(lent.offset, lent.others);
}

/// Bytes on their way to the head are kept there, too.
void ClientLinkAtClient::count_kept() {
  view_.kept_elsewhere().store(lent_bytes_ - kept_.taken + kept_.in_use, std::memory_order_relaxed);
}

// ---------------------------------------------------------------------------------------------------------- deliver

void ClientLinkAtClient::take(const FrameHeader& header, std::span<const std::byte> payload) {
  switch (header.kind) {
    case FrameKind::kToClient:
      return take_record(payload);
    case FrameKind::kFutureDone:
      if (!is_completion(payload)) break;
      return complete_future(view_, payload);
    case FrameKind::kRetired:
      return view_.tell_retired(first_of<uint64_t>(payload, "a count of runs"));
    case FrameKind::kStatus:
      return take_status(header, payload);
    case FrameKind::kData:
      return take_data(payload);
    case FrameKind::kBlockOver:
      return take_block_over(first_of<uint64_t>(payload, "the number of a block"));
    case FrameKind::kKept:
      kept_ = first_of<KeptFrame>(payload, "what the head keeps");
      if (kept_.taken > lent_bytes_) refuse("more blocks than were sent");
      return count_kept();
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

/// The link returns the client's leases, each once (ARENA-5): the client takes none back from hosts that are lost.
void ClientLinkAtClient::take_record(std::span<const std::byte> bytes) {
  const auto header = first_of<RecordHeader>(bytes, "a record");
  credit_.received(bytes.size());
  if (header.kind != RecordKind::kReclaim || bytes.size() < sizeof(ReclaimRecord)) return keep(to_client_, bytes);
  auto record = read_record<ReclaimRecord>(bytes);
  record.stamp = 0;
  keep(to_client_, std::as_bytes(std::span(&record, 1)));
}

void ClientLinkAtClient::take_data(std::span<const std::byte> payload) {
  const auto data = first_of<DataFrame>(payload, "bytes of a block");
  payload = payload.subspan(sizeof data);
  const LentBlocks::Lent* lent = lent_.writable(kSelf, data.number, data.at, payload.size());
  std::byte* to = lent != nullptr && view_.arena().is_there()
                      ? view_.arena().find(lent->offset, data.at + payload.size())
                      : nullptr;
  if (to == nullptr) {
    ++stats_.dropped;
    return;
  }
  std::memcpy(to + data.at, payload.data(), payload.size());
}

void ClientLinkAtClient::take_block_over(uint64_t number) {
  LentBlocks::Lent* lent = lent_.find(number);
  if (lent == nullptr || !lent->is_fetch) {
    ++stats_.dropped;
    return;
  }
  return_leases(*lent);
  lent_.end(number);
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
