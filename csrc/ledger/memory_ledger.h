/// What records and handles mean for the ledger of memory (sequencer/admission.h): which record needs what, which
/// handle has which block, and when a block is released.
///
/// AdmissionQueue asks whether a record fits (`check`) and books it when the record gets its place in the order
/// (`enter`, `apply`). Grants ends a run's reservation (`leave`). Recovery and the Controller release the blocks of
/// buffers that are gone. The Controller moves a suspended client's blocks out and in.
///
/// MEM-1: the ledger follows the order. At any moment it is true for the order up to the last record that was booked.
/// Each live handle has at most one reference to one block, and drops it when the handle is released, is donated, is
/// renamed over, or is made again without a release.
/// MEM-7: a block is released only by a record at which every host that may hold the buffer drops it. `misplaced` and
/// `apply` say what is wrong with a record that would release a block while some host keeps the buffer. What a task
/// keeps for longer has a hold (ledger/task_holds.h).
///
/// Invariant: a run that is in `entered_` is admitted and not over.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ledger/client_state.h"
#include "ledger/group_cover.h"
#include "ledger/plan_memory.h"
#include "ledger/task_holds.h"
#include "sequencer/admission.h"
#include "sequencer/sequencer.h"

namespace pathways {

/// Whether a record fits.
struct Judgement {
  Verdict verdict = Verdict::kFits;
  bool is_quota = false;  ///< it is the client's quota that has no room (MEM-5)
  SpaceId worst = 0;      ///< the first space with the worst verdict; of no meaning when it fits
  bool fits() const { return verdict == Verdict::kFits; }
};

class MemoryLedger {
 public:
  /// `devices`: so many of the spaces are devices, which clients' quotas count; UINT32_MAX: all. They are numbered host
  /// by host, and each of the `hosts` has the same number of them.
  MemoryLedger(std::vector<uint64_t> budgets, uint32_t devices, uint32_t hosts)
      : admission_(std::move(budgets), devices), devices_per_host_(devices == UINT32_MAX ? 0 : devices / hosts) {}

  // What is registered; see the Controller's methods of these names.
  SpaceSetId add_space_set(std::vector<SpaceId> spaces) { return admission_.add_set(std::move(spaces)); }
  bool has_set(SpaceSetId set) const { return admission_.has_set(set); }
  /// MEM-6: the devices of a host that belong to a set, one bit each: those where a record that names the set is
  /// booked.
  uint64_t devices_of(SpaceSetId set, uint32_t host) const;
  void set_budget(std::vector<SpaceId> spaces, uint64_t bytes) { admission_.set_budget(std::move(spaces), bytes); }
  void set_plan_memory(uint32_t plan, PlanMemory memory);
  /// The memory that a plan takes; nullptr: the plan is not registered.
  const PlanMemory* memory_of(uint32_t plan) const {
    return plan < plan_memory_.size() ? plan_memory_[plan].get() : nullptr;
  }

  /// Whether a record of the client fits now, and if not: why.
  Judgement check(uint32_t client, std::span<const std::byte> record) const;
  /// MEM-5; kUnlimited: no quota.
  void set_quota(uint32_t client, uint64_t bytes) { admission_.set_quota(client, bytes); }
  /// Keeps everybody else off the spaces of a record that waits, until `clear_claims`.
  void claim(std::span<const std::byte> record);
  void clear_claims() { admission_.clear_claims(); }

  /// MEM-7: why the ledger and the hosts would differ after this run, put, fetch or task; nullptr: they would not.
  /// No correct client sends such a record. It must not be booked, nor go to any host.
  /// `handles`: of the run's arguments, then of its results. `memory`: of its plan; nullptr: not known.
  static const char* misplaced(ClientState& client, const RunRecord& record, const uint64_t* handles,
                               const PlanMemory* memory, const GroupCover& cover) {
    const uint64_t* const results = handles + record.arguments;
    for (uint32_t i = 0; i < record.results; ++i) {
      if (client.handles.has_block_at(Handle{results[i]})) return over_live();
    }
    if (memory == nullptr || memory->donated.empty()) return nullptr;
    return donates_elsewhere(client, record, handles, *memory, cover);
  }
  static const char* misplaced(ClientState& client, std::span<const std::byte> command);

  /// Books a run whose plan's memory is `memory`: its results get their blocks, and it takes its donated arguments
  /// over. Returns the number to pass to `entered`, which tells the run's entry in the order.
  uint64_t enter(ClientState& client, std::span<const std::byte> run, const PlanMemory& memory);
  // For a composite (loops/loops.h), which is no entry of the order. Its donated arguments keep their blocks: the
  // composite takes the block of each over before it enters; kNoBlock: it has none.
  BlockId take_block(ClientState& client, Handle argument) {
    HandleTable::Entry* entry = client.handles.find(argument);
    return entry == nullptr ? HandleTable::kNoBlock : std::exchange(entry->block, HandleTable::kNoBlock);
  }
  void release_block(BlockId block) { admission_.release(block); }
  void leave(const PlanMemory& memory, uint64_t number, uint32_t client) {
    admission_.leave(memory.by_class, number, client);
  }
  std::shared_ptr<const PlanMemory> share_memory_of(uint32_t plan) const { return plan_memory_[plan]; }

  void entered(EntryId id, const ClientState& client, uint32_t plan, uint64_t number);
  /// The run of an entry is over. It does nothing for a run that was not entered.
  void leave(EntryId id);
  /// The memory of an entered run; nullptr: the run was not entered.
  const PlanMemory* memory_of_entry(EntryId id) const {
    return id < entered_.size() ? entered_[id].memory.get() : nullptr;
  }
  /// Books any other record: enters the handles that it makes, and removes those that it releases. Returns why it
  /// cannot be booked, as `misplaced` does, for a rename; else nullptr.
  const char* apply(ClientState& client, std::span<const std::byte> record, const GroupCover& cover);
  /// MEM-7: whether each buffer that a release names lies on the hosts of the record's group, as far as it is known.
  static bool lies_where_it_says(ClientState& client, std::span<const std::byte> release);

  /// The task has its place in the order. Returns the number of its hold on the memory of its buffer, for the hosts
  /// that get the task; 0: the buffer is in no ledger. Call it behind `apply`.
  uint64_t hold(ClientState& client, std::span<const std::byte> task, std::span<const uint32_t> hosts);
  TaskHolds& holds() { return holds_; }
  const TaskHolds& holds() const { return holds_; }

  /// Releases the block of one handle, if it has one.
  void release(HandleTable::Entry& entry);
  /// The client is gone: releases the memory of its buffers, for entries that come behind its end.
  void release_all(ClientState& client);
  void forget_plans_of(uint32_t client);
  /// The client's blocks leave the devices and come back; see Admission.
  void offload(uint32_t client) {
    admission_.offload(client);
    holds_.offloaded(client);
  }
  bool restore(uint32_t client, SpaceId* worst) { return admission_.restore(client, worst); }

  /// For reading: budgets, holders, and the version, which changes whenever a held record may have become admissible.
  const Admission& admission() const { return admission_; }
  void validate() const {
    admission_.validate();
    holds_.validate();
  }

 private:
  /// What the admission ledger needs to know of an admitted run.
  struct Entered {
    std::shared_ptr<const PlanMemory> memory;  ///< nullptr: no run under way has this entry
    uint64_t number = 0;
    uint32_t client = 0;
  };

  BlockId block_of_result(ClientState& client, std::span<const std::byte> run, const PlanMemory& memory,
                          uint32_t index);
  HandleTable::Entry* announce(ClientState& client, Handle handle, GroupId group);
  static const char* over_live();
  static const char* donates_elsewhere(ClientState& client, const RunRecord& record, const uint64_t* handles,
                                       const PlanMemory& memory, const GroupCover& cover);
  const char* rename(ClientState& client, GroupId group, Handle name, Handle fresh, const GroupCover& cover);

  Admission admission_;
  TaskHolds holds_{admission_};
  const uint32_t devices_per_host_;                             ///< 0: not known
  std::vector<std::shared_ptr<const PlanMemory>> plan_memory_;  ///< by plan
  std::vector<Entered> entered_;                                ///< by entry
  std::vector<BlockId> blocks_;                                 ///< scratch of enter()
};

}  // namespace pathways
