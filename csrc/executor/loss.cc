/// The executor's half of lost hosts (ERR-2): what will never come is not waited for, and what is missing says why.
///
/// Hosts hear of a loss behind every run that they were granted together with the lost host. So each exchange with it
/// is prepared, and what it did not post or write by now it never will. Its ready_receives are forgotten: they name
/// memory that its successor uses otherwise; and nothing of those runs is said to its successor.
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
    lost_peers_.erase(host);  // runs to come know its successor
  }
  drain();
}

/// What a dead host announced and nothing was begun to be written to; of others' sends it hears no more.
void Executor::forget_receives(uint64_t key, uint32_t host) {
  const auto at = exchanges_.find(key);
  if (at == exchanges_.end()) return;
  Exchange& exchange = at->second;
  const auto is_its = [&](const ReceiveBuffers& ready) { return ready.source == host; };
  if (!exchange.is_prepared) {  // of a run that this host refused, or of one to come: then others have announced too
    std::erase_if(exchange.ready_receives, is_its);
    std::erase(exchange.announced, host);
    if (exchange.ready_receives.empty()) exchanges_.erase(at);
    return;
  }
  exchange.dead.push_back(host);
  if (std::erase_if(exchange.ready_receives, is_its) != 0) end_send(key, host, true, {});
}

void Executor::set_predecessor_failure(std::string text, uint32_t youngest_client) {
  predecessor_failure_ = std::move(text);
  predecessor_client_ = youngest_client;
}

/// What to say of a buffer that is not here.
std::string Executor::missing(uint32_t client, std::string_view otherwise) const {
  return predecessor_failure_.empty() || client > predecessor_client_ ? std::string(otherwise) : predecessor_failure_;
}

}  // namespace pathways
