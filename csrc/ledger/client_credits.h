/// FLOW-1 for one client: what the client has under way, against the bounds of messages/credits.h, or against bounds of
/// its own (ledger/client_limits.h).
///
/// Grants counts records that wait in the order and commands that are sent to hosts.
/// AdmissionQueue counts a run when it is admitted, Grants when it is over. Inbox counts the commands that hosts report
/// as done. Recovery counts for lost hosts and their successors. Inbox and AdmissionQueue ask whether the client may
/// have more under way.
///
/// Invariant: `full_hosts_` is the number of hosts whose load is at its bound.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "messages/credits.h"

namespace pathways {

class ClientCredits {
 public:
  explicit ClientCredits(uint32_t hosts = 0) : hosts_(hosts) {}

  /// The client has as much under way as allowed. The hosts will finish that work, so this ends.
  bool is_behind() const { return is_flooded() || in_flight_ >= most_runs_; }
  /// The same without the number of its runs: a run of several, which counts as one, must go on.
  bool is_flooded() const { return full_hosts_ != 0 || waiting_.is_above(kMostWaiting, most_bytes_); }
  /// Its own bounds. What is under way already stays.
  void set_bounds(uint64_t runs, uint64_t bytes) {
    most_runs_ = runs;
    most_bytes_ = bytes;
    full_hosts_ = static_cast<uint32_t>(
        std::count_if(on_host_.begin(), on_host_.end(), [this](const Load& load) { return is_full(load); }));
  }

  void command_sent(uint32_t host, uint64_t bytes) {
    if (on_host_.empty()) on_host_.resize(hosts_);
    change(on_host_[host], [&](Load& load) { load.add(1, bytes); });
  }
  void commands_done(uint32_t host, uint64_t count, uint64_t bytes) {
    if (on_host_.empty()) return;
    change(on_host_[host], [&](Load& load) { load.remove(count, bytes); });
  }
  /// The host is lost. Its successor begins with no commands.
  void host_lost(uint32_t host) {
    if (on_host_.empty()) return;
    change(on_host_[host], [](Load& load) { load = {}; });
  }

  /// A record has entered the order, and no host was granted it; and its end.
  void record_waits(uint64_t bytes) { waiting_.add(1, bytes); }
  void record_goes(uint64_t bytes) { waiting_.remove(1, bytes); }

  /// Runs admitted and not over.
  uint64_t in_flight() const { return in_flight_; }
  void run_admitted() { ++in_flight_; }
  void run_over() { --in_flight_; }

  void validate() const {
    PW_CHECK(static_cast<std::ptrdiff_t>(full_hosts_) ==
             std::count_if(on_host_.begin(), on_host_.end(), [this](const Load& load) { return is_full(load); }));
  }

 private:
  bool is_full(const Load& load) const { return load.is_above(kMostCommands, most_bytes_); }
  template <typename Change>
  void change(Load& load, Change&& by) {
    const bool was_full = is_full(load);
    by(load);
    full_hosts_ += is_full(load) ? 1U : 0U;
    full_hosts_ -= was_full ? 1U : 0U;
  }

  uint32_t hosts_;
  uint64_t most_runs_ = kMostRuns;
  uint64_t most_bytes_ = kMostWaitingBytes;  ///< of records, in the order and at each host
  static_assert(kMostWaitingBytes == kMostCommandBytes);
  std::vector<Load> on_host_;  ///< by host: commands sent and not done there; empty: none anywhere
  uint32_t full_hosts_ = 0;    ///< hosts that have as many of its commands as allowed
  Load waiting_;               ///< records in the order that no host was granted
  uint64_t in_flight_ = 0;
};

}  // namespace pathways
