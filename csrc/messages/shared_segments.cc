#include "messages/shared_segments.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/status.h"

namespace pathways {
namespace {

constexpr size_t kPage = 4096;

/// Assigns offsets in a block that will be made afterwards.
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
Block* attach_block(void* memory, size_t bytes, const char* what) {
  if (memory == nullptr || bytes < sizeof(Block))
    throw Error(Status::kInvalid, std::string(what) + " block: too small");
  auto* block = static_cast<Block*>(memory);
  if (copied_once(block->magic) != Block::kMagic)
    throw Error(Status::kInvalid, std::string("not a ") + what + " block");
  return block;
}

template <typename Block>
Segment make_block(std::string_view name, bool shared, Segment::Others others = Segment::Others::kWrite) {
  const size_t bytes = std::max(sizeof(Block), kPage);
  Segment segment = shared ? Segment::create(name, bytes, others) : Segment::heap(bytes);
  new (segment.data()) Block{};
  return segment;
}

/// The part of a block that begins at `offset`; an empty part if `offset` is 0 and the part may be missing.
BlockPart part_of(void* block, size_t bytes, size_t header, uint64_t offset, const char* what, bool may_be_missing) {
  if (offset == 0 && may_be_missing) return {};
  if (offset < header || offset >= bytes || offset % kCacheLine != 0) {
    throw Error(Status::kInvalid, std::string(what) + ": offset " + std::to_string(offset) + " in a block of " +
                                      std::to_string(bytes) + " bytes");
  }
  return {static_cast<std::byte*>(block) + offset, bytes - offset};
}

}  // namespace

Segment StatusBlock::make(bool shared) {
  return make_block<StatusBlock>("pathways-status", shared, Segment::Others::kRead);
}

StatusBlock* StatusBlock::attach(Segment& segment) {
  return attach_block<StatusBlock>(segment.data(), segment.size(), "status");
}

Segment BellBlock::make(bool shared) { return make_block<BellBlock>("pathways-bell", shared); }

BellBlock* BellBlock::attach(Segment& segment) {
  return attach_block<BellBlock>(segment.data(), segment.size(), "bell");
}

Segment ControllerBlock::make(bool shared) { return make_block<ControllerBlock>("pathways-controller", shared); }

ControllerBlock* ControllerBlock::attach(Segment& segment) {
  return attach_block<ControllerBlock>(segment.data(), segment.size(), "controller");
}

void StatusBlock::set_status(ClusterStatus next, std::string_view why) {
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
  const size_t link_bytes = sizes.link_ring_bytes == 0 ? 0 : ByteRing::bytes_for(sizes.link_ring_bytes);
  const uint64_t to_link = sizes.link_ring_bytes == 0 ? 0 : layout.take(link_bytes);
  const uint64_t from_link = sizes.link_ring_bytes == 0 ? 0 : layout.take(link_bytes);
  const uint64_t arena = sizes.arena_bytes == 0 ? 0 : layout.take(sizes.arena_bytes, kPage);
  Segment segment = make_segment("pathways-host-" + std::to_string(host), layout.bytes(), shared);
  auto* block = new (segment.data()) HostBlock{};
  block->magic = kMagic;
  block->host = host;
  block->first_peer = sizes.first_peer;
  block->peers = from_peers == 0 ? 0 : hosts;
  block->from_controller = from_controller;
  block->to_controller = to_controller;
  block->from_peers = from_peers;
  block->peer_stride = stride;
  block->arena = arena;
  block->to_link = to_link;
  block->from_link = from_link;
  ByteRing::create(segment.data() + from_controller, sizes.ring_bytes);
  ByteRing::create(segment.data() + to_controller, sizes.ring_bytes);
  for (const uint64_t ring : {to_link, from_link}) {
    if (ring != 0) ByteRing::create(segment.data() + ring, sizes.link_ring_bytes);
  }
  for (uint32_t peer = 0; peer < block->peers; ++peer) {
    ByteRing::create(segment.data() + from_peers + peer * stride, sizes.peer_ring_bytes);
  }
  if (arena != 0) Arena::create(segment.data() + arena, sizes.arena_bytes);
  return segment;
}

HostBlock* HostBlock::attach(Segment& segment) {
  return attach_block<HostBlock>(segment.data(), segment.size(), "host");
}

HostView::HostView(void* memory, size_t bytes) : block_(attach_block<HostBlock>(memory, bytes, "host")) {
  struct Offsets {
    uint32_t host, first_peer, peers;
    uint64_t from_controller, to_controller, from_peers, peer_stride, arena, to_link, from_link;
  } header;
  static_assert(offsetof(HostBlock, doorbell) >= offsetof(HostBlock, host) + sizeof header);
  copy_once(&header, &block_->host, sizeof header);
  const auto part = [&](uint64_t offset, const char* what, bool may_be_missing) {
    return part_of(memory, bytes, sizeof(HostBlock), offset, what, may_be_missing);
  };
  from_controller_ = part(header.from_controller, "ring from the controller", false);
  to_controller_ = part(header.to_controller, "ring to the controller", false);
  from_peers_ = part(header.from_peers, "rings from peers", true);
  to_link_ = part(header.to_link, "ring to the link", true);
  from_link_ = part(header.from_link, "ring from the link", true);
  if (from_peers_.is_there()) {
    first_peer_ = header.first_peer;
    peers_ = header.peers;
    peer_stride_ = header.peer_stride;
    if (peers_ == 0 || peer_stride_ < ByteRing::bytes_for(ByteRing::kMinCapacity) || peer_stride_ % kCacheLine != 0 ||
        peer_stride_ > from_peers_.room / peers_) {
      throw Error(Status::kInvalid, "rings from peers: " + std::to_string(peers_) + " of " +
                                        std::to_string(peer_stride_) + " bytes do not fit");
    }
    peer_ring_bytes_ = from(first_peer_).ring()->capacity();
    if (ByteRing::bytes_for(peer_ring_bytes_) > peer_stride_) throw Error(Status::kInvalid, "rings from peers overlap");
  }
  if (const BlockPart arena = part(header.arena, "arena", true); arena.is_there()) {
    arena_ = ArenaView(arena.at, arena.room);
  }
}

BlockPart HostView::from(uint32_t peer) const {
  if (!has_ring_from(peer)) throw Error(Status::kInvalid, "no ring from host " + std::to_string(peer));
  return {from_peers_.at + (peer - first_peer_) * peer_stride_, peer_stride_};
}

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

ClientBlock* ClientBlock::attach(Segment& segment) {
  return attach_block<ClientBlock>(segment.data(), segment.size(), "client");
}

ClientView::ClientView(void* memory, size_t bytes) : block_(attach_block<ClientBlock>(memory, bytes, "client")) {
  struct Offsets {
    uint64_t to_controller, cancels, from_controller, table, read_back, arena;
  } header;
  static_assert(offsetof(ClientBlock, arena) == offsetof(ClientBlock, to_controller) + offsetof(Offsets, arena));
  copy_once(&header, &block_->to_controller, sizeof header);
  const auto part = [&](uint64_t offset, const char* what, bool may_be_missing) {
    return part_of(memory, bytes, sizeof(ClientBlock), offset, what, may_be_missing);
  };
  to_controller_ = part(header.to_controller, "ring to the controller", false);
  from_controller_ = part(header.from_controller, "ring from the controller", false);
  cancels_ = part(header.cancels, "ring of cancels", false);
  (void)to_controller_.ring();
  (void)cancels_.ring();
  (void)from_controller_.ring();
  const BlockPart table = part(header.table, "future table", false);
  futures_ = FutureView(table.at, table.room);
  if (const BlockPart area = part(header.read_back, "read-back area", true); area.is_there()) {
    read_back_ = ReadBackView(area.at, area.room);
  }
  if (const BlockPart arena = part(header.arena, "arena", true); arena.is_there()) {
    arena_ = ArenaView(arena.at, arena.room);
  }
}

void ClientView::tell_retired(uint64_t count) const {
  // SYNC client/retired: pairs with Client::in_flight(); SYNC client/wanted: see Client::wait_room().
  retired().store(count, std::memory_order_seq_cst);
  uint64_t waits_for = wanted().load(std::memory_order_seq_cst);
  if (waits_for == 0 || count < waits_for) return;
  (void)wanted().compare_exchange(waits_for, 0, std::memory_order_relaxed, std::memory_order_relaxed);
  futures().doorbell().ring();
}

}  // namespace pathways
