/// One host's part of all runs: what is ready, what to enqueue, what to send.
///
/// The controller's records come in the cluster's order (`on_*`); `poll` moves finished work on. A run's nodes are all
/// prepared when its record comes (ASY-2): their inputs are counted, their receives announced, their places in the
/// device FIFOs taken. A call is launched when nothing is missing, which means: its inputs exist as values (XLA may
/// still compute them), it heads the FIFO of each local device it holds, and its plan is compiled.
///
/// A run sent as kRunStepwise is prepared node by node instead, as the controller says go (`on_go`), and each of its
/// calls is reported as it is enqueued: sequential dispatch, which exists to be measured against.
///
///   ORD-1   calls enter the device FIFOs in the order of the records and leave them from the head only.
///   ASY-1   nothing here waits; what cannot go on stays in a list and `poll` looks again.
///   GANG-1  a call of a gang is launched exactly once whatever befell its inputs: on stand-ins when they failed.
///           `gangs` counts those launches, per run and in all.
///   GANG-2  where a gang holds up what its host does after it (`gangs_block`), gangs are launched in the order,
///           whatever devices they hold. And nothing that comes before a gang in the order, and that other hosts may
///           need of this one, is left to be done behind it: they may need that, by whatever way, before they can
///           launch theirs. All that is waited for is earlier in the order, so nothing goes round. What is held up
///           differs:
///           - A launch on one local device computes in the call, and waits there for the other hosts. It is made when
///             this host owes nobody anything: every room is announced, every value sent. What was said goes out
///             meanwhile (HostLink::leave).
///           - A launch on several local devices returns at once. But XLA runs all such launches of a process one after
///             the other, on whatever devices. It is made when all that is owed is enqueued; sending goes on beside it.
///   GANG-3  where gangs block, a gang on one local device and a gang on several never run at the same time on a
///           shared device: the later one is launched when the earlier one has run. Collectives among the same devices
///           are paired by the order in which they run, and XLA's CPU client does not order these two kinds. If they
///           ran together, collectives of different gangs would be paired: wrong values, or a crash.
///   MEM-1   what values take is in the ledger from their first reference to their last; a call that finds no room
///           beside what is there waits for what is under way.
///   MEM-4   a value is dropped when its last reader has been launched, not before; arguments and results are the
///           object store's own references.
///   ERR-1   a failed value fails exactly the values and results that depend on it, with the first error's text.
///   ERR-2   what waits for a lost host's post or arrival fails with the failure reason of that host (loss.cc).
///   OWN-1   a client that is gone owns nothing here; its launched work and its tasks end unheard. Its plans go at its
///           end in the order too, so that all hosts of a gang still know its plan, or none (GANG-1). Gone is for
///           good: a plan, or the client itself, may be registered late, beside the order.
///   READ-1  a result that the client wants with its completion is in its read-back area before it is told as ready.
///   LOOK-1  what is told as ready was seen ready, or a value was that was computed from it: launches of one set of
///           devices that each take a result of the one before are chained, and the last speaks for all. XLA gives a
///           launch the error of its inputs, so one that is well also says that they were. A value that was donated
///           says nothing: its launch is watched by another of its outputs, or else by the launch that took the value
///           over. That launch may be a gang, which waits for other hosts. So what was enqueued between the two, and
///           has a value of its own, is settled before it (GANG-2).
///
/// Threading: one thread at a time (the owner); no locks. Allocation: none per node in the steady state (runs, their
/// tables and the queues are reused).
#pragma once

#include <bit>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "executor/backend.h"
#include "executor/ledger.h"
#include "executor/object_store.h"
#include "messages/records.h"
#include "plan/plan.h"

namespace pathways {

/// Test hooks: faults that the runtime itself never makes.
struct ExecutorFaults {
  /// Breaks ORD-1: each n-th pair of neighbouring runs changes places on this host, unless the second needs the first.
  uint32_t swap_every = 0;
};

struct ExecutorStats {
  uint64_t runs = 0;
  uint64_t launches = 0;
  uint64_t gangs = 0;
  uint64_t transfers = 0;
  uint64_t objects = 0;
  uint64_t live_runs = 0;
  uint64_t waiting = 0;    ///< values watched for readiness
  uint64_t exchanges = 0;  ///< transfers to or from other hosts, under way
  uint64_t overfull = 0;   ///< launches that found no room, and nothing under way that would make some
  uint64_t tasks = 0;      ///< under way in the backend
  uint64_t goes = 0;       ///< of stepwise runs
  uint64_t go_ns = 0;      ///< time spent on preparing what they were for
};

class Executor {
 public:
  struct Options {
    uint32_t host = 0;
    uint32_t devices = 1;
    uint32_t max_in_flight = 0;  ///< launches not known to be done, per device; 0: no bound
    uint64_t device_bytes = 0;   ///< memory of each device; 0: no bound
    bool gangs_block = false;    ///< the launch of a gang holds up what comes after it (GANG-2)
  };

  Executor(Options options, Backend& backend, HostLink& link);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  static constexpr uint32_t kNobody = 0xffffffffu;
  /// The plan goes with its client. Throws Error(kInvalid) when the id is taken or the plan is another host's.
  void add_plan(uint32_t id, Plan plan, uint32_t client = kNobody);
  /// The plan may be launched; or, with a text, its runs fail with it.
  void set_compiled(uint32_t id, std::optional<std::string> error = std::nullopt, PlanSizes sizes = {});
  /// Runs that came before go on; then the backend hears that the plan is gone.
  void remove_plan(uint32_t id);
  /// `capacity`: futures that the client can have; handles beyond it are refused. Numbers of clients are never reused.
  void add_client(uint32_t client, uint32_t capacity = UINT32_MAX);
  /// The order has passed its end.
  bool is_gone(uint32_t client) const { return client < clients_.size() && clients_[client].gone; }
  /// Numbers of clients go up by one. False: this one is far ahead of all that were heard of, so nobody gave it.
  bool may_be_client(uint32_t id) const {
    return id < std::max<uint64_t>(clients_.size(), predecessor_client_) + kMostClientsAhead;
  }

  /// `words`: what follows the record. A run that is not sound (unknown plan, wrong counts) fails as a whole, alone.
  void on_run(const RunRecord& record, const uint64_t* words);
  /// Prepares the nodes up to global node `last` of a stepwise run. A run that failed as a whole is not known any more.
  void on_go(uint64_t order, uint32_t last);
  void on_command(const CommandRecord& record, std::span<const std::byte> payload);
  void on_client_gone(uint32_t client);
  /// kInvalid: the peer makes no sense (it has no part in that transfer, or spoke twice); nothing was done.
  Status on_receive_ready(uint64_t order, uint32_t node, uint32_t host, std::span<const uint64_t> offsets);
  Status on_receive_done(uint64_t order, uint32_t node, uint32_t host, bool failed, std::string_view text);
  /// This host is not heard any more: what is still missing of it has failed with `text`, now and in runs to come. It
  /// is told so, as it is of every transfer that failed. Room that it was to fill is taken for good while it is alive
  /// and may still write there.
  enum class LostPeer : uint8_t { kAlive, kDead };
  void lose_peer(uint32_t host, std::string_view text, LostPeer state);
  /// The backend has done a task, or failed with `error`. Takes over `made`, which lies on `devices`; nullptr: none.
  void on_task_done(uint64_t task, Value made, uint64_t devices, const std::optional<std::string>& error);
  /// A launch that the backend attended to is over: takes over `made`, its outputs, which are ready; or it failed with
  /// `error`. It has taken none of its inputs over.
  void on_launched(uint64_t order, uint32_t node, std::span<const Value> made, const std::optional<std::string>& error);
  /// ERR-2: nothing more comes from these hosts for the runs so far; later runs know their successors.
  void on_hosts_lost(std::span<const uint32_t> hosts, std::string_view text);
  /// Copies that still go on to memory of a host's; where it is dead, nobody else may have that memory before they end.
  uint32_t sends_under_way(uint32_t host) const {
    const auto found = under_way_.find(host);
    return found == under_way_.end() ? 0 : found->second;
  }
  /// ERR-2: this host succeeds one that was lost. A buffer that is not here was there, if its client is not younger
  /// than the loss: whoever asks for it is told `text`.
  void set_predecessor_failure(std::string text, uint32_t youngest_client);

  /// Looks at the oldest watched values of each ready queue and moves on what has become possible. Number of things
  /// done.
  uint32_t poll();
  /// Oldest values not ready yet, one per ready queue: who wants to sleep until something happens waits for these.
  void watched(std::vector<Value>* out) const;
  /// Values half way down each ready queue: who may sleep until there is much to do waits for these.
  void watched_half_way(std::vector<Value>* out) const;
  /// Some launch waits for a place in flight.
  bool is_throttled() const { return !throttled_.empty(); }
  bool is_idle() const { return live_runs_ == 0 && stats_.waiting == 0 && tasks_.empty(); }

  ExecutorStats stats() const;
  /// What the oldest live runs wait for, in words for people, a line each.
  std::vector<std::string> describe_runs(size_t most) const;
  const Ledger& ledger() const { return ledger_; }
  void set_faults(ExecutorFaults faults) { faults_ = faults; }
  /// Memory of one run of a plan: the counters and handles that a host keeps.
  static size_t run_bytes(const Plan& plan);
  /// Drops every value; called before the backend goes.
  void clear();

 private:
  static constexpr uint32_t kNone = 0xffffffffu;

  struct PlanEntry {
    uint32_t id = 0;
    Plan plan;
    bool compiled = false;
    std::optional<std::string> failure;  ///< why it could not be compiled
    uint32_t client = kNobody;           ///< whose end is its own
    uint32_t live = 0;                   ///< runs that use it
    bool removed = false;
    PlanSizes sizes;
    std::vector<uint64_t> room;     ///< by node: bytes that it takes on each device beside its inputs; empty: not known
    std::vector<uint32_t> watched;  ///< by node: which of its outputs is watched; one that later runs do not donate
    uint32_t account = kNone;       ///< in the ledger, from the first run on
    std::vector<uint32_t> waiting;  ///< run slots that came before it was compiled
  };

  struct Run {
    PlanEntry* plan = nullptr;
    uint64_t order = 0;
    uint64_t tag = 0;
    uint32_t client = 0;
    uint32_t open = 0;  ///< steps not done, and results not settled
    uint32_t gangs = 0;
    bool is_stepwise = false;
    uint32_t prepared = 0;  ///< stepwise: nodes of the plan that need no go any more
    std::vector<Value> values;
    std::vector<uint64_t> ages;          ///< per value, once it is there
    std::vector<uint32_t> errors;        ///< per value: 0, or the failure reason of it
    std::vector<uint32_t> readers;       ///< per value: readings still to come
    std::vector<uint32_t> missing;       ///< per node
    std::vector<uint32_t> input_errors;  ///< per node: error of a failed input
    std::vector<uint64_t> results;       ///< handles
    std::vector<uint64_t> wanted;        ///< READ-1: a bit per result, or empty
    void begin(const Plan& of);
  };

  struct NodeRef {
    uint32_t run;
    uint32_t node;
  };

  /// One thing to do when a value is ready.
  struct PendingValue {
    enum class Kind : uint8_t { kNode, kStandIn, kValue, kSend, kFetch, kPut } kind;
    bool counts;  ///< gives back a place in flight on the ready queue's devices
    uint32_t run;
    uint32_t index;  ///< node, value, or fetch slot
    Value value;     ///< a reference of its own
    uint64_t key;    ///< kSend: the exchange; kPut: the handle
    uint64_t age;    ///< of the value
    /// LOOK-1: the value was computed from that of the pending value before it in the ready queue.
    bool chained = false;
    /// LOOK-1: the launch of this age has taken over the value; its watch, further down the ready queue, answers. 0:
    /// none has.
    uint64_t taken_by = 0;
  };

  /// Values on one set of devices become ready in the order they were enqueued: only the first ones are looked at, and
  /// of a chain of chained ones the last speaks for all. Kept by age, so that who asks late for an old value does not
  /// wait for young ones.
  struct ReadyQueue {
    uint64_t devices;
    std::deque<PendingValue> pending;
  };

  /// Both ends of one cross-host transfer of one run, as far as they are on this host.
  struct Exchange {
    uint32_t run = 0xffffffffu;
    uint32_t node = 0;
    Value source = nullptr;
    bool source_ready = false;
    uint32_t source_error = 0;
    uint32_t sends_left = 0;
    uint32_t receives_left = 0;
    bool is_prepared = false;
    bool has_room = false;    ///< begin_receive took some
    bool is_written = false;  ///< by a host that will not say when it is done
    uint32_t receive_error = 0;
    std::vector<ReceiveBuffers> ready_receives;  ///< `source` names the destination that announced
    std::vector<uint32_t> announced;             ///< hosts that have, ever
    std::vector<uint32_t> done_sources;          ///< hosts that have written, or failed to
    std::vector<uint32_t> dead;  ///< hosts that ended since: they are told nothing, nor are their successors
  };

  struct Fetch {
    uint32_t client = 0;
    uint64_t token = 0;
    bool is_task = false;  ///< the buffer is for a task, not to be written out
    std::vector<std::byte> payload;
    uint64_t command = 0;  ///< bytes of its record
  };

  /// A task that the backend has taken: `future` is its token, or the buffer that it makes.
  struct Task {
    uint32_t client = 0;
    uint64_t future = 0;
    bool makes = false;
    bool is_counted = false;  ///< what it makes is in the ledger, with `bytes` on each device
    uint64_t bytes = 0;
    uint64_t command = 0;  ///< bytes of its record
  };

  struct Client {
    bool present = false;
    bool gone = false;
    uint32_t capacity = 0;
    uint32_t account = 0;  ///< in the ledger, of its puts
    ObjectStore objects;
    std::unordered_map<uint64_t, Object> orphans;  ///< released before they were defined, by handle
  };

  Value retain(Value value) {
    ledger_.retain(value);
    return backend_.retain(value);
  }
  void drop(Value value) {
    ledger_.drop(value);
    backend_.drop(value);
  }
  std::string describe_run(uint32_t slot) const;
  static void measure(PlanEntry& entry);
  bool has_room(const Run& run, const NodeRecord& node) const;
  bool owes_before(const Run& run, const NodeRecord& node);
  bool conflicts_with_running_gang(const NodeRecord& node) const;
  void count_in_flight(const PendingValue& item, uint64_t devices, uint32_t by);
  void trim_sends();
  static bool waits_in_launch(const NodeRecord& node);
  void book_launch(const Run& run, const NodeRecord& node);
  void book(const Run& run, const NodeRecord& node, Value value);
  void forget_plan(uint32_t id);
  void free_client(uint32_t id);
  NodeContext context(const Run& run, uint32_t node) const;
  uint32_t acquire_run();
  std::string unsound(const RunRecord& record, const uint64_t* handles);
  void prepare(const RunRecord& record, const uint64_t* handles);
  void prepare_node(uint32_t slot, uint32_t index, const NodeRecord& node);
  void await_goes(uint32_t slot);
  bool hold_back(const RunRecord& record, const uint64_t* handles);
  bool needs_held(const RunRecord& record, const uint64_t* handles) const;
  void release_held();
  void bind_argument(uint32_t slot, uint32_t value, Handle handle);
  void drain();  // launches and starts everything in ready_
  void satisfy(uint32_t slot, uint32_t node);
  void launch(NodeRef ref);
  void book_launched(Run& run, const NodeRecord& node);
  void finish_launch(NodeRef ref, uint32_t error, bool counts, bool is_watched);
  void leave_fifos(const NodeRecord& node);
  void enter_fifo(std::deque<NodeRef>& fifo, NodeRef ref);
  void leave_fifo(std::deque<NodeRef>& fifo);
  void define(uint32_t slot, uint32_t value, Value ref, uint64_t devices, uint64_t age);
  void propagate_error(uint32_t slot, uint32_t value, uint32_t error);
  void deliver(uint32_t slot, uint32_t value, Value ref, uint64_t devices, uint64_t age);
  void read_done(Run& run, std::span<const uint32_t> values);
  void close_step(uint32_t slot);
  uint32_t failure(const PendingValue& item);
  static uint32_t maker_of(const Plan& plan, uint32_t value);
  uint32_t cause(uint32_t slot, uint32_t value);
  uint32_t failed_at(uint64_t age) const;
  void resolve_result(const Run& run, uint32_t result, uint32_t error);
  Status read_back(const Run& run, uint32_t result);
  template <typename F>
  static void for_each_device(uint64_t mask, F&& f) {
    for (; mask != 0; mask &= mask - 1) f(static_cast<uint32_t>(std::countr_zero(mask)));
  }
  void settle(const PendingValue& item, uint64_t devices, Readiness readiness);
  void add_pending(uint64_t devices, const PendingValue& item, std::span<const uint64_t> input_ages = {});
  uint32_t settle_ready(size_t queue);
  static std::optional<size_t> first_between(const ReadyQueue& queue);
  uint32_t settle_between(size_t queue);
  static size_t chain_length(const ReadyQueue& queue);
  std::span<const uint32_t> donated(const Run& run, const NodeRecord& node) const;
  void take_over(const NodeRecord& node, std::span<const uint32_t> positions);
  bool use_another_output(PendingValue& item);
  static size_t answering(const ReadyQueue& queue, size_t at);
  Readiness look(size_t queue, size_t at);

  std::optional<Object> take_orphan(uint32_t id, Handle handle);
  Object& make_object(Client& c, Handle handle, ObjectState state);
  void define_object(uint32_t client, Handle handle, Value ref, uint64_t devices, uint64_t age);  // takes over ref
  void fail_object(uint32_t client, Handle handle, uint32_t error);
  static void keep_orphan(Client& c, Object& object);
  void wake_waiters(Object& object);
  void release(Client& c, Object& object);
  void rename(uint32_t client, Client& c, Handle name, Handle fresh);
  void offload(uint32_t client, Client& c, CommandKind kind, std::span<const std::byte> payload);
  void fetch(uint32_t client, Client& c, const CommandRecord& record, std::span<const std::byte> payload);
  void start_fetch(uint32_t slot, Object& object);
  void refuse_fetch(uint32_t slot, std::string_view why);
  void end_fetch(uint32_t slot, bool is_done);
  void fetch_now(const Fetch& fetch, Value value);
  void task(uint32_t client, Client& c, const CommandRecord& record, std::span<const std::byte> payload);
  void start_task(Task task, Value value, std::span<const std::byte> payload);

  void prepare_transfer(uint32_t slot, uint32_t node);
  bool is_local(const Plan& plan, const NodeRecord& node) const;
  void start_transfer(NodeRef ref);
  bool announce_receive(uint64_t key);
  void refuse_receives(uint64_t order, const std::string& why);
  void try_send(uint64_t key);
  void end_send(uint64_t key, uint32_t destination, bool failed, std::string_view text);
  void source_done(uint64_t key, uint32_t host, bool failed, std::string_view text);
  bool has_part(const Exchange& exchange, uint32_t host, bool as_source) const;
  void source_settled(uint64_t key, uint32_t error);
  void miss_peer(uint64_t key, uint32_t host, bool was_told);
  void miss_lost_peers(uint32_t slot);
  void finish_exchange(uint64_t key);
  void finish_exchange_receive(uint64_t key);
  void forget_receives(uint64_t key, uint32_t host);
  std::string missing(uint32_t client, std::string_view otherwise) const;
  static uint64_t exchange_key(uint64_t order, uint32_t node) { return order << 20 | (node & 0xfffffu); }

  uint32_t new_error(std::string text);
  std::string_view error_text(uint32_t error) const;
  Client* client(uint32_t id) { return id < clients_.size() && clients_[id].present ? &clients_[id] : nullptr; }

  const Options options_;
  Backend& backend_;
  HostLink& link_;
  Ledger ledger_;
  bool may_overfill_ = false;
  uint32_t stuck_polls_ = 0;
  ExecutorFaults faults_;
  uint64_t fault_counter_ = 0;
  std::vector<std::byte> held_;  ///< the run that the swap fault holds back
  uint32_t held_polls_ = 0;

  std::vector<std::unique_ptr<PlanEntry>> plans_;
  std::vector<Client> clients_;
  std::vector<std::unique_ptr<Run>> runs_;
  std::vector<uint32_t> free_runs_;
  std::unordered_map<uint64_t, uint32_t> stepwise_;  ///< by order: slots of runs with nodes that wait for their go
  std::vector<std::deque<NodeRef>> fifos_;           ///< one per local device
  std::deque<NodeRef> gangs_;                        ///< GANG-2: all gangs, where they hold up one another
  std::vector<uint32_t> in_flight_;                  ///< per local device
  /// GANG-3: running gangs per local device: on this device only, and on several devices of this host.
  std::vector<uint32_t> one_device_gangs_, several_device_gangs_;
  std::vector<NodeRef> ready_;
  std::vector<NodeRef> throttled_;
  std::unordered_map<uint64_t, NodeRef> attended_;  ///< launches that the backend attends to, by order and node
  std::vector<ReadyQueue> ready_queues_;
  std::vector<size_t> between_;         ///< scratch of settle_between
  std::vector<PendingValue> settling_;  ///< likewise
  std::unordered_map<uint64_t, Exchange> exchanges_;
  static constexpr size_t kRefusedKept = 256;
  static constexpr uint32_t kMostClientsAhead = 4096;
  std::deque<std::pair<uint64_t, std::string>> refused_;  ///< the last runs that this host refused, by order, and why
  struct Lost {
    std::string text;
    LostPeer state;
  };
  std::unordered_map<uint32_t, Lost> lost_peers_;
  std::unordered_map<uint32_t, uint32_t> under_way_;  ///< by destination: copies
  std::vector<Sent> sent_;                            ///< scratch of poll()
  std::deque<uint64_t> unsourced_, unsent_;           ///< GANG-2: sends that wait for their value, or are not done
  std::deque<uint64_t> stalled_receives_;             ///< in the order of their runs: nobody takes room before them
  std::vector<Fetch> fetches_;
  std::vector<uint32_t> free_fetches_;
  std::unordered_map<uint64_t, Task> tasks_;  ///< by the number that the backend knows
  uint64_t last_task_ = 0;
  std::deque<std::string> errors_;  ///< the newest; error n is errors_[n - first_error_]
  uint32_t first_error_ = 1;
  static constexpr size_t kFailedKept = 256;
  std::deque<std::pair<uint64_t, uint32_t>> failed_;  ///< the last launches that failed, by age, and their errors
  std::vector<Value> inputs_, outputs_;               ///< scratch of launch()
  std::vector<uint64_t> input_ages_;                  ///< the same
  std::vector<Value> taken_;                          ///< scratch of take_over()
  bool draining_ = false;
  std::string predecessor_failure_;  ///< the failure reason of this host's predecessor; empty: it has none
  uint32_t predecessor_client_ = 0;
  uint32_t live_runs_ = 0;
  uint64_t age_ = 0;  ///< launches, puts and arrivals so far: each gives its values an age of their own
  ExecutorStats stats_;
};

}  // namespace pathways
