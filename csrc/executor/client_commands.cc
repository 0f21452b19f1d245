#include "executor/client_commands.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace pathways {

void ClientCommands::on_command(LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload) {
  const uint32_t id = record.header.client;
  const uint64_t record_bytes = bytes_of(record);
  switch (static_cast<CommandKind>(record.header.detail)) {
    case CommandKind::kPut:
      if (!puts_.add(c, record, payload)) return;  // it reports its end itself
      break;
    case CommandKind::kFetch:
      fetches_.add(c, record, payload);
      return;  // it reports its end itself
    case CommandKind::kRelease:
      release(c, payload);
      break;
    case CommandKind::kBackend:
      work_.command(id, record.token, payload);
      break;
    case CommandKind::kTask:
      task(c, record, payload);
      return;  // it reports its end itself
    case CommandKind::kFail:
      fail(c, record, payload);
      break;
    case CommandKind::kRename:
      for (size_t at = 0; at + 2 * sizeof(uint64_t) <= payload.size(); at += 2 * sizeof(uint64_t)) {
        Handle pair[2];
        std::memcpy(pair, payload.data() + at, sizeof pair);
        rename(c, id, pair[0], pair[1]);
      }
      break;
    case CommandKind::kOffload:
    case CommandKind::kRestore:
      if (tasks_.is_making(id)) {
        postponed_.push_back({record, {payload.begin(), payload.end()}});
        return;  // it reports its end when it is done
      }
      offload(c, record, payload);
      break;
  }
  link_.command_done(id, record_bytes);
}

void ClientCommands::release(LocalClient& c, std::span<const std::byte> payload) {
  for (size_t at = 0; at + sizeof(uint64_t) <= payload.size(); at += sizeof(uint64_t)) {
    uint64_t raw;
    std::memcpy(&raw, payload.data() + at, sizeof raw);
    if (Object* object = c.objects.find(Handle{raw})) objects_.release(c, *object);
  }
}

void ClientCommands::task(LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload) {
  const Handle handle{record.handle};
  if (record.token != 0) {
    if (handle.valid()) {
      fetches_.add(c, record, payload);
    } else {
      tasks_.start({record}, payload);
    }
    return;
  }
  if (!c.may_name(handle)) {
    link_.failed(record.header.client, handle, "a buffer's handle is out of range on host " + std::to_string(host_));
    link_.command_over(record);
    return;
  }
  const uint64_t maker = objects_.next_maker();
  objects_.make(c, handle, ObjectState::kAnnounced).maker = maker;
  tasks_.start({record, maker}, payload);
}

/// ERR-1: what takes the buffer as an argument fails with the text of the command.
void ClientCommands::fail(LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload) {
  const Handle handle{record.handle};
  if (!c.may_name(handle)) return;
  // FUT-3: the index may belong to a younger handle by now. Then nobody can use this handle any more.
  const Object* there = c.objects.occupant(handle);
  if (there != nullptr && there->generation >= handle.generation()) return;
  Object& object = objects_.make(c, handle, ObjectState::kFailed);
  object.error = errors_.add({reinterpret_cast<const char*>(payload.data()), payload.size()});
}

/// MOVE-1: a name means one buffer. When the buffer moved to other hosts, nothing of it stays here. When it moved here,
/// it gets the old name `name` in place of `fresh`.
void ClientCommands::rename(LocalClient& c, uint32_t client, Handle name, Handle fresh) {
  Object* came = c.objects.find(fresh);
  if (came == nullptr) {  // it moved to other hosts
    if (Object* object = c.objects.find(name)) objects_.release(c, *object);
    return;
  }
  if (!c.may_name(name)) return;
  if (came->state == ObjectState::kAnnounced) {  // a client that waits for the move never does this
    objects_.release(c, *came);
    const uint32_t error = errors_.add("a buffer was renamed before it was there, on host " + std::to_string(host_));
    objects_.make(c, name, ObjectState::kFailed).error = error;
    link_.failed(client, name, errors_.text(error));
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

void ClientCommands::do_postponed() {
  for (size_t at = 0; at < postponed_.size();) {
    const uint32_t id = postponed_[at].record.header.client;
    LocalClient* c = objects_.client(id);
    if (c != nullptr && tasks_.is_making(id)) {
      ++at;
      continue;
    }
    const Postponed due = std::move(postponed_[at]);
    postponed_.erase(postponed_.begin() + static_cast<std::ptrdiff_t>(at));
    if (c != nullptr) offload(*c, due.record, due.payload);
    link_.command_done(id, bytes_of(due.record));
  }
}

/// Offloads or restores all buffers of a client whose runs are over: it has no buffers here but the defined ones.
void ClientCommands::offload(LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload) {
  puts_.make_those_of(record.header.client);
  std::vector<Object*> objects;
  std::vector<Value> values;
  c.objects.for_each([&](Object& object) {
    if (object.state != ObjectState::kDefined) return;
    objects.push_back(&object);
    values.push_back(object.value);
  });
  const bool is_away = static_cast<CommandKind>(record.header.detail) == CommandKind::kOffload;
  const Offload where = is_away ? Offload::kAway : Offload::kBack;
  if (work_.offload(record.header.client, values, payload, where) != Status::kOk) return;
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
