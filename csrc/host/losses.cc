/// How a host loses its peers, and gets their successors (ERR-2).
///
/// A ring from a peer lies in this host's block, so it outlives the peer. This host takes in what the lost peer
/// published, and then makes the ring anew for the successor. The controller starts a successor that has such rings
/// only after every host has done so. So nobody else uses the ring meanwhile.
///
/// A successor beyond the link shares no memory with this host, and nobody waits for this host. It is open before a run
/// is taken that needs it, because the run comes after the loss in the order. What it says before is kept (Peers).
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
  (void)peers_.drain();
  for (const uint32_t peer : lost) peers_.lose(peer);
  losses_ = record.loss;
  executor_.on_hosts_lost(lost, {text, record.bytes});
  open_peers();
}

void Host::open_peer(uint32_t peer, const HostView& block, int32_t epoch, uint64_t loss) {
  peers_.check(peer, block, epoch);
  if (!block.is_there()) peers_.expect(peer, epoch);
  mailbox_.post([this, next = Opening{peer, block, epoch, loss}] {
    openings_.push_back(next);
    open_peers();
  });
}

void Host::open_peers() {
  std::erase_if(openings_, [&](const Opening& next) {
    const bool is_near = next.block.is_there();
    if (next.loss > losses_ || (is_near && executor_.sends_under_way(next.peer) != 0)) return false;
    executor_.peer_opens(next.peer, next.epoch);
    peers_.replace(next.peer, next.block, next.epoch);
    // SYNC host/replaced: pairs with peers_replaced().
    if (is_near) peers_replaced_.fetch_add(1, std::memory_order_release);
    return true;
  });
}

}  // namespace pathways
