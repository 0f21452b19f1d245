#include "runtime/wiring.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/status.h"

namespace pathways {
namespace {

constexpr size_t kPage = 4096;

/// Hands out offsets in a block that is still to be made.
class Layout {
 public:
  explicit Layout(size_t header) { take(header, kCacheLine); }
  uint64_t take(size_t bytes, size_t alignment = kCacheLine) {
    const size_t at = (end_ + alignment - 1) / alignment * alignment;
    end_ = at + bytes;
    return at;
  }
  size_t bytes() const { return (end_ + kPage - 1) / kPage * kPage; }

 private:
  size_t end_ = 0;
};

Segment make_segment(std::string_view name, size_t bytes, bool shared) {
  return shared ? Segment::create(name, bytes) : Segment::heap(bytes);
}

template <typename Block>
Block* attach_block(Segment& segment, const char* what) {
  if (segment.size() < sizeof(Block)) throw Error(Status::kInvalid, std::string(what) + " block: too small");
  auto* block = reinterpret_cast<Block*>(segment.data());
  if (block->magic != Block::kMagic) throw Error(Status::kInvalid, std::string("not a ") + what + " block");
  return block;
}

}  // namespace

Segment ControllerBlock::make(bool shared) {
  Segment segment = make_segment("pathways-controller", std::max(sizeof(ControllerBlock), kPage), shared);
  auto* block = new (segment.data()) ControllerBlock{};
  block->magic = kMagic;
  return segment;
}

ControllerBlock* ControllerBlock::attach(Segment& segment) {
  return attach_block<ControllerBlock>(segment, "controller");
}

void ControllerBlock::set_status(ClusterStatus next, std::string_view why) {
  if (cluster_status() != ClusterStatus::kUp) return;
  text_bytes = static_cast<uint32_t>(std::min(why.size(), kTextBytes));
  std::memcpy(text, why.data(), text_bytes);
  // SYNC cluster/status: pairs with cluster_status(); the text is written.
  status.store(static_cast<uint32_t>(next), std::memory_order_release);
}

Segment HostBlock::make(uint32_t host, uint32_t hosts, Sizes sizes, bool shared) {
  Layout layout(sizeof(HostBlock));
  const size_t ring_bytes = ByteRing::bytes_for(sizes.ring_bytes);
  const uint64_t from_controller = layout.take(ring_bytes), to_controller = layout.take(ring_bytes);
  uint64_t from_peers = 0, stride = 0;
  if (sizes.peer_ring_bytes != 0 && hosts > 1) {
    stride = (ByteRing::bytes_for(sizes.peer_ring_bytes) + kCacheLine - 1) / kCacheLine * kCacheLine;
    from_peers = layout.take(stride * hosts);
  }
  const uint64_t arena = sizes.arena_bytes == 0 ? 0 : layout.take(sizes.arena_bytes, kPage);
  Segment segment = make_segment("pathways-host-" + std::to_string(host), layout.bytes(), shared);
  auto* block = new (segment.data()) HostBlock{};
  block->magic = kMagic;
  block->host = host;
  block->peers = from_peers == 0 ? 0 : hosts;
  block->from_controller = from_controller;
  block->to_controller = to_controller;
  block->from_peers = from_peers;
  block->peer_stride = stride;
  block->arena = arena;
  ByteRing::create(segment.data() + from_controller, sizes.ring_bytes);
  ByteRing::create(segment.data() + to_controller, sizes.ring_bytes);
  for (uint32_t peer = 0; peer < block->peers; ++peer) {
    ByteRing::create(segment.data() + from_peers + peer * stride, sizes.peer_ring_bytes);
  }
  if (arena != 0) Arena::create(segment.data() + arena, sizes.arena_bytes);
  return segment;
}

HostBlock* HostBlock::attach(Segment& segment) { return attach_block<HostBlock>(segment, "host"); }

Segment ClientBlock::make(Sizes sizes, bool shared) {
  Layout layout(sizeof(ClientBlock));
  const size_t ring_bytes = ByteRing::bytes_for(sizes.ring_bytes);
  const uint64_t to_controller = layout.take(ring_bytes), from_controller = layout.take(ring_bytes);
  const uint64_t cancels = layout.take(ByteRing::bytes_for(ByteRing::kMinCapacity));
  const uint64_t table = layout.take(FutureTable::bytes_for(sizes.futures));
  const uint64_t read_back = sizes.has_read_back ? layout.take(ReadBackArea::bytes_for(sizes.futures), kPage) : 0;
  const uint64_t arena = sizes.arena_bytes == 0 ? 0 : layout.take(sizes.arena_bytes, kPage);
  Segment segment = make_segment("pathways-client", layout.bytes(), shared);
  auto* block = new (segment.data()) ClientBlock{};
  block->magic = kMagic;
  block->to_controller = to_controller;
  block->cancels = cancels;
  block->from_controller = from_controller;
  block->table = table;
  block->read_back = read_back;
  block->arena = arena;
  ByteRing::create(segment.data() + to_controller, sizes.ring_bytes);
  ByteRing::create(segment.data() + from_controller, sizes.ring_bytes);
  ByteRing::create(segment.data() + cancels, ByteRing::kMinCapacity);
  FutureTable::create(segment.data() + table, sizes.futures);
  if (read_back != 0) ReadBackArea::create(segment.data() + read_back, sizes.futures);
  if (arena != 0) Arena::create(segment.data() + arena, sizes.arena_bytes);
  return segment;
}

ClientBlock* ClientBlock::attach(Segment& segment) { return attach_block<ClientBlock>(segment, "client"); }

}  // namespace pathways
