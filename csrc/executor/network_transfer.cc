#include "executor/network_transfer.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "base/status.h"
#include "messages/records.h"

namespace pathways {
namespace {

constexpr uint64_t kMostBytes = std::numeric_limits<uint32_t>::max() & ~7u;  // of one chunk

[[noreturn]] void refuse(const ChunkRecord& chunk, const std::string& why) {
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

uint64_t OutgoingTransfer::room() const { return overhead() + padded(copy_plan_->bytes() - walk_.passed()); }

uint64_t OutgoingTransfer::pack(std::span<std::byte> out) {
  const uint64_t before = overhead();
  if (out.size() < least()) return 0;
  ChunkRecord chunk{order_, node_, host_, walk_.passed(), 0, 0};
  if (walk_.passed() == 0) {
    const auto words = copy_plan_->words();
    chunk.words = static_cast<uint32_t>(words.size());
    std::memcpy(out.data() + sizeof chunk, words.data(), words.size_bytes());
  }
  const uint64_t most = std::min((out.size() - before) & ~uint64_t{7}, kMostBytes);
  const uint64_t bytes = gather(walk_, sources_, out.subspan(before, most));
  std::memset(out.data() + before + bytes, 0, padded(bytes) - bytes);
  chunk.bytes = static_cast<uint32_t>(bytes);
  std::memcpy(out.data(), &chunk, sizeof chunk);
  return before + padded(bytes);
}

std::pair<Chunk, uint64_t> first_chunk(std::span<const std::byte> message) {
  Chunk chunk{};
  if (message.size() < sizeof chunk.record) throw Error(Status::kInvalid, "a chunk of network transfers is cut off");
  std::memcpy(&chunk.record, message.data(), sizeof chunk.record);
  const uint64_t before = sizeof chunk.record + uint64_t{chunk.record.words} * 8;
  const uint64_t all = before + padded(uint64_t{chunk.record.bytes});
  if (all > message.size()) refuse(chunk.record, "that is cut off");
  chunk.words.resize(chunk.record.words);
  if (!chunk.words.empty()) {
    std::memcpy(chunk.words.data(), message.data() + sizeof chunk.record, chunk.words.size() * 8);
  }
  chunk.bytes = message.subspan(before, chunk.record.bytes);
  return {std::move(chunk), all};
}

void IncomingTransfer::take(const Chunk& chunk) {
  if (!walk_.has_value()) {
    CopyPlan copy_plan = CopyPlan::parse(chunk.words);
    const auto blocks = copy_plan.block_bytes();
    if (blocks.size() != blocks_.size()) refuse(chunk.record, "for another number of blocks");
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (copy_plan.writes(i) && (blocks_[i] == nullptr || blocks[i] != bytes_[i])) {
        refuse(chunk.record, "for block " + std::to_string(i) + ", which is not what it takes it for");
      }
    }
    copy_plan_.emplace(std::move(copy_plan));
    walk_.emplace(*copy_plan_);
  }
  if (chunk.record.at != walk_->passed() || chunk.bytes.size() > copy_plan_->bytes() - walk_->passed()) {
    refuse(chunk.record, "out of turn");
  }
  scatter(*walk_, blocks_, chunk.bytes);
}

}  // namespace pathways
