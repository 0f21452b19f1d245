/// The executor's part of lost hosts (ERR-2): nothing waits for a lost host, and what is missing fails with the reason.
///
/// A host is notified of a loss after every run that it was granted together with the lost host. So each exchange with
/// the lost host is prepared, and what the lost host has not announced or written by now, it never will. The receives
/// that it announced are forgotten, because they name memory that its successor uses for other things. The successor is
/// told nothing of those runs.
#include <algorithm>

#include "executor/executor.h"

namespace pathways {

void Executor::on_hosts_lost(std::span<const uint32_t> hosts, std::string_view text) {
  if (!held_.empty()) release_held();
  for (const uint32_t host : hosts) {
    lost_peers_.insert_or_assign(host, Lost{std::string(text), LostPeer::kDead});
    std::vector<uint64_t> keys;
    keys.reserve(exchanges_.size());
    for (const auto& [key, exchange] : exchanges_) keys.push_back(key);
    std::sort(keys.begin(), keys.end());  // in the order of the runs
    for (const uint64_t key : keys) {
      forget_receives(key, host);
      miss_peer(key, host, true);
    }
    lost_peers_.erase(host);  // later runs use its successor
  }
  drain();
}

/// Forgets the receives that a dead host announced and to which nothing is being written. The host is not notified of
/// the ends of other sends.
void Executor::forget_receives(uint64_t key, uint32_t host) {
  const auto at = exchanges_.find(key);
  if (at == exchanges_.end()) return;
  Exchange& exchange = at->second;
  const auto is_its = [&](const ReceiveBuffers& ready) { return ready.source == host; };
  if (!exchange.is_prepared) {  // a refused run, or a later one: keeps what other hosts announced
    std::erase_if(exchange.ready_receives, is_its);
    std::erase(exchange.announced, host);
    if (exchange.ready_receives.empty()) exchanges_.erase(at);
    return;
  }
  exchange.dead.push_back(host);
  if (std::erase_if(exchange.ready_receives, is_its) != 0) end_send(key, host, true, {});
}

}  // namespace pathways
