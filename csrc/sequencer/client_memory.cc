#include "sequencer/client_memory.h"

#include <algorithm>

#include "base/check.h"

namespace pathways {

void ClientMemory::add_class(ClassId from, bool is_counted) {
  const auto id = static_cast<ClassId>(holders_.size());
  is_counted_.push_back(is_counted ? 1 : 0);
  holders_.emplace_back();
  if (from != kNoClass) {
    holders_[id] = holders_[from];
    for (const uint32_t holder : holders_[id]) {
      Client& client = clients_.at(holder);
      client.held.resize(id + 1);
      client.held[id] = client.held[from];
    }
  }
  for (auto& [number, client] : clients_) {
    if (!client.has_quota()) continue;
    client.accounts.push_back(from == kNoClass ? MemoryAccount(client.quota) : MemoryAccount(client.accounts[from]));
  }
}

void ClientMemory::set_quota(uint32_t number, uint64_t bytes, uint64_t next_number) {
  Client& client = clients_[number];
  const bool had_quota = client.has_quota();
  client.quota = std::min(bytes, kUnlimited);
  quotas_ += (client.has_quota() ? 1U : 0U) - (had_quota ? 1U : 0U);
  if (!client.has_quota()) {
    client.accounts.clear();
    return;
  }
  if (had_quota) {
    for (MemoryAccount& account : client.accounts) account.set_budget(client.quota);
    return;
  }
  client.accounts.assign(is_counted_.size(), MemoryAccount(client.quota));
  client.first_number = next_number;
  for (ClassId id = 0; id < client.held.size(); ++id) {
    if (is_counted_[id] != 0) client.accounts[id].add(client.held[id].bytes, true);
  }
}

uint64_t ClientMemory::quota(uint32_t id) const {
  const auto found = clients_.find(id);
  return found == clients_.end() ? kUnlimited : found->second.quota;
}

void ClientMemory::forget(uint32_t id) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  for (const Held& held : found->second.held) PW_CHECK(held.bytes == 0);
  if (found->second.has_quota()) --quotas_;
  clients_.erase(found);
}

// ------------------------------------------------------------------------------------------------------ held, runs

void ClientMemory::add(uint32_t number, std::span<const ClassPart> classes, uint64_t bytes, bool is_early) {
  if (bytes == 0) return;
  Client& client = clients_[number];
  for (const auto [id] : classes) {
    if (id >= client.held.size()) client.held.resize(is_counted_.size());
    Held& held = client.held[id];
    if (held.bytes == 0) {
      held.position = static_cast<uint32_t>(holders_[id].size());
      holders_[id].push_back(number);
    }
    held.bytes += bytes;
    if (client.has_quota() && is_counted_[id] != 0) client.accounts[id].add(bytes, is_early);
  }
}

void ClientMemory::remove(uint32_t number, std::span<const ClassPart> classes, uint64_t bytes) {
  if (bytes == 0) return;
  Client& client = clients_.at(number);
  for (const auto [id] : classes) {
    Held& held = client.held[id];
    PW_DCHECK(held.bytes >= bytes);
    held.bytes -= bytes;
    if (client.has_quota() && is_counted_[id] != 0) client.accounts[id].remove(bytes);
    if (held.bytes != 0) continue;
    auto& holders = holders_[id];
    const uint32_t last = holders.back();
    holders[held.position] = last;
    clients_.at(last).held[id].position = held.position;
    holders.pop_back();
  }
}

void ClientMemory::enter(uint32_t client, std::span<const ClassNeed> needs, uint64_t number) {
  const auto found = clients_.find(client);
  if (found == clients_.end() || !found->second.has_quota()) return;
  for (const ClassNeed& need : needs) {
    if (is_counted_[need.id] != 0) found->second.accounts[need.id].enter(need.peak, need.eager, number);
  }
}

void ClientMemory::leave(uint32_t client, std::span<const ClassNeed> needs, uint64_t number) {
  const auto found = clients_.find(client);
  if (found == clients_.end()) return;  // it is gone
  Client& its = found->second;
  if (!its.has_quota() || number < its.first_number) return;
  for (const ClassNeed& need : needs) {
    if (is_counted_[need.id] != 0) its.accounts[need.id].leave(need.eager, number);
  }
}

// --------------------------------------------------------------------------------------------------------- verdicts

const ClientMemory::Client* ClientMemory::with_quota(uint32_t client) const {
  const auto found = clients_.find(client);
  return found == clients_.end() || !found->second.has_quota() ? nullptr : &found->second;
}

ClientMemory::WorstOf ClientMemory::check(uint32_t number, std::span<const ClassNeed> needs) const {
  WorstOf worst;
  const Client* client = with_quota(number);
  if (client == nullptr) return worst;
  for (const ClassNeed& need : needs) {
    if (is_counted_[need.id] == 0 || need.peak + need.eager == 0) continue;
    worst.look_at(client->accounts[need.id].judge(need.peak, need.eager), need.id);
  }
  return worst;
}

ClientMemory::WorstOf ClientMemory::check_block(uint32_t number, std::span<const ClassPart> classes,
                                                uint64_t bytes) const {
  WorstOf worst;
  const Client* client = with_quota(number);
  if (client == nullptr || bytes == 0) return worst;
  for (const auto [id] : classes) {
    if (is_counted_[id] != 0) worst.look_at(client->accounts[id].judge_early(bytes), id);
  }
  return worst;
}

uint64_t ClientMemory::held(uint32_t client, ClassId id) const {
  const auto found = clients_.find(client);
  return found == clients_.end() || id >= found->second.held.size() ? 0 : found->second.held[id].bytes;
}

uint64_t ClientMemory::most_held(uint32_t client) const {
  uint64_t most = 0;
  for (ClassId id = 0; id < is_counted_.size(); ++id) {
    if (is_counted_[id] != 0) most = std::max(most, held(client, id));
  }
  return most;
}

void ClientMemory::validate() const {
  size_t listed = 0, holding = 0, quotas = 0;
  for (ClassId id = 0; id < holders_.size(); ++id) {
    listed += holders_[id].size();
    for (uint32_t i = 0; i < holders_[id].size(); ++i) {
      const Held& held = clients_.at(holders_[id][i]).held[id];
      PW_CHECK(held.bytes != 0 && held.position == i);
    }
  }
  for (const auto& [number, client] : clients_) {
    for (const Held& held : client.held) holding += held.bytes != 0 ? 1U : 0U;
    quotas += client.has_quota() ? 1U : 0U;
    PW_CHECK(client.accounts.size() == (client.has_quota() ? is_counted_.size() : 0));
    for (ClassId id = 0; id < client.accounts.size(); ++id) {
      client.accounts[id].validate();
      PW_CHECK(client.accounts[id].live() == (is_counted_[id] != 0 ? held(number, id) : 0));
    }
  }
  PW_CHECK(listed == holding && quotas == quotas_);
}

}  // namespace pathways
