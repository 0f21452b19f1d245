#include "executor/fetch_table.h"

namespace pathways {

void FetchTable::add(LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload) {
  const uint32_t id = record.header.client;
  const bool is_task = static_cast<CommandKind>(record.header.detail) == CommandKind::kTask;
  Object* object = c.objects.find(Handle{record.handle});
  if (object == nullptr) {
    link_.failed(id, Handle{record.token}, objects_.missing(id, "the buffer to read was deleted"));
    if (!is_task) backend_.refuse_fetch(id, payload);
    link_.command_done(id, bytes_of(record));
    return;
  }
  uint32_t slot;
  if (free_.empty()) {
    slot = static_cast<uint32_t>(fetches_.size());
    fetches_.emplace_back();
  } else {
    slot = free_.back();
    free_.pop_back();
  }
  fetches_[slot] = {id, record.token, is_task, {payload.begin(), payload.end()}, bytes_of(record)};
  if (object->state == ObjectState::kAnnounced) {
    object->waiters.push_back({ObjectWaiter::Kind::kFetch, slot, 0});
  } else {
    start(slot, *object);
  }
}

void FetchTable::start(uint32_t slot, const Object& object) {
  if (object.state == ObjectState::kFailed) {
    refuse(slot, errors_.text(object.error));
    return;
  }
  tracker_.add(object.devices,
               {PendingValue::Kind::kFetch, false, 0xffffffffu, slot, refs_.retain(object.value), 0, object.age});
}

void FetchTable::settle(uint32_t slot, Value value) {
  write(fetches_[slot], value);
  end(slot, !fetches_[slot].is_task);
}

void FetchTable::refuse(uint32_t slot, std::string_view why) {
  Fetch& fetch = fetches_[slot];
  if (objects_.client(fetch.client) != nullptr) {
    link_.failed(fetch.client, Handle{fetch.token}, why);
    if (!fetch.is_task) backend_.refuse_fetch(fetch.client, fetch.payload);
  }
  end(slot, true);
}

/// Writes a ready buffer for the client, or starts the task that reads it.
void FetchTable::write(const Fetch& fetch, Value value) {
  if (objects_.client(fetch.client) == nullptr) return;
  if (fetch.is_task) {
    tasks_.start({fetch.client, fetch.token, false, false, {}, fetch.command}, value, fetch.payload);
  } else if (backend_.fetch(fetch.client, value, fetch.payload) == Status::kOk) {
    link_.complete(fetch.client, Handle{fetch.token});
  } else {
    link_.failed(fetch.client, Handle{fetch.token}, backend_.last_error());
  }
}

/// Frees the slot of a fetch. `is_done`: the command is done; false: a task goes on with it.
void FetchTable::end(uint32_t slot, bool is_done) {
  Fetch& fetch = fetches_[slot];
  if (is_done) link_.command_done(fetch.client, fetch.command);
  fetch.payload.clear();
  free_.push_back(slot);
}

void FetchTable::clear() {
  fetches_.clear();
  free_.clear();
}

}  // namespace pathways
