/// A host: its rings, its executor, and the clients' future tables that it completes.
///
/// `step` takes a batch of records, lets the executor do what has become possible, and publishes the outgoing records.
/// `wait` sleeps on the host's doorbell. The owner of the enqueue thread calls the two in turn: pathways/_host.pxi
/// holds Python's lock in `step` and releases it in `wait` (GIL-1); the simulation has no such lock.
///
/// ERR-2: when the order reports a loss, this host takes in what the lost peers wrote before, and then forgets them. It
/// uses a successor from `replace_peer` on, with new rings in both directions (host/losses.cc).
///
/// FAR-2: a record to or from a host on another machine is dropped unless it names the incarnation that both ends know.
/// So the records of a lost host, or those meant for it, never reach its successor (host/far_peers.cc).
///
///   PEER-1  an invalid record of another host (corrupt, truncated, or of a transfer in which not both hosts take part)
///           closes the channel from that host, with an error that names the host. Nothing else is closed.
///
/// Threading: `step` and `wait` by the owner's thread. `add_plan`, `set_compiled`, `remove_plan`, `attach_client`,
/// `replace_peer`, `task_done` and `launched` by any thread: they leave mail, which the owner's thread
/// reads before it takes a record. So what was registered before a record was submitted is known when the record comes.
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
#include "messages/far_records.h"
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

  /// `hosts`: the blocks of all hosts, by number. A host that is not there is lost now, and will be replaced.
  /// `far`: by host, its incarnation if it is on another machine (messages/far_records.h); empty: all are on this one.
  Host(Options options, std::vector<HostView> hosts, ControllerBlock* controller, Backend backend,
       std::vector<int32_t> far = {});
  ~Host() override;

  /// The plan is removed when its client is gone. Throws Error(kInvalid) when the id is taken, when the plan is for
  /// another host, or when it moves data between this host and a host to which it has no ring.
  void add_plan(uint32_t id, Plan plan, uint32_t client = Executor::kNobody);
  void set_compiled(uint32_t id, std::optional<std::string> error, PlanSizes sizes = {});
  /// No later record names the plan. Runs under way go on, see Executor::remove_plan.
  void remove_plan(uint32_t id);
  /// The client's memory must stay mapped until the backend is told to forget the client; after that this host does not
  /// touch it any more. A client whose notice has come already is forgotten at once.
  /// `is_far`: the client is on another machine, and `view` is of a twin of its block.
  void attach_client(uint32_t client, const ClientView& view, uint32_t futures, bool is_far = false);
  /// A task of the backend's is done: see Executor::on_task_done.
  void task_done(uint64_t task, Value made, uint64_t devices, std::optional<std::string> error);
  /// See Executor::on_task_answered.
  void task_answered(uint64_t task);
  /// A launch that the backend attended to is over: see Executor::on_launched.
  void launched(uint64_t order, uint32_t node, std::vector<Value> made, std::optional<std::string> error);
  /// `block` is that of a lost peer's successor. It takes effect when this host was notified of the cluster's loss
  /// number `loss` (0: at once) and no send to the predecessor is under way. Then `peers_replaced` goes up by one, and
  /// this host uses nothing of the predecessor's memory any more.
  void replace_peer(uint32_t peer, const HostView& block, uint64_t loss);
  /// The same for a successor on another machine.
  void replace_far_peer(uint32_t peer, int32_t incarnation, uint64_t loss);
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
  void failed(uint32_t client, Handle future, std::string_view text) override;
  Status read_back(uint32_t client, Handle future, const WriteValue& write) override;
  void run_done(uint32_t client, uint64_t tag, uint32_t gangs, uint32_t expected, DeviceTime time,
                const TakenBranches& taken) override;
  void command_done(uint32_t client, uint64_t bytes) override;
  void hold_over(uint32_t client, uint64_t hold) override;
  void leave() override;
  void come_back() override;
  void receive_ready(uint32_t host, uint64_t order, uint32_t node, std::span<const uint64_t> offsets) override;
  void receive_done(uint32_t host, uint64_t order, uint32_t node, Outcome outcome, std::string_view text) override;
  void exchange_words(uint32_t host, ExchangeWords kind, uint64_t order, uint32_t node,
                      std::span<const uint64_t> words) override;
  void exchange_written(uint32_t host, uint64_t order, uint32_t node, std::string_view error) override;
  void decided(uint32_t host, uint64_t order, uint32_t choice, const Decision& decision) override;

  void send_words(RecordKind kind, uint32_t host, uint64_t order, uint32_t node, std::span<const uint64_t> words);
  void send_written(RecordKind kind, uint32_t host, uint64_t order, uint32_t node, Outcome outcome,
                    std::string_view text);
  template <typename Record>
  void send_peer(uint32_t host, const Record& record, std::span<const std::byte> behind = {});
  bool has_peer(uint32_t host) const { return to_peers_.at(host).is_connected() || is_far_there(host); }
  bool is_far(uint32_t host) const override { return host < far_.size() && far_[host] != kNear; }
  bool is_far_there(uint32_t host) const { return is_far(host) && far_[host] != kAbsent; }
  /// Bytes of the longest record to a peer.
  uint32_t most_to(uint32_t host) const;
  void open_far(std::vector<int32_t> far, size_t hosts, ControllerBlock* controller);
  uint32_t drain_far();
  void complete_far(uint32_t client, Handle future);
  Status read_back_far(Handle future, const WriteValue& write);
  bool flush_peers();
  std::chrono::nanoseconds overflow_look() const;
  void forget_client(uint32_t client);
  uint32_t drain_peer(uint32_t peer);
  std::string take_peer(uint32_t peer, std::span<const std::byte> bytes);
  std::string take_words(uint32_t peer, std::span<const std::byte> bytes);
  std::string take_written(uint32_t peer, std::span<const std::byte> bytes);
  std::string take_decision(uint32_t peer, std::span<const std::byte> bytes);
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
  std::vector<int32_t> far_;      ///< by host: kNear, kAbsent, or the incarnation; empty: all are on this machine
  std::vector<bool> closed_far_;  ///< by host: the channel from it is closed (PEER-1)
  ByteRing::Consumer from_far_;
  std::string far_fault_;  ///< why from_far_ is not read any more; successors over there are closed at once
  Outbox to_far_;
  std::vector<std::vector<uint64_t>> partial_words_;  ///< by peer: the first records of long words
  struct Replacement {
    uint32_t peer;
    HostView block;       ///< of a peer on this machine
    int32_t incarnation;  ///< of a peer on another machine; else kNear
    uint64_t loss;
  };
  std::vector<Replacement> replacements_;  ///< that have not taken effect yet
  uint64_t losses_ = 0;                    ///< of the cluster: the number of the last known one
  std::atomic<uint64_t> peers_replaced_{0};
  int64_t distance_ns_ = 0;
  std::jthread speaker_;       ///< see leave()
  int64_t read_ns_ = 0;        ///< when the record that is being done was read; 0: the clock was not read since
  bool has_overflow_ = false;  ///< some record waits for room in a ring; no doorbell rings for that
  struct Attached {
    FutureView futures;  ///< not there: no such client, or it is gone
    ReadBackView read_back;
    bool is_far = false;
  };
  std::vector<Attached> clients_;  ///< by number
  /// The value of a future that a client on another machine will get, from read_back_far to complete_far.
  struct FarValue {
    Handle future;
    bool is_large = false;
    uint32_t runs = 0;
    std::vector<std::byte> bytes;  ///< the runs as they go behind a FutureDoneRecord
  } far_value_;
  std::vector<std::byte> record_, peer_record_;  ///< scratch: copy of the record being read (TRUST-1)
  std::vector<Load> commands_done_;              ///< by client: not reported to the controller yet
  std::atomic<uint32_t> attached_{0};
  Executor executor_;

  Mailbox mailbox_;
  std::mutex mutex_;  ///< guards plans_
  std::unordered_set<uint32_t> plans_;
};

}  // namespace pathways
