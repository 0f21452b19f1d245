#include "link/client_twin.h"

#include <algorithm>
#include <utility>

namespace pathways {

ClientTwin::ClientTwin(Segment segment) : segment_(std::move(segment)) {
  arena_ = ArenaTwin(ClientBlock::attach(segment_)->client_arena(), ClientView(segment_).arena().bytes());
}

void ClientTwin::mirror(const LeaseFrame& lease, std::span<const uint32_t> hosts, uint64_t stamp) {
  if (arena_.mirror(lease.offset, lease.bytes, hosts, lease.lease, stamp) && lease.token != 0) {
    fetches_[lease.token] = {{lease.offset, lease.bytes, lease.lease}, hosts.size()};
  }
}

std::optional<ClientTwin::Fetched> ClientTwin::settle(uint64_t token, bool is_done) {
  const auto fetch = fetches_.find(token);
  if (fetch == fetches_.end() || --fetch->second.left != 0) return std::nullopt;
  const Fetched block = fetch->second.block;
  fetches_.erase(fetch);
  return is_done ? std::optional(block) : std::nullopt;
}

std::vector<ArenaTwin::Returned> ClientTwin::take_returned(std::optional<uint64_t> sent) {
  return arena_.take_returned([&](const ArenaTwin::Returned& block) {
    return sent == block.lease ||
           std::ranges::any_of(fetches_, [&](const auto& fetch) { return fetch.second.block.lease == block.lease; });
  });
}

}  // namespace pathways
