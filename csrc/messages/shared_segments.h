/// The shared memory of a cluster: blocks, each mapped only by the processes that must write or read it.
///
/// Each block begins with a header of fixed width. Everything behind the header is found by offsets, so each process
/// may map the block anywhere, and the same layout serves the heap when all parts of the cluster are one process. A
/// block's doorbell belongs to the process that the block is named after: a process that publishes to it rings there.
///
///   controller   doorbell, which hosts' rings have records                             controller and hosts
///   status       status of the cluster, and the text of its failure                 controller; clients only read
///   bell c       the controller's doorbell for client c                             controller and client c
///   host h       doorbell, rings controller -> h, h -> controller and g -> h for
///                each host g of its machine, arena; if its machine has a link: rings
///                h -> hosts beyond it, these -> h                                   controller and hosts
///   client c     rings c -> controller (and one for cancels, which overtake what
///                waits in the other), controller -> c, counters, future table (with
///                c's doorbell), read-back area, arena                               client c, controller and hosts
///
/// TRUST-1: so a client can write nothing that another client reads. A client can write its own block and bell; these
/// are data to every other process. HostView and ClientView copy the offsets out of a header once, and check them
/// against the mapped size. A process that is not a block's owner uses the block through such a view only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/copy_once.h"
#include "futures/future_table.h"
#include "futures/read_back.h"
#include "memory/arena.h"
#include "memory/segment.h"
#include "messages/ready_bitmap.h"
#include "sync/atomic.h"
#include "sync/byte_ring.h"
#include "sync/doorbell.h"

namespace pathways {

enum class ClusterStatus : uint32_t { kUp = 0, kFailed = 1, kClosed = 2 };

/// What clients read about the controller. Its segment is sealed: a process that attaches it maps it read-only.
struct StatusBlock {
  static constexpr uint64_t kMagic = 0x5057535441545553ULL;
  static constexpr size_t kTextBytes = 8192;
  uint64_t magic = kMagic;
  Atomic<uint32_t> status;     ///< ClusterStatus; leaves kUp only once
  Atomic<uint32_t> is_traced;  ///< 1: clients say when they submit a run (kRunHasSubmitted)
  uint32_t text_bytes = 0;     ///< written before `status`
  char text[kTextBytes] = {};

  static Segment make(bool shared);
  static StatusBlock* attach(Segment& segment);
  ClusterStatus cluster_status() const {
    // SYNC cluster/status: pairs with set_status().
    return static_cast<ClusterStatus>(status.load(std::memory_order_acquire));
  }
  void set_status(ClusterStatus status, std::string_view text);
  std::string failure() const { return std::string(text, std::min<size_t>(copied_once(text_bytes), kTextBytes)); }
};

/// The doorbell that one client rings for the controller, alone in its segment.
struct BellBlock {
  static constexpr uint64_t kMagic = 0x505742454c4c3031ULL;
  uint64_t magic = kMagic;
  DoorbellWord doorbell{};

  static Segment make(bool shared);
  static BellBlock* attach(Segment& segment);
};

struct ControllerBlock {
  static constexpr uint64_t kMagic = 0x5057434f4e54524cULL;
  uint64_t magic = kMagic;
  int64_t distance_ns = 0;  ///< delay of records between controller and hosts, as if they were far
                            ///< apart; for measurement; written before anybody else attaches
  DoorbellWord doorbell{};
  ReadyBitmap ready_bitmap{};  ///< hosts whose ring to the controller has records
  StatusBlock status{};  ///< for clients in the controller's own process; other clients have one in a sealed segment

  static Segment make(bool shared);
  static ControllerBlock* attach(Segment& segment);
  ClusterStatus cluster_status() const { return status.cluster_status(); }
  std::string failure() const { return status.failure(); }
};

struct HostBlock {
  static constexpr uint64_t kMagic = 0x5057484f53540001ULL;
  uint64_t magic;
  uint32_t host;
  uint32_t first_peer, peers;  ///< rings from so many hosts, whose numbers begin with the first one
  /// Offsets in the block; 0: none.
  uint64_t from_controller, to_controller, from_peers, peer_stride, arena, to_link, from_link;
  DoorbellWord doorbell;
  Atomic<uint64_t> pulse;  ///< the host counts it up (host/pulse.h); its agent looks whether it still does

  struct Sizes {
    uint32_t ring_bytes = 1u << 20;
    uint32_t peer_ring_bytes = 1u << 16;    ///< 0: no rings between hosts
    size_t arena_bytes = size_t{64} << 20;  ///< 0: no arena
    uint32_t link_ring_bytes = 0;           ///< of the rings to and from the machine's link; 0: none
    uint32_t first_peer = 0;                ///< the first host that shares memory with this one
  };
  /// `hosts`: so many share memory with each other, `host` among them. One alone has no rings from others.
  static Segment make(uint32_t host, uint32_t hosts, Sizes sizes, bool shared);
  static HostBlock* attach(Segment& segment);
  /// For the block's owner, which trusts its own header.
  ByteRing* ring_from_controller() { return ring(from_controller); }
  ByteRing* ring_to_controller() { return ring(to_controller); }
  ByteRing* ring_from(uint32_t peer) { return ring(from_peers + (peer - first_peer) * peer_stride); }
  Arena* host_arena() { return Arena::attach(reinterpret_cast<std::byte*>(this) + arena); }

 private:
  ByteRing* ring(uint64_t offset) { return ByteRing::attach(reinterpret_cast<std::byte*>(this) + offset); }
};

/// A part of a block, and the number of bytes mapped from there on.
struct BlockPart {
  std::byte* at = nullptr;
  size_t room = 0;

  bool is_there() const { return at != nullptr; }
  ByteRing* ring() const { return ByteRing::attach(at, room); }
  ByteRing::Producer producer() const { return ring()->claim_producer(room); }
  ByteRing::Consumer consumer() const { return ring()->claim_consumer(room); }
};

/// A host's block, for every process but its owner (TRUST-1). A value; the segment must outlive it.
class HostView {
 public:
  HostView() = default;
  /// Throws Error(kInvalid) when `bytes` of `memory` hold no host's block, or a block with parts outside of them.
  HostView(void* memory, size_t bytes);
  explicit HostView(Segment& segment) : HostView(segment.data(), segment.size()) {}
  /// For a block that this process made itself. nullptr: none.
  HostView(HostBlock* own) : HostView() {  // NOLINT(google-explicit-constructor)
    if (own != nullptr) *this = HostView(own, SIZE_MAX - reinterpret_cast<uintptr_t>(own));
  }

  bool is_there() const { return block_ != nullptr; }
  DoorbellWord* doorbell() const { return &block_->doorbell; }
  ByteRing::Producer to_host() const { return from_controller_.producer(); }
  ByteRing::Consumer from_host() const { return to_controller_.consumer(); }
  /// The other ends of these rings, which the host itself uses.
  ByteRing::Consumer inbox() const { return from_controller_.consumer(); }
  ByteRing::Producer outgoing() const { return to_controller_.producer(); }
  uint32_t peers() const { return peers_; }
  bool has_ring_from(uint32_t peer) const { return peer - first_peer_ < peers_; }
  /// The ring from `peer`. Throws Error(kInvalid) when there is none.
  BlockPart from(uint32_t peer) const;
  /// Capacity of the ring from another host, in bytes: see ByteRing::bytes_for. 0: no rings between hosts.
  uint32_t peer_ring_bytes() const { return peer_ring_bytes_; }
  /// The rings to and from the hosts beyond the machine's link; is_there() is false when the machine has no link.
  const BlockPart& to_link() const { return to_link_; }
  const BlockPart& from_link() const { return from_link_; }
  /// Its is_there() is false when the host has no arena.
  const ArenaView& arena() const { return arena_; }
  HostBlock* block() const { return block_; }

 private:
  HostBlock* block_ = nullptr;
  BlockPart from_controller_, to_controller_, from_peers_, to_link_, from_link_;
  uint64_t peer_stride_ = 0;
  uint32_t first_peer_ = 0, peers_ = 0, peer_ring_bytes_ = 0;
  ArenaView arena_;
};

struct ClientBlock {
  static constexpr uint64_t kMagic = 0x5057434c49454e54ULL;
  uint64_t magic;
  uint64_t to_controller, cancels, from_controller, table, read_back, arena;  ///< offsets in the block; 0: none
  alignas(kCacheLine) Atomic<uint64_t> retired;  ///< runs over on all their hosts; the controller writes it
  Atomic<uint64_t> wanted;          ///< the controller rings and clears it when `retired` reaches it; 0: nobody waits
  Atomic<uint64_t> delivered;       ///< records published to the client; the controller writes it, before it rings
  Atomic<uint64_t> kept_elsewhere;  ///< bytes of the client's blocks that another machine keeps; its link writes it

  struct Sizes {
    uint32_t futures = 1u << 16;
    uint32_t ring_bytes = 1u << 20;
    size_t arena_bytes = size_t{64} << 20;
    bool has_read_back = true;
  };
  static Segment make(Sizes sizes, bool shared);
  static ClientBlock* attach(Segment& segment);
  /// For the client itself, which trusts its own header.
  ByteRing* ring_to_controller() { return ring(to_controller); }
  ByteRing* ring_of_cancels() { return ring(cancels); }
  ByteRing* ring_from_controller() { return ring(from_controller); }
  FutureTable* futures() { return FutureTable::attach(reinterpret_cast<std::byte*>(this) + table); }
  /// nullptr: the client has none.
  ReadBackArea* read_back_area() {
    return read_back == 0 ? nullptr : ReadBackArea::attach(reinterpret_cast<std::byte*>(this) + read_back);
  }
  Arena* client_arena() { return Arena::attach(reinterpret_cast<std::byte*>(this) + arena); }

 private:
  ByteRing* ring(uint64_t offset) { return ByteRing::attach(reinterpret_cast<std::byte*>(this) + offset); }
};

/// A client's block, for the controller and the hosts (TRUST-1). A value; the segment must outlive it.
class ClientView {
 public:
  ClientView() = default;
  /// Throws Error(kInvalid) when `bytes` of `memory` hold no client's block, or a block with parts outside of them.
  ClientView(void* memory, size_t bytes);
  explicit ClientView(Segment& segment) : ClientView(segment.data(), segment.size()) {}
  /// For a block that this process made itself.
  ClientView(ClientBlock* own)  // NOLINT(google-explicit-constructor)
      : ClientView(own, SIZE_MAX - reinterpret_cast<uintptr_t>(own)) {}

  bool is_there() const { return block_ != nullptr; }
  ByteRing::Consumer from_client() const { return to_controller_.consumer(); }
  ByteRing::Consumer cancels() const { return cancels_.consumer(); }
  ByteRing::Producer to_client() const { return from_controller_.producer(); }
  const FutureView& futures() const { return futures_; }
  /// Its is_there() is false when the client has no read-back area. The same holds for the arena.
  const ReadBackView& read_back() const { return read_back_; }
  const ArenaView& arena() const { return arena_; }
  /// Says that so many runs of the client are over, and wakes the client when it waits for that.
  void tell_retired(uint64_t count) const;
  Atomic<uint64_t>& retired() const { return block_->retired; }
  Atomic<uint64_t>& wanted() const { return block_->wanted; }
  Atomic<uint64_t>& delivered() const { return block_->delivered; }
  Atomic<uint64_t>& kept_elsewhere() const { return block_->kept_elsewhere; }

 private:
  ClientBlock* block_ = nullptr;
  BlockPart to_controller_, cancels_, from_controller_;
  FutureView futures_;
  ReadBackView read_back_;
  ArenaView arena_;
};

}  // namespace pathways
