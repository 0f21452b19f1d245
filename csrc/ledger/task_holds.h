/// The memory that hosts keep for tasks under way: a part of MemoryLedger.
///
/// A host keeps the array of a save from its place in the order until the save is over, and makes the array of a
/// restore on its own threads. The client may release the array meanwhile. So a task has a *hold*: a reference to the
/// block of its buffer beside the client's own.
///
/// MEM-7: the hold lasts until each host of the task has reported its end, is lost, or will never get the task.
/// When the client's buffers are offloaded, what tasks keep stays on the devices: their holds get blocks of their own
/// there. When the client is gone, its holds stay until they are over. No task's end depends on a client that is gone.
///
/// Cost: a search over the holds when hosts are lost, or a client is offloaded or gone; else O(hosts of the task).
///
/// Invariant: `clients_` says for each client how many of `holds_` it has; it has no entry for a client without holds.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "sequencer/admission.h"

namespace pathways {

class TaskHolds {
 public:
  explicit TaskHolds(Admission& admission) : admission_(admission) {}

  /// Holds a block until each of `hosts` has reported. Returns the number of the hold, which is never 0.
  uint64_t begin(uint32_t client, BlockId block, std::span<const uint32_t> hosts);
  /// A host reports that it keeps nothing for a hold any more. False: it was not to report that.
  bool over(uint64_t hold, uint32_t host);
  /// No host gets the task.
  void drop(uint64_t hold) { end(hold); }
  /// The host reports nothing any more, except on the holds in `waiting`: its successor gets their tasks.
  void host_lost(uint32_t host, const std::unordered_set<uint64_t>& waiting);

  /// The client's blocks were offloaded.
  void offloaded(uint32_t client);
  /// The client is gone. When its last hold is over, `Admission` forgets it.
  void client_gone(uint32_t client);

  /// Holds of a client.
  uint32_t count(uint32_t client) const;
  void validate() const;

 private:
  struct Hold {
    uint32_t client = 0;
    BlockId block = 0;
    std::vector<uint32_t> hosts;  ///< that have not reported
  };
  struct Client {
    uint32_t holds = 0;
    bool is_gone = false;
  };

  void end(uint64_t hold);

  Admission& admission_;
  std::unordered_map<uint64_t, Hold> holds_;  ///< by number
  std::unordered_map<uint32_t, Client> clients_;
  uint64_t last_ = 0;
};

}  // namespace pathways
