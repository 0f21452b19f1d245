/// The controller: moves the clients' records from their rings into the sequencer, and the sequencer's grants into the
/// hosts' rings.
///
/// One pass (`step`) takes a bounded batch from every ring, so a client that floods the controller delays another
/// client by one batch at most. At its end the pass publishes and rings once per reader. The pass never waits for a
/// reader (see messages/outbox.h), and never for a value. `start` runs the passes on a native thread that never takes
/// Python's lock (GIL-1). In an embedded cluster the submitting thread calls `step` itself.
///
/// GANG-1: the controller checks it. Each host of a run reports whether the host launched all gangs of the run or none,
/// and all hosts must report the same. Otherwise the controller fails the cluster, because the results can no longer be
/// trusted.
/// COST-3: for each run, the controller sends one record to each host and takes one record from it. A pass looks only
/// at hosts whose bit is set (ReadyBitmap), and flushes only the hosts that it wrote to.
/// MEM-2: the controller admits a run (sequencer/admission.h) before the run gets its place in the order. A run that is
/// not admitted holds back the later records of its own client, but no other client's. Only releases of buffers that no
/// held record names pass it. A run that only live buffers keep out gets turns. In a turn nobody else is admitted to
/// the run's memory spaces; otherwise clients that release some buffers and make others could keep the run out for
/// ever.
/// MEM-3: a run that can never fit fails at once. A run that only live buffers keep out fails after a short grace, in
/// which releases that are on their way can arrive. It waits longer while another client that holds some of these
/// buffers has runs in flight.
/// OWN-1: a client that sends an invalid record is evicted and gets the reason; the other clients notice nothing. Hosts
/// are the runtime's own processes: an invalid record from a host fails the cluster, and the error names the host.
/// TRUST-1: the controller copies a record out of its ring before it reads the record, and accesses a client's block
/// through a ClientView only. The ring that a record came by says which client sent it. A run must name a plan of its
/// own client, and that plan's hosts.
///
/// FLOW-1: the controller bounds the work that a client has under way (messages/credits.h). It reads no further record
/// of a client that is at a bound until the hosts have done earlier work of that client. A client's cancels come on a
/// ring of their own, which the controller always reads.
///
/// ERR-2: the controller takes lost hosts out of the order, and puts them back when they have been started again
/// (controller/recovery.cc). What a lost host had been granted is over: the controller completes it in the host's
/// place, and every pending future with a part on that host fails. Entries that still waited for a lost host wait on,
/// and run on its successor. One kind of run is dropped instead: a run that needs lost hosts and surviving hosts, so
/// that no surviving host waits for a host that is starting. When a client submits such a run meanwhile, the controller
/// does not read that client further until all hosts of the run are there.
/// Options::sequential replaces parallel dispatch by sequential dispatch (controller/stepper.h), to measure against it.
///
/// Threading: `step` by one thread. The registration calls by any thread: they leave mail, which the next step reads.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/status.h"
#include "controller/deadline_heap.h"
#include "controller/handle_table.h"
#include "controller/stepper.h"
#include "memory/arena.h"
#include "messages/credits.h"
#include "messages/outbox.h"
#include "messages/records.h"
#include "messages/shared_segments.h"
#include "sequencer/admission.h"
#include "sequencer/sequencer.h"
#include "sync/bell_set.h"
#include "sync/mailbox.h"

namespace pathways {

struct ControllerStats {
  uint64_t runs = 0;  ///< submitted
  uint64_t granted = 0;
  uint64_t retired = 0;
  uint64_t dropped = 0;  ///< runs that were cancelled, or too late, before they were granted
  uint64_t late = 0;     ///< runs that were not over when their deadline passed
  uint64_t commands = 0;
  uint64_t records_out = 0;
  uint64_t passes = 0;
  uint64_t clients = 0;
  uint64_t waiting = 0;
  std::vector<uint64_t> gangs;  ///< launches per host, of retired runs
  uint64_t held = 0;            ///< records that wait for memory, or behind one that does
  uint64_t unread = 0;          ///< clients that are not read further, because they have too much under way
  uint64_t refused = 0;         ///< runs and puts that failed because there was no memory for them
  std::vector<uint64_t> live_bytes, high_water;  ///< per memory space; see sequencer/admission.h
};

/// The memory that a plan takes; its hosts computed it when they compiled the plan. Immutable once registered.
struct PlanMemory {
  struct Result {
    GroupId group = 0;  ///< hosts that hold the result
    SpaceSetId set = kNoSpaceSet;
    uint64_t bytes = 0;     ///< on each memory space
    int32_t argument = -1;  ///< the position of the argument whose buffer the result is; -1: of none
    int32_t same_as = -1;   ///< the position of an earlier result that is the same value; -1: none
  };
  uint32_t client = 0;
  std::string name;
  std::string biggest;  ///< its biggest buffers, as text for errors
  std::vector<SpaceNeed> needs;
  std::vector<Result> results;
  std::vector<uint32_t> donated;  ///< positions of donated arguments
};

class Controller {
 public:
  struct Options {
    uint32_t window = 256;              ///< most runs that are granted to one host and not done there
    std::vector<uint32_t> islands;      ///< per host, its island; for statistics
    std::vector<uint64_t> budgets{};    ///< bytes per memory space: devices by number, then hosts' memory for transfers
    std::vector<std::string> spaces{};  ///< their names, for errors
    std::chrono::nanoseconds grace = std::chrono::milliseconds(250);  ///< see MEM-3
    bool sequential = false;                                          ///< dispatch node by node, to measure against it
    /// Every plan is registered with `register_plan` before its first run; a client that runs any other plan is
    /// evicted. False where a test takes the part of client and hosts.
    bool knows_plans = false;
  };
  static constexpr GroupId kAllHosts = 0;

  /// `status`: the block that clients read; nullptr: the one in `block`.
  Controller(Options options, ControllerBlock* block, std::vector<HostView> hosts, StatusBlock* status = nullptr);
  ~Controller();

  /// Throws Error(kInvalid) for no hosts, an unknown or a repeated one, or a group number of 2^24 or more.
  void add_group(GroupId group, std::vector<uint32_t> hosts);
  /// Registers memory spaces that hold buffers together, and returns the set's number. Throws Error(kInvalid) for an
  /// unknown or a repeated space.
  SpaceSetId add_space_set(std::vector<SpaceId> spaces);
  void set_budget(SpaceId space, uint64_t bytes);
  /// Registers the memory that a plan takes. Call it before the plan's first run is submitted.
  void set_plan_memory(uint32_t plan, PlanMemory memory);
  /// Registers the nodes of a plan, in the program's order. Call it before the plan's first run. It does nothing unless
  /// dispatch is sequential.
  void add_plan(uint32_t plan, std::vector<ProgramNode> nodes);
  /// TRUST-1: registers the plan's client, and the hosts that its runs go to. Call it before the first run is
  /// submitted.
  void register_plan(uint32_t plan, uint32_t client, GroupId group);
  /// A client's number is never used again. `bell`: the doorbell that this client rings, valid until remove_client()
  /// has returned; nullptr: the controller's own doorbell. Throws Error(kInvalid) when the client's rings are invalid.
  void add_client(uint32_t client, const ClientView& view, DoorbellWord* bell = nullptr);
  /// OWN-1: drops what the client has waiting, and notifies the hosts, in the order, that the client is gone. It does
  /// so also for a client that was never added, because a host may have attached that client. When this returns, the
  /// controller no longer touches the client's memory; each host may use it until the notice reaches that host
  /// (Host::attached_clients).
  void remove_client(uint32_t client);
  /// ERR-2: the processes of these hosts have ended. Futures with a part there fail with `text`. Returns the number of
  /// this loss; the surviving hosts are notified in the order (host/losses.cc). Throws Error(kInvalid) for a host that
  /// is lost already.
  uint64_t lose_hosts(std::vector<uint32_t> hosts, std::string text);
  /// The successor of a lost host takes part from now on, with a block of its own. When this returns, nobody uses the
  /// old block. Throws Error(kInvalid) for a host that is not lost.
  void restore_host(uint32_t host, const HostView& block);
  /// Plans that no entry of the order names any more; each is returned once. For such a plan, all hosts have been
  /// granted the command that drops it. The successor of a lost host must know all other plans, because entries that
  /// wait for it may name them.
  std::vector<uint32_t> take_forgotten();

  /// Takes no further record of the client, until `resume`; its records wait in its ring. For this call and the next
  /// ones: any thread may call them, and they do nothing when the client is gone.
  void suspend(uint32_t client);
  void resume(uint32_t client);
  /// Whether every admitted run of the client is over on all its hosts. True when the client is gone.
  bool is_quiet(uint32_t client);
  /// MEM-1: the client's buffers have left the devices, and no longer count against the devices' budgets.
  void offload(uint32_t client);
  /// The client's buffers are to come back. When there is no room for them beside other clients' buffers and runs,
  /// nothing changes and the error text is returned; empty: they fit.
  std::string restore(uint32_t client);
  /// Sends a command to all hosts, as if the client had sent it: kOffload or kRestore, which only the controller sends.
  void command_for(uint32_t client, CommandKind kind, std::vector<std::byte> payload);

  /// Runs one pass. Returns the number of records handled; 0 when there was nothing to do.
  uint32_t step();
  void start();
  void stop();
  void fail(std::string_view text) { finish(ClusterStatus::kFailed, text); }
  void close() { finish(ClusterStatus::kClosed, "the cluster was closed"); }
  ControllerStats stats();
  /// True when nothing waits, is granted, or is kept in an outbox. Call it between steps only.
  bool is_idle() const;
  /// The time (monotonic_ns()) at which `step` has work although nobody rings: the next deadline; INT64_MAX: none.
  int64_t next_deadline_ns() const { return deadlines_.empty() ? INT64_MAX : deadlines_.next_ns(); }

 private:
  struct Held {
    std::vector<std::byte> record;
    std::string dropped;  ///< why the run was dropped; empty: it was not. Its hosts get the failure in its place
  };
  struct Client {
    uint32_t id = 0;
    ClientView view;
    DoorbellWord* bell = nullptr;
    ByteRing::Consumer inbox;
    ByteRing::Consumer cancels;
    Outbox outbox;
    uint64_t retired = 0;
    uint64_t newest = 0;                     ///< the highest tag of a run that was taken from its ring
    std::unordered_set<uint64_t> cancelled;  ///< tags of runs whose cancel came before the run itself
    std::vector<Load> on_host;               ///< by host: commands sent and not done there; empty: none anywhere
    uint32_t full_hosts = 0;                 ///< hosts that have as many of its commands as allowed
    Load waiting;                            ///< records in the order that no host was granted
    Load holding;                            ///< records in `held`
    bool is_unread = false;                  ///< the controller reads it no further: it has too much under way
    bool is_paced = false;                   ///< for the same reason, its held records are not ordered
    std::vector<Handle> late;                ///< results of granted runs whose deadline has passed; see fail_late()
    bool has_unsent = false;
    bool is_suspended = false;
    std::string fault;     ///< why it is to be evicted; empty: it is not
    bool is_mute = false;  ///< its ring from the controller is invalid: nothing more is sent
    HandleTable handles;
    std::map<uint64_t, std::vector<std::byte>>
        definitions;  ///< backend commands by number; a successor gets them again
    uint64_t defined_bytes = 0;
    uint64_t in_flight = 0;                               ///< runs admitted and not over
    std::deque<Held> held;                                ///< records that wait for memory, or behind one that does
    std::unordered_map<uint64_t, uint32_t> held_handles;  ///< how many held records name each handle
    std::unordered_map<uint64_t, GroupId> held_releases;  ///< released handles that held records still name, and groups
    std::vector<std::pair<GroupId, uint64_t>> let_go;     ///< groups and released handles that no held record names
    int64_t held_since = 0;    ///< when only live buffers began to keep the first record out; 0: they do not
    int64_t turn_since = 0;    ///< when its turn began, or the time between two turns
    uint32_t turns = 0;        ///< turns it has had for the first held record
    bool is_its_turn = false;  ///< see may_wait_for_blocks()
    std::array<uint64_t, Arena::kBorrowers> lease_stamp{};  ///< by host: stamp of the last lease sent there
  };
  /// What the admission ledger needs to know of an admitted run.
  struct Admitted {
    std::shared_ptr<const PlanMemory> memory;
    uint64_t number = 0;
  };
  struct Host {
    ByteRing::Consumer inbox;
    Outbox outbox;
    uint64_t gangs = 0;
    bool is_dirty = false;  ///< it is listed in dirty_
    bool is_lost = false;
  };

  uint32_t drain_clients();
  uint32_t drain_client(Client& client);
  uint32_t drain_cancels(Client& client);
  static bool is_behind(const Client& client);
  static bool is_full(const Client& client);
  uint32_t read_on() const;
  void give(Client* client, uint32_t host, uint64_t bytes);
  void commands_done(uint32_t host, const CommandsDoneRecord& record);
  uint32_t drain_hosts();
  uint32_t drain_host(uint32_t index);
  bool take(Client& client, std::span<const std::byte> record);
  std::string unsound(std::span<const std::byte> record) const;
  std::string foreign(const Client& client, std::span<const std::byte> record, bool* may_be_in_the_mail) const;
  void take(uint32_t host, std::span<const std::byte> record);
  Client* client_of(uint32_t id) const { return id < by_id_.size() ? by_id_[id] : nullptr; }
  /// The memory that a plan takes; nullptr: the plan is not registered.
  const PlanMemory* memory_of(uint32_t plan) const {
    return plan < plan_memory_.size() ? plan_memory_[plan].get() : nullptr;
  }
  bool admit(Client& client, std::span<const std::byte> record, Verdict* verdict, SpaceId* worst);
  void order(Client& client, std::span<const std::byte> record);
  void hold(Client& client, std::span<const std::byte> record);
  void count_held(Client& client, std::span<const std::byte> record, bool is_added);
  void release_ahead(Client& client, std::span<const std::byte> record);
  void order_releases(Client& client);
  void retry_held();
  bool retry_held(Client& client);
  void refuse(Client& client, std::span<const std::byte> record, Verdict verdict, SpaceId worst);
  void fail_results(Client& client, std::span<const std::byte> record, std::string_view text, uint16_t detail = 0);
  void tell_results(Client& client, std::span<const std::byte> record, std::string_view text, uint16_t detail);
  void fail_on_hosts(Client& client, std::span<const std::byte> record, std::string_view text);
  std::vector<std::vector<std::byte>> failure_commands(uint32_t client, std::span<const std::byte> record,
                                                       const PlanMemory* memory, std::string_view text) const;
  std::string refusal(const Client& client, const std::string& what, const std::string& biggest, uint64_t wanted,
                      Verdict verdict, SpaceId worst) const;
  bool is_held_by_busy(const Client& client, SpaceId space) const;
  void claim_spaces(std::span<const std::byte> record);
  bool may_wait_for_blocks(Client& client, std::span<const std::byte> record, SpaceId worst);
  static std::vector<std::byte> failure_command(uint32_t client, Handle handle, GroupId group, std::string_view text);
  void release_bytes(HandleTable::Entry& entry);
  HandleTable::Entry* announce(Client& client, Handle handle, GroupId group);
  void command_handles(Client& client, std::span<const std::byte> record);
  void rename(Client& client, Handle name, Handle fresh);
  void evict(Client& client);
  /// Sends one record to a client. A client whose ring is invalid will be evicted.
  template <typename Fill>
  void say(Client& client, uint32_t bytes, Fill&& fill) {
    if (client.is_mute) return;
    try {
      client.outbox.send(bytes, fill);
    } catch (const Error& error) {
      silence(client, error.what());
    }
  }
  void silence(Client& client, std::string_view why);
  void fault(Client& client, std::string why);
  uint32_t evict_faulty();
  void tell(Client& client, Handle handle, std::string_view text, uint16_t detail = 0);
  static int64_t deadline_of(std::span<const std::byte> record);
  void refuse_late(Client& client, std::span<const std::byte> record);
  void refuse_cancelled(Client& client, std::span<const std::byte> record);
  void watch_deadline(Client& client, std::span<const std::byte> record, EntryId id = Deadlines::kHeld);
  bool is_over(const Deadlines::Item& item);
  uint32_t pass_deadlines();
  void pass_deadline(const Deadlines::Item& item);
  static void fail_late(Client& client);
  std::string too_late(std::span<const std::byte> record) const;
  EntryId submit_record(Client& client, std::span<const std::byte> record, GroupId group, EntryKind kind, uint64_t tag);
  void forward_granted(EntryId id, std::span<const std::byte> record);
  void settle_granted();
  void forward(const Entry& entry, EntryId id, std::span<const std::byte> record, uint16_t flags = 0);
  void forward_in_turn(const Entry& entry, EntryId id, std::span<const std::byte> record);
  void step_on();
  bool enqueued(uint32_t host, const EnqueuedRecord& record);
  Outbox& outbox_of(uint32_t host);
  void keep_command(Client& client, std::span<const std::byte> record, std::span<const uint32_t> hosts);
  void retire(EntryId id, uint32_t client);
  void cancel(Client& client, uint64_t tag);
  bool cancel_held(Client& client, uint64_t tag, std::string_view text, uint16_t detail = 0);
  void run_done(uint32_t host, const RunDoneRecord& record);
  void drop_client(uint32_t client);
  void forget_client(Client& client);
  void lose(const std::vector<uint32_t>& hosts, std::string_view text);
  void restore(uint32_t host, const HostView& block);
  void hear_last_words(uint32_t host);
  void reclaim(uint32_t h);
  void tell_survivors(const std::vector<uint32_t>& hosts, std::string_view text);
  void fail_futures(const std::vector<uint32_t>& hosts, std::string_view text);
  void drop(EntryId id, std::string_view text, uint16_t detail = 0);
  void forward_instead(EntryId id);
  void release_donated(EntryId id);
  std::vector<EntryId> stranded() const;
  bool is_stranded(GroupId group) const;
  void flush();
  void finish(ClusterStatus status, std::string_view text);
  void loop();
  std::chrono::nanoseconds overflow_look() const;
  /// Runs `mail` on the stepping thread, and returns when it has run.
  void run_mail(std::function<void()> mail);
  ControllerStats snapshot() const;

  const Options options_;
  ControllerBlock* block_;
  StatusBlock* status_;
  BellSet bells_;  ///< every doorbell that is rung for the controller
  Sequencer sequencer_;
  std::unique_ptr<Stepper> stepper_;  ///< sequential dispatch; null: parallel
  std::vector<Host> hosts_;
  std::vector<std::unique_ptr<Client>> clients_;        ///< owner: the stepping thread
  std::vector<Client*> by_id_;                          ///< nullptr: the client is gone
  std::vector<std::vector<std::byte>> kept_;            ///< by entry: its record while it waits for its grant
  std::vector<uint32_t> dirty_;                         ///< hosts whose outbox has something to flush
  std::vector<uint32_t> ready_bitmap_;                  ///< hosts whose rings are to be read
  uint32_t max_record_ = 0;                             ///< the longest record that fits every host's ring
  std::vector<std::byte> client_record_, host_record_;  ///< scratch: the record being read, copied (TRUST-1)
  bool has_faults_ = false;                             ///< some client is to be evicted
  struct PlanOwner {
    uint32_t client = UINT32_MAX;  ///< UINT32_MAX: the plan is not registered
    GroupId group = 0;
  };
  std::vector<PlanOwner> plan_owners_;  ///< by plan
  Admission admission_;
  std::vector<std::shared_ptr<const PlanMemory>> plan_memory_;  ///< by plan
  std::vector<BlockId> blocks_;                                 ///< scratch of order()
  std::vector<Admitted> admitted_;                              ///< by entry
  std::vector<Client*> holding_;                                ///< clients with held records, the oldest first
  const Client* first_held_ = nullptr;  ///< the first of them that only live buffers keep out, in this pass
  std::vector<uint32_t> forgotten_;     ///< see take_forgotten()
  uint64_t admission_version_ = 0;      ///< the ledger's version when the held records were last tried
  uint32_t unread_ = 0;                 ///< clients whose `is_unread` is true
  bool has_undelivered_ = false;        ///< some record waits for room in a client's ring
  uint64_t losses_ = 0;
  uint32_t lost_ = 0;                                                         ///< hosts that are lost now
  std::unordered_map<EntryId, std::vector<std::vector<std::byte>>> instead_;  ///< what its hosts get for a dropped run
  Deadlines deadlines_;
  ControllerStats stats_;

  Mailbox mailbox_;
  std::mutex mutex_;  ///< guards is_running_ and client_ids_
  std::unordered_set<uint32_t> client_ids_;
  bool is_running_ = false;  ///< the thread reads mail
  std::atomic<bool> stopping_{false};
  std::mutex finish_mutex_;
  std::thread thread_;
};

}  // namespace pathways
