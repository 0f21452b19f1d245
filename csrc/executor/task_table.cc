#include "executor/task_table.h"

namespace pathways {

void TaskTable::start(const Task& task, Value value, std::span<const std::byte> payload) {
  const uint64_t number = ++last_;
  tasks_.emplace(number, task);
  const Status status = backend_.start_task(task.client, number, value, payload, task.booked);
  if (status == Status::kOk) return;
  const bool is_unknown = status == Status::kInvalid;
  on_done(number, nullptr, 0, std::string(is_unknown ? "this host does no tasks" : backend_.last_error()));
}

void TaskTable::on_done(uint64_t number, Value made, uint64_t devices, const std::optional<std::string>& error) {
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
    const uint64_t age = tracker_.next_age();
    if (LocalClient* c = objects_.client(task.client)) {
      if (task.is_counted) ledger_.add(made, c->account, devices, task.booked.bytes);
      tracker_.add(devices, {PendingValue::Kind::kPut, false, task.client, 0, refs_.retain(made), future.raw, age});
    }
    objects_.define(task.client, future, task.maker, made, devices, age);
  } else if (task.makes) {
    objects_.fail(task.client, future, task.maker, errors_.add(error.value_or("the task made nothing")));
  } else if (objects_.client(task.client) == nullptr) {
    return;
  } else if (error) {
    link_.failed(task.client, future, *error);
  } else {
    link_.complete(task.client, future);
  }
  dispatcher_.drain();
}

}  // namespace pathways
