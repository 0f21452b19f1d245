/// ObjectStore: the buffers of one client on one host, handle -> value, by index and without hashing.
///
/// An object is announced when the run that makes it is prepared, defined when its value exists (XLA may still be
/// computing it), and forgotten when its client releases the handle. Readers that come before the definition wait.
///
/// States: kAbsent -> kAnnounced -> kDefined | kFailed -> kAbsent; kAbsent -> kDefined | kFailed for puts.
/// FUT-3: a handle of an older generation finds nothing.
/// Hidden handles (base/ids.h) have an array of their own, because their indices are high.
/// Threading: the executor's thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "device/device.h"

namespace pathways {

enum class ObjectState : uint8_t { kAbsent, kAnnounced, kDefined, kFailed };

/// What waits for an object: a value of a run, or a fetch.
struct ObjectWaiter {
  enum class Kind : uint8_t { kRunValue, kFetch } kind;
  uint32_t index;  ///< run slot, or fetch slot
  uint32_t value;
};

struct Object {
  uint32_t index = 0;
  uint32_t generation = 0;
  ObjectState state = ObjectState::kAbsent;
  uint32_t error = 0;
  Value value = nullptr;
  uint64_t devices = 0;
  uint64_t age = 0;    ///< of its value, as the executor counts ages
  uint64_t maker = 0;  ///< announced: what will define it: the order of a run, or ClientObjects::next_maker()
  std::vector<ObjectWaiter> waiters;
};

class ObjectStore {
 public:
  /// The object of a handle, or nullptr when there is none.
  Object* find(Handle handle) {
    std::vector<Object>& objects = array_of(handle);
    const uint32_t at = place_of(handle);
    if (at >= objects.size()) return nullptr;
    Object& object = objects[at];
    return object.state != ObjectState::kAbsent && object.generation == handle.generation() ? &object : nullptr;
  }

  /// The object at this handle's index, of any generation; nullptr when the index is free.
  Object* occupant(Handle handle) {
    std::vector<Object>& objects = array_of(handle);
    const uint32_t at = place_of(handle);
    return at >= objects.size() || objects[at].state == ObjectState::kAbsent ? nullptr : &objects[at];
  }

  /// Makes a new object in state `state`, at a free index.
  Object& announce(Handle handle, ObjectState state = ObjectState::kAnnounced) {
    std::vector<Object>& objects = array_of(handle);
    const uint32_t at = place_of(handle);
    if (at >= objects.size()) objects.resize(std::max<size_t>(size_t{at} + 1, objects.size() * 2));
    Object& object = objects[at];
    object.index = handle.index();
    object.generation = handle.generation();
    object.state = state;
    object.error = 0;
    object.value = nullptr;
    object.devices = 0;
    object.age = 0;
    object.maker = 0;
    object.waiters.clear();
    ++count_;
    return object;
  }

  void forget(Object& object) {
    object.state = ObjectState::kAbsent;
    object.value = nullptr;
    object.waiters.clear();
    --count_;
  }

  template <typename F>
  void for_each(F&& f) {
    for (std::vector<Object>* objects : {&objects_, &hidden_}) {
      for (Object& object : *objects) {
        if (object.state != ObjectState::kAbsent) f(object);
      }
    }
  }
  size_t count() const { return count_; }

 private:
  std::vector<Object>& array_of(Handle handle) { return handle.is_hidden() ? hidden_ : objects_; }
  static uint32_t place_of(Handle handle) { return handle.index() & ~Handle::kHidden; }

  std::vector<Object> objects_;
  std::vector<Object> hidden_;  ///< by the index without its highest bit
  size_t count_ = 0;
};

}  // namespace pathways
