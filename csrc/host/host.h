/// A host: its rings, its executor, and the clients' future tables that it completes.
///
/// `step` takes a batch of records, lets the executor do what has become possible, and publishes the outgoing records.
/// `wait` sleeps on the host's doorbell. The owner of the enqueue thread calls the two in turn: pathways/_host.pxi
/// holds Python's lock in `step` and releases it in `wait` (GIL-1); the simulation has no such lock.
///
/// ERR-2: when the order reports a loss, this host takes in what the lost peers wrote before, and then forgets them. It
/// uses a successor from `open_peer` on, over a channel of its own (host/losses.cc).
///
/// PEER-1: what other hosts say counts between the epochs that both ends know; an invalid record (corrupt, truncated,
/// or of a transfer in which not both hosts take part) closes the channel from its sender (host/peers.h).
///
/// Threading: `step` and `wait` by the owner's thread. `add_plan`, `set_compiled`, `remove_plan`, `attach_client`,
/// `open_peer`, `task_done` and `launched` by any thread: they leave mail, which the owner's thread
/// reads before it takes a record. So what was registered before a record was submitted is known when the record comes.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "executor/executor.h"
#include "host/client_ends.h"
#include "host/peers.h"
#include "messages/credits.h"
#include "messages/outbox.h"
#include "messages/shared_segments.h"
#include "sync/mailbox.h"

namespace pathways {

class Host : private HostLink {
 public:
  struct Options {
    uint32_t host = 0;
    uint32_t devices = 1;
    uint64_t device_bytes = 0;  ///< memory of each device; 0: no bound
    Quirks quirks{};            ///< of its platform
    uint32_t batch = 64;        ///< records taken in one step
    /// A step that has lasted so long takes no further record. Why: a launch may take as long as its computation, and
    /// completions are checked and delivered only at the end of a step. They must come so often that the thread that
    /// polls for them has not gone to sleep meanwhile (SpinPolicy::serve_stream), because a wake-up costs more than a
    /// check; and so seldom that the checks are cheap.
    std::chrono::nanoseconds longest_step = std::chrono::microseconds(30);
    Clock clock = monotonic_ns;
  };

  /// `hosts`, `epochs`: of all hosts, by number; see Peers. Clients are on this machine unless it has a link.
  Host(Options options, const std::vector<HostView>& hosts, ControllerBlock* controller, Backend backend,
       std::vector<int32_t> epochs = {});
  ~Host() override;

  /// The plan is removed when its client is gone. Throws Error(kInvalid) when the id is taken, when the plan is for
  /// another host, or when it moves data between this host and a host to which it has no ring.
  void add_plan(uint32_t id, Plan plan, uint32_t client = Executor::kNobody);
  void set_compiled(uint32_t id, std::optional<std::string> error, PlanSizes sizes = {});
  /// No later record names the plan. Runs under way go on, see Executor::remove_plan.
  void remove_plan(uint32_t id);
  /// The client's memory must stay mapped until the backend is told to forget the client; after that this host does not
  /// touch it any more. A client whose notice has come already is forgotten at once.
  void attach_client(uint32_t client, const ClientView& view, uint32_t futures);
  /// A task of the backend's is done: see Executor::on_task_done.
  void task_done(uint64_t task, Value made, uint64_t devices, std::optional<std::string> error);
  /// See Executor::on_task_answered.
  void task_answered(uint64_t task);
  /// A launch that the backend attended to is over: see Executor::on_launched.
  void launched(uint64_t order, uint32_t node, std::vector<Value> made, std::optional<std::string> error);
  /// A lost peer has a successor, in this epoch; `block`: its block; not there: it is beyond the machine's link. It
  /// takes effect when this host was notified of the cluster's loss number `loss` (0: at once). Where there is a block,
  /// it also waits for the sends to the predecessor. Then `peers_replaced` goes up by one, and this host uses nothing
  /// of the predecessor's memory any more. Throws Error(kInvalid) when this host has no such peer, or no channel to it.
  void open_peer(uint32_t peer, const HostView& block, int32_t epoch, uint64_t loss);
  uint64_t peers_replaced() const { return peers_replaced_.load(std::memory_order_acquire); }

  /// Returns the number of records and completions handled; 0 when there was nothing to do.
  virtual uint32_t step();
  /// `wait` sleeps until the doorbell was rung after `ticket`, or until the timeout.
  uint32_t ticket() const { return block_->doorbell.ticket(); }
  Status wait(uint32_t ticket, std::chrono::nanoseconds timeout, SpinPolicy spin);
  /// Clients whose memory this host may still touch. It forgets one when the order tells it that the client is gone.
  uint32_t attached_clients() const { return attached_.load(std::memory_order_acquire); }
  void ring() { block_->doorbell.ring(); }

  Executor& executor() { return executor_; }
  const HostBlock& block() const { return *block_; }

 protected:
  /// Does a record of the controller.
  virtual void take(std::span<const std::byte> bytes);

 private:
  void complete(uint32_t client, Handle future) override;
  void fetched(uint32_t client, Handle token, std::span<const BlockPiece> written) override;
  void failed(uint32_t client, Handle future, std::string_view text) override;
  Status read_back(uint32_t client, Handle future, const WriteValue& write) override;
  void run_done(uint32_t client, uint64_t tag, uint32_t gangs, uint32_t expected, DeviceTime time,
                const TakenBranches& taken) override;
  void command_done(uint32_t client, uint64_t bytes) override;
  void hold_over(uint32_t client, uint64_t hold) override;
  void leave() override { peers_.leave(); }
  void come_back() override { peers_.come_back(); }
  void receive_ready(uint32_t host, uint64_t order, uint32_t node, std::span<const uint64_t> offsets) override;
  void receive_done(uint32_t host, uint64_t order, uint32_t node, Outcome outcome, std::string_view text) override;
  void exchange_words(uint32_t host, ExchangeWords kind, uint64_t order, uint32_t node,
                      std::span<const uint64_t> words) override;
  void exchange_written(uint32_t host, uint64_t order, uint32_t node, std::string_view error) override;
  void decided(uint32_t host, uint64_t order, uint32_t choice, const Decision& decision) override;

  void send_words(RecordKind kind, uint32_t host, uint64_t order, uint32_t node, std::span<const uint64_t> words);
  void send_outcome(RecordKind kind, uint32_t host, uint64_t order, uint32_t node, const Decision& outcome);
  void forget_client(uint32_t client);
  std::string take_peer(uint32_t peer, std::span<const std::byte> bytes);
  void close_peer(uint32_t peer, const std::string& fault);
  void check_reach(const std::string& what, uint32_t host) const;
  void lose_peers(std::span<const std::byte> record);
  void open_peers();

  const Options options_;
  HostView own_;
  HostBlock* block_;
  ByteRing::Consumer inbox_;
  Outbox to_controller_;
  std::unique_ptr<ClientEnds> clients_;
  Peers peers_;
  struct Opening {
    uint32_t peer;
    HostView block;
    int32_t epoch;
    uint64_t loss;
  };
  std::vector<Opening> openings_;  ///< that have not taken effect yet
  uint64_t losses_ = 0;            ///< of the cluster: the number of the last known one
  std::atomic<uint64_t> peers_replaced_{0};
  int64_t read_ns_ = 0;              ///< when the record that is being done was read; 0: the clock was not read since
  bool has_overflow_ = false;        ///< some record waits for room in a ring; no doorbell rings for that
  std::vector<std::byte> record_;    ///< scratch: copy of the record being read (TRUST-1)
  std::vector<Load> commands_done_;  ///< by client: not reported to the controller yet
  std::atomic<uint32_t> attached_{0};
  Executor executor_;

  Mailbox mailbox_;
  std::mutex mutex_;  ///< guards plans_
  std::unordered_set<uint32_t> plans_;
};

}  // namespace pathways
