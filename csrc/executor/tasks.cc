/// Tasks: work of the backend's that takes long (a checkpoint's shards are written, or read), done beside the order.
///
/// A task enters in its place in the order and waits for its buffer as a fetch does; from then on it runs on a thread
/// of the backend's, and nothing here waits for it (ASY-1): its end is one more event, `on_task_done`. A task that
/// makes a buffer announces it at once, so who reads the buffer waits for it as for any other, and its failure is
/// theirs (ERR-1).
///
/// OWN-1: the value of a task is the backend's reference for as long as the task lasts. When the client goes meanwhile,
/// the buffer that is being made becomes an orphan, as the results of its runs do, and is dropped when it is defined;
/// a token's completion has nobody to go to.
#include "executor/executor.h"

namespace pathways {

void Executor::task(uint32_t id, Client& c, const CommandRecord& record, std::span<const std::byte> payload) {
  const Handle handle{record.handle};
  if (record.token != 0) {
    if (handle.valid()) {
      fetch(id, c, record, payload);
    } else {
      start_task({id, record.token, false, false, 0, bytes_of(record)}, nullptr, payload);
    }
    return;
  }
  if (!handle.valid() || handle.index() >= c.capacity) {
    link_.failed(id, handle, "a buffer's handle is out of range on host " + std::to_string(options_.host));
    link_.command_done(id, bytes_of(record));
    return;
  }
  make_object(c, handle, ObjectState::kAnnounced);
  start_task({id, record.handle, true, record.space_set != kNoSpaceSet, record.space_bytes, bytes_of(record)}, nullptr,
             payload);
}

void Executor::start_task(Task task, Value value, std::span<const std::byte> payload) {
  const uint64_t number = ++last_task_;
  tasks_.emplace(number, task);
  const Status status = backend_.start_task(task.client, number, value, payload);
  if (status == Status::kOk) return;
  const bool is_unknown = status == Status::kInvalid;
  on_task_done(number, nullptr, 0, std::string(is_unknown ? "this host does no tasks" : backend_.last_error()));
}

void Executor::on_task_done(uint64_t number, Value made, uint64_t devices, const std::optional<std::string>& error) {
  const auto found = tasks_.find(number);
  const bool is_known = found != tasks_.end();
  const Task task = is_known ? found->second : Task{};
  if (is_known) {
    tasks_.erase(found);
    link_.command_done(task.client, task.command);
  }
  const Handle future{task.future};
  if (made != nullptr && (!is_known || !task.makes || error)) {
    backend_.drop(made);  // never told to the ledger
    made = nullptr;
  }
  if (!is_known) return;
  if (task.makes && made != nullptr) {
    ++age_;
    if (Client* c = client(task.client)) {
      if (task.is_counted) ledger_.add(made, c->account, devices, task.bytes);
      add_pending(devices, {PendingValue::Kind::kPut, false, task.client, 0, retain(made), future.raw, age_});
    }
    define_object(task.client, future, made, devices, age_);
  } else if (task.makes) {
    fail_object(task.client, future, new_error(error.value_or("the task made nothing")));
  } else if (client(task.client) == nullptr) {
    return;
  } else if (error) {
    link_.failed(task.client, future, *error);
  } else {
    link_.complete(task.client, future);
  }
  drain();
}

}  // namespace pathways
