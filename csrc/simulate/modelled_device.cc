#include "simulate/modelled_device.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <string>

#include "base/check.h"
#include "runs/run_table.h"

namespace pathways {
namespace {

uint64_t mix(uint64_t h, uint64_t x) {  // splitmix64's finalizer
  h += x + 0x9e3779b97f4a7c15ULL;
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9ULL;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebULL;
  return h ^ (h >> 31);
}

}  // namespace

uint64_t modelled_hash(uint32_t plan, uint32_t node, uint32_t output, std::span<const uint64_t> inputs) {
  uint64_t h = mix(uint64_t{plan} << 32 | node, output);
  for (const uint64_t input : inputs) h = mix(h, input);
  return h | 1;  // never 0, because 0 (kNothing) means that nothing was written
}

// -------------------------------------------------------------------------------------------------------- backend

ModelledBackend::ModelledBackend(Options options, const ModelClock& clock, Fabric* fabric)
    : options_(options),
      clock_(clock),
      fabric_(fabric),
      device_free_ns_(options.devices, 0),
      last_launch_(options.devices, {0, 0}) {}

ModelledBackend::~ModelledBackend() = default;

void ModelledBackend::learn(uint32_t plan_id, const Plan& plan, std::span<const uint32_t> communicators) {
  if (plan_id >= plans_.size()) plans_.resize(plan_id + 1);
  auto& nodes = plans_[plan_id];
  nodes.clear();
  for (size_t i = 0; i < plan.nodes().size(); ++i) {
    const NodeRecord& n = plan.nodes()[i];
    const auto sources = plan.sources(n);
    nodes.push_back({n.global_node,
                     i < communicators.size() ? communicators[i] : Fabric::kNoCommunicator,
                     n.gang != 0,
                     n.devices,
                     {sources.begin(), sources.end()}});
  }
}

Value ModelledBackend::make(uint64_t hash, int64_t ready_ns, bool fails) {
  Record* record;
  if (free_.empty()) {
    record = &records_.emplace_back();
  } else {
    record = free_.back();
    free_.pop_back();
  }
  *record = {1, fails, hash, ready_ns, false};
  ++live_;
  return record;
}

Value ModelledBackend::retain(Value value) {
  PW_CHECK(at(value).references > 0);
  ++at(value).references;
  return value;
}

void ModelledBackend::drop(Value value) {
  Record& record = at(value);
  PW_CHECK(record.references > 0);
  if (--record.references != 0) return;
  --live_;
  free_.push_back(&record);
}

Value ModelledBackend::begin_scalar(Value value) {
  if (scalar_ns_ == 0) return retain(value);
  const Record& record = at(value);
  return make(record.hash, std::max(record.ready_ns, clock_.now_ns()) + scalar_ns_, record.fails);
}

Status ModelledBackend::read_scalar(Value value, int64_t* out) {
  const Record& record = at(value);
  PW_CHECK(record.references > 0 && !record.is_deleted && readiness(value) == Readiness::kReady);  // LOOK-1
  *out = static_cast<int64_t>(record.hash < 256 ? record.hash : (record.hash >> 8) % cases_);
  return Status::kOk;
}

Readiness ModelledBackend::readiness(Value value) {
  const Record& record = at(value);
  PW_CHECK(record.references > 0);
  ++looks_;
  if (record.is_deleted) return Readiness::kDeleted;
  if (record.ready_ns != 0 && clock_.now_ns() < record.ready_ns) return Readiness::kPending;
  if (!record.fails) return Readiness::kReady;
  last_error_ = "a modelled step failed on host " + std::to_string(options_.host);
  return Readiness::kFailed;
}

void ModelledBackend::check_order(const NodeContext& context, uint64_t devices) {
  const std::pair<uint64_t, uint32_t> now{context.order, context.node};
  for (; devices != 0; devices &= devices - 1) {
    auto& last = last_launch_[static_cast<size_t>(std::countr_zero(devices))];
    if (now <= last) ++order_violations_;
    last = now;
  }
}

Status ModelledBackend::launch(const NodeContext& context, std::span<const Value> inputs, std::span<Value> outputs) {
  const Node& node = node_of(context);
  ++launches_;
  check_order(context, node.devices);
  uint64_t paired = 0;
  if (node.gang) {
    ++gangs_;
    if (fabric_ != nullptr && node.communicator != Fabric::kNoCommunicator) {
      const uint64_t what = mix(context.order, node.global_node);
      const bool waits = options_.gangs_wait && std::has_single_bit(node.devices);
      paired = what ^ fabric_->launch(node.communicator, options_.host, what, waits);
    }
  }
  if (std::find(attends_.begin(), attends_.end(), context.plan) != attends_.end()) {
    attended_.push_back({context.order, context.node, {inputs.begin(), inputs.end()}});
    for (const Value input : inputs) retain(input);
    return Status::kPending;
  }
  if (launches_ == faults_.fail_launch)
    return refuse("a modelled launch was refused on host " + std::to_string(options_.host));
  bool fails = launches_ == faults_.fail_value;
  int64_t ready_ns = 0;
  hashes_.clear();
  for (const Value input : inputs) {
    const Record& record = at(input);
    PW_CHECK(record.references > 0 && !record.is_deleted);
    fails |= record.fails;
    ready_ns = std::max(ready_ns, record.ready_ns);
    hashes_.push_back(record.hash);
  }
  for (const uint32_t position : node.donated) at(inputs[position]).is_deleted = true;
  if (options_.step_ns != 0) {
    ready_ns = std::max(ready_ns, clock_.now_ns());
    for (uint64_t d = node.devices; d != 0; d &= d - 1) {
      ready_ns = std::max(ready_ns, device_free_ns_[static_cast<size_t>(std::countr_zero(d))]);
    }
    ready_ns += options_.step_ns;
    for (uint64_t d = node.devices; d != 0; d &= d - 1) {
      device_free_ns_[static_cast<size_t>(std::countr_zero(d))] = ready_ns;
    }
  }
  for (uint32_t i = 0; i < outputs.size(); ++i) {
    const uint64_t hash = modelled_hash(context.plan, node.global_node, i, hashes_);
    outputs[i] = make(paired == 0 ? hash : mix(hash, paired), ready_ns, fails);
  }
  return Status::kOk;
}

Value ModelledBackend::placeholder(const NodeContext&, uint32_t) { return make(~uint64_t{0}, 0, false); }

// ------------------------------------------------------------------------------------------------------ transfers

Status ModelledBackend::transfer(const NodeContext& context, Value input, Value* output) {
  const Record& record = at(input);
  const uint64_t hash = modelled_hash(context.plan, node_of(context).global_node, 0, {&record.hash, 1});
  *output = make(hash, std::max(record.ready_ns, clock_.now_ns() + options_.transfer_ns), record.fails);
  return Status::kOk;
}

Status ModelledBackend::begin_receive(const NodeContext& context, std::vector<ReceiveBuffers>* receives) {
  if (faults_.no_memory != 0) {
    --faults_.no_memory;
    return Status::kNoMemory;
  }
  if (++receive_calls_ == faults_.fail_receive) return refuse("a modelled receive was refused");
  const Node& node = node_of(context);
  auto receive = std::make_unique<Receive>();
  receive->order = context.order;
  receive->global_node = node.global_node;
  receive->sources = node.sources;
  receive->slots.assign(node.sources.size(), kNothing);
  for (size_t i = 0; i < node.sources.size(); ++i) {
    receives->push_back({node.sources[i], {reinterpret_cast<uint64_t>(&receive->slots[i])}});
  }
  PW_CHECK(receives_.emplace(receive_key(context), std::move(receive)).second);
  return Status::kOk;
}

void ModelledBackend::send(const NodeContext& context, Value input, std::span<const ReceiveBuffers> posts, uint64_t key,
                           std::span<SendState> states) {
  for (size_t i = 0; i < posts.size(); ++i) {
    const std::vector<uint64_t>& offsets = posts[i].offsets;
    states[i] = SendState::kDone;
    if (offsets.empty()) continue;
    if (const auto stream = streams_.find(posts[i].source); stream != streams_.end()) {
      states[i] = SendState::kUnderWay;
      const std::string error = ++send_calls_ == faults_.fail_send ? "a modelled stream broke" : "";
      under_way_.push_back({{key, posts[i].source, {}, Notice::kSeen},
                            input,
                            nullptr,
                            clock_.now_ns() + faults_.send_ns,
                            stream->second,
                            node_of(context).global_node,
                            error});
      continue;
    }
    if (++send_calls_ == faults_.fail_send) {
      (void)refuse("a modelled send failed");
      states[i] = SendState::kFailed;
      continue;
    }
    const auto is_slot = [&](const uint64_t& slot) { return reinterpret_cast<uint64_t>(&slot) == offsets[0]; };
    if (landing_ && (offsets.size() != 1 || std::none_of(landing_->begin(), landing_->end(), is_slot))) {
      (void)refuse("a modelled send was to go where nothing was posted");
      states[i] = SendState::kFailed;
      continue;
    }
    PW_CHECK(offsets.size() == 1 && readiness(input) == Readiness::kReady);
    auto* slot = reinterpret_cast<uint64_t*>(offsets[0]);
    if (faults_.send_ns == 0) {
      *slot = at(input).hash;
    } else {
      states[i] = SendState::kUnderWay;
      under_way_.push_back({{key, posts[i].source}, input, slot, clock_.now_ns() + faults_.send_ns, nullptr, 0, {}});
    }
  }
}

void ModelledBackend::take_sent(std::vector<Sent>* out) {
  for (; !under_way_.empty() && under_way_.front().done_ns <= clock_.now_ns(); under_way_.pop_front()) {
    UnderWay& send = under_way_.front();
    PW_CHECK(at(send.input).references != 0);  // the executor keeps it until the send is done
    if (send.there == nullptr) {
      *send.slot = at(send.input).hash;
    } else {
      send.sent.error = send.error;
      if (send.error.empty() &&
          !send.there->come(order_of(send.sent.key), send.node, options_.host, at(send.input).hash)) {
        send.sent.error = "a modelled host waits for no such transfer";
      }
    }
    out->push_back(send.sent);
  }
}

ModelledBackend::Receive* ModelledBackend::receive_of(uint64_t order, uint32_t global_node) {
  for (const auto& [key, receive] : receives_) {
    if (receive->order == order && receive->global_node == global_node) return receive.get();
  }
  return nullptr;
}

/// A host on another machine has sent its part of a transfer. False: it is refused.
bool ModelledBackend::come(uint64_t order, uint32_t global_node, uint32_t source, uint64_t hash) {
  if (Receive* receive = receive_of(order, global_node); receive != nullptr) {
    const auto found = std::ranges::find(receive->sources, source);
    if (found == receive->sources.end()) return false;
    receive->slots[static_cast<size_t>(found - receive->sources.begin())] = hash;
    arrived_.push_back({order, global_node, source});
    return true;
  }
  if (faults_.no_room_early != 0) {
    --faults_.no_room_early;
    return false;
  }
  arrived_.push_back({order, global_node, source, EarlyChunk(std::as_bytes(std::span(&hash, 1)), nullptr)});
  return true;
}

uint64_t ModelledBackend::early_bytes(const NodeContext&, uint32_t destination, std::vector<uint64_t>* offsets) {
  if (!streams_.contains(destination)) return 0;
  offsets->assign(1, 0);
  return sizeof(uint64_t);
}

void ModelledBackend::take_arrived(std::vector<Arrived>* out) {
  if (arrived_.empty()) return;
  std::move(arrived_.begin(), arrived_.end(), std::back_inserter(*out));
  arrived_.clear();
}

Status ModelledBackend::place_early(const NodeContext& context, uint32_t source, std::span<const std::byte> chunk) {
  Receive& receive = *receives_.at(receive_key(context));
  const auto found = std::ranges::find(receive.sources, source);
  PW_CHECK(found != receive.sources.end() && chunk.size() == sizeof(uint64_t));
  std::memcpy(&receive.slots[static_cast<size_t>(found - receive.sources.begin())], chunk.data(), chunk.size());
  return Status::kOk;
}

Status ModelledBackend::finish_receive(const NodeContext& context, Value* output) {
  const auto found = receives_.find(receive_key(context));
  PW_CHECK(found != receives_.end());
  const std::vector<uint64_t> slots = std::move(found->second->slots);
  receives_.erase(found);
  for (const uint64_t slot : slots) {
    if (slot != slots[0] || slot == kNothing) return refuse("a modelled transfer brought parts of different values");
  }
  *output = make(modelled_hash(context.plan, node_of(context).global_node, 0, {slots.data(), 1}),
                 options_.transfer_ns == 0 ? 0 : clock_.now_ns() + options_.transfer_ns, false);
  return Status::kOk;
}

void ModelledBackend::abandon_receive(const NodeContext& context) { receives_.erase(receive_key(context)); }

// ---------------------------------------------------------------------------------------------------------- commands

Status ModelledBackend::put(uint32_t, std::span<const std::byte> payload, const Leased&, const Booked&, Value* output,
                            uint64_t* devices) {
  if (++put_calls_ == faults_.fail_put) return refuse("a modelled put was refused");
  Put put;
  if (payload.size() != sizeof put) return refuse("a modelled put of " + std::to_string(payload.size()) + " bytes");
  std::memcpy(&put, payload.data(), sizeof put);
  *output = make(put.hash, 0, false);
  *devices = put.devices;
  return Status::kOk;
}

uint64_t ModelledBackend::devices_of_put(uint32_t, std::span<const std::byte> payload) {
  Put put;
  if (payload.size() != sizeof put) return 0;
  std::memcpy(&put, payload.data(), sizeof put);
  return put.devices;
}

Status ModelledBackend::fetch(uint32_t, Value value, std::span<const std::byte> payload, const Leased&,
                              std::vector<BlockPiece>*) {
  Fetch fetch;
  PW_CHECK(readiness(value) == Readiness::kReady);
  if (payload.size() != sizeof fetch) return refuse("a modelled fetch of " + std::to_string(payload.size()) + " bytes");
  std::memcpy(&fetch, payload.data(), sizeof fetch);
  fetch.out[options_.host] = at(value).hash;
  return Status::kOk;
}

Status ModelledBackend::read_back(Value value, const ReadBackSlot& place) {
  if (faults_.fail_read_back) return refuse("a modelled read-back was refused");
  if (at(value).is_deleted) return Status::kOk;
  PW_CHECK(readiness(value) == Readiness::kReady);
  const uint64_t hash = at(value).hash;
  place.wrote(sizeof hash, 0, sizeof hash);
  std::memcpy(place.small, &hash, sizeof hash);
  return Status::kOk;
}

Status ModelledBackend::start_task(uint32_t client, uint64_t task, Value value, std::span<const std::byte>,
                                   const Booked&) {
  if (faults_.fail_tasks) return refuse("a modelled task was refused");
  PW_CHECK(value == nullptr || readiness(value) == Readiness::kReady);
  tasks_.push_back({client, task, value == nullptr ? nullptr : retain(value)});
  return Status::kOk;
}

Status ModelledBackend::offload(uint32_t, std::span<Value> values, std::span<const std::byte>, Offload where) {
  const bool is_away = where == Offload::kAway;
  if (is_away && faults_.refuse_offload) {
    return refuse("no room for offloaded values on host " + std::to_string(options_.host));
  }
  for (Value& value : values) {
    const Record record = at(value);
    if (((record.hash & kOffDevices) != 0) == is_away) continue;
    const Value moved = make(record.hash ^ kOffDevices, record.ready_ns, record.fails);
    drop(value);
    value = moved;
    offloaded_ += is_away ? 1 : ~uint64_t{0};
  }
  return Status::kOk;
}

void ModelledBackend::command(uint32_t, uint64_t, std::span<const std::byte>) { ++commands_; }

}  // namespace pathways
