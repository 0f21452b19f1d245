/// The executor's part of buffers that move: to another slice's hosts under their old names, or off the devices and
/// back.
#include "executor/executor.h"

namespace pathways {

/// MOVE-1: a name means one buffer. When the buffer moved to other hosts, nothing of it stays here. When it moved here,
/// it gets the old name `name` in place of `fresh`.
void Executor::rename(uint32_t id, Client& c, Handle name, Handle fresh) {
  Object* came = c.objects.find(fresh);
  if (came == nullptr) {  // it moved to other hosts
    if (Object* object = c.objects.find(name)) release(c, *object);
    return;
  }
  if (name.index() >= c.capacity) return;
  if (came->state == ObjectState::kAnnounced) {  // a client that waits for the move never does this
    release(c, *came);
    const uint32_t error =
        errors_.add("a buffer was renamed before it was there, on host " + std::to_string(options_.host));
    make_object(c, name, ObjectState::kFailed).error = error;
    link_.failed(id, name, errors_.text(error));
    return;
  }
  const Object moved = std::move(*came);
  c.objects.forget(*came);
  // A moved buffer fails when the buffer that it was made of failed. The error of the old buffer is preferred, because
  // it names the computation that failed (ERR-1).
  const Object* old = moved.state == ObjectState::kFailed ? c.objects.find(name) : nullptr;
  const uint32_t error = old != nullptr && old->state == ObjectState::kFailed ? old->error : moved.error;
  Object& object = make_object(c, name, moved.state);
  object.error = error;
  object.value = moved.value;
  object.devices = moved.devices;
  object.age = moved.age;
}

/// Offloads or restores all buffers of a client whose runs are over: it has no buffers here but the defined ones.
void Executor::offload(uint32_t id, Client& c, CommandKind kind, std::span<const std::byte> payload) {
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
