/// The memory that a plan takes. The plan's hosts computed it when they compiled the plan. Controller::set_plan_memory
/// registers it, MemoryLedger keeps it.
///
/// Threading: immutable once it is registered.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "messages/records.h"
#include "sequencer/admission.h"
#include "sequencer/sequencer.h"

namespace pathways {

struct PlanMemory {
  struct Result {
    GroupId group = 0;  ///< hosts that hold the result
    SpaceSetId set = kNoSpaceSet;
    uint64_t bytes = 0;     ///< on each memory space
    int32_t argument = -1;  ///< the position of the argument whose buffer the result is; -1: of none
    int32_t same_as = -1;   ///< the position of an earlier result that is the same value; -1: none
  };
  uint32_t client = 0;
  std::string name;
  std::string biggest;           ///< its biggest buffers, as text for errors
  std::vector<SpaceNeed> needs;  ///< by space, as it is given; empty once it is registered
  std::vector<Result> results;
  std::vector<uint32_t> donated;  ///< positions of donated arguments
  /// Hosts that hold each argument. With these, each host of a run gets only its own handles (dispatch/run_parts.h).
  /// nullopt: not known, or a composite's.
  std::optional<std::vector<GroupId>> argument_groups = {};
  bool is_composite = false;  ///< no host has such a plan
  RunNeeds by_class{};        ///< what MemoryLedger makes of `needs`

  /// The hosts that take over a donated argument, in runs that go to the hosts of `group`.
  GroupId takers_of(uint32_t argument, GroupId group) const {
    return argument_groups && argument < argument_groups->size() ? (*argument_groups)[argument] : group;
  }
  /// Whether a run may have so many arguments, as far as it is known.
  bool may_have(size_t arguments) const { return !argument_groups || argument_groups->size() == arguments; }
};

}  // namespace pathways
