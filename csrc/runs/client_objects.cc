#include "runs/client_objects.h"

#include <utility>

#include "base/check.h"

namespace pathways {

void ClientObjects::add_client(uint32_t id, uint32_t capacity) {
  if (id >= clients_.size()) clients_.resize(id + 1);
  PW_DCHECK(!clients_[id].gone);
  if (!clients_[id].present) clients_[id].account = ledger_.open(id, Ledger::kPuts);
  clients_[id].present = true;
  clients_[id].capacity = capacity;
}

bool ClientObjects::end_client(uint32_t id) {
  if (id >= clients_.size()) clients_.resize(id + 1);
  LocalClient& c = clients_[id];
  c.gone = true;
  if (!c.present) return false;
  // A value that does not exist yet is dropped when it is made, because its run may be part of a gang. A value that
  // exists is dropped now.
  c.objects.for_each([&](Object& object) {
    if (object.state == ObjectState::kAnnounced) {
      keep_orphan(c, object);
    } else if (object.value != nullptr) {
      refs_.drop(object.value);
    }
  });
  c.objects = ObjectStore{};
  c.present = false;
  ledger_.close(c.account);
  return true;
}

/// Removes the orphan of this handle that `maker` makes, an object that its client released before it was defined, and
/// returns it.
std::optional<Object> ClientObjects::take_orphan(uint32_t id, Handle handle, uint64_t maker) {
  if (id >= clients_.size() || clients_[id].orphans.empty()) return std::nullopt;
  const auto orphan = clients_[id].orphans.find({handle.raw, maker});
  if (orphan == clients_[id].orphans.end()) return std::nullopt;
  Object taken = std::move(orphan->second);
  clients_[id].orphans.erase(orphan);
  return taken;
}

/// Keeps an announced object that its client has released, because others wait for its value.
void ClientObjects::keep_orphan(LocalClient& c, Object& object) {
  c.orphans.try_emplace({Handle::make(object.index, object.generation).raw, object.maker}, std::move(object));
}

Object& ClientObjects::make(LocalClient& c, Handle handle, ObjectState state) {
  if (Object* old = c.objects.occupant(handle)) release(c, *old);
  return c.objects.announce(handle, state);
}

void ClientObjects::define(uint32_t id, Handle handle, uint64_t maker, Value ref, uint64_t devices, uint64_t age) {
  std::optional<Object> orphan = take_orphan(id, handle, maker);
  Object* object = orphan ? &*orphan : id < clients_.size() ? clients_[id].objects.find(handle) : nullptr;
  if (object == nullptr || object->state != ObjectState::kAnnounced || object->maker != maker) {
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

void ClientObjects::fail(uint32_t id, Handle handle, uint64_t maker, uint32_t error) {
  std::optional<Object> orphan = take_orphan(id, handle, maker);
  Object* object = orphan ? &*orphan : id < clients_.size() ? clients_[id].objects.find(handle) : nullptr;
  if (client(id) != nullptr && !handle.is_hidden()) link_.failed(id, handle, errors_.text(error));
  if (object != nullptr && object->maker == maker) set_failed(*object, error);
}

void ClientObjects::fail_put(uint32_t id, Handle handle, uint64_t age, uint32_t error) {
  if (client(id) == nullptr) return;
  link_.failed(id, handle, errors_.text(error));
  Object* object = clients_[id].objects.find(handle);
  if (object != nullptr && object->state == ObjectState::kDefined && object->age == age) set_failed(*object, error);
}

void ClientObjects::set_failed(Object& object, uint32_t error) {
  object.state = ObjectState::kFailed;
  object.error = error;
  refs_.reset(object.value);
  wake_waiters(object);
}

void ClientObjects::wake_waiters(Object& object) {
  if (object.waiters.empty()) return;
  const std::vector<ObjectWaiter> waiters = std::move(object.waiters);
  object.waiters.clear();
  for (const ObjectWaiter& waiter : waiters) dispatcher_.wake(waiter, object);
}

void ClientObjects::release(LocalClient& c, Object& object) {
  if (object.state == ObjectState::kAnnounced) {  // its index may be used again before it is defined
    keep_orphan(c, object);
  } else if (object.value != nullptr) {
    refs_.drop(object.value);
  }
  c.objects.forget(object);
}

void ClientObjects::set_predecessor_failure(std::string text, uint32_t youngest_client) {
  predecessor_failure_ = std::move(text);
  predecessor_client_ = youngest_client;
}

std::string ClientObjects::missing(uint32_t id, std::string_view otherwise) const {
  return predecessor_failure_.empty() || id > predecessor_client_ ? std::string(otherwise) : predecessor_failure_;
}

uint64_t ClientObjects::count() const {
  uint64_t count = 0;
  for (const LocalClient& c : clients_) count += c.objects.count();
  return count;
}

void ClientObjects::clear() {
  for (LocalClient& c : clients_) {
    c.objects.for_each([&](Object& object) { refs_.reset(object.value); });
    c = LocalClient{};
  }
}

void ClientObjects::validate() const {
  for (const LocalClient& c : clients_) {
    PW_CHECK(!(c.present && c.gone));  // OWN-1
    PW_CHECK(c.present || c.objects.count() == 0);
    for (const auto& [key, orphan] : c.orphans) {
      PW_CHECK(key.first != 0 && key.second == orphan.maker && orphan.state == ObjectState::kAnnounced &&
               orphan.value == nullptr);
    }
  }
}

}  // namespace pathways
