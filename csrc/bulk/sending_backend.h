/// SendingBackend: the native half of the JAX backend: sends, from shards whose addresses Python gives, into blocks
/// that a peer announced. Cython implements all other operations (pathways/_host_callbacks.pxi). It names no base, so a
/// signature that differs would go unnoticed if they were not pure here.
///
/// How bytes go to a host is chosen when its path is opened. Through memory: the copier writes the shards into the
/// receiver's blocks (large ones on its own thread). Through a stream: native code packs an outgoing transfer, and
/// Python sends it (`send_remote`).
///
/// Threading: as Device, where the methods do not say otherwise.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bulk/copier.h"
#include "bulk/network_transfer.h"
#include "device/backend.h"
#include "memory/arena.h"
#include "sync/doorbell.h"

namespace pathways {

/// What goes through a stream.
enum class Remote : uint8_t { kTransfer, kRows };

/// The owner calls stop_sends() before it destroys the backend: jobs of the copier hold references.
class SendingBackend : public Device, public Mover, public ClientWork {
 public:
  /// Call it once, before anything else. `arenas`: of all hosts, by number; not there for a host that has none. When
  /// this host has none, the offsets of what it sends to itself are plain addresses. The copier rings `doorbell` when a
  /// job is done.
  void open(uint32_t host, const std::vector<ArenaView>& arenas, DoorbellWord* doorbell);
  /// Registers what host reshard plan `route` of `plan` writes to `destination`, in the words that `CopyPlan::parse`
  /// reads. Any thread, before the plan's first run. Throws Error(kInvalid) when it is malformed.
  void add_copy_plan(uint32_t plan, uint32_t route, uint32_t destination, std::span<const uint64_t> words);
  void forget_copy_plans(uint32_t plan);
  /// Bytes go to `host` through its arena, or through a stream. `open` has opened the arenas. Call it before the first
  /// send; of a lost host's successor, the arena only between steps, when no send to the predecessor is under way.
  void open_memory(uint32_t host, const ArenaView& arena) { paths_.at(host) = {&SendingBackend::copy, arena}; }
  void open_stream(uint32_t host);
  /// An outgoing transfer to `destination` is over: everything is written there, or `error` says why not. Any thread.
  void remote_send_done(uint64_t key, uint32_t destination, std::string error);
  /// All that `source` sends through its stream in a transfer is written. Any thread.
  void arrived(uint64_t order, uint32_t node, uint32_t source);
  /// Keeps a chunk that came before its receive has memory (FAR-3). False: it is not whole, or there is no room for it.
  /// Any thread.
  bool keep_early(const Chunk& chunk, std::span<const std::byte> message);
  /// Bytes written to other hosts through memory and through streams, and to this host itself.
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }
  uint64_t bytes_shipped() const { return bytes_shipped_.load(std::memory_order_relaxed); }
  uint64_t bytes_kept() const { return bytes_kept_.load(std::memory_order_relaxed); }
  void set_error(std::string text) { error_ = std::move(text); }
  /// Each copy takes so much longer. Call it after `open`, before the first send.
  void slow_copies_for_testing(std::chrono::nanoseconds delay);

  void send(const NodeContext& where, Value in, std::span<const ReceiveBuffers> ready_receives, uint64_t key,
            std::span<SendState> states) final;
  SendState write_rows(const NodeContext& where, const RowWrite& write) final;
  void take_sent(std::vector<Sent>* out) final;
  uint64_t early_bytes(const NodeContext& where, uint32_t destination, std::vector<uint64_t>* offsets) final;
  void take_arrived(std::vector<Arrived>* out) final;
  void stop_sends() final;
  std::string_view last_error() const final { return error_; }

  Status launch(const NodeContext& where, std::span<const Value> inputs, std::span<Value> outputs) override = 0;
  Value placeholder(const NodeContext& where, uint32_t input) override = 0;
  Readiness readiness(Value value) override = 0;
  Value begin_scalar(Value value) override = 0;
  Status read_scalar(Value value, int64_t* out) override = 0;
  Value retain(Value value) override = 0;
  void drop(Value value) override = 0;
  Status transfer(const NodeContext& where, Value input, Value* output) override = 0;
  void forget_plan(uint32_t plan) override = 0;
  void explain(const NodeContext& maker) override = 0;
  Status begin_receive(const NodeContext& where, std::vector<ReceiveBuffers>* receives) override = 0;
  void peer_opens(uint32_t host, int32_t epoch) override = 0;
  Status place_early(const NodeContext& where, uint32_t source, Bytes chunk) override = 0;
  Status finish_receive(const NodeContext& where, Value* output) override = 0;
  void abandon_receive(const NodeContext& where) override = 0;
  Status read_shards(const NodeContext& where, uint32_t input, Value value, std::vector<Bytes>* shards,
                     Value* keep) override = 0;
  Status begin_exchange(const NodeContext& where, std::vector<uint64_t>* places) override = 0;
  Status finish_exchange(const NodeContext& where, const RowResults& results, std::span<Value> outputs) override = 0;
  void abandon_exchange(const NodeContext& where) override = 0;
  Status put(uint32_t client, Bytes payload, const Leased& leased, const Booked& booked, Value* output,
             uint64_t* devices) override = 0;
  uint64_t devices_of_put(uint32_t client, Bytes payload) override = 0;
  void refuse_put(uint32_t client, Bytes payload, const Leased& leased) override = 0;
  Status fetch(uint32_t client, Value value, Bytes payload, const Leased& leased,
               std::vector<BlockPiece>* written) override = 0;
  void refuse_fetch(uint32_t client, Bytes payload, const Leased& leased) override = 0;
  Status read_back(Value value, const ReadBackSlot& place) override = 0;
  Status start_task(uint32_t client, uint64_t task, Value value, Bytes payload, const Booked& booked) override = 0;
  void command(uint32_t client, uint64_t plan, Bytes payload) override = 0;
  Status offload(uint32_t client, std::span<Value> values, Bytes payload, Offload where) override = 0;
  void forget_client(uint32_t client) override = 0;

 protected:
  /// Gives the addresses of the local shards that the copy plans of this transfer read, in the order of the copy plans'
  /// sources. `keep`: a new reference on what keeps the shards there.
  virtual Status shards(const NodeContext& where, Value in, std::vector<const std::byte*>* out, Value* keep) = 0;
  /// This host receives shards of its own value unchanged: the receive under way takes them without a copy.
  virtual Status direct(const NodeContext& where, Value in) = 0;
  /// Starts an outgoing transfer through a stream; `keep` keeps its sources alive. If the result is kOk,
  /// `remote_send_done` is called with `key` exactly once, when the transfer is over.
  virtual Status send_remote(const NodeContext& where, Remote what, uint32_t destination, uint64_t key,
                             std::shared_ptr<const CopyPlan> copy_plan, std::vector<const std::byte*> sources,
                             Value keep) = 0;

 private:
  /// How bytes go to one host. `send` starts a job that has no targets yet: they are the receiver's blocks, which it
  /// announced at `offsets`.
  struct Path {
    SendState (SendingBackend::*send)(const NodeContext& where, Remote what, Copier::Job& job,
                                      std::span<const uint64_t> offsets, Value keep);
    ArenaView arena = {};
  };
  SendState copy(const NodeContext& where, Remote what, Copier::Job& job, std::span<const uint64_t> offsets,
                 Value keep);
  SendState stream(const NodeContext& where, Remote what, Copier::Job& job, std::span<const uint64_t> offsets,
                   Value keep);
  SendState start(const NodeContext& where, Remote what, Copier::Job job, std::span<const uint64_t> offsets,
                  Value keep);
  std::shared_ptr<const CopyPlan> copy_plan_of(const NodeContext& where, uint32_t destination);

  uint32_t host_ = 0;
  std::vector<Path> paths_;  // by host
  DoorbellWord* doorbell_ = nullptr;
  std::string error_;
  std::unique_ptr<Copier> copier_;
  std::vector<Copier::Job> done_;                                   // scratch of take_sent()
  std::vector<const std::byte*> shards_;                            // scratch of send()
  std::atomic<uint64_t> bytes_sent_{0};                             // written by the owner
  std::atomic<uint64_t> bytes_shipped_{0};                          // the same
  std::atomic<uint64_t> bytes_kept_{0};                             // the same
  std::vector<std::shared_ptr<std::atomic<uint64_t>>> early_kept_;  // by host: bytes of its early chunks; only streams
  std::atomic<bool> has_remote_sends_done_{false}, has_arrived_{false};
  std::mutex mutex_;  // guards what follows
  std::vector<Sent> remote_sends_done_;
  std::vector<Arrived> arrived_;
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, std::shared_ptr<const CopyPlan>> copy_plans_;
};

}  // namespace pathways
