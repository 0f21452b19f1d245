#include "ledger/task_holds.h"

#include <algorithm>

#include "base/check.h"

namespace pathways {

uint64_t TaskHolds::begin(uint32_t client, BlockId block, std::span<const uint32_t> hosts) {
  admission_.share(block);
  holds_.emplace(++last_, Hold{client, block, {hosts.begin(), hosts.end()}});
  ++clients_[client].holds;
  return last_;
}

bool TaskHolds::over(uint64_t number, uint32_t host) {
  const auto found = holds_.find(number);
  if (found == holds_.end() || std::erase(found->second.hosts, host) == 0) return false;
  if (found->second.hosts.empty()) end(number);
  return true;
}

void TaskHolds::host_lost(uint32_t host, const std::unordered_set<uint64_t>& waiting) {
  std::vector<uint64_t> ended;
  for (auto& [number, hold] : holds_) {
    if (!waiting.contains(number) && std::erase(hold.hosts, host) != 0 && hold.hosts.empty()) ended.push_back(number);
  }
  for (const uint64_t number : ended) end(number);
}

void TaskHolds::end(uint64_t number) {
  const auto found = holds_.find(number);
  if (found == holds_.end()) return;
  const uint32_t id = found->second.client;
  admission_.release(found->second.block);
  admission_.touch();  // a record that has waited for the end of the hold may have to be refused now
  holds_.erase(found);
  const auto client = clients_.find(id);
  if (--client->second.holds != 0) return;
  if (client->second.is_gone) admission_.forget(id);
  clients_.erase(client);
}

void TaskHolds::offloaded(uint32_t client) {
  if (!clients_.contains(client)) return;
  std::unordered_map<BlockId, BlockId> separated;  // several tasks may keep one buffer
  std::vector<BlockId*> left;
  for (auto& [number, hold] : holds_) {
    if (hold.client == client && admission_.is_offloaded(hold.block)) left.push_back(&hold.block);
  }
  for (BlockId* block : left) {
    const auto [at, is_first] = separated.try_emplace(*block, 0);
    if (is_first) {
      at->second = admission_.separate(*block);
    } else {
      admission_.share(at->second);
      admission_.release(*block);
    }
    *block = at->second;
  }
}

void TaskHolds::client_gone(uint32_t client) {
  const auto found = clients_.find(client);
  if (found == clients_.end()) {
    admission_.forget(client);
  } else {
    found->second.is_gone = true;
  }
}

uint32_t TaskHolds::count(uint32_t client) const {
  const auto found = clients_.find(client);
  return found == clients_.end() ? 0 : found->second.holds;
}

void TaskHolds::validate() const {
  std::unordered_map<uint32_t, uint32_t> counts;
  for (const auto& [number, hold] : holds_) {
    PW_CHECK(number <= last_ && !hold.hosts.empty());
    ++counts[hold.client];
  }
  PW_CHECK(counts.size() == clients_.size());
  for (const auto& [id, count] : counts) PW_CHECK(clients_.at(id).holds == count);
}

}  // namespace pathways
