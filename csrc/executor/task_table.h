/// TaskTable: the tasks that the backend has under way: work that takes long (writing or reading the shards of a
/// checkpoint), done beside the order.
///
/// A task enters at its place in the order and waits for its buffer as a fetch does. Then it runs on a thread of the
/// backend, and nothing here waits for it (ASY-1): its end is one more event, `on_done`. A task that makes a buffer
/// announces the buffer at once. So readers wait for this buffer as for any other, and when the task fails they fail
/// with its error (ERR-1).
///
/// MEM-7: the task keeps a reference to its value until its end, and then its hold is over. A task may be answered
/// before: the client goes on, and the backend keeps the value.
/// MEM-6: the backend refuses a task that would make a buffer which takes more than the order has booked for it.
/// OWN-1: when the client is gone meanwhile, the buffer that the task makes is an orphan, as the results of the
/// client's runs are, and is dropped when it is defined. The completion of a token is then delivered to nobody.
///
/// Threading: the executor's thread only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>

#include "runs/client_objects.h"
#include "runs/executor_part.h"

namespace pathways {

class TaskTable : private ExecutorPart {
 public:
  struct Task {
    CommandRecord record;
    uint64_t maker = 0;        ///< of the object that was announced for the buffer that it makes
    Value value = nullptr;     ///< what it reads
    bool is_answered = false;  ///< its token is completed, and it only keeps its value

    uint32_t client() const { return record.header.client; }
    bool makes() const { return record.token == 0; }
    /// Its token, or the handle of the buffer that it makes.
    Handle future() const { return Handle{makes() ? record.handle : record.token}; }
  };

  TaskTable(const ExecutorPart& part, ClientObjects& objects) : ExecutorPart(part), objects_(objects) {}

  /// Its value is ready. Takes a reference to it.
  void start(Task task, std::span<const std::byte> payload);
  /// The backend has answered a task, and keeps its value.
  void on_answered(uint64_t number);
  /// The backend has done a task, or the task failed with `error`. Takes over `made`, the buffer that the task made on
  /// `devices`; nullptr: it made none.
  void on_done(uint64_t number, Value made, uint64_t devices, const std::optional<std::string>& error);
  uint64_t count() const { return tasks_.size(); }
  /// Whether a task under way makes a buffer for the client.
  bool is_making(uint32_t client) const {
    return std::any_of(tasks_.begin(), tasks_.end(),
                       [&](const auto& each) { return each.second.client() == client && each.second.makes(); });
  }
  /// A task that ends later finds no entry.
  void clear() {
    for (auto& [number, task] : tasks_) refs_.reset(task.value);
    tasks_.clear();
  }

 private:
  void answer(const Task& task, Value made, uint64_t devices, const std::optional<std::string>& error);

  ClientObjects& objects_;
  std::unordered_map<uint64_t, Task> tasks_;  ///< by the number that the backend was given
  uint64_t last_ = 0;
};

}  // namespace pathways
