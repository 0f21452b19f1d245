/// The clients that are connected, and all that the controller sends them: failures, leases to take back, credits.
///
/// Every other class of the controller finds a client here by its number, and notifies the client through this class.
/// What is sent becomes visible when the pass flushes, and each client's doorbell is rung once then.
///
///   OWN-1   a client whose ring is invalid, or that sent an invalid record, is marked with the reason (`fault`).
///           the Controller evicts it in this pass or in the next; the other clients notice nothing.
///   FLOW-1  a client that does not read its ring gets shorter error texts.
///   DEAD-1  a result that was late stays late: see `fail_late`.
///
/// Invariant: `by_id_` names exactly the clients of `all_`, but for one that the Controller is removing.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "ledger/client_state.h"
#include "ledger/ready_clients.h"
#include "sync/bell_set.h"

namespace pathways {

class Clients {
 public:
  /// `bells`: every doorbell that is rung for the controller. `shared_bell`: rung by those that have no bell of their
  /// own.
  Clients(BellSet& bells, const DoorbellWord* shared_bell) : bells_(bells), ready_(shared_bell) {}

  void add(std::unique_ptr<ClientState> client);
  /// nullptr: there is no such client, or it is gone.
  ClientState* find(uint32_t id) const { return id < by_id_.size() ? by_id_[id] : nullptr; }
  std::span<const std::unique_ptr<ClientState>> all() const { return all_; }
  size_t count() const { return all_.size(); }
  /// Which of them are to be looked at.
  ReadyClients& ready() { return ready_; }
  const ReadyClients& ready() const { return ready_; }
  /// The end of a client has two steps. From the first on, nobody finds the client and nothing is written to its
  /// memory. The second frees it.
  void forget(ClientState& client);
  void erase(ClientState& client);

  /// Sends the failure of a future. Handle 0: the client itself is evicted.
  void tell(ClientState& client, Handle handle, std::string_view text, uint16_t detail = 0);
  /// Sends the failure of all results of a record, which is valid.
  void tell_results(ClientState& client, std::span<const std::byte> record, std::string_view text, uint16_t detail = 0);
  /// A host is lost. The client takes back what it leased to it, with stamps up to `stamp`.
  void tell_host_lost(ClientState& client, uint32_t host, uint64_t stamp);
  /// A run of the client is over: it has one more credit.
  void run_over(ClientState& client) {
    ++client.retired;
    client.has_unsent = true;
    soil(client);
  }
  /// The result is late, and its failure was sent.
  void is_late(ClientState& client, Handle result) {
    client.late.push_back(result);
    soil(client);
  }

  /// Marks a client to be evicted at the end of this pass, or in the next.
  void fault(ClientState& client, std::string why);
  /// Whether some client is to be evicted.
  bool has_faults() const { return has_faults_; }
  void clear_faults() { has_faults_ = false; }
  /// The client is being evicted: it is sent the reason, even if its ring was invalid.
  void tell_eviction(ClientState& client);

  /// Publishes what was sent, and the credits. COST-4: it looks only at clients for which there is something.
  void flush();
  /// Some record waits for room in a client's ring, as of the last flush.
  bool has_undelivered() const { return has_undelivered_; }
  /// True when some record waits for room in a client's ring.
  bool has_overflow() const;
  void ring_all();

  void validate() const;

 private:
  /// Sends one record to a client. A client whose ring is invalid will be evicted.
  template <typename Fill>
  void say(ClientState& client, uint32_t bytes, Fill&& fill) {
    if (client.is_mute) return;
    soil(client);
    try {
      client.outbox.send(bytes, fill);
    } catch (const Error& error) {
      silence(client, error.what());
    }
  }
  /// The next flush looks at the client.
  void soil(ClientState& client) {
    if (!client.is_dirty) dirty_.push_back(&client);
    client.is_dirty = true;
  }
  void silence(ClientState& client, std::string_view why);
  void flush(ClientState& client);
  static void fail_late(ClientState& client);

  BellSet& bells_;
  std::vector<std::unique_ptr<ClientState>> all_;  ///< owner: the stepping thread
  std::vector<ClientState*> by_id_;                ///< nullptr: the client is gone
  ReadyClients ready_;
  std::vector<ClientState*> dirty_;  ///< those whose `is_dirty` is true
  bool has_faults_ = false;          ///< some client is to be evicted
  bool has_undelivered_ = false;     ///< some record waits for room in a client's ring
};

}  // namespace pathways
