#include "executor/put_queue.h"

#include <string>
#include <utility>

#include "sync/atomic.h"

namespace pathways {

bool PutQueue::add(LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload) {
  const uint32_t id = record.header.client;
  const Handle handle{record.handle};
  if (record.is_refused != 0) {  // a kFail that follows gives the reason
    work_.refuse_put(id, payload, {record.lease_at, record.lease_bytes});
    return true;
  }
  if (!c.may_name(handle)) {
    link_.failed(id, handle, "a buffer's handle is out of range on host " + std::to_string(host_));
    work_.refuse_put(id, payload, {record.lease_at, record.lease_bytes});
    return true;
  }
  uint64_t devices = 0;
  if (must_wait(record, payload, &devices)) {
    const uint64_t maker = objects_.next_maker();
    objects_.make(c, handle, ObjectState::kAnnounced).maker = maker;
    waiting_.push_back({record, {payload.begin(), payload.end()}, devices, now_ns_(), maker});
    memory_.keep_free(devices);
    return false;
  }
  const Made made = make(c, record, payload);
  Object& object = objects_.make(c, handle, made.value == nullptr ? ObjectState::kFailed : ObjectState::kDefined);
  object.error = made.error;
  object.value = made.value;
  object.devices = made.devices;
  object.age = made.age;
  if (made.error != 0) link_.failed(id, handle, errors_.text(made.error));
  return true;
}

/// Whether the put does not fit on its devices now, or an earlier put waits for one of them.
bool PutQueue::must_wait(const CommandRecord& record, std::span<const std::byte> payload, uint64_t* devices) {
  if (record.space_set == kNoSpaceSet) return false;  // its size is not known
  if (waiting_.empty() && memory_.fits(~uint64_t{0}, record.space_bytes)) return false;
  *devices = work_.devices_of_put(record.header.client, payload);
  return (*devices & memory_.kept_free()) != 0 || !memory_.fits(*devices, record.space_bytes);
}

/// Makes the buffer.
PutQueue::Made PutQueue::make(const LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload) {
  const uint32_t id = record.header.client;
  Made made;
  const Booked booked{record.space_devices, record.space_bytes};
  if (work_.put(id, payload, {record.lease_at, record.lease_bytes}, booked, &made.value, &made.devices) !=
      Status::kOk) {
    made.error = errors_.add(std::string(work_.last_error()));
    return made;
  }
  if (record.space_set != kNoSpaceSet) ledger_.add(made.value, c.account, made.devices, record.space_bytes);
  made.age = tracker_.next_age();
  tracker_.add(made.devices,
               {PendingValue::Kind::kPut, false, id, 0, refs_.retain(made.value), record.handle, made.age});
  return made;
}

/// Makes the buffer of a put that has waited, and defines its object, or fails it.
void PutQueue::define(const Put& put) {
  const uint32_t id = put.record.header.client;
  const Handle handle{put.record.handle};
  const Made made = make(*objects_.client(id), put.record, put.payload);
  if (made.error != 0) {
    objects_.fail(id, handle, put.maker, made.error);
  } else {
    objects_.define(id, handle, put.maker, made.value, made.devices, made.age);
  }
}

uint32_t PutQueue::make_those_due() {
  const int64_t late_ns = now_ns_() - longest_wait_.count();
  uint32_t made = 0;
  uint64_t passed = 0;  // devices of puts that still wait
  for (size_t at = 0; at < waiting_.size();) {
    const Put& put = waiting_[at];
    const bool fits = (put.devices & passed) == 0 && memory_.fits(put.devices, put.record.space_bytes);
    if (!fits && put.since_ns > late_ns) {
      passed |= put.devices;
      ++at;
      continue;
    }
    overfull_ += fits ? 0 : 1;
    define(take(at));
    ++made;
  }
  return made;
}

void PutQueue::make_first() {
  ++overfull_;
  define(take(0));
}

void PutQueue::make_those_of(uint32_t client) {
  for (size_t at = 0; at < waiting_.size();) {
    if (waiting_[at].record.header.client == client) {
      define(take(at));
    } else {
      ++at;
    }
  }
}

void PutQueue::forget(uint32_t client) {
  for (size_t at = 0; at < waiting_.size();) {
    if (waiting_[at].record.header.client == client) {
      const Put put = take(at);
      objects_.fail(client, Handle{put.record.handle}, put.maker,
                    errors_.add("the client that put the buffer is gone"));
    } else {
      ++at;
    }
  }
}

/// Removes a waiting put, whose command is then done (FLOW-1). What it kept free is free for others, and for it.
PutQueue::Put PutQueue::take(size_t at) {
  Put put = std::move(waiting_[at]);
  waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(at));
  uint64_t devices = 0;
  for (const Put& each : waiting_) devices |= each.devices;
  memory_.keep_free_only(devices);
  link_.command_done(put.record.header.client, bytes_of(put.record));
  return put;
}

void PutQueue::clear() {
  waiting_.clear();
  memory_.keep_free_only(0);
}

}  // namespace pathways
