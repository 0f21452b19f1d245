/// MachineLink's sending half: what the rings have becomes frames, and so do the blocks that commands lease.
#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "link/machine_link.h"
#include "messages/leased_parts.h"

namespace pathways {
namespace {

/// What the head is told of a record of a host: of a fetch that is written, that the host's part of its token is over.
std::span<std::byte> without_pieces(std::span<std::byte> bytes) {
  const bool is_fetch = read_record<RecordHeader>(bytes).kind == RecordKind::kFetchDone;
  if (!is_fetch || bytes.size() < sizeof(FetchDoneRecord)) return bytes;
  const auto record = read_record<FetchDoneRecord>(bytes);
  const FutureDoneRecord done{{RecordKind::kFutureDone, 0, record.header.client}, record.handle, 0, 0};
  std::memcpy(bytes.data(), &done, sizeof done);
  return bytes.first(sizeof done);
}

}  // namespace

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
  const bool is_head = end_ == End::kHead;
  const FrameKind kind = is_head ? FrameKind::kFromController : FrameKind::kToController;
  return pump(host.from, record_, [&](std::span<std::byte> record) {
    if (record.size() < sizeof(RecordHeader)) throw Error(Status::kInvalid, "a ring has a record without a header");
    if (!(is_head ? lease(number, record, to) : answer_fetch(record, to)) || !to.fits(record.size())) return false;
    if (!is_head) record = without_pieces(record);
    if (is_head) {
      host.awaited.sent(record);
      move_times(record, -clock_());
    }
    std::memcpy(to.begin(kind, number, host.incarnation, record.size()), record.data(), record.size());
    ++stats_.records_out;
    return true;
  });
}

/// The same for a host's records to hosts of other machines.
bool MachineLink::pump_far(uint32_t number, FarHost& host, FrameWriter& to) {
  if (!host.from_far.valid()) return true;
  return pump(host.from_far, record_, [&](std::span<std::byte> bytes) {
    if (bytes.size() < sizeof(PeerHeader)) throw Error(Status::kInvalid, "a host wrote a record without a destination");
    if (!to.fits(bytes.size())) return false;
    const auto there = read_record<PeerHeader>(bytes);
    const PeerHeader source{number, host.incarnation};
    std::byte* at = to.begin(FrameKind::kPeer, there.host, there.epoch, bytes.size());
    std::memcpy(at, &source, sizeof source);
    std::memcpy(at + sizeof source, bytes.data() + sizeof source, bytes.size() - sizeof source);
    ++stats_.records_out;
    return true;
  });
}

/// LINK-3: before the first record of a command that leases a block goes out, the block does. True: the record may go.
bool MachineLink::lease(uint32_t number, std::span<std::byte> bytes, FrameWriter& to) {
  const auto header = read_record<RecordHeader>(bytes);
  if (header.kind == RecordKind::kClientGone) lent_.remove_host(number, header.client);  // it gets no more of it
  const auto command = leasing(bytes);
  if (!command) return true;
  if (!to.fits(bytes.size())) return false;  // so that what follows is done once for the record
  const auto& [record, is_fetch, handle] = *command;
  if (record.is_refused != 0) {  // nobody will read the bytes
    hub_.return_lease(header.client, record.lease_at, number);
    set_lease(bytes, 0, 0);
    return true;
  }
  uint64_t block = lent_.number_of(header.client, handle, is_fetch);
  if (block == 0) {
    std::vector<uint32_t> here;
    std::vector<BlockHost> there;
    for (const uint32_t host : hub_.group(record.group)) {
      const auto found = hosts_.find(host);
      if (found == hosts_.end() || here.size() >= kMostHosts ||
          !hub_.is_leased(header.client, record.lease_at, leased_bytes(record), host)) {
        continue;
      }
      here.push_back(host);
      there.push_back({host, found->second.incarnation});
    }
    if (std::ranges::find(here, number) != here.end()) {
      const size_t hosts_bytes = there.size() * sizeof(BlockHost);
      if (!to.fits(sizeof(BlockFrame) + hosts_bytes)) return false;
      block = lent_.add({header.client, handle, is_fetch, record.lease_at, record.lease_bytes, 0, here, here});
      const BlockFrame frame{block, record.lease_bytes, is_fetch ? record.token : 0};
      std::byte* at =
          to.begin(FrameKind::kBlock, header.client, static_cast<int32_t>(here.size()), sizeof frame + hosts_bytes);
      std::memcpy(at, &frame, sizeof frame);
      std::memcpy(at + sizeof frame, there.data(), hosts_bytes);
      if (!is_fetch) data_ = {header.client, block, needed(record, here)};
    }
  }
  LentBlocks::Lent* lent = lent_.find(block);
  if (lent == nullptr || std::ranges::find(lent->awaited, number) == lent->awaited.end()) {
    set_lease(bytes, 0, record.lease_bytes);  // it was not leased to this host, which refuses it
    return true;
  }
  if (!send_data(to) || !to.fits(bytes.size())) return false;
  set_lease(bytes, block, record.lease_bytes);
  std::erase(lent_.find(block)->awaited, number);
  lent_.end_if_over(block);
  return true;
}

/// The pieces of a put's block that some of these hosts need. A client that says nonsense sends all of it.
std::vector<BlockPiece> MachineLink::needed(const CommandRecord& record, std::vector<uint32_t> hosts) {
  const BlockPiece all{0, record.lease_bytes};
  std::vector<LeasedPart> parts(record.lease_parts);
  const auto said = std::as_writable_bytes(std::span(parts));
  if (parts.empty() || !hub_.read(record.header.client, record.lease_at, record.lease_bytes, said)) return {all};
  std::ranges::sort(hosts);
  std::ranges::sort(parts, {}, &LeasedPart::at);
  std::vector<BlockPiece> pieces;
  for (const auto& [host, reserved, at, bytes] : parts) {
    if (at > record.lease_bytes || bytes > record.lease_bytes - at) return {all};
    if (!std::ranges::binary_search(hosts, host)) continue;
    const uint64_t end = pieces.empty() ? 0 : pieces.back().at + pieces.back().bytes;
    if (pieces.empty() || at > end) {
      pieces.push_back({at, bytes});
    } else if (at + bytes > end) {  // hosts may need the same bytes
      pieces.back().bytes = at + bytes - pieces.back().at;
    }
  }
  return pieces;
}

/// LINK-3: before the last completion of a fetch goes out, the bytes do.
bool MachineLink::answer_fetch(std::span<const std::byte> bytes, FrameWriter& to) {
  const auto header = read_record<RecordHeader>(bytes);
  const bool is_fetch_done = header.kind == RecordKind::kFetchDone && bytes.size() >= sizeof(FetchDoneRecord);
  const bool is_done = is_fetch_done || header.kind == RecordKind::kFutureDone;  // which says that nothing was written
  if (!is_done && header.kind != RecordKind::kFailed) return true;
  if (bytes.size() < sizeof(FailedRecord)) return true;  // all three kinds have the handle at the same place
  const auto twin = twins_.find(header.client);
  const uint64_t token = read_record<FailedRecord>(bytes).handle;
  if (twin == twins_.end() || !twin->second.memory.is_fetching(token)) return true;
  if (!to.fits(bytes.size())) return false;  // so that this is done once for the record
  std::optional<std::span<const BlockPiece>> written;
  std::vector<BlockPiece> pieces;
  if (is_done) written.emplace();
  if (is_fetch_done) {
    bytes = bytes.subspan(sizeof(FetchDoneRecord));
    pieces.resize(bytes.size() / sizeof(BlockPiece));
    if (!pieces.empty()) std::memcpy(pieces.data(), bytes.data(), pieces.size() * sizeof(BlockPiece));
    written = pieces;
  }
  if (auto block = twin->second.memory.settle(token, written)) {
    data_ = {header.client, block->number, std::move(block->pieces)};
  }
  return send_data(to);
}

bool MachineLink::read_block(const Block& block, uint64_t at, std::span<std::byte> out) {
  if (end_ == End::kAgent) {
    const auto twin = twins_.find(block.client);
    return twin != twins_.end() && twin->second.memory.read(block.number, at, out);
  }
  const LentBlocks::Lent* lent = lent_.find(block.number);
  return lent != nullptr && hub_.read(lent->client, lent->offset, at, out);
}

/// By value: a put's leases end here, and what goes back of a fetch is needed here no more.
void MachineLink::sent(const Block& block) {
  if (end_ == End::kAgent) {
    if (const auto twin = twins_.find(block.client); twin != twins_.end()) twin->second.memory.end(block.number);
  } else if (LentBlocks::Lent* lent = lent_.find(block.number)) {
    for (const uint32_t host : std::exchange(lent->hosts, {})) hub_.return_lease(lent->client, lent->offset, host);
    lent_.end_if_over(block.number);
  }
}

bool MachineLink::must_look_soon() const {
  return std::ranges::any_of(twins_, [](const auto& twin) { return twin.second.memory.is_trimming(); });
}

void MachineLink::look(int64_t now_ns) {
  for (auto& [client, twin] : twins_) twin.memory.look(now_ns);
}

}  // namespace pathways
