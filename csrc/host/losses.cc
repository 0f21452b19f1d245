/// How a host loses its peers, and gets their successors (ERR-2).
///
/// The ring from a peer lies in this host's block, so it outlives the peer. This host takes in what the lost peer
/// published, and then makes the ring anew for the successor. The controller starts a successor only after every host
/// has done so. So nobody else uses the ring meanwhile.
#include <cstring>

#include "base/status.h"
#include "host/host.h"

namespace pathways {

void Host::lose_peers(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(HostLostRecord)) throw Error(Status::kInvalid, "the controller sent a short loss");
  const auto record = read_record<HostLostRecord>(bytes);
  const uint64_t expected = sizeof record + padded(uint64_t{record.hosts} * 4) + padded(uint64_t{record.bytes});
  if (bytes.size() != expected) throw Error(Status::kInvalid, "the controller sent a loss of the wrong size");
  std::vector<uint32_t> lost(record.hosts);
  if (!lost.empty()) std::memcpy(lost.data(), bytes.data() + sizeof record, lost.size() * sizeof(uint32_t));
  const auto* text = reinterpret_cast<const char*>(bytes.data() + sizeof record + padded(record.hosts * 4));
  if (!far_.empty()) (void)drain_far();
  for (const uint32_t peer : lost) {
    if (peer >= from_peers_.size()) continue;  // there are no rings between hosts
    if (is_far(peer)) far_[peer] = kAbsent;
    (void)drain_peer(peer);
    from_peers_[peer] = ByteRing::Consumer();
    to_peers_[peer] = Outbox();
    partial_words_[peer].clear();
  }
  losses_ = record.loss;
  executor_.on_hosts_lost(lost, {text, record.bytes});
  replace_peers();
}

void Host::replace_peer(uint32_t peer, const HostView& block, uint64_t loss) {
  if (peer >= to_peers_.size() || peer == options_.host) {
    throw Error(Status::kInvalid, "host " + std::to_string(options_.host) + " has no peer " + std::to_string(peer));
  }
  mailbox_.post([this, peer, block, loss] {
    replacements_.push_back({peer, block, kNear, loss});
    replace_peers();
  });
}

void Host::replace_far_peer(uint32_t peer, int32_t incarnation, uint64_t loss) {
  if (!is_far(peer) || incarnation < 0) {
    throw Error(Status::kInvalid, "host " + std::to_string(options_.host) + " has no peer " + std::to_string(peer) +
                                      " on another machine, or it has no incarnation " + std::to_string(incarnation));
  }
  mailbox_.post([this, peer, incarnation, loss] {
    replacements_.push_back({peer, HostView(), incarnation, loss});
    replace_peers();
  });
}

void Host::replace_peers() {
  std::erase_if(replacements_, [&](const Replacement& next) {
    if (next.loss > losses_ || executor_.sends_under_way(next.peer) != 0) return false;
    if (next.incarnation == kNear) {
      from_peers_[next.peer] = ByteRing::Consumer();
      const BlockPart ring = own_.from(next.peer);
      ByteRing::create(ring.at, own_.peer_ring_bytes());
      from_peers_[next.peer] = ring.consumer();
      to_peers_[next.peer] = Outbox(next.block.from(options_.host).producer(), next.block.doorbell());
      to_peers_[next.peer].set_distance(distance_ns_, options_.clock);
    } else {
      far_[next.peer] = next.incarnation;
      closed_far_[next.peer] = false;
    }
    partial_words_[next.peer].clear();
    if (next.incarnation != kNear && !far_fault_.empty()) close_peer(next.peer, far_fault_);
    // SYNC host/replaced: pairs with peers_replaced().
    peers_replaced_.fetch_add(1, std::memory_order_release);
    return true;
  });
}

}  // namespace pathways
