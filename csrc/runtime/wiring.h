/// What the processes of a cluster share: one block of memory each for the controller, every host and every client.
///
/// Each block begins with a header of fixed width; everything behind it is found by offsets, so each process may map it
/// anywhere, and the same layout serves the heap when all of them are one process. A block's doorbell belongs to the
/// process that the block is named after: whoever publishes to it rings there.
///
///   controller   doorbell, status of the cluster and the text of its failure, which hosts' rings have news
///   host h       doorbell, rings controller -> h, h -> controller and g -> h for each other host g, arena
///   client c     rings c -> controller (and one for cancels, which pass what waits in the other), controller -> c,
///                counters, future table (with c's doorbell), read-back area, arena
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "channel/news_board.h"
#include "futures/future_table.h"
#include "futures/read_back.h"
#include "memory/arena.h"
#include "memory/segment.h"
#include "sync/atomic.h"
#include "sync/byte_ring.h"
#include "sync/doorbell.h"

namespace pathways {

enum class ClusterStatus : uint32_t { kUp = 0, kFailed = 1, kClosed = 2 };

struct ControllerBlock {
  static constexpr uint64_t kMagic = 0x5057434f4e54524cULL;
  static constexpr size_t kTextBytes = 8192;
  uint64_t magic;
  Atomic<uint32_t> status;  ///< ClusterStatus; leaves kUp once
  uint32_t text_bytes;      ///< written before `status`
  int64_t distance_ns;  ///< how long records between controller and hosts are on their way, as if they were far apart;
                        ///< for measurement; written before anybody else attaches
  DoorbellWord doorbell;
  NewsBoard news;  ///< hosts whose ring to the controller has records
  char text[kTextBytes];

  static Segment make(bool shared);
  static ControllerBlock* attach(Segment& segment);
  ClusterStatus cluster_status() const {
    // SYNC cluster/status: pairs with set_status().
    return static_cast<ClusterStatus>(status.load(std::memory_order_acquire));
  }
  void set_status(ClusterStatus status, std::string_view text);
  std::string failure() const { return std::string(text, text_bytes); }
};

struct HostBlock {
  static constexpr uint64_t kMagic = 0x5057484f53540001ULL;
  uint64_t magic;
  uint32_t host;
  uint32_t peers;  ///< rings from other hosts: 0, or as many as the cluster has hosts
  uint64_t from_controller, to_controller, from_peers, peer_stride, arena;  ///< offsets in the block; 0: none
  DoorbellWord doorbell;

  struct Sizes {
    uint32_t ring_bytes = 1u << 20;
    uint32_t peer_ring_bytes = 1u << 16;    ///< 0: no rings between hosts
    size_t arena_bytes = size_t{64} << 20;  ///< 0: no arena
  };
  static Segment make(uint32_t host, uint32_t hosts, Sizes sizes, bool shared);
  static HostBlock* attach(Segment& segment);
  ByteRing* ring_from_controller() { return ring(from_controller); }
  ByteRing* ring_to_controller() { return ring(to_controller); }
  ByteRing* ring_from(uint32_t peer) { return ring(from_peers + peer * peer_stride); }
  Arena* host_arena() { return Arena::attach(reinterpret_cast<std::byte*>(this) + arena); }

 private:
  ByteRing* ring(uint64_t offset) { return ByteRing::attach(reinterpret_cast<std::byte*>(this) + offset); }
};

struct ClientBlock {
  static constexpr uint64_t kMagic = 0x5057434c49454e54ULL;
  uint64_t magic;
  uint64_t to_controller, cancels, from_controller, table, read_back, arena;  ///< offsets in the block; 0: none
  alignas(kCacheLine) Atomic<uint64_t> retired;  ///< runs over on all their hosts; the controller writes
  Atomic<uint64_t> wanted;  ///< ring the doorbell when `retired` reaches it, and clear it; 0: nobody waits
  Atomic<uint64_t> told;    ///< records published to the client; the controller writes, before it rings

  struct Sizes {
    uint32_t futures = 1u << 16;
    uint32_t ring_bytes = 1u << 20;
    size_t arena_bytes = size_t{64} << 20;
    bool has_read_back = true;
  };
  static Segment make(Sizes sizes, bool shared);
  static ClientBlock* attach(Segment& segment);
  ByteRing* ring_to_controller() { return ring(to_controller); }
  ByteRing* ring_of_cancels() { return ring(cancels); }
  ByteRing* ring_from_controller() { return ring(from_controller); }
  FutureTable* futures() { return FutureTable::attach(reinterpret_cast<std::byte*>(this) + table); }
  /// nullptr: it has none.
  ReadBackArea* read_back_area() {
    return read_back == 0 ? nullptr : ReadBackArea::attach(reinterpret_cast<std::byte*>(this) + read_back);
  }
  Arena* client_arena() { return Arena::attach(reinterpret_cast<std::byte*>(this) + arena); }

 private:
  ByteRing* ring(uint64_t offset) { return ByteRing::attach(reinterpret_cast<std::byte*>(this) + offset); }
};

}  // namespace pathways
