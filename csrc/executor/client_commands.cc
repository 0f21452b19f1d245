/// The executor's part of commands: puts, releases, names, and buffers that move: to another slice's hosts under their
/// old names, or off the devices and back.
#include <cstring>

#include "executor/executor.h"

namespace pathways {

void Executor::on_command(const CommandRecord& record, std::span<const std::byte> payload) {
  const uint32_t id = record.header.client;
  const uint64_t record_bytes = bytes_of(record);
  LocalClient* c = objects_.client(id);
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
      Object& object = objects_.make(*c, handle, ObjectState::kDefined);
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
        if (Object* object = c->objects.find(Handle{raw})) objects_.release(*c, *object);
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
      Object& object = objects_.make(*c, handle, ObjectState::kFailed);
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

/// MOVE-1: a name means one buffer. When the buffer moved to other hosts, nothing of it stays here. When it moved here,
/// it gets the old name `name` in place of `fresh`.
void Executor::rename(uint32_t id, LocalClient& c, Handle name, Handle fresh) {
  Object* came = c.objects.find(fresh);
  if (came == nullptr) {  // it moved to other hosts
    if (Object* object = c.objects.find(name)) objects_.release(c, *object);
    return;
  }
  if (name.index() >= c.capacity) return;
  if (came->state == ObjectState::kAnnounced) {  // a client that waits for the move never does this
    objects_.release(c, *came);
    const uint32_t error =
        errors_.add("a buffer was renamed before it was there, on host " + std::to_string(options_.host));
    objects_.make(c, name, ObjectState::kFailed).error = error;
    link_.failed(id, name, errors_.text(error));
    return;
  }
  const Object moved = std::move(*came);
  c.objects.forget(*came);
  // A moved buffer fails when the buffer that it was made of failed. The error of the old buffer is preferred, because
  // it names the computation that failed (ERR-1).
  const Object* old = moved.state == ObjectState::kFailed ? c.objects.find(name) : nullptr;
  const uint32_t error = old != nullptr && old->state == ObjectState::kFailed ? old->error : moved.error;
  Object& object = objects_.make(c, name, moved.state);
  object.error = error;
  object.value = moved.value;
  object.devices = moved.devices;
  object.age = moved.age;
}

/// Offloads or restores all buffers of a client whose runs are over: it has no buffers here but the defined ones.
void Executor::offload(uint32_t id, LocalClient& c, CommandKind kind, std::span<const std::byte> payload) {
  std::vector<Object*> objects;
  std::vector<Value> values;
  c.objects.for_each([&](Object& object) {
    if (object.state != ObjectState::kDefined) return;
    objects.push_back(&object);
    values.push_back(object.value);
  });
  const bool is_away = kind == CommandKind::kOffload;
  const Status status = is_away ? backend_.offload(id, values, payload) : backend_.restore(id, values, payload);
  if (status != Status::kOk) return;
  for (size_t i = 0; i < objects.size(); ++i) {
    if (objects[i]->value == values[i]) continue;
    if (is_away) {  // MEM-1
      ledger_.offload(objects[i]->value, values[i]);
    } else {
      ledger_.restore(objects[i]->value, values[i]);
    }
    objects[i]->value = values[i];
  }
}

}  // namespace pathways
