#include "ledger/clients.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "ledger/client_records.h"
#include "messages/records.h"

namespace pathways {
namespace {

constexpr uint32_t kLeastText = 256;  // bytes of an error text for a client that does not read its ring

}  // namespace

void Clients::add(std::unique_ptr<ClientState> client) {
  if (client->id >= by_id_.size()) by_id_.resize(client->id + 1);
  by_id_[client->id] = client.get();
  bells_.add(client->bell);
  ready_.add(*client);
  all_.push_back(std::move(client));
}

void Clients::forget(ClientState& client) {
  by_id_[client.id] = nullptr;
  bells_.remove(client.bell);
  ready_.forget(client);
  std::erase(dirty_, &client);
}

void Clients::erase(ClientState& client) {
  std::erase_if(all_, [&](const auto& each) { return each.get() == &client; });
}

// ------------------------------------------------------------------------------------------------------------ sent

void Clients::tell(ClientState& client, Handle handle, std::string_view text, uint16_t detail) {
  // A client that does not read its ring gets shorter error texts (FLOW-1).
  const uint32_t most = client.outbox.overflow_bytes() < kMostUndeliveredBytes ? kMostText : kLeastText;
  text = text.substr(0, std::min(most, client.outbox.max_record() - uint32_t{sizeof(FailedRecord)} - 8));
  const auto bytes = static_cast<uint32_t>(text.size());
  say(client, static_cast<uint32_t>(sizeof(FailedRecord)) + padded(bytes), [&](std::byte* out) {
    const FailedRecord record{{RecordKind::kFailed, detail, client.id}, handle.raw, bytes, 0};
    std::memcpy(out, &record, sizeof record);
    std::memcpy(out + sizeof record, text.data(), bytes);
  });
}

void Clients::tell_results(ClientState& client, std::span<const std::byte> bytes, std::string_view text,
                           uint16_t detail) {
  if (!is_run(bytes)) {
    tell(client, Handle{read_record<CommandRecord>(bytes).handle}, text, detail);
    return;
  }
  const uint32_t results = read_record<RunRecord>(bytes).results;
  for (uint32_t i = 0; i < results; ++i) tell(client, Handle{result_of(bytes, i)}, text, detail);
}

void Clients::tell_host_lost(ClientState& client, uint32_t host, uint64_t stamp) {
  say(client, sizeof(ReclaimRecord), [&](std::byte* out) {
    const ReclaimRecord record{{RecordKind::kReclaim, 0, client.id}, host, 0, stamp};
    std::memcpy(out, &record, sizeof record);
  });
}

void Clients::fault(ClientState& client, std::string why) {
  if (client.fault.empty()) client.fault = std::move(why);
  has_faults_ = true;
}

/// The client's ring from the controller is invalid: drops what would still be sent there.
void Clients::silence(ClientState& client, std::string_view why) {
  client.is_mute = true;
  client.late.clear();
  client.outbox.forget_reader();
  fault(client, std::string(why));
}

void Clients::tell_eviction(ClientState& client) {
  client.is_mute = false;  // for the record with the reason
  tell(client, Handle{}, "the controller put client " + std::to_string(client.id) + " out: " + client.fault);
}

// ----------------------------------------------------------------------------------------------------------- flush

void Clients::flush() {
  has_undelivered_ = false;
  // `silence` may add to the list.
  size_t left = 0;
  for (size_t i = 0; i < dirty_.size(); ++i) {
    ClientState& client = *dirty_[i];
    flush(client);
    client.is_dirty = client.outbox.has_overflow();
    if (client.is_dirty) dirty_[left++] = &client;
  }
  dirty_.resize(left);
}

void Clients::flush(ClientState& client) {
  const ClientView& view = client.view;
  // SYNC client/delivered: pairs with Client::wait(); the records are there, and the doorbell rings after it.
  const auto published = [&](uint64_t count) { view.delivered().store(count, std::memory_order_release); };
  try {
    if (client.outbox.flush(published)) {
      has_undelivered_ = true;
    } else {
      fail_late(client);
    }
  } catch (const Error& error) {
    silence(client, error.what());
  }
  if (!client.has_unsent) return;
  client.has_unsent = false;
  view.tell_retired(client.retired);
}

/// Fails late results in the client's future table. Otherwise the hosts could complete them before the client, busy or
/// waiting for a core, reads of the failure: a result that was late stays late. Called when the failure's text is in
/// the client's ring.
void Clients::fail_late(ClientState& client) {
  for (const Handle result : client.late) (void)client.view.futures().fail(result);
  client.late.clear();
}

bool Clients::has_overflow() const {
  return std::any_of(all_.begin(), all_.end(), [](const auto& client) { return client->outbox.has_overflow(); });
}

void Clients::ring_all() {
  for (const auto& client : all_) client->view.futures().doorbell().ring();
}

void Clients::validate() const {
  const auto known =
      std::count_if(by_id_.begin(), by_id_.end(), [](const ClientState* each) { return each != nullptr; });
  PW_CHECK(static_cast<size_t>(known) == all_.size());
  ready_.validate(all_);
  for (const auto& client : all_) {
    PW_CHECK(client->is_dirty || (!client->has_unsent && client->late.empty() && !client->outbox.has_overflow()));
    PW_CHECK(find(client->id) == client.get());
    PW_CHECK(client->fault.empty() || has_faults_);
    client->credits.validate();
    client->sent.validate();
    client->held.validate();
  }
}

}  // namespace pathways
