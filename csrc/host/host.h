/// A host: its rings, the clients' future tables it completes, and its executor.
///
/// `step` takes a batch of records, lets the executor do what has become possible, and publishes what is to be said;
/// `wait` sleeps on the host's doorbell. Whoever owns the enqueue thread calls the two in turn: pathways/_core.pyx with
/// Python's lock held in `step` and let go in `wait` (GIL-1), the simulation with neither.
///
/// ERR-2: peers that are lost are forgotten when the order says so, with what they wrote before taken in; a successor
/// is known from `replace_peer` on, with rings as new in both directions (host/losses.cc).
///
///   PEER-1  a record of another host that makes no sense (corrupt, truncated, of no transfer that both take part in)
///           closes the channel from it, with an error that names it, and nothing else.
///
/// Threading: `step` and `wait` by the owner's thread; `add_plan`, `set_compiled`, `remove_plan`, `attach_client`,
/// `replace_peer`, `set_faults`, `task_done` and `launched` by any thread, they leave mail that the next step reads
/// before it takes a record, so what was registered before a record was submitted is known when it comes.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "executor/executor.h"
#include "messages/credits.h"
#include "messages/outbox.h"
#include "messages/shared_segments.h"
#include "sync/mailbox.h"

namespace pathways {

class Host final : private HostLink {
 public:
  struct Options {
    uint32_t host = 0;
    uint32_t devices = 1;
    uint32_t max_in_flight = 0;
    uint64_t device_bytes = 0;  ///< memory of each device; 0: no bound
    bool gangs_block = false;   ///< see Executor::Options
    uint32_t batch = 64;        ///< records taken in one step
    /// A step that has lasted so long takes no further record, for a launch may take as long as its computation, and
    /// what is done is looked at and told at the end of the step: so often that who hears of it has not gone to sleep
    /// meanwhile (SpinPolicy::yield_long), for waking it costs more than looking; seldom enough to be cheap.
    std::chrono::nanoseconds longest_step = std::chrono::microseconds(30);
  };

  /// `hosts`: of all hosts; one that is not there is lost now, and will be replaced.
  Host(Options options, std::vector<HostView> hosts, ControllerBlock* controller, Backend& backend);
  ~Host() override;

  /// The plan goes with its client. Throws Error(kInvalid) when the id is taken, or the plan is another host's or moves
  /// data to hosts that are not there.
  void add_plan(uint32_t id, Plan plan, uint32_t client = Executor::kNobody);
  void set_compiled(uint32_t id, std::optional<std::string> error, PlanSizes sizes = {});
  /// No record that comes after names it. Runs under way go on, see Executor::remove_plan.
  void remove_plan(uint32_t id);
  /// The client's memory stays mapped until the backend is told to forget the client; then nothing here touches it any
  /// more. A client whose end has passed already is forgotten at once.
  void attach_client(uint32_t client, const ClientView& view);
  void set_faults(ExecutorFaults faults);
  /// A task of the backend's is done: see Executor::on_task_done.
  void task_done(uint64_t task, Value made, uint64_t devices, std::optional<std::string> error);
  /// A launch that the backend attended to is over: see Executor::on_launched.
  void launched(uint64_t order, uint32_t node, std::vector<Value> made, std::optional<std::string> error);
  /// A lost peer's successor has `block`. Takes effect when this host has heard of the cluster's loss number `loss` (0:
  /// at once); then `peers_replaced` goes up by one, and nothing of the predecessor's memory is used any more.
  void replace_peer(uint32_t peer, const HostView& block, uint64_t loss);
  uint64_t peers_replaced() const { return peers_replaced_.load(std::memory_order_acquire); }

  /// The number of records and completions handled; 0 when there was nothing to do.
  uint32_t step();
  /// Sleeps until somebody rings since `ticket`.
  uint32_t ticket() const { return block_->doorbell.ticket(); }
  Status wait(uint32_t ticket, std::chrono::nanoseconds timeout, SpinPolicy spin);
  /// Clients whose memory this host may still touch. It forgets one when the order tells it that the client is gone.
  uint32_t attached_clients() const { return attached_.load(std::memory_order_acquire); }
  void ring() { block_->doorbell.ring(); }

  Executor& executor() { return executor_; }
  const HostBlock& block() const { return *block_; }

 private:
  void complete(uint32_t client, Handle future) override;
  void failed(uint32_t client, Handle future, std::string_view text) override;
  bool begin_read_back(uint32_t client, Handle future, ReadBackSlot* slot) override;
  void end_read_back(uint32_t client, Handle future) override;
  void run_done(uint32_t client, uint64_t tag, uint32_t gangs, uint32_t expected) override;
  void command_done(uint32_t client, uint64_t bytes) override;
  void enqueued(uint32_t client, uint64_t tag, uint32_t node) override;
  void leave() override;
  void come_back() override;
  void receive_ready(uint32_t host, uint64_t order, uint32_t node, std::span<const uint64_t> offsets) override;
  void receive_done(uint32_t host, uint64_t order, uint32_t node, bool failed, std::string_view text) override;

  bool flush_peers();
  std::chrono::nanoseconds overflow_look() const;
  void take(std::span<const std::byte> bytes);
  void forget_client(uint32_t client);
  uint32_t drain_peer(uint32_t peer);
  std::string take_peer(uint32_t peer, std::span<const std::byte> bytes);
  void close_peer(uint32_t peer, const std::string& fault);
  void lose_peers(std::span<const std::byte> record);
  void replace_peers();

  const Options options_;
  HostView own_;
  HostBlock* block_;
  ByteRing::Consumer inbox_;
  Outbox to_controller_;
  std::vector<ByteRing::Consumer> from_peers_;
  std::vector<Outbox> to_peers_;
  std::vector<std::vector<uint64_t>> partial_receive_ready_;  ///< by peer: the first chunks of a long post
  struct Replacement {
    uint32_t peer;
    HostView block;
    uint64_t loss;
  };
  std::vector<Replacement> replacements_;  ///< that wait for their loss to be heard of
  uint64_t losses_ = 0;                    ///< of the cluster, as far as heard of
  std::atomic<uint64_t> peers_replaced_{0};
  int64_t distance_ns_ = 0;
  std::jthread speaker_;       ///< see leave()
  bool has_overflow_ = false;  ///< some record waits for room in a ring; nobody rings for that
  struct Attached {
    FutureView futures;  ///< not there: no such client, or it is gone
    ReadBackView read_back;
  };
  std::vector<Attached> clients_;                ///< by number
  std::vector<std::byte> record_, peer_record_;  ///< scratch: the record that is looked at, copied (TRUST-1)
  std::vector<Load> commands_done_;              ///< by client: that the controller has not heard of
  std::atomic<uint32_t> attached_{0};
  Executor executor_;

  Mailbox mailbox_;
  std::mutex mutex_;  ///< guards plans_
  std::unordered_set<uint32_t> plans_;
};

}  // namespace pathways
