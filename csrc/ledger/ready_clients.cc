#include "ledger/ready_clients.h"

#include <algorithm>

#include "base/check.h"

namespace pathways {

void ReadyClients::add(ClientState& client) {
  PW_CHECK(client.bell != nullptr);
  if (client.bell == shared_bell_) without_bell_.push_back(&client);
  client.ticket = client.bell->ticket();  // before the rings are read: READY-2
  mark(client);
}

void ReadyClients::forget(ClientState& client) {
  for (auto* list : {&ready_, &taken_, &near_, &without_bell_}) {
    // A gap in `taken_` would move clients that are still to be looked at.
    if (list == &taken_) {
      std::replace(list->begin(), list->end(), &client, static_cast<ClientState*>(nullptr));
    } else {
      std::erase(*list, &client);
    }
  }
}

bool ReadyClients::has_rung(ClientState& client) {
  PW_DCHECK(client.bell != nullptr);
  const uint32_t ticket = client.bell->ticket();
  if (ticket == client.ticket) return false;
  client.ticket = ticket;
  client.quiet = 0;
  if (!client.is_near) near_.push_back(&client);
  client.is_near = true;
  return true;
}

void ReadyClients::compare_near() {
  for (size_t i = 0; i < near_.size(); ++i) {
    if (has_rung(*near_[i])) mark(*near_[i]);
  }
  for (ClientState* client : without_bell_) mark(*client);
}

void ReadyClients::compare_all(std::span<const std::unique_ptr<ClientState>> all, int64_t now) {
  compared_ns_ = now;
  for (const auto& client : all) {
    if (client->bell != shared_bell_ && has_rung(*client)) mark(*client);
  }
  for (ClientState* client : without_bell_) mark(*client);
  std::erase_if(near_, [](ClientState* client) {
    client->is_near = ++client->quiet <= kNearScans;
    return !client->is_near;
  });
}

std::span<ClientState* const> ReadyClients::take() {
  taken_.swap(ready_);
  ready_.clear();
  for (ClientState* client : taken_) client->is_ready = false;
  return taken_;
}

void ReadyClients::validate(std::span<const std::unique_ptr<ClientState>> all) const {
  size_t ready = 0, near = 0;
  for (const auto& client : all) {
    ready += client->is_ready ? 1U : 0U;
    near += client->is_near ? 1U : 0U;
    PW_CHECK(!client->is_ready || std::count(ready_.begin(), ready_.end(), client.get()) == 1);
    PW_CHECK(!client->is_near || std::count(near_.begin(), near_.end(), client.get()) == 1);
  }
  PW_CHECK(ready == ready_.size() && near == near_.size());
}

}  // namespace pathways
