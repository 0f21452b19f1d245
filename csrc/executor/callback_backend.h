/// CallbackBackend: the `Backend` for JAX. It is made of plain functions, so that Cython can implement it.
///
/// Each function gets `self` first and returns a Status as a number; error texts go through `set_error`. The thread
/// that calls `Host::step` calls the functions, with Python's lock held.
///
/// Sends are native: Python only gives the addresses of the shards, and the copier writes them into the receivers'
/// blocks (large ones on its own thread). A send to another machine is an outgoing transfer: native code packs it, and
/// Python sends it (`send_remote`).
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "executor/backend.h"
#include "memory/arena.h"
#include "memory/copier.h"
#include "sync/doorbell.h"

namespace pathways {

struct BackendCallbacks {
  void* self = nullptr;
  int (*launch)(void*, const NodeContext*, const Value*, size_t, Value*, size_t) = nullptr;
  Value (*placeholder)(void*, const NodeContext*, uint32_t) = nullptr;
  int (*readiness)(void*, Value) = nullptr;
  void (*retain)(void*, Value) = nullptr;
  void (*drop)(void*, Value) = nullptr;
  int (*transfer)(void*, const NodeContext*, Value, Value*) = nullptr;
  int (*begin_receive)(void*, const NodeContext*, std::vector<ReceiveBuffers>*) = nullptr;
  /// Gives the addresses of the local shards that the copy plans of this transfer read, in the order of the copy plans'
  /// sources. `keep`: a new reference on what keeps the shards there.
  int (*shards)(void*, const NodeContext*, Value, std::vector<const std::byte*>*, Value* keep) = nullptr;
  /// Starts an outgoing transfer to a host on another machine; `keep` keeps its sources alive. If the result is kOk,
  /// Python calls `CallbackBackend::remote_send_done` with `key` exactly once, when the transfer is over.
  int (*send_remote)(void*, const NodeContext*, uint32_t destination, uint64_t key, std::shared_ptr<const CopyPlan>,
                     std::vector<const std::byte*>, Value keep) = nullptr;
  /// This host receives shards of its own value unchanged: the receive under way takes them without a copy.
  int (*direct)(void*, const NodeContext*, Value) = nullptr;
  int (*finish_receive)(void*, const NodeContext*, Value*) = nullptr;
  void (*abandon_receive)(void*, const NodeContext*) = nullptr;
  int (*put)(void*, uint32_t, const std::byte*, size_t, Value*, uint64_t*) = nullptr;
  int (*fetch)(void*, uint32_t, Value, const std::byte*, size_t) = nullptr;
  int (*read_back)(void*, Value, std::byte*, std::byte*) = nullptr;
  void (*refuse_fetch)(void*, uint32_t, const std::byte*, size_t) = nullptr;
  void (*refuse_put)(void*, uint32_t, const std::byte*, size_t) = nullptr;
  int (*start_task)(void*, uint32_t, uint64_t, Value, const std::byte*, size_t) = nullptr;
  void (*command)(void*, uint32_t, const std::byte*, size_t) = nullptr;
  void (*explain)(void*, const NodeContext*) = nullptr;
  int (*offload)(void*, uint32_t, Value*, size_t, const std::byte*, size_t, bool) = nullptr;
  void (*forget_plan)(void*, uint32_t) = nullptr;
  void (*forget_client)(void*, uint32_t) = nullptr;
};

class CallbackBackend final : public Backend {
 public:
  /// `arenas`: of all hosts, by number; not there for a host that has none. When this host has none, the offsets of
  /// what it sends to itself are plain addresses. The copier rings `doorbell` when a job is done.
  CallbackBackend(const BackendCallbacks& callbacks, uint32_t host, std::vector<ArenaView> arenas,
                  DoorbellWord* doorbell);
  ~CallbackBackend() override;
  /// Registers what host reshard plan `route` of `plan` writes to `destination`, in the words that `CopyPlan::parse`
  /// reads. Any thread, before the plan's first run. Throws Error(kInvalid) when it is malformed.
  void add_copy_plan(uint32_t plan, uint32_t route, uint32_t destination, std::span<const uint64_t> words);
  /// A lost host's successor has an arena of its own. Call it only between steps, when no send to the old arena is
  /// under way.
  void replace_arena(uint32_t host, const ArenaView& arena) { arenas_.at(host) = arena; }
  /// `host` is on another machine. Call it before the first send.
  void set_far(uint32_t host) { far_.at(host) = true; }
  /// An outgoing transfer to `destination` is over: everything is written there, or `error` says why not. Any thread.
  void remote_send_done(uint64_t key, uint32_t destination, std::string error);
  /// Bytes written to other hosts of this machine, to hosts of other machines, and to this host itself.
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }
  uint64_t bytes_shipped() const { return bytes_shipped_.load(std::memory_order_relaxed); }
  uint64_t bytes_kept() const { return bytes_kept_.load(std::memory_order_relaxed); }
  Copier& copier() { return copier_; }
  void set_error(std::string text) { error_ = std::move(text); }

  Status launch(const NodeContext& where, std::span<const Value> in, std::span<Value> out) override {
    return static_cast<Status>(c_.launch(c_.self, &where, in.data(), in.size(), out.data(), out.size()));
  }
  Value placeholder(const NodeContext& where, uint32_t input) override {
    return c_.placeholder(c_.self, &where, input);
  }
  Readiness readiness(Value value) override { return static_cast<Readiness>(c_.readiness(c_.self, value)); }
  Value retain(Value value) override {
    c_.retain(c_.self, value);
    return value;
  }
  void drop(Value value) override { c_.drop(c_.self, value); }
  Status transfer(const NodeContext& where, Value in, Value* out) override {
    return static_cast<Status>(c_.transfer(c_.self, &where, in, out));
  }
  Status begin_receive(const NodeContext& where, std::vector<ReceiveBuffers>* receives) override {
    return static_cast<Status>(c_.begin_receive(c_.self, &where, receives));
  }
  void send(const NodeContext& where, Value in, std::span<const ReceiveBuffers> ready_receives, uint64_t key,
            std::span<SendState> states) override;
  void take_sent(std::vector<Sent>* out) override;
  void stop_sends() override;
  Status finish_receive(const NodeContext& where, Value* out) override {
    return static_cast<Status>(c_.finish_receive(c_.self, &where, out));
  }
  void abandon_receive(const NodeContext& where) override { c_.abandon_receive(c_.self, &where); }
  Status put(uint32_t client, std::span<const std::byte> payload, Value* out, uint64_t* devices) override {
    return static_cast<Status>(c_.put(c_.self, client, payload.data(), payload.size(), out, devices));
  }
  Status fetch(uint32_t client, Value value, std::span<const std::byte> payload) override {
    return static_cast<Status>(c_.fetch(c_.self, client, value, payload.data(), payload.size()));
  }
  void refuse_put(uint32_t client, std::span<const std::byte> payload) override {
    c_.refuse_put(c_.self, client, payload.data(), payload.size());
  }
  void refuse_fetch(uint32_t client, std::span<const std::byte> payload) override {
    c_.refuse_fetch(c_.self, client, payload.data(), payload.size());
  }
  Status read_back(Value value, const ReadBackSlot& slot) override {
    return static_cast<Status>(c_.read_back(c_.self, value, slot.small, slot.large));
  }
  Status start_task(uint32_t client, uint64_t task, Value value, std::span<const std::byte> payload) override {
    return static_cast<Status>(c_.start_task(c_.self, client, task, value, payload.data(), payload.size()));
  }
  Status offload(uint32_t client, std::span<Value> values, std::span<const std::byte> payload) override {
    return static_cast<Status>(
        c_.offload(c_.self, client, values.data(), values.size(), payload.data(), payload.size(), true));
  }
  Status restore(uint32_t client, std::span<Value> values, std::span<const std::byte> payload) override {
    return static_cast<Status>(
        c_.offload(c_.self, client, values.data(), values.size(), payload.data(), payload.size(), false));
  }
  void forget_plan(uint32_t plan) override;
  void forget_client(uint32_t client) override {
    if (c_.forget_client != nullptr) c_.forget_client(c_.self, client);
  }
  void command(uint32_t client, std::span<const std::byte> payload) override {
    c_.command(c_.self, client, payload.data(), payload.size());
  }
  std::string_view last_error() const override { return error_; }
  void explain(const NodeContext& maker) override { c_.explain(c_.self, &maker); }

 private:
  SendState send_one(const NodeContext& where, Value keep, const ReceiveBuffers& ready,
                     const std::shared_ptr<const CopyPlan>& copy_plan, uint64_t key);
  std::shared_ptr<const CopyPlan> copy_plan_of(const NodeContext& where, uint32_t destination);

  BackendCallbacks c_;
  const uint32_t host_;
  std::vector<ArenaView> arenas_;
  std::vector<bool> far_;
  DoorbellWord* doorbell_;
  std::string error_;
  Copier copier_;
  std::vector<Copier::Job> done_;           // scratch of take_sent()
  std::vector<const std::byte*> shards_;    // scratch of send()
  std::atomic<uint64_t> bytes_sent_{0};     // written by the owner
  std::atomic<uint64_t> bytes_shipped_{0};  // the same
  std::atomic<uint64_t> bytes_kept_{0};     // the same
  std::atomic<bool> has_remote_sends_done_{false};
  std::mutex mutex_;  // guards what follows
  std::vector<Sent> remote_sends_done_;
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, std::shared_ptr<const CopyPlan>> copy_plans_;
};

}  // namespace pathways
