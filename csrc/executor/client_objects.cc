/// The executor's part of buffers: defines, fails and releases the clients' objects; does puts, fetches and other
/// commands.
#include <cstring>

#include "executor/executor.h"

namespace pathways {

/// Removes the orphan of this handle, an object that its client released before it was defined, and returns it. The
/// orphan comes before an object that has the handle now: a client may use a handle again (TRUST-1), and each of its
/// objects waits for a definition of its own.
std::optional<Object> Executor::take_orphan(uint32_t id, Handle handle) {
  if (id >= clients_.size() || clients_[id].orphans.empty()) return std::nullopt;
  const auto orphan = clients_[id].orphans.find(handle.raw);
  if (orphan == clients_[id].orphans.end()) return std::nullopt;
  Object taken = std::move(orphan->second);
  clients_[id].orphans.erase(orphan);
  return taken;
}

/// Keeps an announced object that its client has released, because others wait for its value.
void Executor::keep_orphan(Client& c, Object& object) {
  const auto [kept, is_new] = c.orphans.try_emplace(Handle::make(object.index, object.generation).raw);
  if (is_new) {
    kept->second = std::move(object);
  } else {  // the handle was released before: the next definition serves all waiters
    auto& waiters = kept->second.waiters;
    waiters.insert(waiters.end(), object.waiters.begin(), object.waiters.end());
  }
}

/// Makes the object of a handle. When the client did not release the old object at the same index, that object is
/// released first.
Object& Executor::make_object(Client& c, Handle handle, ObjectState state) {
  if (Object* old = c.objects.occupant(handle)) release(c, *old);
  return c.objects.announce(handle, state);
}

void Executor::define_object(uint32_t id, Handle handle, Value ref, uint64_t devices, uint64_t age) {
  std::optional<Object> orphan = take_orphan(id, handle);
  Object* object = orphan ? &*orphan : id < clients_.size() ? clients_[id].objects.find(handle) : nullptr;
  if (object == nullptr || object->state != ObjectState::kAnnounced) {
    refs_.drop(ref);
    return;
  }
  object->state = ObjectState::kDefined;
  object->value = ref;
  object->devices = devices;
  object->age = age;
  wake_waiters(*object);
  if (orphan) refs_.drop(ref);
}

void Executor::fail_object(uint32_t id, Handle handle, uint32_t error) {
  std::optional<Object> orphan = take_orphan(id, handle);
  Object* object = orphan ? &*orphan : id < clients_.size() ? clients_[id].objects.find(handle) : nullptr;
  if (client(id) != nullptr) link_.failed(id, handle, errors_.text(error));
  if (object == nullptr) return;
  object->state = ObjectState::kFailed;
  object->error = error;
  wake_waiters(*object);
}

void Executor::wake_waiters(Object& object) {
  if (object.waiters.empty()) return;
  const std::vector<ObjectWaiter> waiters = std::move(object.waiters);
  object.waiters.clear();
  for (const ObjectWaiter& waiter : waiters) {
    if (waiter.kind == ObjectWaiter::Kind::kFetch) {
      start_fetch(waiter.index, object);
    } else if (object.state == ObjectState::kFailed) {
      propagate_error(waiter.index, waiter.value, object.error);
      close_step(waiter.index);
    } else {
      deliver(waiter.index, waiter.value, refs_.retain(object.value), object.devices, object.age);
      close_step(waiter.index);
    }
  }
}

void Executor::release(Client& c, Object& object) {
  if (object.state == ObjectState::kAnnounced) {  // its index may be used again before it is defined
    keep_orphan(c, object);
  } else if (object.value != nullptr) {
    refs_.drop(object.value);
  }
  c.objects.forget(object);
}

void Executor::on_command(const CommandRecord& record, std::span<const std::byte> payload) {
  const uint32_t id = record.header.client;
  const uint64_t record_bytes = bytes_of(record);
  Client* c = client(id);
  if (c == nullptr) {
    link_.command_done(id, record_bytes);
    return;
  }
  if (!held_.empty()) release_held();  // the swap fault swaps runs, not a run and the release of its results
  const Handle handle{record.handle};
  const auto kind = static_cast<CommandKind>(record.header.detail);
  switch (kind) {
    case CommandKind::kPut: {
      if (record.is_refused != 0) {  // a kFail that follows gives the reason
        backend_.refuse_put(id, payload);
        break;
      }
      if (handle.index() >= c->capacity) {
        link_.failed(id, handle, "a buffer's handle is out of range on host " + std::to_string(options_.host));
        break;
      }
      Value value = nullptr;
      uint64_t devices = 0;
      const Status status = backend_.put(id, payload, &value, &devices);
      Object& object = make_object(*c, handle, ObjectState::kDefined);
      if (status != Status::kOk) {
        object.state = ObjectState::kFailed;
        object.error = errors_.add(std::string(backend_.last_error()));
        link_.failed(id, handle, errors_.text(object.error));
        break;
      }
      if (record.space_set != kNoSpaceSet) ledger_.add(value, c->account, devices, record.space_bytes);
      object.value = value;
      object.devices = devices;
      object.age = tracker_.next_age();
      tracker_.add(devices, {PendingValue::Kind::kPut, false, id, 0, refs_.retain(value), handle.raw, tracker_.age()});
      break;
    }
    case CommandKind::kFetch:
      fetch(id, *c, record, payload);
      break;
    case CommandKind::kRelease:
      for (size_t at = 0; at + sizeof(uint64_t) <= payload.size(); at += sizeof(uint64_t)) {
        uint64_t raw;
        std::memcpy(&raw, payload.data() + at, sizeof raw);
        if (Object* object = c->objects.find(Handle{raw})) release(*c, *object);
      }
      break;
    case CommandKind::kBackend:
      backend_.command(id, payload);
      break;
    case CommandKind::kTask:
      task(id, *c, record, payload);
      break;
    case CommandKind::kFail: {  // ERR-1: what takes it as an argument fails with its text
      if (handle.index() >= c->capacity) break;
      // FUT-3: the index may belong to a younger handle by now. Then nobody can use this handle any more.
      const Object* there = c->objects.occupant(handle);
      if (there != nullptr && there->generation >= handle.generation()) break;
      Object& object = make_object(*c, handle, ObjectState::kFailed);
      object.error = errors_.add({reinterpret_cast<const char*>(payload.data()), payload.size()});
      break;
    }
    case CommandKind::kRename:
      for (size_t at = 0; at + 2 * sizeof(uint64_t) <= payload.size(); at += 2 * sizeof(uint64_t)) {
        Handle pair[2];
        std::memcpy(pair, payload.data() + at, sizeof pair);
        rename(id, *c, pair[0], pair[1]);
      }
      break;
    case CommandKind::kOffload:
    case CommandKind::kRestore:
      offload(id, *c, kind, payload);
      break;
  }
  if (kind != CommandKind::kFetch && kind != CommandKind::kTask)
    link_.command_done(id, record_bytes);  // those two report their end themselves
  drain();
}

void Executor::fetch(uint32_t id, Client& c, const CommandRecord& record, std::span<const std::byte> payload) {
  const bool is_task = static_cast<CommandKind>(record.header.detail) == CommandKind::kTask;
  Object* object = c.objects.find(Handle{record.handle});
  if (object == nullptr) {
    link_.failed(id, Handle{record.token}, missing(id, "the buffer to read was deleted"));
    if (!is_task) backend_.refuse_fetch(id, payload);
    link_.command_done(id, bytes_of(record));
    return;
  }
  uint32_t slot;
  if (free_fetches_.empty()) {
    slot = static_cast<uint32_t>(fetches_.size());
    fetches_.emplace_back();
  } else {
    slot = free_fetches_.back();
    free_fetches_.pop_back();
  }
  fetches_[slot] = {id, record.token, is_task, {payload.begin(), payload.end()}, bytes_of(record)};
  if (object->state == ObjectState::kAnnounced) {
    object->waiters.push_back({ObjectWaiter::Kind::kFetch, slot, 0});
  } else {
    start_fetch(slot, *object);
  }
}

void Executor::start_fetch(uint32_t slot, Object& object) {
  if (object.state == ObjectState::kFailed) {
    refuse_fetch(slot, errors_.text(object.error));
    return;
  }
  tracker_.add(object.devices,
               {PendingValue::Kind::kFetch, false, kNone, slot, refs_.retain(object.value), 0, object.age});
}

/// The buffer of a fetch, or of a task, has failed.
void Executor::refuse_fetch(uint32_t slot, std::string_view why) {
  Fetch& fetch = fetches_[slot];
  if (client(fetch.client) != nullptr) {
    link_.failed(fetch.client, Handle{fetch.token}, why);
    if (!fetch.is_task) backend_.refuse_fetch(fetch.client, fetch.payload);
  }
  end_fetch(slot, true);
}

/// Frees the slot of a fetch. `is_done`: the command is done; false: a task goes on with it.
void Executor::end_fetch(uint32_t slot, bool is_done) {
  Fetch& fetch = fetches_[slot];
  if (is_done) link_.command_done(fetch.client, fetch.command);
  fetch.payload.clear();
  free_fetches_.push_back(slot);
}

/// The buffer of a fetch, or of a task, is ready.
void Executor::fetch_now(const Fetch& fetch, Value value) {
  if (client(fetch.client) == nullptr) return;
  if (fetch.is_task) {
    start_task({fetch.client, fetch.token, false, false, 0, fetch.command}, value, fetch.payload);
  } else if (backend_.fetch(fetch.client, value, fetch.payload) == Status::kOk) {
    link_.complete(fetch.client, Handle{fetch.token});
  } else {
    link_.failed(fetch.client, Handle{fetch.token}, backend_.last_error());
  }
}

}  // namespace pathways
