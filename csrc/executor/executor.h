/// Executor: one host's part of all runs: which nodes are ready, what to enqueue, what to send.
///
/// The controller's records come in the cluster's order (`on_*`); `poll` moves finished work on. When the record of a
/// run comes, the executor prepares all nodes of the run (ASY-2): it counts the inputs of each node, announces its
/// receives, and puts its calls into the device FIFOs. Everything else it passes on to the classes of which it
/// consists, each with one job. A label is explained at the class that keeps its law:
///
///   PlanTable                the plans
///   RunTable                 the state of the runs
///   LaunchQueues             what is ready, in which order, and what must wait (ORD-1, ASY-1, GANG-2, GANG-3)
///   Launcher, LaunchMemory   launch calls; what they need of the memory (GANG-1, MEM-1)
///   Dataflow                 values and errors go from node to node (ERR-1, MEM-4)
///   PeerBook                 the peers: who is lost, what was refused, what came before its run (PEER-2..4)
///   TransferManager          transfers between hosts (GANG-2, ERR-2)
///   RowExchanges             exchanges of rows (GANG-2, ERR-2)
///   Decisions                which branches are taken (GANG-1, GANG-2, ERR-2)
///   ReadinessTracker         values that XLA has not computed yet (LOOK-1)
///   ValueSettler             what follows when it has computed them (READ-1)
///   ClientObjects            the clients and their buffers (OWN-1)
///   ClientCommands, PutQueue, FetchTable, TaskTable   what clients ask beside runs (FUT-3, MOVE-1)
///   RunTrace                 what was done when, while a trace is on (TRACE-2)
///
/// Each of them uses those on which it is built, directly. What goes the other way (a buffer that is defined wakes its
/// readers, a transfer that is over starts what it made ready) goes through OutputFinder and Dispatcher, which the
/// executor implements.
///
///   OWN-1   a client that is gone owns nothing here. Its launched work and its tasks run to their end, and nobody is
///           notified. Each host hears of its end behind all runs that the client was granted, and removes its plans
///           then; so the hosts of a gang all know its plan, or none does (GANG-1). Being gone is final: a plan of the
///           client, or the client itself, may be registered later, because registrations do not go through the order;
///           such a registration has no effect.
///
/// Threading: one thread at a time (the owner); no locks. Allocation: none per node in the steady state.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "device/backend.h"
#include "executor/client_commands.h"
#include "executor/executor_stats.h"
#include "executor/fetch_table.h"
#include "executor/launcher.h"
#include "executor/put_queue.h"
#include "executor/task_table.h"
#include "executor/value_settler.h"
#include "messages/records.h"
#include "movement/decisions.h"
#include "movement/peer_book.h"
#include "movement/row_exchanges.h"
#include "movement/transfer_manager.h"
#include "plan/plan.h"
#include "runs/client_objects.h"
#include "runs/dataflow.h"
#include "runs/error_table.h"
#include "runs/executor_part.h"
#include "runs/launch_memory.h"
#include "runs/launch_queues.h"
#include "runs/ledger.h"
#include "runs/plan_table.h"
#include "runs/readiness_tracker.h"
#include "runs/run_table.h"
#include "runs/run_trace.h"
#include "runs/value_refs.h"

namespace pathways {

class Executor final : private OutputFinder, private Dispatcher {
 public:
  struct Options {
    uint32_t host = 0;
    uint32_t devices = 1;
    uint64_t device_bytes = 0;  ///< memory of each device; 0: no bound
    Quirks quirks{};            ///< of its platform
    Clock clock = monotonic_ns;
    std::chrono::nanoseconds longest_put_wait = std::chrono::seconds(10);  ///< for memory, see PutQueue
  };

  Executor(Options options, Backend backend, HostLink& link);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  static constexpr uint32_t kNobody = 0xffffffffu;
  /// The plan is removed when its client is gone. Throws Error(kInvalid) when the id is taken or the plan is for
  /// another host.
  void add_plan(uint32_t id, Plan plan, uint32_t client = kNobody);
  /// The plan is compiled, and its calls may be launched. With an `error`: it could not be compiled, and its runs fail
  /// with that text.
  void set_compiled(uint32_t id, std::optional<std::string> error = std::nullopt, PlanSizes sizes = {});
  /// Runs that came before go on. When they are over, the backend is notified (Device::forget_plan).
  void remove_plan(uint32_t id) { plans_.remove(id); }
  /// `capacity`: how many futures the client can have; handles beyond it are refused. Client numbers are never reused.
  void add_client(uint32_t client, uint32_t capacity = UINT32_MAX) { objects_.add_client(client, capacity); }
  /// The notice of the client's end has come.
  bool is_gone(uint32_t client) const { return objects_.is_gone(client); }
  /// False: this cannot be the number of a client. Client numbers go up by one, and this one is far ahead of all that
  /// this host knows.
  bool may_be_client(uint32_t id) const { return objects_.may_be_client(id); }

  /// READ-2: the value of a buffer that is defined here, until the next call; nullptr: none.
  Value value_of(uint32_t client, Handle handle) { return objects_.value_of(client, handle); }

  /// `words`: what follows the record. An invalid run (unknown plan, wrong counts) fails as a whole; no other run does.
  /// `read_ns`: when the host read the record, for a trace; 0: now.
  void on_run(const RunRecord& record, const uint64_t* words, int64_t read_ns = 0);
  void on_command(const CommandRecord& record, std::span<const std::byte> payload);
  void on_client_gone(uint32_t client);
  /// kInvalid: the peer's record is wrong (the peer has no part in that transfer, or has sent the same before). Then
  /// nothing was done.
  Status on_receive_ready(uint64_t order, uint32_t node, uint32_t host, std::span<const uint64_t> offsets);
  Status on_receive_done(uint64_t order, uint32_t node, uint32_t host, Outcome outcome, std::string_view text);
  Status on_exchange_words(ExchangeWords kind, uint64_t order, uint32_t node, uint32_t host,
                           std::span<const uint64_t> words);
  Status on_exchange_written(uint64_t order, uint32_t node, uint32_t host, std::string_view error);
  Status on_decision(uint64_t order, uint32_t choice, uint32_t host, const Decision& decision);
  /// The executor takes nothing more from peer `host`. Whatever is still missing from the peer fails with `text`, in
  /// present runs and in later ones. The peer is notified, as it is of every failed transfer. A peer that is alive may
  /// still write into receive buffers that were announced to it, so their memory is never returned.
  void close_peer(uint32_t host, std::string_view text) { lose({&host, 1}, text, LostPeer::kAlive); }
  /// The backend has done a task, or the task failed with `error`. Takes over `made`, the buffer that the task made on
  /// `devices`; nullptr: it made none.
  void on_task_done(uint64_t task, Value made, uint64_t devices, const std::optional<std::string>& error) {
    tasks_.on_done(task, made, devices, error);
    commands_.task_over();
  }
  /// The backend keeps a task's value for longer, but the client need not wait.
  void on_task_answered(uint64_t task) { tasks_.on_answered(task); }
  /// An attended launch is over (Device::launch, kPending). Takes over `made`, its outputs, which are ready; or the
  /// launch failed with `error`. No output of such a launch has taken over an input.
  void on_launched(uint64_t order, uint32_t node, std::span<const Value> made, const std::optional<std::string>& error);
  /// ERR-2: these hosts are lost, and send nothing more for the runs so far. Later runs use their successors.
  void on_hosts_lost(std::span<const uint32_t> hosts, std::string_view text) { lose(hosts, text, LostPeer::kDead); }
  /// Sends to a host that are still under way. When that host is dead, nobody else may use its memory before these
  /// sends end.
  uint32_t sends_under_way(uint32_t host) const { return peers_.sends_to(host); }
  /// See Mover::peer_opens.
  void peer_opens(uint32_t host, int32_t epoch) { backend_.mover.peer_opens(host, epoch); }
  /// ERR-2: this host is the successor of a lost host. A buffer that is missing here was on the lost host if its client
  /// is not younger than the loss (its number is at most `youngest_client`). Requests for such a buffer fail with
  /// `text`.
  void set_predecessor_failure(std::string text, uint32_t youngest_client) {
    objects_.set_predecessor_failure(std::move(text), youngest_client);
  }
  /// Checks the oldest pending values of each ready queue, and starts what has become possible. Returns how many things
  /// were done.
  uint32_t poll();
  /// The oldest values that are not ready yet, one or two per ready queue. A thread that sleeps until something happens
  /// waits for these.
  void watched(std::vector<Value>* out) const { tracker_.watched(out); }
  /// Values half way down each ready queue. A thread that may sleep until there is much to do waits for these.
  void watched_half_way(std::vector<Value>* out) const { tracker_.watched_half_way(out); }
  /// Some node has its inputs but waits for something else: the bound on launches in flight, memory, GANG-2 or GANG-3.
  bool is_throttled() const { return !queues_.throttled().empty() || puts_.is_waiting(); }
  bool is_idle() const {
    return runs_.live() == 0 && tracker_.waiting() == 0 && tasks_.count() == 0 && !puts_.is_waiting();
  }
  /// Traces the runs that are read from now on. See RunTrace.
  void start_trace(size_t capacity) { trace_.start(capacity); }
  void stop_trace() { trace_.stop(runs_); }
  RunTrace::Ring::Taken take_trace() { return trace_.take(); }
  /// How long each client kept each device busy.
  std::vector<DeviceClock::Use> device_uses() const { return clock_.uses(); }
  ExecutorStats stats() const;
  /// What the oldest live runs wait for: one line of text for each, for people to read.
  std::vector<std::string> describe_runs(size_t most) const;
  const Ledger& ledger() const { return ledger_; }
  /// Bytes of memory that a host keeps for one run of a plan: its counters and handles.
  static size_t run_bytes(const Plan& plan) { return RunTable::run_bytes(plan); }
  /// Drops every value. Call it before the backend is destroyed.
  void clear();
  /// Checks the invariants of all parts. For debug builds and tests; not from within a call of the backend or the link.
  void validate() const;

 private:
  Value another_output(const PendingValue& item, std::span<const Value> taken) override {
    return settler_.another_output(item, taken);
  }
  void wake(const ObjectWaiter& waiter, const Object& object) override;
  void value_there(uint32_t slot, uint32_t value, Value ref, uint64_t devices) override {
    decisions_.value_there(slot, value, ref, devices);
  }
  /// A call enters its FIFOs; a transfer announces its receive.
  void prepare_node(NodeRef ref, const NodeRecord& node);
  void drain() override;
  Status drained(Status status);
  void lose(std::span<const uint32_t> hosts, std::string_view text, LostPeer state);
  /// The slots of all live runs, in the order of the runs.
  std::vector<uint32_t> live_runs() const;
  /// Ends the sends that are over, and gives memory to the receives that wait. Returns how many things were done.
  uint32_t move_on();
  /// Settles the values that have become ready. Returns how many there were.
  uint32_t look();
  std::string describe_run(uint32_t slot) const;
  std::string unsound(const RunRecord& record, const uint64_t* handles);
  void prepare(const RunRecord& record, const uint64_t* handles, int64_t read_ns);
  void release_donated(const RunRecord& record, const uint64_t* handles, const Plan& plan);

  const Options options_;
  const Backend backend_;
  HostLink& link_;
  Ledger ledger_;
  ValueRefs refs_;
  ErrorTable errors_;
  PlanTable plans_;
  RunTable runs_;
  LaunchMemory memory_;
  LaunchQueues queues_;
  ReadinessTracker tracker_;
  DeviceClock clock_{options_.clock};
  RunTrace trace_{options_.clock};
  const ExecutorPart part_;
  ClientObjects objects_;
  Dataflow flow_;
  ReceiveQueue receives_;
  PeerBook peers_;
  Decisions decisions_;
  TransferManager transfers_;
  RowExchanges rows_;
  Launcher launcher_;
  PutQueue puts_;
  TaskTable tasks_;
  FetchTable fetches_;
  ClientCommands commands_;
  ValueSettler settler_;
  bool is_looking_ = false;  ///< within look()
  /// A launch took long. Nothing more is started until the next `poll`, so that the records that other hosts have sent
  /// meanwhile are read first: what they make possible may be due before what is ready here, at those hosts too.
  bool is_paused_ = false;
  std::vector<Sent> sent_;        ///< scratch of poll()
  std::vector<Arrived> arrived_;  ///< the same
  uint32_t stuck_polls_ = 0;  ///< in which nothing was done, although something is throttled and nothing is under way
  uint64_t polls_ = 0;
  uint64_t run_records_ = 0, overfull_ = 0;
};

}  // namespace pathways
