/// ClientCommands: does what clients ask beside runs: puts (PutQueue), fetches, releases, tasks, and buffers that fail
/// or move.
///
///   FUT-3   a handle that is older than the object at its index makes no object.
///   MOVE-1  a name means one buffer: a buffer that moved to another slice's hosts keeps its old name.
///   MEM-1   a buffer that is off the devices is not counted.
///   MEM-7   a client's buffers leave the devices when none of its tasks makes another one: else that one would be on
///           the devices while the ledger counts nothing of the client's there. Its other commands do not come
///           meanwhile, because the controller reads nothing of a client that it suspends.
///
/// Used by the executor, for each command record of a client that is present, in the order. Threading: the executor's
/// thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "executor/fetch_table.h"
#include "executor/put_queue.h"
#include "executor/task_table.h"
#include "messages/records.h"
#include "runs/client_objects.h"
#include "runs/executor_part.h"

namespace pathways {

class ClientCommands : private ExecutorPart {
 public:
  ClientCommands(const ExecutorPart& part, ClientObjects& objects, PutQueue& puts, FetchTable& fetches,
                 TaskTable& tasks)
      : ExecutorPart(part), objects_(objects), puts_(puts), fetches_(fetches), tasks_(tasks) {}

  void on_command(LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload);
  /// A task is over: does what waited for it.
  void task_over() {
    if (!postponed_.empty()) do_postponed();
  }
  /// The client is gone.
  void forget(uint32_t client) {
    std::erase_if(postponed_, [&](const Postponed& each) { return each.record.header.client == client; });
  }
  void clear() { postponed_.clear(); }

 private:
  void release(LocalClient& c, std::span<const std::byte> payload);
  void task(LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload);
  void fail(LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload);
  void rename(LocalClient& c, uint32_t client, Handle name, Handle fresh);
  void offload(LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload);
  void do_postponed();

  struct Postponed {
    CommandRecord record;
    std::vector<std::byte> payload;
  };
  ClientObjects& objects_;
  PutQueue& puts_;
  FetchTable& fetches_;
  TaskTable& tasks_;
  std::vector<Postponed> postponed_;  ///< moves off the devices and back that wait for tasks, in their order
};

}  // namespace pathways
