#include "executor/task_table.h"

namespace pathways {

void TaskTable::start(Task task, std::span<const std::byte> payload) {
  const uint64_t number = ++last_;
  const CommandRecord record = task.record;
  const Booked booked = task.makes() ? Booked{record.space_devices, record.space_bytes} : Booked{};
  if (task.value != nullptr) refs_.retain(task.value);
  tasks_.emplace(number, task);
  const Status status = work_.start_task(task.client(), number, task.value, payload, booked);
  if (status == Status::kOk) return;
  const bool is_unknown = status == Status::kInvalid;
  on_done(number, nullptr, 0, std::string(is_unknown ? "this host does no tasks" : work_.last_error()));
}

void TaskTable::on_answered(uint64_t number) {
  const auto found = tasks_.find(number);
  if (found == tasks_.end() || found->second.makes() || found->second.is_answered) return;
  Task& task = found->second;
  task.is_answered = true;
  link_.command_done(task.client(), bytes_of(task.record));
  if (objects_.client(task.client()) != nullptr) link_.complete(task.client(), task.future());
}

void TaskTable::on_done(uint64_t number, Value made, uint64_t devices, const std::optional<std::string>& error) {
  const auto found = tasks_.find(number);
  const bool is_known = found != tasks_.end();
  Task task = is_known ? found->second : Task{};
  if (is_known) tasks_.erase(found);
  if (made != nullptr && (!is_known || !task.makes() || error)) {
    device_.drop(made);  // the ledger has never known it
    made = nullptr;
  }
  if (!is_known) return;
  refs_.reset(task.value);
  answer(task, made, devices, error);
  if (!task.is_answered) link_.command_done(task.client(), bytes_of(task.record));
  if (task.record.hold != 0) link_.hold_over(task.client(), task.record.hold);
  dispatcher_.drain();
}

/// Defines or fails the buffer that a task makes, or its token.
void TaskTable::answer(const Task& task, Value made, uint64_t devices, const std::optional<std::string>& error) {
  const uint32_t id = task.client();
  LocalClient* const client = objects_.client(id);
  if (task.makes() && made != nullptr) {
    const uint64_t age = tracker_.next_age();
    if (client != nullptr) {
      if (task.record.space_set != kNoSpaceSet) ledger_.add(made, client->account, devices, task.record.space_bytes);
      tracker_.add(devices, {PendingValue::Kind::kPut, false, id, 0, refs_.retain(made), task.future().raw, age});
    }
    objects_.define(id, task.future(), task.maker, made, devices, age);
  } else if (task.makes()) {
    objects_.fail(id, task.future(), task.maker, errors_.add(error.value_or("the task made nothing")));
  } else if (client != nullptr && !task.is_answered) {
    if (error) {
      link_.failed(id, task.future(), *error);
    } else {
      link_.complete(id, task.future());
    }
  }
}

}  // namespace pathways
