/// PlanTable: the plans that a host knows, from their registration until no run uses them any more.
///
/// A plan is registered, then compiled (or not: it has a failure), then removed. Runs that came before it was compiled
/// wait for that. Runs that came before its removal go on, and the backend is notified when the last one is over
/// (Device::forget_plan). An id is free again then.
///
///   MEM-1  the values that the runs of a plan make are booked on the plan's account, which is open from the plan's
///          first run on. The table also computes how much memory each node needs.
///
/// Used by the executor alone. Threading: the executor's thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/device.h"
#include "plan/plan.h"
#include "runs/ledger.h"

namespace pathways {

struct PlanEntry {
  static constexpr uint32_t kNoAccount = 0xffffffffu;

  uint32_t id = 0;
  Plan plan;
  bool compiled = false;
  std::optional<std::string> failure;  ///< why it could not be compiled
  uint32_t client = 0;                 ///< the plan is removed when this client is gone
  uint32_t live = 0;                   ///< runs that use it
  bool removed = false;
  PlanSizes sizes;
  std::vector<uint64_t> room;     ///< by node: bytes that it needs on each device beside its inputs; empty: unknown
  std::vector<uint32_t> watched;  ///< by node: which output answers for it; another one once that is donated
  uint32_t account = kNoAccount;  ///< in the ledger, from the first run on
  std::vector<uint32_t> waiting;  ///< slots of runs that came before it was compiled

  /// Positions of the inputs that a call's outputs take over.
  std::span<const uint32_t> donated(const NodeRecord& node) const {
    if (node.computation >= sizes.launches.size()) return {};
    return sizes.launches[node.computation].donated;
  }
  /// Whether a call moves its input to another memory.
  bool moves(const NodeRecord& node) const {
    return node.computation < sizes.launches.size() && sizes.launches[node.computation].moves;
  }
};

class PlanTable {
 public:
  PlanTable(Device& device, Ledger& ledger) : device_(device), ledger_(ledger) {}

  /// nullptr: no such plan.
  PlanEntry* find(uint32_t id) { return id < entries_.size() ? entries_[id].get() : nullptr; }
  /// The id must be free.
  void add(uint32_t id, Plan plan, uint32_t client);
  /// Sets that the plan is compiled, or why it could not be. Returns its entry, whose waiting runs may go on; nullptr:
  /// the plan was removed while it was compiled, or was compiled before.
  PlanEntry* set_compiled(uint32_t id, std::optional<std::string> error, PlanSizes sizes);
  /// Runs under way go on.
  void remove(uint32_t id);
  /// Removes the plans of a client that is gone.
  void remove_plans_of(uint32_t client);

  /// One more run of `client` uses the plan.
  void begin_run(PlanEntry& entry, uint32_t client);
  /// The run is over. The entry may be gone after that.
  void end_run(PlanEntry& entry);
  /// Closes the accounts of a client's plans. A plan with live runs keeps its account: they still book on it.
  void close_accounts_of(uint32_t client);
  /// No run uses a plan any more.
  void forget_runs();

 private:
  static void measure(PlanEntry& entry);
  void forget(uint32_t id);

  Device& device_;
  Ledger& ledger_;
  std::vector<std::unique_ptr<PlanEntry>> entries_;  ///< by id
};

}  // namespace pathways
