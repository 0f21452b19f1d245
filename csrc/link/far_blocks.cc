#include "link/far_blocks.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace pathways {
namespace {

constexpr size_t kMostBlocks = size_t{1} << 20;  ///< under way at once
constexpr int64_t kTrimAfterNs = 1'000'000'000;  ///< how long pages stay that are not in use

}  // namespace

FarBlocks::FarBlocks(Segment segment, size_t most_unnamed) : segment_(std::move(segment)), most_unnamed_(most_unnamed) {
  arena_ = ReceivedArena(ClientBlock::attach(segment_)->client_arena(), ClientView(segment_).arena().bytes());
}

bool FarBlocks::add(const BlockFrame& frame, std::span<const uint32_t> hosts, uint64_t stamp, size_t commands,
                    bool may_take) {
  if (blocks_.contains(frame.number) || fetches_.contains(frame.token) || blocks_.size() >= kMostBlocks ||
      unnamed_ >= most_unnamed_) {
    return false;
  }
  taken_ += frame.bytes;
  ++unnamed_;
  Block& block = blocks_[frame.number];
  const uint64_t at = may_take ? arena_.make(frame.bytes, hosts, stamp) : 0;
  block = {at, frame.bytes, frame.token, stamp, commands, hosts.size(), {}, {}};
  if (block.token != 0 && block.at != 0) {
    block.hosts.assign(hosts.begin(), hosts.end());
    fetches_[block.token] = frame.number;
  }
  return true;
}

const FarBlocks::Block* FarBlocks::holding(uint64_t number, uint64_t at, uint64_t bytes) const {
  const auto found = blocks_.find(number);
  if (found == blocks_.end() || found->second.at == 0) return nullptr;
  const Block& block = found->second;
  return at <= block.bytes && bytes <= block.bytes - at ? &block : nullptr;
}

bool FarBlocks::write(uint64_t number, uint64_t at, std::span<const std::byte> bytes) {
  const Block* block = holding(number, at, bytes.size());
  if (block == nullptr || block->token != 0) return false;
  std::memcpy(arena_.at(block->at) + at, bytes.data(), bytes.size());
  return true;
}

bool FarBlocks::read(uint64_t number, uint64_t at, std::span<std::byte> out) const {
  const Block* block = holding(number, at, out.size());
  if (block == nullptr) return false;
  std::memcpy(out.data(), arena_.at(block->at) + at, out.size());
  return true;
}

uint64_t FarBlocks::place(uint64_t number) {
  const auto found = blocks_.find(number);
  if (found == blocks_.end() || found->second.commands == 0) return 0;
  const uint64_t at = found->second.at;
  if (found->second.commands == 1) --unnamed_;
  // A put's block is the hosts' from here on; a fetch's is filled first.
  if (--found->second.commands == 0 && (found->second.token == 0 || at == 0)) end(number);
  return at;
}

std::optional<FarBlocks::Fetched> FarBlocks::settle(uint64_t token,
                                                    std::optional<std::span<const BlockPiece>> written) {
  const auto fetch = fetches_.find(token);
  if (fetch == fetches_.end()) return std::nullopt;
  Block& block = blocks_.at(fetch->second);
  if (written) {
    std::ranges::copy_if(*written, std::back_inserter(block.written), [&](const BlockPiece& piece) {
      return piece.bytes != 0 && piece.at <= block.bytes && piece.bytes <= block.bytes - piece.at;
    });
  }
  if (--block.left != 0) return std::nullopt;
  if (written) return Fetched{fetch->second, std::move(block.written)};
  end(fetch->second);
  return std::nullopt;
}

std::optional<FarBlocks::Fetched> FarBlocks::settle_whole(uint64_t token) {
  const auto fetch = fetches_.find(token);
  if (fetch == fetches_.end()) return std::nullopt;
  const BlockPiece whole{0, blocks_.at(fetch->second).bytes};
  return settle(token, std::span(&whole, 1));
}

uint64_t FarBlocks::fail(uint64_t token) {
  const auto fetch = fetches_.find(token);
  if (fetch == fetches_.end()) return 0;
  const uint64_t number = fetch->second;
  end(number);
  return number;
}

std::vector<uint64_t> FarBlocks::reclaim(uint32_t host, uint64_t stamp) {
  std::vector<uint64_t> over;
  for (const auto& [token, number] : fetches_) {
    const Block& block = blocks_.at(number);
    const bool is_meant = block.stamp != 0 && block.stamp <= stamp;
    if (is_meant && std::ranges::find(block.hosts, host) != block.hosts.end()) over.push_back(number);
  }
  for (const uint64_t number : over) end(number);
  arena_.reclaim(host, stamp);
  return over;
}

void FarBlocks::end(uint64_t number) {
  const auto found = blocks_.find(number);
  if (found == blocks_.end()) return;
  if (found->second.at != 0) arena_.drop(found->second.at);
  if (found->second.commands != 0) --unnamed_;
  fetches_.erase(found->second.token);
  blocks_.erase(found);
}

void FarBlocks::look(int64_t now_ns) {
  (void)arena_.collect();
  if (trim_ns_ == INT64_MAX && arena_.can_trim()) trim_ns_ = now_ns + kTrimAfterNs;
  if (now_ns >= trim_ns_ && !arena_.trim()) trim_ns_ = INT64_MAX;
}

}  // namespace pathways
