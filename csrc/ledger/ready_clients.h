/// Which clients the controller looks at in a pass: those that have rung their bell, and those that it has not finished
/// with. A part of Clients; Inbox reads the rings of the clients that `take` returns.
///
/// COST-4 (idle clients)  A pass reads the rings of no client that is idle. A client's bell is a word in memory of its
///   own (TRUST-1), so nothing but that word says that the client has rung. In every pass the words of *near* clients
///   are compared: those that have rung lately. The words of all clients are compared in passes that have nothing else
///   to do, and else once in kScan_ns. A client that was compared often enough without a ring is near no more.
///
/// READY-2 (no record is missed)  A client publishes, then rings. The ticket of its bell is read before its rings are
///   read. So if a record is not seen, the bell is rung after the ticket was read, and the next comparison finds that.
///   A pass that finds nothing to do has compared all words. The sleeper drew its tickets before that pass (BellSet),
///   so a ring behind the comparison ends the sleep. Who finishes with a client before the client's rings are empty
///   calls `mark`.
///
/// A client that has no bell of its own is looked at in every pass.
///
/// Invariant: `ready_` has exactly the clients whose `is_ready` is true, each once; so has `near_` for `is_near`.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ledger/client_state.h"

namespace pathways {

class ReadyClients {
 public:
  static constexpr int64_t kScan_ns = 50'000;
  static constexpr uint32_t kNearScans = 200;  ///< comparisons with all others without a ring

  explicit ReadyClients(const DoorbellWord* shared_bell) : shared_bell_(shared_bell) {}

  void add(ClientState& client);
  void forget(ClientState& client);
  /// Looks at the client in the next `take`, whatever its bell says.
  void mark(ClientState& client) {
    if (client.is_ready) return;
    client.is_ready = true;
    ready_.push_back(&client);
  }
  /// Marks the near clients that have rung, and those without a bell of their own.
  void compare_near();
  /// Marks all clients that have rung.
  void compare_all(std::span<const std::unique_ptr<ClientState>> all, int64_t now);
  /// Whether `compare_all` is due although the pass has other work.
  bool is_due(int64_t now) const { return now - compared_ns_ >= kScan_ns; }

  /// The clients to look at now; the next call returns those that were marked since. Valid until then.
  std::span<ClientState* const> take();
  /// Those that were marked since `take`.
  std::span<ClientState* const> marked() const { return ready_; }

  void validate(std::span<const std::unique_ptr<ClientState>> all) const;

 private:
  bool has_rung(ClientState& client);

  const DoorbellWord* const shared_bell_;
  std::vector<ClientState*> ready_;
  std::vector<ClientState*> taken_;
  std::vector<ClientState*> near_;
  std::vector<ClientState*> without_bell_;
  int64_t compared_ns_ = 0;  ///< when all were compared last
};

}  // namespace pathways
