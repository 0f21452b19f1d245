/// The controller: drains the clients' rings into the sequencer, and the sequencer's grants into the hosts' rings.
///
/// One pass (`step`) takes a bounded batch from every ring, so that one client's flood delays another by a batch and no
/// more, and publishes and rings once per reader at its end. It never waits for a reader (see messages/outbox.h) nor
/// for a value. `start` runs the passes on a native thread that never takes Python's lock (GIL-1); embedded, the
/// submitting thread calls `step` itself.
///
/// GANG-1 is checked here: a host says of each run whether it launched all of its gangs or none, and all hosts of the
/// run must say the same; otherwise the cluster is failed, for its results can no longer be trusted.
/// COST-3: per run and host one record out and one in; a pass looks only at hosts whose bit is set (ReadyBitmap) and
/// flushes only those it wrote to.
/// MEM-2: a run is admitted (sequencer/admission.h) before it gets its place in the order. One that is not keeps its
/// client's later records behind it, but no other client's; only releases of buffers that none of the held records
/// names go ahead. One that only live buffers keep out gets turns, in which nobody else enters its places, so that
/// others who let go of some and take some do not keep it out for ever. MEM-3: one that can never fit fails at once;
/// one that only live buffers keep out fails after a short grace, in which releases under way arrive, unless another
/// client that holds some of them has runs in flight. OWN-1: a client whose records make no sense is put out, with the
/// reason; the others see nothing. Hosts are ours: a senseless record of theirs fails the cluster, naming the host.
/// TRUST-1: a record is copied out of its ring before it is looked at, and a client's block is met through a
/// ClientView. Whose a record is follows from the ring it came by. A run must name a plan of its own client, and that
/// plan's hosts.
///
/// FLOW-1: what a client has under way is bounded here (messages/credits.h): past its bounds it is not read further
/// until earlier work of it is done on the hosts. Its cancels come on a ring of their own, which is read in any case.
///
/// ERR-2: hosts that are lost are taken out of the order, and put back when they have been started anew
/// (controller/recovery.cc). Whatever they had been granted is over: it is completed in their stead, and every pending
/// future with a part there fails. What was still waiting for them waits on, and runs on their successors; only a run
/// that other hosts are waiting for as well is dropped, so that nobody waits for a host that starts, and a client that
/// submits such a run meanwhile is not read further until all its hosts are there.
/// Options::sequential replaces parallel dispatch by sequential dispatch, to be measured against
/// (controller/stepper.h).
///
/// Threading: `step` by one thread; the registration calls by any thread, they leave mail that the next step reads.
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
#include "controller/deadlines.h"
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
  uint64_t dropped = 0;  ///< cancelled, or too late, before they were granted
  uint64_t late = 0;     ///< not over when their deadline passed
  uint64_t commands = 0;
  uint64_t records_out = 0;
  uint64_t passes = 0;
  uint64_t clients = 0;
  uint64_t waiting = 0;
  std::vector<uint64_t> gangs;                   ///< per host, of retired runs
  uint64_t held = 0;                             ///< records held back for want of memory
  uint64_t unread = 0;                           ///< clients that are not read further: they have too much under way
  uint64_t refused = 0;                          ///< runs and puts that failed for want of memory
  std::vector<uint64_t> live_bytes, high_water;  ///< per memory space, as the order sees them
};

/// What a plan takes, as its hosts worked it out when they compiled it. Immutable once registered.
struct PlanMemory {
  struct Result {
    GroupId group = 0;  ///< hosts that hold it
    SpaceSetId set = kNoSpaceSet;
    uint64_t bytes = 0;     ///< on each memory space
    int32_t argument = -1;  ///< the argument whose buffer it is, if it is one
    int32_t same_as = -1;   ///< the earlier result that is the same value
  };
  uint32_t client = 0;
  std::string name;
  std::string biggest;  ///< its biggest buffers, in words
  std::vector<SpaceNeed> needs;
  std::vector<Result> results;
  std::vector<uint32_t> donated;  ///< positions of arguments
};

class Controller {
 public:
  struct Options {
    uint32_t window = 256;              ///< runs granted to a host and not done there
    std::vector<uint32_t> islands;      ///< per host, its island; for statistics
    std::vector<uint64_t> budgets{};    ///< bytes per memory space: devices by number, then hosts' memory for transfers
    std::vector<std::string> spaces{};  ///< their names, for errors
    std::chrono::nanoseconds grace = std::chrono::milliseconds(250);  ///< of MEM-3
    bool sequential = false;                                          ///< dispatch node by node, for measurement
    /// Every plan is told of by `register_plan` before its first run; a run of any other puts its client out. Off where
    /// a test plays client and hosts.
    bool knows_plans = false;
  };
  static constexpr GroupId kAllHosts = 0;

  /// `status`: what clients read; nullptr: that of `block`.
  Controller(Options options, ControllerBlock* block, std::vector<HostView> hosts, StatusBlock* status = nullptr);
  ~Controller();

  /// Throws Error(kInvalid) for no hosts, an unknown or a repeated one, or a group number above 2^24.
  void add_group(GroupId group, std::vector<uint32_t> hosts);
  /// The number of a space set that hold buffers together. Throws Error(kInvalid) for unknown or repeated places.
  SpaceSetId add_space_set(std::vector<SpaceId> spaces);
  void set_budget(SpaceId space, uint64_t bytes);
  /// Registers what a plan takes, before its first run is submitted.
  void set_plan_memory(uint32_t plan, PlanMemory memory);
  /// Sequential dispatch only, else it does nothing: the nodes of a plan in the program's order. Before its first run.
  void add_plan(uint32_t plan, std::vector<ProgramNode> nodes);
  /// TRUST-1: whose plan it is, and which hosts its runs go to. Before its first run is submitted.
  void register_plan(uint32_t plan, uint32_t client, GroupId group);
  /// Numbers of clients are never used again. `bell`: where this one rings, until remove_client() has returned;
  /// nullptr: at the controller's own doorbell. Throws Error(kInvalid) when its rings make no sense.
  void add_client(uint32_t client, const ClientView& view, DoorbellWord* bell = nullptr);
  /// OWN-1: drops what the client has waiting and tells the hosts, in the order, that it is gone: also of a client that
  /// never was added, for a host may have been told to attach it. Returns when the controller no longer touches the
  /// client's memory; each host goes on until the order tells it (Host::attached_clients).
  void remove_client(uint32_t client);
  /// ERR-2: these hosts' processes have ended. `text` is what their futures fail with. Returns the number of this loss;
  /// the surviving hosts hear of it in the order (Host::losses). Throws Error(kInvalid) for a host that is lost
  /// already.
  uint64_t lose_hosts(std::vector<uint32_t> hosts, std::string text);
  /// A lost host's successor, with a block of its own, takes part from now on. When this returns nobody uses the old
  /// block. Throws Error(kInvalid) for a host that is not lost.
  void restore_host(uint32_t host, const HostView& block);
  /// Plans that no entry of the order names any more, each told once: all their hosts were granted the command that
  /// says so. A host's successor must know all others, for what waits for it may name them.
  std::vector<uint32_t> take_forgotten();

  /// Takes no further record of the client's, until `resume`: what it sent waits in its ring. By any thread, as the
  /// next ones; nothing happens when the client is gone.
  void suspend(uint32_t client);
  void resume(uint32_t client);
  /// Every run of the client that was admitted is over on all its hosts. True when the client is gone.
  bool is_quiet(uint32_t client);
  /// MEM-1: the client's buffers left the devices, and take nothing of their budgets.
  void offload(uint32_t client);
  /// They are to come back. When there is no room beside what others hold, nothing happens but that this says so.
  std::string restore(uint32_t client);
  /// A command to all hosts, as if the client had sent it: kOffload and kRestore, which are the controller's alone.
  void command_for(uint32_t client, CommandKind kind, std::vector<std::byte> payload);

  /// One pass. The number of records handled; 0 when there was nothing to do.
  uint32_t step();
  void start();
  void stop();
  void fail(std::string_view text) { finish(ClusterStatus::kFailed, text); }
  void close() { finish(ClusterStatus::kClosed, "the cluster was closed"); }
  ControllerStats stats();
  /// True when nothing waits, is granted, or is kept back; only between steps.
  bool is_idle() const;
  /// When `step` has something to do although nobody rings: the next deadline, monotonic_ns(); INT64_MAX: none.
  int64_t next_deadline_ns() const { return deadlines_.empty() ? INT64_MAX : deadlines_.next_ns(); }

 private:
  struct Held {
    std::vector<std::byte> record;
    std::string dropped;  ///< a run that was dropped: why; its hosts hear it in its place
  };
  struct Client {
    uint32_t id = 0;
    ClientView view;
    DoorbellWord* bell = nullptr;
    ByteRing::Consumer inbox;
    ByteRing::Consumer cancels;
    Outbox outbox;
    uint64_t retired = 0;
    uint64_t newest = 0;                     ///< tag of the newest run that was taken
    std::unordered_set<uint64_t> cancelled;  ///< tags of runs that were cancelled before they were taken
    std::vector<Load> on_host;               ///< by host: commands given and not done there; empty: none anywhere
    uint32_t full_hosts = 0;                 ///< hosts that have as many as they may
    Load waiting;                            ///< records in the order that no host was granted
    Load holding;                            ///< records in `held`
    bool is_unread = false;                  ///< it was not read further for what it has under way
    bool is_paced = false;                   ///< nor was what it has held ordered
    std::vector<Handle> late;                ///< results of granted runs that it is being told of
    bool has_unsent = false;
    bool is_suspended = false;
    std::string fault;     ///< why it is to be put out
    bool is_mute = false;  ///< its ring from here makes no sense: nothing more is sent
    HandleTable handles;
    std::map<uint64_t, std::vector<std::byte>>
        definitions;  ///< backend commands by number: a successor hears them again
    uint64_t defined_bytes = 0;
    uint64_t in_flight = 0;                                 ///< runs admitted and not over
    std::deque<Held> held;                                  ///< records that wait for memory, or behind one that does
    std::unordered_map<uint64_t, uint32_t> held_handles;    ///< handles that they name, and how often
    std::unordered_map<uint64_t, GroupId> held_releases;    ///< of those, which are released behind the last that does
    std::vector<std::pair<GroupId, uint64_t>> let_go;       ///< of those again, which no held record names any more
    int64_t held_since = 0;                                 ///< when only live buffers began to keep the first out
    int64_t turn_since = 0;                                 ///< when it got its turn, or the others theirs
    uint32_t turns = 0;                                     ///< that were in vain
    bool is_its_turn = false;                               ///< see may_wait_for_blocks()
    std::array<uint64_t, Arena::kBorrowers> lease_stamp{};  ///< by host: the last stamp of a lease that it has heard of
  };
  /// An admitted run's part in the ledger.
  struct Admitted {
    std::shared_ptr<const PlanMemory> memory;
    uint64_t number = 0;
  };
  struct Host {
    ByteRing::Consumer inbox;
    Outbox outbox;
    uint64_t gangs = 0;
    bool is_dirty = false;  ///< in dirty_
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
  /// What is known of a plan; nullptr: nothing.
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
  /// Sends a client one record; one whose ring makes no sense is to be put out.
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
  BellSet bells_;  ///< where who has something for the controller rings
  Sequencer sequencer_;
  std::unique_ptr<Stepper> stepper_;  ///< sequential dispatch; null: parallel
  std::vector<Host> hosts_;
  std::vector<std::unique_ptr<Client>> clients_;        ///< owner: the stepping thread
  std::vector<Client*> by_id_;                          ///< nullptr: gone
  std::vector<std::vector<std::byte>> kept_;            ///< by entry: the record of one that waits for its grant
  std::vector<uint32_t> dirty_;                         ///< hosts that were written to
  std::vector<uint32_t> ready_bitmap_;                  ///< hosts to look at
  uint32_t max_record_ = 0;                             ///< that fits every host's ring
  std::vector<std::byte> client_record_, host_record_;  ///< scratch: the record that is looked at, copied (TRUST-1)
  bool has_faults_ = false;                             ///< some client is to be put out
  struct PlanOwner {
    uint32_t client = UINT32_MAX;  ///< UINT32_MAX: nothing is known of the plan
    GroupId group = 0;
  };
  std::vector<PlanOwner> plan_owners_;  ///< by plan
  Admission admission_;
  std::vector<std::shared_ptr<const PlanMemory>> plan_memory_;  ///< by plan
  std::vector<BlockId> blocks_;                                 ///< scratch of order()
  std::vector<Admitted> admitted_;                              ///< by entry
  std::vector<Client*> holding_;                                ///< clients with held records, the oldest first
  const Client* first_held_ = nullptr;                          ///< of them, whom only live buffers keep out; of a pass
  std::vector<uint32_t> forgotten_;                             ///< plans; see take_forgotten()
  uint64_t admission_version_ = 0;                              ///< that the held records were last tried at
  uint32_t unread_ = 0;                                         ///< clients whose `is_unread` is true
  bool has_undelivered_ = false;                                ///< something waits for room in a client's ring
  uint64_t losses_ = 0;
  uint32_t lost_ = 0;                                                         ///< hosts that are lost now
  std::unordered_map<EntryId, std::vector<std::vector<std::byte>>> instead_;  ///< what hosts hear in a run's stead
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
