/// ClientObjects: the clients that a host knows, and their buffers here.
///
/// A buffer is an object of its client's ObjectStore. An object that is announced has waiters: values of runs, and
/// fetches. They go on when it is defined or has failed. An announced object that its client releases stays as an
/// orphan until then, because others wait for its value. A client may use a handle again whenever it likes (TRUST-1),
/// so an announced object knows its maker, and only that maker defines it.
///
///   MEM-7  a value is kept only in an object that was announced for it; so the ledger of the controller, which booked
///          the object, knows its size. A buffer that has failed keeps no value.
///   READ-2 a value is defined before its client's future is ready, and stays until the client releases the handle. So
///          an embedded client, which is on the executor's thread, reads a ready value from here and sends nothing.
///   OWN-1  a client that is gone owns nothing here. Its launched work and its tasks run to their end, and nobody is
///          notified. Being gone is final.
///   ERR-2  a buffer that is missing here was on the lost predecessor of this host, if its client is not younger than
///          the loss. Requests for such a buffer fail with the failure reason of that host.
///
/// Used by whatever makes or reads buffers. Threading: the executor's thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runs/executor_part.h"

namespace pathways {

/// A client, as this host knows it.
struct LocalClient {
  static constexpr uint32_t kMostHidden = Handle::kHidden + (1u << 26);

  bool present = false;
  bool gone = false;
  uint32_t capacity = 0;  ///< of its futures
  uint32_t account = 0;   ///< in the ledger, for its puts
  ObjectStore objects;
  std::map<std::pair<uint64_t, uint64_t>, Object> orphans;  ///< released before they were defined, by handle and maker

  /// False: this cannot be a handle of the client's futures, and nothing may get it. Hidden handles come from the
  /// controller, which refuses them to clients and gives out the lowest ones that are free.
  bool may_name(Handle handle) const {
    return handle.valid() && (handle.index() < capacity || (handle.is_hidden() && handle.index() < kMostHidden));
  }
};

class ClientObjects : private ExecutorPart {
 public:
  explicit ClientObjects(const ExecutorPart& part) : ExecutorPart(part) {}

  void add_client(uint32_t id, uint32_t capacity);
  /// The notice of the client's end has come. False: the client was not present.
  bool end_client(uint32_t id);
  bool is_gone(uint32_t id) const { return id < clients_.size() && clients_[id].gone; }
  /// Whom the DeviceClock charges for a run.
  uint32_t payer(const Run& run) const { return is_gone(run.client) ? DeviceClock::kNobody : run.client; }
  /// False: this cannot be the number of a client. Client numbers go up by one, and this one is far ahead of all that
  /// this host knows.
  bool may_be_client(uint32_t id) const {
    return id < std::max<uint64_t>(clients_.size(), predecessor_client_) + kMostClientsAhead;
  }
  /// nullptr: the client is not known yet, or is gone.
  LocalClient* client(uint32_t id) { return id < clients_.size() && clients_[id].present ? &clients_[id] : nullptr; }

  /// nullptr: no such object, or its client is not present.
  Object* find(uint32_t id, Handle handle) {
    LocalClient* c = client(id);
    return c == nullptr ? nullptr : c->objects.find(handle);
  }
  /// READ-2: the value of a buffer that is defined, until something changes; nullptr: there is none.
  Value value_of(uint32_t id, Handle handle) {
    const Object* object = find(id, handle);
    return object != nullptr && object->state == ObjectState::kDefined ? object->value : nullptr;
  }
  /// Makes the object of a handle. When the client did not release the old object at the same index, that object is
  /// released first.
  Object& make(LocalClient& c, Handle handle, ObjectState state);
  /// A number for what makes a buffer and is no run.
  uint64_t next_maker() { return kNoRun | ++last_maker_; }
  /// Defines the object that was announced for `maker`, or its orphan. Takes over `ref`.
  void define(uint32_t id, Handle handle, uint64_t maker, Value ref, uint64_t devices, uint64_t age);
  /// Fails the object of this handle that `maker` makes or has made, or its orphan, and the client's future.
  void fail(uint32_t id, Handle handle, uint64_t maker, uint32_t error);
  /// The same for a buffer that a put or a task has made, whose value has this age.
  void fail_put(uint32_t id, Handle handle, uint64_t age, uint32_t error);
  void release(LocalClient& c, Object& object);

  /// This host is the successor of a lost host, whose clients had numbers up to `youngest_client`.
  void set_predecessor_failure(std::string text, uint32_t youngest_client);
  /// The error text for a buffer that is not here.
  std::string missing(uint32_t id, std::string_view otherwise) const;

  /// Objects of all clients.
  uint64_t count() const;
  /// Drops all values, and forgets all clients.
  void clear();
  /// For debug builds and tests.
  void validate() const;

 private:
  static constexpr uint32_t kMostClientsAhead = 4096;

  static constexpr uint64_t kNoRun = uint64_t{1} << 63;  ///< set in makers that are no order of a run

  void set_failed(Object& object, uint32_t error);
  std::optional<Object> take_orphan(uint32_t id, Handle handle, uint64_t maker);
  static void keep_orphan(LocalClient& c, Object& object);
  void wake_waiters(Object& object);

  std::vector<LocalClient> clients_;  ///< by number
  std::string predecessor_failure_;   ///< of this host's predecessor; empty: it has no predecessor
  uint32_t predecessor_client_ = 0;
  uint64_t last_maker_ = 0;
};

}  // namespace pathways
