/// FetchTable: the fetches, and the tasks that read a buffer, which wait for their buffer.
///
/// A fetch enters at its place in the order. When its buffer is defined it becomes a pending value, and when the buffer
/// is ready the backend writes it for the client, or starts the task. A fetch keeps its slot until then.
///
/// OWN-1: when the client is gone meanwhile, nothing is written and nobody is notified.
///
/// Threading: the executor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "executor/task_table.h"
#include "messages/records.h"
#include "runs/client_objects.h"
#include "runs/executor_part.h"

namespace pathways {

class FetchTable : private ExecutorPart {
 public:
  FetchTable(const ExecutorPart& part, ClientObjects& objects, TaskTable& tasks)
      : ExecutorPart(part), objects_(objects), tasks_(tasks) {}

  /// A command of kind kFetch, or of kind kTask for a task that reads a buffer.
  void add(LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload);
  /// The buffer that the fetch waited for is defined or has failed.
  void start(uint32_t slot, const Object& object);
  /// The buffer is ready.
  void settle(uint32_t slot, Value value);
  /// The buffer has failed.
  void refuse(uint32_t slot, std::string_view why);
  void clear();

 private:
  struct Fetch {
    CommandRecord record;
    std::vector<std::byte> payload;
  };

  /// Whether the buffer is a task's input; then it is not written for the client.
  static bool is_task(const CommandRecord& record) {
    return static_cast<CommandKind>(record.header.detail) == CommandKind::kTask;
  }
  /// Frees the slot.
  Fetch take(uint32_t slot);

  ClientObjects& objects_;
  TaskTable& tasks_;
  std::vector<Fetch> fetches_;
  std::vector<BlockPiece> written_;  ///< by the fetch that is written now
  std::vector<uint32_t> free_;
};

}  // namespace pathways
