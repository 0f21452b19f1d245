#include "bulk/network_transfer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "base/status.h"

namespace pathways {
namespace {

static_assert(std::endian::native == std::endian::little, "chunks have the order of bytes of little-endian machines");

constexpr uint64_t kMostBytes = uint64_t{1} << 30;  // of one chunk

[[noreturn]] void refuse(const Chunk& chunk, const std::string& why) {
  throw Error(Status::kInvalid, "host " + std::to_string(chunk.host) + " sent a chunk of transfer " +
                                    std::to_string(chunk.node) + " of run " + std::to_string(chunk.order) + " " + why);
}

}  // namespace

OutgoingTransfer::OutgoingTransfer(uint64_t order, uint32_t node, uint32_t host,
                                   std::shared_ptr<const CopyPlan> copy_plan, std::vector<const std::byte*> sources)
    : order_(order),
      node_(node),
      host_(host),
      copy_plan_(std::move(copy_plan)),
      sources_(std::move(sources)),
      walk_(*copy_plan_) {}

uint64_t OutgoingTransfer::overhead() const {
  return sizeof(ChunkRecord) + (walk_.passed() == 0 ? copy_plan_->words().size_bytes() : 0);
}

uint64_t OutgoingTransfer::room() const { return overhead() + left(); }

uint64_t OutgoingTransfer::pack(std::span<std::byte> out) {
  if (out.size() < least()) return 0;
  const uint64_t before = overhead(), at = walk_.passed(), all = left();
  const uint64_t most = std::min<uint64_t>(out.size() - before, kMostBytes);
  // Words are not cut, so that the next chunk reads its sources aligned too.
  const uint64_t bytes = gather(walk_, sources_, out.subspan(before, all <= most ? all : most & ~uint64_t{7}));
  write_head(out.data(), at, bytes);
  return before + bytes;
}

uint64_t OutgoingTransfer::pack_head(std::span<std::byte> out, uint64_t least, uint64_t most,
                                     std::span<const std::byte>* payload) {
  const uint64_t head = overhead(), at = walk_.passed();
  if (out.size() < head) return 0;
  CopyWalk next = walk_;
  CopyRun run{};
  if (!next.next(std::min(most, kMostBytes), &run)) return 0;
  const uint64_t bytes = run.row * run.count;
  if (bytes < least || (run.count != 1 && run.source_stride != run.row)) return 0;
  walk_ = next;
  *payload = {sources_[run.source] + run.source_offset, bytes};
  write_head(out.data(), at, bytes);
  return head;
}

/// Writes all of a chunk that comes before its payload.
void OutgoingTransfer::write_head(std::byte* out, uint64_t at, uint64_t bytes) const {
  const auto words = at == 0 ? copy_plan_->words() : std::span<const uint64_t>{};
  const ChunkRecord record{
      .order = order_, .node = node_, .host = host_, .at = at, .words = words.size(), .payload = bytes};
  std::memcpy(out, &record, sizeof record);
  if (!words.empty()) std::memcpy(out + sizeof record, words.data(), words.size_bytes());
}

std::optional<ChunkHead> chunk_head(std::span<const std::byte> prefix) {
  ChunkRecord record;
  if (prefix.size() < sizeof record) return std::nullopt;
  std::memcpy(&record, prefix.data(), sizeof record);
  const auto behind = prefix.subspan(sizeof record);
  if (record.magic != ChunkRecord::kMagic || record.words > behind.size() / 8 || record.payload > kMostBytes) {
    return std::nullopt;
  }
  ChunkHead head{{record.order, record.node, record.host, record.at, std::vector<uint64_t>(record.words), {}},
                 sizeof record + record.words * 8,
                 record.payload};
  if (record.words != 0) std::memcpy(head.chunk.words.data(), behind.data(), record.words * 8);
  return head;
}

std::pair<Chunk, uint64_t> first_chunk(std::span<const std::byte> message) {
  auto head = chunk_head(message);
  if (!head.has_value() || head->payload_bytes > message.size() - head->payload_at) {
    throw Error(Status::kInvalid, "a message of network transfers is no chunk, or is cut off");
  }
  head->chunk.bytes = message.subspan(head->payload_at, head->payload_bytes);
  return {std::move(head->chunk), head->payload_at + head->payload_bytes};
}

bool is_whole(const Chunk& chunk) {
  return chunk.at == 0 && !chunk.words.empty() && CopyPlan::parse(chunk.words).bytes() == chunk.bytes.size();
}

void IncomingTransfer::begin(const Chunk& chunk) {
  if (walk_.has_value()) return;
  CopyPlan copy_plan = CopyPlan::parse(chunk.words);
  const auto blocks = copy_plan.block_bytes();
  if (blocks.size() != blocks_.size()) refuse(chunk, "for another number of blocks");
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (copy_plan.writes(i) && (blocks_[i] == nullptr || blocks[i] != bytes_[i])) {
      refuse(chunk, "for block " + std::to_string(i) + ", which is not what it takes it for");
    }
  }
  copy_plan_.emplace(std::move(copy_plan));
  walk_.emplace(*copy_plan_);
}

void IncomingTransfer::take(const Chunk& chunk) {
  begin(chunk);
  if (chunk.at != walk_->passed() || chunk.bytes.size() > copy_plan_->bytes() - walk_->passed()) {
    refuse(chunk, "out of turn");
  }
  scatter(*walk_, blocks_, chunk.bytes);
}

std::span<std::byte> IncomingTransfer::place(const Chunk& chunk, uint64_t bytes) {
  try {
    begin(chunk);
  } catch (const Error&) {
    return {};
  }
  if (chunk.at != walk_->passed() || bytes > copy_plan_->bytes() - walk_->passed()) return {};
  CopyWalk next = *walk_;
  CopyRun run{};
  if (!next.next(bytes, &run) || run.row * run.count != bytes) return {};
  if (run.count != 1 && run.target_stride != run.row) return {};
  walk_ = next;
  return {blocks_[run.block] + run.target_offset, bytes};
}

}  // namespace pathways
