/// The memory that a plan takes. The plan's hosts computed it when they compiled the plan. Controller::set_plan_memory
/// registers it, MemoryLedger keeps it.
///
/// Threading: immutable once it is registered.
#pragma once

#include <cstdint>
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
  bool is_composite = false;      ///< no host has such a plan
  RunNeeds by_class{};            ///< what MemoryLedger makes of `needs`
};

}  // namespace pathways
