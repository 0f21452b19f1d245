#include "executor/executor.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"

namespace pathways {
namespace {

constexpr size_t kErrorsKept = 4096;

template <typename F>
void for_each_device(uint64_t mask, F&& f) {
  for (; mask != 0; mask &= mask - 1) f(static_cast<uint32_t>(std::countr_zero(mask)));
}

}  // namespace

Executor::Executor(Options options, Backend& backend, HostLink& link)
    : options_(options), backend_(backend), link_(link), fifos_(options.devices), in_flight_(options.devices) {
  PW_CHECK(options.devices >= 1 && options.devices <= kMaxLocalDevices);
}

Executor::~Executor() { clear(); }

void Executor::clear() {
  const auto drop = [&](Value& value) {
    if (value != nullptr) backend_.drop(value);
    value = nullptr;
  };
  for (auto& run : runs_) {
    for (Value& value : run->values) drop(value);
  }
  for (Lane& lane : lanes_) {
    for (Watch& item : lane.watches) drop(item.value);
    lane.watches.clear();
  }
  for (auto& [key, exchange] : exchanges_) drop(exchange.source);
  for (Client& c : clients_) {
    c.objects.for_each([&](Object& object) { drop(object.value); });
    c = Client{};
  }
  exchanges_.clear();
  runs_.clear();
  free_runs_.clear();
  ready_.clear();
  throttled_.clear();
  for (auto& fifo : fifos_) fifo.clear();
  live_runs_ = 0;
  stats_.waiting = 0;
}

// ---------------------------------------------------------------------------------------------- plans and clients

void Executor::add_plan(uint32_t id, Plan plan) {
  if (id >= plans_.size()) plans_.resize(id + 1);
  plans_[id] = std::make_unique<PlanEntry>();
  plans_[id]->id = id;
  plans_[id]->plan = std::move(plan);
}

void Executor::set_compiled(uint32_t id, std::optional<std::string> error) {
  PlanEntry& entry = *plans_[id];
  if (entry.compiled) return;
  entry.compiled = true;
  if (error) entry.error = new_error(std::move(*error));
  for (uint32_t slot : entry.waiting) {
    const auto nodes = entry.plan.nodes();
    for (uint32_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i].kind == NodeKind::kCall) satisfy(slot, i);
    }
  }
  entry.waiting.clear();
  drain();
}

void Executor::remove_plan(uint32_t id) {
  if (id >= plans_.size() || !plans_[id]) return;
  if (plans_[id]->live == 0) {
    plans_[id].reset();
  } else {
    plans_[id]->removed = true;
  }
}

void Executor::add_client(uint32_t id) {
  if (id >= clients_.size()) clients_.resize(id + 1);
  clients_[id].present = true;
}

void Executor::on_client_gone(uint32_t id) {
  Client* c = client(id);
  if (c == nullptr) return;
  // What is still to be made is dropped when it is (its runs may be parts of gangs); what exists goes now.
  c->objects.for_each([&](Object& object) {
    if (object.state == ObjectState::kAnnounced) {
      c->orphans.emplace(Handle::make(object.generation, object.index).raw, std::move(object));
    } else if (object.value != nullptr) {
      backend_.drop(object.value);
    }
  });
  c->objects = ObjectStore{};
  c->present = false;
}

// ----------------------------------------------------------------------------------------------------------- runs

NodeContext Executor::context(const Run& run, uint32_t node) const {
  return {run.order, run.client, run.plan->id, node, run.plan->plan.node(node).computation};
}

uint32_t Executor::acquire_run() {
  ++live_runs_;
  if (free_runs_.empty()) {
    runs_.push_back(std::make_unique<Run>());
    return static_cast<uint32_t>(runs_.size() - 1);
  }
  const uint32_t slot = free_runs_.back();
  free_runs_.pop_back();
  return slot;
}

void Executor::on_run(const RunRecord& record, const uint64_t* handles) {
  ++stats_.runs;
  if (faults_.swap_every != 0) {  // test hook: breaks ORD-1
    if (held_.empty() && ++fault_counter_ % faults_.swap_every == 0) {
      const size_t extra = size_t{record.arguments + record.results} * sizeof(uint64_t);
      held_.resize(sizeof record + extra);
      std::memcpy(held_.data(), &record, sizeof record);
      std::memcpy(held_.data() + sizeof record, handles, extra);
      return;
    }
  }
  prepare(record, handles);
  if (!held_.empty()) release_held();
}

void Executor::release_held() {
  const std::vector<std::byte> bytes = std::move(held_);
  held_.clear();
  prepare(*reinterpret_cast<const RunRecord*>(bytes.data()),
          reinterpret_cast<const uint64_t*>(bytes.data() + sizeof(RunRecord)));
}

void Executor::prepare(const RunRecord& record, const uint64_t* handles) {
  PW_CHECK(record.plan < plans_.size() && plans_[record.plan]);
  PlanEntry& entry = *plans_[record.plan];
  const Plan& plan = entry.plan;
  PW_CHECK(record.arguments == plan.argument_count() && record.results == plan.result_count());
  const uint32_t slot = acquire_run();
  Run& run = *runs_[slot];
  ++entry.live;
  run.plan = &entry;
  run.order = record.order;
  run.tag = record.tag;
  run.client = record.header.client;
  run.open = plan.step_count() + 1;  // one for this function
  run.gangs = 0;
  const auto readers = plan.initial_readers(), missing = plan.initial_missing();
  run.values.assign(plan.value_count(), nullptr);
  run.errors.assign(plan.value_count(), 0);
  run.readers.assign(readers.begin(), readers.end());
  run.missing.assign(missing.begin(), missing.end());
  run.poison.assign(missing.size(), 0);
  run.results.assign(handles + record.arguments, handles + record.arguments + record.results);

  if (Client* c = client(run.client)) {
    const auto results = plan.results();
    for (uint32_t i = 0; i < results.size(); ++i) {
      if (results[i] != kNoValue) c->objects.announce(Handle{run.results[i]});
    }
  }
  if (!entry.compiled) entry.waiting.push_back(slot);
  const auto nodes = plan.nodes();
  for (uint32_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].kind == NodeKind::kCall) {
      if (!entry.compiled) ++run.missing[i];
      for_each_device(nodes[i].devices, [&](uint32_t d) {
        fifos_[d].push_back({slot, i});
        if (fifos_[d].size() == 1) satisfy(slot, i);
      });
    } else if (nodes[i].kind == NodeKind::kTransfer) {
      prepare_transfer(slot, i);
    }
  }
  const auto arguments = plan.arguments();
  for (uint32_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] != kNoValue) bind_argument(slot, arguments[i], Handle{handles[i]});
  }
  close_step(slot);
  drain();
}

void Executor::bind_argument(uint32_t slot, uint32_t value, Handle handle) {
  Client* c = client(runs_[slot]->client);
  Object* object = c == nullptr ? nullptr : c->objects.find(handle);
  if (object == nullptr) {
    poison(slot, value, new_error("an argument is no buffer on host " + std::to_string(options_.host) +
                                  ": it was deleted, or its client is gone"));
  } else if (object->state == ObjectState::kAnnounced) {
    ++runs_[slot]->open;  // the run must not end before its argument came
    object->waiters.push_back({ObjectWaiter::Kind::kRunValue, slot, value});
  } else if (object->state == ObjectState::kFailed) {
    poison(slot, value, object->error);
  } else {
    define(slot, value, backend_.retain(object->value), object->devices);
    watch_result(slot, value, object->devices);
  }
}

void Executor::satisfy(uint32_t slot, uint32_t node) {
  Run& run = *runs_[slot];
  PW_DCHECK(run.missing[node] > 0);
  if (--run.missing[node] == 0) ready_.push_back({slot, node});
}

void Executor::drain() {
  if (draining_) return;
  draining_ = true;
  while (!ready_.empty()) {
    const NodeRef ref = ready_.back();
    ready_.pop_back();
    const NodeRecord& node = runs_[ref.run]->plan->plan.node(ref.node);
    if (node.kind == NodeKind::kCall) {
      launch(ref);
    } else {
      start_transfer(ref);
    }
  }
  draining_ = false;
}

void Executor::launch(NodeRef ref) {
  Run& run = *runs_[ref.run];
  const Plan& plan = run.plan->plan;
  const NodeRecord& node = plan.node(ref.node);
  if (options_.max_in_flight != 0) {
    bool full = false;
    for_each_device(node.devices, [&](uint32_t d) { full |= in_flight_[d] >= options_.max_in_flight; });
    if (full) {
      throttled_.push_back(ref);
      return;
    }
  }
  uint32_t error = run.plan->error != 0 ? run.plan->error : run.poison[ref.node];
  const auto inputs = plan.inputs(node), outputs = plan.outputs(node);
  outputs_.assign(outputs.size(), nullptr);
  // A failed plan has no executable on any host, so no host launches it; a failed input is no excuse for a gang.
  const bool is_launched = run.plan->error == 0 && (error == 0 || node.gang != 0);
  if (is_launched) {
    const NodeContext where = context(run, ref.node);
    inputs_.clear();
    for (uint32_t i = 0; i < inputs.size(); ++i) {
      const Value value = run.values[inputs[i]];
      inputs_.push_back(value != nullptr ? value : backend_.placeholder(where, i));
    }
    const Status status = backend_.launch(where, inputs_, outputs_);
    for (uint32_t i = 0; i < inputs.size(); ++i) {
      if (run.values[inputs[i]] == nullptr) backend_.drop(inputs_[i]);
    }
    ++stats_.launches;
    if (node.gang != 0) {  // GANG-1
      ++run.gangs;
      ++stats_.gangs;
    }
    if (status != Status::kOk) error = new_error(std::string(backend_.last_error()));
  }
  leave_fifos(node.devices);
  const bool counts = options_.max_in_flight != 0 && is_launched && error == 0 && !outputs.empty();
  Value watched = nullptr;
  for (uint32_t i = 0; i < outputs.size(); ++i) {
    if (error == 0) {
      if (watched == nullptr && (counts || !plan.results_of(outputs[i]).empty())) watched = backend_.retain(outputs_[i]);
      define(ref.run, outputs[i], outputs_[i], node.devices);
    } else {
      if (outputs_[i] != nullptr) backend_.drop(outputs_[i]);
      poison(ref.run, outputs[i], error);
    }
  }
  if (watched != nullptr) {
    ++run.open;
    watch(node.devices, {Watch::Kind::kNode, counts, ref.run, ref.node, watched, 0});
  }
  read_done(run, inputs);
  close_step(ref.run);
}

void Executor::leave_fifos(uint64_t devices) {
  for_each_device(devices, [&](uint32_t d) {
    fifos_[d].pop_front();
    if (!fifos_[d].empty()) satisfy(fifos_[d].front().run, fifos_[d].front().node);
  });
}

void Executor::define(uint32_t slot, uint32_t value, Value ref, uint64_t devices) {
  Run& run = *runs_[slot];
  const Plan& plan = run.plan->plan;
  run.values[value] = ref;
  for (uint32_t result : plan.results_of(value)) {
    define_object(run.client, Handle{run.results[result]}, backend_.retain(ref), devices);
  }
  for (uint32_t consumer : plan.consumers(value)) satisfy(slot, consumer);
  if (run.readers[value] == 0) {
    run.values[value] = nullptr;
    backend_.drop(ref);
  }
}

void Executor::watch_result(uint32_t slot, uint32_t value, uint64_t devices) {
  Run& run = *runs_[slot];
  const auto results = run.plan->plan.results_of(value);
  if (results.empty() || run.errors[value] != 0) return;
  Client* c = client(run.client);
  Object* object = c == nullptr ? nullptr : find_object(*c, Handle{run.results[results[0]]});
  if (object == nullptr || object->value == nullptr) return;
  ++run.open;
  watch(devices, {Watch::Kind::kValue, false, slot, value, backend_.retain(object->value), 0});
}

void Executor::poison(uint32_t slot, uint32_t value, uint32_t error) {
  Run& run = *runs_[slot];
  const Plan& plan = run.plan->plan;
  run.errors[value] = error;
  for (uint32_t result : plan.results_of(value)) fail_object(run.client, Handle{run.results[result]}, error);
  for (uint32_t consumer : plan.consumers(value)) {
    run.poison[consumer] = error;
    satisfy(slot, consumer);
  }
}

void Executor::read_done(Run& run, std::span<const uint32_t> values) {
  for (uint32_t value : values) {
    if (--run.readers[value] != 0 || run.values[value] == nullptr) continue;
    backend_.drop(run.values[value]);
    run.values[value] = nullptr;
  }
}

void Executor::close_step(uint32_t slot) {
  Run& run = *runs_[slot];
  PW_DCHECK(run.open > 0);
  if (--run.open != 0) return;
  link_.run_done(run.client, run.tag, run.gangs);
  if (--run.plan->live == 0 && run.plan->removed) plans_[run.plan->id].reset();
  run.plan = nullptr;
  free_runs_.push_back(slot);
  --live_runs_;
}

// ------------------------------------------------------------------------------------------------------ readiness

void Executor::watch(uint64_t devices, Watch item) {
  if (item.counts) for_each_device(devices, [&](uint32_t d) { ++in_flight_[d]; });
  ++stats_.waiting;
  for (Lane& lane : lanes_) {
    if (lane.devices == devices) {
      lane.watches.push_back(item);
      return;
    }
  }
  lanes_.push_back({devices, {}});
  lanes_.back().watches.push_back(item);
}

uint32_t Executor::poll() {
  uint32_t done = 0;
  if (!held_.empty() && live_runs_ == 0) release_held();
  for (size_t i = 0; i < lanes_.size(); ++i) {  // settling may add lanes
    while (!lanes_[i].watches.empty()) {
      const Watch item = lanes_[i].watches.front();
      const Readiness readiness = backend_.readiness(item.value);
      if (readiness == Readiness::kPending) break;
      lanes_[i].watches.pop_front();
      --stats_.waiting;
      settle(item, lanes_[i].devices, readiness);
      ++done;
    }
  }
  if (!stalled_receives_.empty()) {
    std::vector<uint64_t> stalled = std::move(stalled_receives_);
    stalled_receives_.clear();
    for (uint64_t key : stalled) done += post_receive(key) ? 1U : 0U;
  }
  if (!throttled_.empty() && done != 0) {
    ready_.insert(ready_.end(), throttled_.rbegin(), throttled_.rend());
    throttled_.clear();
  }
  drain();
  return done;
}

void Executor::settle(const Watch& item, uint64_t devices, Readiness readiness) {
  if (item.counts) for_each_device(devices, [&](uint32_t d) { --in_flight_[d]; });
  const uint32_t error = readiness == Readiness::kFailed ? new_error(std::string(backend_.last_error())) : 0;
  const auto resolve = [&](uint32_t client_id, Handle handle) {
    if (error == 0) {
      link_.complete(client_id, handle);
    } else {
      fail_object(client_id, handle, error);
    }
  };
  switch (item.kind) {
    case Watch::Kind::kNode: {
      Run& run = *runs_[item.run];
      const Plan& plan = run.plan->plan;
      for (uint32_t value : plan.outputs(plan.node(item.index))) {
        for (uint32_t result : plan.results_of(value)) resolve(run.client, Handle{run.results[result]});
      }
      close_step(item.run);
      break;
    }
    case Watch::Kind::kValue: {
      Run& run = *runs_[item.run];
      for (uint32_t result : run.plan->plan.results_of(item.index)) resolve(run.client, Handle{run.results[result]});
      close_step(item.run);
      break;
    }
    case Watch::Kind::kSend: {
      Exchange& exchange = exchanges_.at(item.key);
      exchange.source_ready = true;
      exchange.source_error = error;
      try_send(item.key);
      break;
    }
    case Watch::Kind::kFetch: {
      Fetch& fetch = fetches_[item.index];
      if (client(fetch.client) != nullptr) {
        if (error != 0) {
          link_.failed(fetch.client, Handle{fetch.token}, error_text(error));
        } else if (backend_.fetch(fetch.client, item.value, fetch.payload) == Status::kOk) {
          link_.complete(fetch.client, Handle{fetch.token});
        } else {
          link_.failed(fetch.client, Handle{fetch.token}, backend_.last_error());
        }
      }
      fetch.payload.clear();
      free_fetches_.push_back(item.index);
      break;
    }
    case Watch::Kind::kPut:
      resolve(item.run, Handle{item.key});  // `run` names the client: a put belongs to no run
      break;
  }
  backend_.drop(item.value);
}

void Executor::watched(std::vector<Value>* out) const {
  out->clear();
  for (const Lane& lane : lanes_) {
    if (!lane.watches.empty()) out->push_back(lane.watches.front().value);
  }
}

// -------------------------------------------------------------------------------------------------------- objects

Object* Executor::find_object(Client& c, Handle handle) {
  if (Object* object = c.objects.find(handle)) return object;
  const auto orphan = c.orphans.find(handle.raw);
  return orphan == c.orphans.end() ? nullptr : &orphan->second;
}

void Executor::define_object(uint32_t id, Handle handle, Value ref, uint64_t devices) {
  Object* object = id < clients_.size() ? find_object(clients_[id], handle) : nullptr;
  if (object == nullptr) {
    backend_.drop(ref);
    return;
  }
  object->state = ObjectState::kDefined;
  object->value = ref;
  object->devices = devices;
  wake_waiters(*object);
  drop_orphan(clients_[id], handle);
}

void Executor::fail_object(uint32_t id, Handle handle, uint32_t error) {
  Object* object = id < clients_.size() ? find_object(clients_[id], handle) : nullptr;
  if (client(id) != nullptr) link_.failed(id, handle, error_text(error));
  if (object == nullptr) return;
  object->state = ObjectState::kFailed;
  object->error = error;
  wake_waiters(*object);
  drop_orphan(clients_[id], handle);
}

void Executor::drop_orphan(Client& c, Handle handle) {
  const auto orphan = c.orphans.find(handle.raw);
  if (orphan == c.orphans.end()) return;
  if (orphan->second.value != nullptr) backend_.drop(orphan->second.value);
  c.orphans.erase(orphan);
}

void Executor::wake_waiters(Object& object) {
  const std::vector<ObjectWaiter> waiters = std::move(object.waiters);
  object.waiters.clear();
  for (const ObjectWaiter& waiter : waiters) {
    if (waiter.kind == ObjectWaiter::Kind::kFetch) {
      start_fetch(waiter.index, object);
    } else if (object.state == ObjectState::kFailed) {
      poison(waiter.index, waiter.value, object.error);
      close_step(waiter.index);
    } else {
      define(waiter.index, waiter.value, backend_.retain(object.value), object.devices);
      watch_result(waiter.index, waiter.value, object.devices);
      close_step(waiter.index);
    }
  }
}

void Executor::release(Client& c, Handle handle) {
  Object* object = c.objects.find(handle);
  if (object == nullptr) return;
  if (object->state == ObjectState::kAnnounced) {
    c.orphans.emplace(handle.raw, std::move(*object));  // the index may be used again before it is defined
  } else if (object->value != nullptr) {
    backend_.drop(object->value);
  }
  c.objects.forget(*object);
}

void Executor::on_note(const NoteRecord& record, std::span<const std::byte> payload) {
  const uint32_t id = record.header.client;
  Client* c = client(id);
  if (c == nullptr) return;
  const Handle handle{record.handle};
  switch (static_cast<NoteKind>(record.header.detail)) {
    case NoteKind::kPut: {
      Value value = nullptr;
      uint64_t devices = 0;
      const Status status = backend_.put(id, payload, &value, &devices);
      Object& object = c->objects.announce(handle, ObjectState::kDefined);
      if (status != Status::kOk) {
        fail_object(id, handle, new_error(std::string(backend_.last_error())));
        break;
      }
      object.value = value;
      object.devices = devices;
      watch(devices, {Watch::Kind::kPut, false, id, 0, backend_.retain(value), handle.raw});
      break;
    }
    case NoteKind::kFetch: {
      uint32_t slot;
      if (free_fetches_.empty()) {
        slot = static_cast<uint32_t>(fetches_.size());
        fetches_.emplace_back();
      } else {
        slot = free_fetches_.back();
        free_fetches_.pop_back();
      }
      Fetch& fetch = fetches_[slot];
      fetch.client = id;
      fetch.handle = record.handle;
      fetch.token = record.token;
      fetch.payload.assign(payload.begin(), payload.end());
      Object* object = c->objects.find(handle);
      if (object != nullptr && object->state == ObjectState::kAnnounced) {
        object->waiters.push_back({ObjectWaiter::Kind::kFetch, slot, 0});
      } else if (object != nullptr) {
        start_fetch(slot, *object);
      } else {
        link_.failed(id, Handle{record.token}, "the buffer to read was deleted");
        free_fetches_.push_back(slot);
      }
      break;
    }
    case NoteKind::kRelease:
      for (size_t at = 0; at + sizeof(uint64_t) <= payload.size(); at += sizeof(uint64_t)) {
        uint64_t raw;
        std::memcpy(&raw, payload.data() + at, sizeof raw);
        release(*c, Handle{raw});
      }
      break;
    case NoteKind::kBackend:
      backend_.note(id, payload);
      break;
  }
  drain();
}

void Executor::start_fetch(uint32_t slot, Object& object) {
  if (object.state == ObjectState::kFailed) {
    link_.failed(fetches_[slot].client, Handle{fetches_[slot].token}, error_text(object.error));
    fetches_[slot].payload.clear();
    free_fetches_.push_back(slot);
    return;
  }
  watch(object.devices, {Watch::Kind::kFetch, false, kNone, slot, backend_.retain(object.value), 0});
}

// --------------------------------------------------------------------------------------------------------- errors

uint32_t Executor::new_error(std::string text) {
  errors_.push_back(std::move(text));
  if (errors_.size() > kErrorsKept) {
    errors_.pop_front();
    ++first_error_;
  }
  return first_error_ + static_cast<uint32_t>(errors_.size()) - 1U;
}

std::string_view Executor::error_text(uint32_t error) const {
  if (error < first_error_) return "the error's text is no longer kept";
  return errors_[error - first_error_];
}

ExecutorStats Executor::stats() const {
  ExecutorStats stats = stats_;
  stats.live_runs = live_runs_;
  for (const Client& c : clients_) stats.objects += c.objects.count();
  return stats;
}

}  // namespace pathways
