#include "executor/fetch_table.h"

#include <utility>

namespace pathways {
namespace {

Leased leased_by(const CommandRecord& record) { return {record.lease_at, record.lease_bytes}; }

}  // namespace

void FetchTable::add(LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload) {
  const uint32_t id = record.header.client;
  Object* object = c.objects.find(Handle{record.handle});
  if (object == nullptr) {
    link_.failed(id, Handle{record.token}, objects_.missing(id, "the buffer to read was deleted"));
    if (!is_task(record)) work_.refuse_fetch(id, payload, leased_by(record));
    link_.command_over(record);
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
  fetches_[slot] = {record, {payload.begin(), payload.end()}};
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
  const Fetch fetch = take(slot);
  const uint32_t id = fetch.record.header.client;
  const Handle token{fetch.record.token};
  if (objects_.client(id) == nullptr) {
    link_.command_over(fetch.record);
  } else if (is_task(fetch.record)) {
    tasks_.start({fetch.record, 0, value}, fetch.payload);  // which goes on with the command
  } else {
    written_.clear();
    if (work_.fetch(id, value, fetch.payload, leased_by(fetch.record), &written_) == Status::kOk) {
      link_.fetched(id, token, written_);
    } else {
      link_.failed(id, token, work_.last_error());
    }
    link_.command_over(fetch.record);
  }
}

void FetchTable::refuse(uint32_t slot, std::string_view why) {
  const Fetch fetch = take(slot);
  const uint32_t id = fetch.record.header.client;
  if (objects_.client(id) != nullptr) {
    link_.failed(id, Handle{fetch.record.token}, why);
    if (!is_task(fetch.record)) work_.refuse_fetch(id, fetch.payload, leased_by(fetch.record));
  }
  link_.command_over(fetch.record);
}

FetchTable::Fetch FetchTable::take(uint32_t slot) {
  free_.push_back(slot);
  return std::move(fetches_[slot]);
}

void FetchTable::clear() {
  fetches_.clear();
  free_.clear();
}

}  // namespace pathways
