/// What the executor's live runs wait for, as text for people.
///
/// Used by Executor::describe_runs. Threading: the executor's thread only.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "executor/launch_memory.h"
#include "executor/launch_queues.h"
#include "executor/launcher.h"
#include "executor/run_table.h"
#include "executor/transfer_manager.h"

namespace pathways {

/// One line for each of the oldest `most` live runs, by their order.
std::vector<std::string> describe_runs(size_t most, const RunTable& runs, const LaunchQueues& queues,
                                       const LaunchMemory& memory, const Launcher& launcher,
                                       const TransferManager& transfers);

}  // namespace pathways
