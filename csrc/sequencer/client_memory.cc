#include "sequencer/client_memory.h"

#include <algorithm>

#include "base/check.h"

namespace pathways {

void ClientMemory::set_quota(uint32_t id, uint64_t bytes, uint64_t next_number) {
  Client& client = clients_[id];
  client.quota = std::min(bytes, kUnlimited);
  if (client.quota == kUnlimited) {
    client.accounts.clear();
    return;
  }
  if (!client.accounts.empty()) {
    for (MemoryAccount& account : client.accounts) account.set_budget(client.quota);
    return;
  }
  client.accounts.assign(counted_, MemoryAccount(client.quota));
  client.first_number = next_number;
  for (SpaceId space = 0; space < client.held.size() && space < counted_; ++space) {
    client.accounts[space].add(client.held[space].bytes, true);
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
  clients_.erase(found);
}

// ------------------------------------------------------------------------------------------------------ held, runs

void ClientMemory::add(uint32_t id, std::span<const SpaceId> spaces, uint64_t bytes, bool is_early) {
  if (bytes == 0) return;
  Client& client = clients_[id];
  if (client.held.empty()) client.held.resize(holders_.size());
  for (const SpaceId space : spaces) {
    Held& held = client.held[space];
    if (held.bytes == 0) {
      held.position = static_cast<uint32_t>(holders_[space].size());
      holders_[space].push_back(id);
    }
    held.bytes += bytes;
    if (space < client.accounts.size()) client.accounts[space].add(bytes, is_early);
  }
}

void ClientMemory::remove(uint32_t id, std::span<const SpaceId> spaces, uint64_t bytes) {
  if (bytes == 0) return;
  Client& client = clients_.at(id);
  for (const SpaceId space : spaces) {
    Held& held = client.held[space];
    PW_DCHECK(held.bytes >= bytes);
    held.bytes -= bytes;
    if (space < client.accounts.size()) client.accounts[space].remove(bytes);
    if (held.bytes != 0) continue;
    auto& holders = holders_[space];
    const uint32_t last = holders.back();
    holders[held.position] = last;
    clients_.at(last).held[space].position = held.position;
    holders.pop_back();
  }
}

void ClientMemory::enter(uint32_t id, std::span<const SpaceNeed> needs, uint64_t number) {
  const auto found = clients_.find(id);
  if (found == clients_.end() || found->second.accounts.empty()) return;
  for (const SpaceNeed& need : needs) {
    if (need.space < counted_) found->second.accounts[need.space].enter(need, number);
  }
}

void ClientMemory::leave(uint32_t id, std::span<const SpaceNeed> needs, uint64_t number) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;  // it is gone
  Client& client = found->second;
  if (client.accounts.empty() || number < client.first_number) return;
  for (const SpaceNeed& need : needs) {
    if (need.space < counted_) client.accounts[need.space].leave(need, number);
  }
}

// --------------------------------------------------------------------------------------------------------- verdicts

const ClientMemory::Client* ClientMemory::with_quota(uint32_t id) const {
  const auto found = clients_.find(id);
  return found == clients_.end() || found->second.accounts.empty() ? nullptr : &found->second;
}

Verdict ClientMemory::check(uint32_t id, std::span<const SpaceNeed> needs, SpaceId* worst) const {
  Verdict verdict = Verdict::kFits;
  const Client* client = with_quota(id);
  if (client == nullptr) return verdict;
  for (const SpaceNeed& need : needs) {
    if (need.space >= counted_ || need.peak + need.eager == 0) continue;
    const Verdict here = client->accounts[need.space].judge(need.peak, need.eager);
    if (here <= verdict) continue;
    verdict = here;
    *worst = need.space;
  }
  return verdict;
}

Verdict ClientMemory::check_block(uint32_t id, std::span<const SpaceId> spaces, uint64_t bytes, SpaceId* worst) const {
  Verdict verdict = Verdict::kFits;
  const Client* client = with_quota(id);
  if (client == nullptr || bytes == 0) return verdict;
  for (const SpaceId space : spaces) {
    if (space >= counted_) continue;
    const Verdict here = client->accounts[space].judge_early(bytes);
    if (here <= verdict) continue;
    verdict = here;
    *worst = space;
  }
  return verdict;
}

uint64_t ClientMemory::held(uint32_t id, SpaceId space) const {
  const auto found = clients_.find(id);
  return found == clients_.end() || space >= found->second.held.size() ? 0 : found->second.held[space].bytes;
}

uint64_t ClientMemory::most_held(uint32_t id) const {
  uint64_t most = 0;
  for (SpaceId space = 0; space < counted_; ++space) most = std::max(most, held(id, space));
  return most;
}

void ClientMemory::validate() const {
  size_t listed = 0, holding = 0;
  for (SpaceId space = 0; space < holders_.size(); ++space) {
    listed += holders_[space].size();
    for (uint32_t i = 0; i < holders_[space].size(); ++i) {
      const Held& held = clients_.at(holders_[space][i]).held[space];
      PW_CHECK(held.bytes != 0 && held.position == i);
    }
  }
  for (const auto& [id, client] : clients_) {
    for (const Held& held : client.held) holding += held.bytes != 0 ? 1U : 0U;
    for (SpaceId space = 0; space < client.accounts.size(); ++space) {
      client.accounts[space].validate();
      PW_CHECK(client.accounts[space].live() == held(id, space));
    }
  }
  PW_CHECK(listed == holding);
}

}  // namespace pathways
