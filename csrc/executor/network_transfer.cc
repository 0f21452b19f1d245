#include "executor/network_transfer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "base/status.h"

namespace pathways {
namespace {

static_assert(std::endian::native == std::endian::little, "protobuf's fixed numbers are little-endian");

constexpr uint64_t kMostBytes = uint64_t{1} << 30;  // of one chunk; protobuf takes messages of up to 2 GiB

// The tags of transfer.proto: number of the field << 3 | wire type.
enum Tag : uint8_t {
  kChunk = 0x0A,
  kOrder = 0x09,
  kNode = 0x15,
  kHost = 0x1D,
  kAt = 0x21,
  kWords = 0x2A,
  kData = 0x32
};

// Numbers are varints that are filled up: lengths to five bytes, so that a chunk's head has the same size for any
// payload, and tags so far that this size is a multiple of 16. So when a chunk without words begins at a multiple of
// 16, its payload does too, and vector copies are fast.
constexpr uint64_t kChunkBytes = 5 + 5, kWordsBytes = 3 + 5, kDataBytes = 5 + 5;
constexpr uint64_t kHeadBytes = kChunkBytes + (1 + 8) + (1 + 4) + (1 + 4) + (1 + 8) + kDataBytes;
static_assert(kHeadBytes == 48);

template <class T>
std::byte* put(std::byte* out, Tag tag, T value) {
  *out = std::byte{tag};
  std::memcpy(out + 1, &value, sizeof value);
  return out + 1 + sizeof value;
}

/// A varint of exactly `width` bytes.
std::byte* put_varint(std::byte* out, uint64_t value, int width) {
  for (int i = 1; i < width; ++i, value >>= 7) *out++ = std::byte{static_cast<uint8_t>(value | 0x80)};
  *out++ = std::byte{static_cast<uint8_t>(value)};
  return out;
}

class WireReader {
 public:
  explicit WireReader(std::span<const std::byte> left) : left_(left) {}
  std::span<const std::byte> left() const { return left_; }

  std::span<const std::byte> bytes(uint64_t count) {
    if (count > left_.size()) throw Error(Status::kInvalid, "a chunk of network transfers is cut off");
    const auto taken = left_.first(count);
    left_ = left_.subspan(count);
    return taken;
  }
  template <class T>
  T fixed() {
    T value;
    std::memcpy(&value, bytes(sizeof value).data(), sizeof value);
    return value;
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 35; shift += 7) {
      const auto next = fixed<uint8_t>();
      value |= uint64_t{next & 0x7Fu} << shift;
      if (next < 0x80) return value;
    }
    throw Error(Status::kInvalid, "a number in a chunk of network transfers has no end");
  }
  /// The bytes behind their length.
  std::span<const std::byte> counted() { return bytes(varint()); }

 private:
  std::span<const std::byte> left_;
};

[[noreturn]] void refuse(const Chunk& chunk, const std::string& why) {
  throw Error(Status::kInvalid, "host " + std::to_string(chunk.host) + " sent a chunk of transfer " +
                                    std::to_string(chunk.node) + " of run " + std::to_string(chunk.order) + " " + why);
}

/// Reads a field of a chunk that is not its payload.
void take_field(WireReader& in, uint64_t tag, Chunk* chunk) {
  switch (tag) {
    case kOrder:
      chunk->order = in.fixed<uint64_t>();
      break;
    case kNode:
      chunk->node = in.fixed<uint32_t>();
      break;
    case kHost:
      chunk->host = in.fixed<uint32_t>();
      break;
    case kAt:
      chunk->at = in.fixed<uint64_t>();
      break;
    case kWords: {
      const auto words = in.counted();
      if (words.size() % 8 != 0) refuse(*chunk, "with half a word");
      chunk->words.resize(words.size() / 8);
      if (!words.empty()) std::memcpy(chunk->words.data(), words.data(), words.size());
      break;
    }
    default:
      refuse(*chunk, "with a field that is unknown");
  }
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
  return kHeadBytes + (walk_.passed() == 0 ? kWordsBytes + copy_plan_->words().size() * 8 : 0);
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
  const uint64_t words_bytes = at == 0 ? kWordsBytes + copy_plan_->words().size() * 8 : 0;
  std::byte* head = put_varint(put_varint(out, kChunk, 5), kHeadBytes + words_bytes - kChunkBytes + bytes, 5);
  head = put(head, kOrder, order_);
  head = put(head, kNode, node_);
  head = put(head, kHost, host_);
  head = put(head, kAt, at);
  if (at == 0) {
    const auto words = copy_plan_->words();
    head = put_varint(put_varint(head, kWords, 3), words.size_bytes(), 5);
    std::memcpy(head, words.data(), words.size_bytes());
    head += words.size_bytes();
  }
  put_varint(put_varint(head, kData, 5), bytes, 5);
}

std::pair<Chunk, uint64_t> first_chunk(std::span<const std::byte> message) {
  WireReader outer(message);
  if (outer.varint() != kChunk) throw Error(Status::kInvalid, "a message of network transfers is no chunk");
  Chunk chunk;
  for (WireReader in(outer.counted()); !in.left().empty();) {
    const uint64_t tag = in.varint();
    if (tag == kData) {
      chunk.bytes = in.counted();
    } else {
      take_field(in, tag, &chunk);
    }
  }
  return {std::move(chunk), message.size() - outer.left().size()};
}

std::optional<ChunkHead> chunk_head(std::span<const std::byte> prefix) {
  try {
    WireReader in(prefix);
    if (in.varint() != kChunk) return std::nullopt;
    const uint64_t bytes = in.varint(), begin = prefix.size() - in.left().size();
    ChunkHead head{};
    for (uint64_t tag = in.varint(); tag != kData; tag = in.varint()) take_field(in, tag, &head.chunk);
    head.payload_bytes = in.varint();
    head.payload_at = prefix.size() - in.left().size();
    if (head.payload_at + head.payload_bytes != begin + bytes) return std::nullopt;  // another field follows
    return head;
  } catch (const Error&) {
    return std::nullopt;
  }
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
