/// The executor's half of lost hosts (ERR-2): what will never come is not waited for, and what is missing says why.
///
/// Hosts hear of a loss behind every run that they were granted together with the lost host. So each exchange with it
/// is prepared, and what it did not post or write by now it never will. Its posts are forgotten: they name memory that
/// its successor uses otherwise; and nothing of those runs is said to its successor.
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
      forget_posts(key, host);
      miss_peer(key, host, true);
    }
    lost_peers_.erase(host);  // runs to come know its successor
  }
  drain();
}

/// What a dead host posted and nothing was begun to be written to; of others' sends it hears no more.
void Executor::forget_posts(uint64_t key, uint32_t host) {
  const auto at = exchanges_.find(key);
  if (at == exchanges_.end()) return;
  Exchange& exchange = at->second;
  const auto is_its = [&](const Landing& post) { return post.source == host; };
  if (!exchange.is_prepared) {  // of a run that this host refused, or of one to come: then others have posted too
    std::erase_if(exchange.posts, is_its);
    std::erase(exchange.posted, host);
    if (exchange.posts.empty()) exchanges_.erase(at);
    return;
  }
  exchange.dead.push_back(host);
  if (std::erase_if(exchange.posts, is_its) != 0) end_send(key, host, true, {});
}

void Executor::set_past(std::string text, uint32_t youngest_client) {
  past_ = std::move(text);
  past_client_ = youngest_client;
}

/// What to say of a buffer that is not here.
std::string Executor::missing(uint32_t client, std::string_view otherwise) const {
  return past_.empty() || client > past_client_ ? std::string(otherwise) : past_;
}

}  // namespace pathways
