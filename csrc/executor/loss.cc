/// The executor's half of lost hosts (ERR-2): what will never come is not waited for, and what is missing says why.
///
/// Hosts hear of a loss behind every run that they were granted together with the lost host. So each exchange with it
/// is prepared, and what it did not post or write by now it never will. Its posts are forgotten: they name memory that
/// its successor uses otherwise.
#include <algorithm>

#include "executor/executor.h"

namespace pathways {
namespace {

bool has(std::span<const uint32_t> hosts, uint32_t host) {
  return std::find(hosts.begin(), hosts.end(), host) != hosts.end();
}

}  // namespace

void Executor::on_hosts_lost(std::span<const uint32_t> hosts, std::string_view text) {
  if (!held_.empty()) release_held();
  std::vector<uint64_t> keys;
  keys.reserve(exchanges_.size());
  for (const auto& [key, exchange] : exchanges_) keys.push_back(key);
  std::sort(keys.begin(), keys.end());  // in the order of the runs
  for (const uint64_t key : keys) lose_peers(key, hosts, text);
  drain();
}

void Executor::lose_peers(uint64_t key, std::span<const uint32_t> hosts, std::string_view text) {
  const auto at = exchanges_.find(key);
  if (at == exchanges_.end()) return;
  Exchange& exchange = at->second;
  std::erase_if(exchange.posts, [&](const Landing& post) { return has(hosts, post.source); });
  if (!exchange.is_prepared) {  // of a run that this host refused, or of one to come: then others have posted too
    if (exchange.posts.empty()) exchanges_.erase(key);
    return;
  }
  const Plan& plan = runs_[exchange.run]->plan->plan;
  const NodeRecord& node = plan.node(exchange.node);
  for (const uint32_t host : plan.destinations(node)) {
    if (!has(hosts, host) || has(exchange.sent, host)) continue;
    --exchange.sends_left;
    exchange.sent.push_back(host);
  }
  uint32_t missing = 0;
  for (const uint32_t host : plan.sources(node)) {
    if (!has(hosts, host) || has(exchange.arrived, host)) continue;
    ++missing;
    exchange.arrived.push_back(host);
  }
  if (missing != 0) {
    if (exchange.receive_error == 0) exchange.receive_error = new_error(std::string(text));
    give_up_room(key);
    exchange.arrivals_left -= missing;
    if (exchange.arrivals_left == 0) receive_done(key);
  }
  try_send(key);
  finish_exchange(key);
}

/// A receive that fails before it found room: its other sources hear from us, with nowhere to write.
void Executor::give_up_room(uint64_t key) {
  const auto at = std::find(stalled_receives_.begin(), stalled_receives_.end(), key);
  if (at == stalled_receives_.end()) return;
  stalled_receives_.erase(at);
  Exchange& exchange = exchanges_.at(key);
  const Run& run = *runs_[exchange.run];
  const NodeRecord& node = run.plan->plan.node(exchange.node);
  for (const uint32_t source : run.plan->plan.sources(node)) {
    if (has(exchange.arrived, source)) continue;
    if (source == options_.host) {
      exchange.posts.push_back({source, {}});
    } else {
      link_.post(source, run.order, node.global_node, {});
    }
  }
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
