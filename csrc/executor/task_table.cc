/// Tasks: work of the backend that takes long (writing or reading the shards of a checkpoint), done beside the order.
///
/// A task enters at its place in the order and waits for its buffer as a fetch does. Then it runs on a thread of the
/// backend, and nothing here waits for it (ASY-1): its end is one more event, `on_task_done`. A task that makes a
/// buffer announces the buffer at once. So readers wait for this buffer as for any other, and when the task fails they
/// fail with its error (ERR-1).
///
/// OWN-1: the backend keeps a reference to the task's value for as long as the task lasts. When the client is gone
/// meanwhile, the buffer that the task makes is an orphan, as the results of the client's runs are, and is dropped when
/// it is defined. The completion of a token is then delivered to nobody.
#include "executor/executor.h"

namespace pathways {

void Executor::task(uint32_t id, LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload) {
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
  objects_.make(c, handle, ObjectState::kAnnounced);
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
    backend_.drop(made);  // the ledger has never known it
    made = nullptr;
  }
  if (!is_known) return;
  if (task.makes && made != nullptr) {
    tracker_.next_age();
    if (LocalClient* c = objects_.client(task.client)) {
      if (task.is_counted) ledger_.add(made, c->account, devices, task.bytes);
      tracker_.add(devices,
                   {PendingValue::Kind::kPut, false, task.client, 0, refs_.retain(made), future.raw, tracker_.age()});
    }
    objects_.define(task.client, future, made, devices, tracker_.age());
  } else if (task.makes) {
    objects_.fail(task.client, future, errors_.add(error.value_or("the task made nothing")));
  } else if (objects_.client(task.client) == nullptr) {
    return;
  } else if (error) {
    link_.failed(task.client, future, *error);
  } else {
    link_.complete(task.client, future);
  }
  drain();
}

}  // namespace pathways
