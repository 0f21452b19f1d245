/// A client's end: it allocates futures, sends one record per call, and takes what the controller sends back.
///
/// COST-1: a call costs the same for any number of shards and hosts: one future per logical result, one record.
/// ASY-1: nothing here waits for a value. `submit` returns kFull when credits, futures or ring space are used up. The
/// caller then waits with `wait_room` (in an embedded cluster it runs ready work instead), and tries again.
/// FUT-3: a handle goes back to the table only after the command that releases it, or the run that donates it, is in
/// the ring. So no host can see a new use of an index before the end of the old use. A donated handle needs no command:
/// the ledger and the hosts release it with the run, and in the run's place when the run is refused or dropped (MEM-7).
///
/// OWN-1: the controller evicts a client whose records it cannot read: everything that the client owns is freed. From
/// then on `cluster_status` returns kFailed, and `cluster_failure` returns the reason. Other clients notice nothing.
///
/// DEAD-1: the controller enforces deadlines, but it may not have read a run yet (FLOW-1, or the client is suspended).
/// So the client checks its own deadlines too, whenever it polls its inbox.
///
/// END-1: a read of an array waits for two futures: the one that the hosts complete when they have written the bytes,
/// and the array itself, its source. A host may not know yet that the array has failed here: by a cancel, by a
/// deadline, or because the notice of a lost host came first. So a read ends when either of them ends.
///   END-1a  Before a thread sleeps, both futures have their waited bit, or are not pending. The thread drew its ticket
///           before. So whoever ends one of them later rings, and this ring ends the sleep, in each order of the two.
///   END-1b  A failed source decides, whatever came of the bytes: so all readers of an array get one outcome.
///   END-1c  A source that was released says nothing any more (FUT-3): then the bytes alone decide.
///
/// Threading: `submit`, `release`, `command`, `flush`, `cancel`, `poll_inbox` and the error texts by one thread at a
/// time (Python's lock ensures it). `wait*`, `in_flight` and `cluster_status` by any thread; they call no callbacks.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "client/failures.h"
#include "memory/fork_holds.h"
#include "messages/records.h"
#include "messages/shared_segments.h"

namespace pathways {

/// The error text of a run whose deadline has passed; shared by all runs of one program with one deadline.
using ErrorText = std::shared_ptr<const std::string>;
inline ErrorText make_error_text(std::string text) { return std::make_shared<const std::string>(std::move(text)); }

/// What `submit` needs to know of a program.
struct ProgramRef {
  uint32_t plan = 0;
  uint32_t group = 0;
  std::vector<uint32_t> result_parts;    ///< per result: hosts that hold a part of it
  std::vector<uint64_t> result_bytes{};  ///< per result: its size; only used for results that are wanted
};

/// A block of the client's memory that a command leases to the hosts that it goes to: one reference for each host.
struct Lease {
  uint64_t offset = 0;
  uint64_t borrowers = 0;  ///< hosts below Arena::kBorrowers, one bit each: their leases come back even if they die
  uint32_t others = 0;     ///< the number of other hosts
  uint64_t bytes = 0;      ///< of the block, without what it says of its parts
  uint32_t parts = 0;      ///< see CommandRecord
  uint64_t lie = 0;        ///< added to the offset that the command says; for tests of TRUST-1
};

class Client {
 public:
  struct Options {
    uint32_t id = 0;
    uint32_t window = 1024;                      ///< most runs in flight
    uint64_t release_bytes = uint64_t{1} << 20;  ///< bytes of buffers whose releases may be held back
    Clock clock = monotonic_ns;
  };

  /// `status`: the block with the cluster's status; `bell`: the doorbell that this client rings for the controller.
  Client(Options options, ClientBlock* block, const StatusBlock* status, DoorbellWord* bell);
  /// For a client in the controller's own process.
  Client(Options options, ClientBlock* block, ControllerBlock* controller)
      : Client(options, block, &controller->status, &controller->doorbell) {}

  /// Submits one run, and writes the handles of its results. `wanted`: empty, or one bit per result: the value of the
  /// result is to come with its completion. On return only the bits of values that will come are still set, and `read`
  /// has these values. `deadline_ns` (by the clock; 0: none): if the run is not over by then, its results fail with
  /// `too_late` (DEAD-1). kFull: nothing happened, try again later. kClosed: the cluster is gone. kInvalid: the record
  /// can never fit the ring.
  Status submit(const ProgramRef& program, std::span<const uint64_t> arguments, uint64_t* results,
                std::span<uint64_t> wanted = {}, int64_t deadline_ns = 0, const ErrorText* too_late = nullptr);
  uint64_t last_tag() const { return submitted(); }
  uint32_t id() const { return options_.id; }
  /// Sets how many runs may be in flight from now on, at least 1. Any thread.
  void set_window(uint32_t window) { window_.store(window, std::memory_order_relaxed); }
  uint32_t window() const { return window_.load(std::memory_order_relaxed); }
  /// Drops the run if no host has been granted it, and fails its results in any case. A cancel overtakes records that
  /// the controller has not read yet (messages/credits.h).
  Status cancel(uint64_t tag, std::span<const uint64_t> results, const std::string& text);

  /// Allocates a future of this client with `parts` completions to come, for puts and fetches. kFull when none is free.
  Status allocate(uint32_t parts, Handle* out);
  /// Sends a command. `space_set`, `space_bytes`: for a put, the memory that its buffer takes (see CommandRecord).
  /// `lease`: the memory that the command leases to its hosts.
  Status command(CommandKind kind, uint32_t group, Handle handle, Handle token, std::span<const std::byte> payload,
                 uint32_t space_set = kNoSpaceSet, uint64_t space_bytes = 0, const Lease& lease = {});
  /// The client will not name this handle again. Releases are sent in batches; a batch with many `bytes` (sizes of the
  /// buffers) is sent earlier.
  void release(Handle handle, uint32_t group, uint64_t bytes);
  /// A run that was submitted donates this handle: nothing is sent.
  void donated(Handle handle);
  /// Returns a token, or a handle that no host knows, to the table.
  void forget(Handle handle);
  /// Sends the releases that are held back.
  void flush();

  /// Takes what the controller has sent, such as failures of futures, and fails futures whose deadline has passed.
  void poll_inbox();
  /// A block of the client's arena; what another machine keeps for the client counts as if it were there. kNoMemory:
  /// there is no room now.
  Status allocate_block(size_t bytes, uint64_t* offset);
  /// Bytes of blocks of this client that another machine keeps.
  uint64_t kept_elsewhere() const { return block_->kept_elsewhere.load(std::memory_order_relaxed); }
  FutureState poll(Handle handle) const { return table_->poll(handle); }
  /// Waits until the future is no longer pending, a record from the controller has come, a deadline has passed, the
  /// cluster has failed, or the time is over. Does not call poll_inbox. `source`: what the future reads, if it reads
  /// something; its failure ends the wait too (END-1).
  FutureState wait(Handle handle, std::chrono::nanoseconds timeout, SpinPolicy spin, Handle source = {});
  /// Waits until a quarter of the window is free again, or the time is over.
  void wait_room(std::chrono::nanoseconds timeout, SpinPolicy spin);

  ClusterStatus cluster_status() const {
    // SYNC client/evict: pairs with poll_inbox(); the text is written.
    return evicted_.load(std::memory_order_acquire) != 0 ? ClusterStatus::kFailed : status_->cluster_status();
  }
  std::string cluster_failure() const {
    return evicted_.load(std::memory_order_acquire) != 0 ? evicted_text_ : status_->failure();
  }
  /// READ-1: the value, of `bytes` bytes, of a wanted result that is ready. It is valid until the result's handle is
  /// released.
  const std::byte* read(Handle handle, size_t bytes) const { return read_back_->slot(handle, bytes); }
  bool has_read_back() const { return read_back_ != nullptr; }
  /// Why a future failed; empty when the client has no error text for it. The failure counts as read (UNREAD-1).
  std::string error_of(Handle handle) { return failures_.read(handle); }
  /// The same, but it does not count as read before `mark_read`.
  std::string unread_error_of(Handle handle) const { return failures_.text_of(handle); }
  void mark_read(const std::string& text) { failures_.mark_read(text); }
  /// What has failed and was read by nobody, to be told now; see Failures::take_unread.
  std::vector<Failures::Unread> take_unread(bool all) { return failures_.take_unread(options_.clock(), all); }
  uint64_t in_flight() const {
    // SYNC client/retired: pairs with the controller's store. Reading an old value only delays credit.
    return submitted() - block_->retired.load(std::memory_order_acquire);
  }
  /// How many losses of hosts the controller has told (ERR-2). What was ready before may be lost.
  uint64_t losses() const { return losses_; }
  uint64_t submitted() const { return submitted_.load(std::memory_order_relaxed); }
  FutureTable& futures() { return *table_; }
  Arena* arena() { return arena_; }
  /// Returns the blocks that forked children could still read, once those children have ended (FORK-1).
  void settle_forks() noexcept { fork_holds_.settle(); }

 private:
  struct Releases {
    std::vector<uint64_t> handles;
    uint64_t bytes = 0;
  };
  void send_releases(uint32_t group, Releases& releases);
  bool open_wanted(const ProgramRef& program, const uint64_t* results, std::span<uint64_t> wanted);
  uint64_t lease_out(const Lease& lease);
  void take_inbox();
  void take_failure(std::span<const std::byte> record);
  void watch_deadline(Handle handle, int64_t at_ns);
  void pass_deadlines(int64_t now_ns);
  void publish();

  const Options options_;
  Atomic<uint32_t> window_;  ///< most runs in flight; written by any thread
  ClientBlock* block_;
  const StatusBlock* status_;
  DoorbellWord* bell_;
  FutureTable* table_;
  ReadBackArea* read_back_;  ///< nullptr: none
  Arena* arena_;
  ForkHolds fork_holds_;
  ByteRing::Producer outgoing_;
  ByteRing::Producer cancels_;
  ByteRing::Consumer inbox_;
  Atomic<uint64_t> submitted_{0};  ///< written by the submitting thread
  Atomic<uint64_t> taken_{0};      ///< records taken from the inbox, by the polling thread; see ClientBlock::delivered
  std::vector<std::byte> record_;  ///< scratch of poll_inbox()
  Atomic<uint32_t> evicted_{0};    ///< 1: the controller has evicted this client
  std::string evicted_text_;       ///< written before evicted_
  uint64_t last_lease_ = 0;        ///< the last lease stamp; stamps rise in the order of the records
  std::unordered_map<uint32_t, Releases> releases_;  ///< by group; no element is ever removed
  Releases* recent_ = nullptr;                       ///< of the last release
  uint32_t recent_group_ = 0;
  Failures failures_;
  uint64_t losses_ = 0;
  std::unordered_map<uint64_t, ErrorText> too_late_;  ///< by handle, of runs with deadlines
  struct Timed {
    int64_t at_ns;
    uint64_t handle;
  };
  std::vector<Timed> timed_;  ///< the same runs' deadlines, as a heap with the earliest on top; some are over
  size_t sweep_timed_at_ = 64;
  Atomic<int64_t> next_deadline_{INT64_MAX};  ///< the earliest of timed_, for threads that wait
};

}  // namespace pathways
