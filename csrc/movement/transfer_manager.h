/// TransferManager: a host's part in the transfers of its runs: announces receives, sends when the source is ready,
/// counts receives done.
///
/// A destination takes memory when its run is prepared, and tells each source where to write (receive ready). A source
/// writes straight there once its value is ready, so each byte is copied once. Then it tells the destination (receive
/// done); one on another machine sees it by itself, and is only told what failed. A transfer within the host is one
/// call of the backend, and makes no pending transfer.
///
///   GANG-2  before the host launches a gang, it finishes whatever is earlier in the order and other hosts may need
///           (`owes_before`). Otherwise the peers of the gang may wait for that, directly or through other hosts,
///           before they launch their part, and all deadlock. Each wait is for something earlier in the order, so no
///           cycle of waits can form. What must be finished depends on the launch:
///           - A launch on one local device computes in the call, and waits there for the other hosts. The host makes
///             it when it owes other hosts nothing: every receive is announced, and every value is sent. Records that
///             are still in an outbox go out during the launch (HostLink::leave).
///           - A launch on several local devices returns at once. But XLA runs all such launches of a process one after
///             the other, whatever their devices. The host makes it when the source of every earlier send is enqueued.
///             The sends themselves go on beside the launch.
///   ERR-1   a transfer that is not taken (Decisions) ends like one whose value failed: its sources tell its
///           destinations that the value is dead. The destinations announce it as ever, since they cannot know.
///           A host that refuses a run tells those that announce a receive for it why.
///   ERR-2   a transfer that waits until a lost host announces a receive, or reports it done, fails with the failure
///           reason of that host. A host is notified of a loss after every run that it was granted together with the
///           lost host. So each transfer with the lost host is prepared, and what the lost host has not announced or
///           written by now, it never will. The receives that it announced are forgotten, because they name memory that
///           its successor uses for other things. The successor is told nothing of those runs.
///
/// Threading: the executor's thread only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "movement/early_sends.h"
#include "movement/exchange_manager.h"
#include "movement/peer_book.h"
#include "movement/receive_queue.h"
#include "runs/dataflow.h"
#include "runs/executor_part.h"
#include "runs/launch_memory.h"

namespace pathways {

/// What has come before its receive had memory (FAR-3).
struct EarlyArrival {
  uint32_t source;
  EarlyChunk chunk;
};

/// This host's part in one cross-host transfer of one run, as a source, as a destination, or as both.
struct PendingTransfer {
  uint32_t run = 0xffffffffu;
  uint32_t node = 0;
  Value source = nullptr;
  bool source_ready = false;
  uint32_t source_error = 0;
  uint32_t sends_left = 0;
  uint32_t receives_left = 0;
  bool has_room = false;    ///< begin_receive has taken memory
  bool is_written = false;  ///< a live peer may still write into it, and report nothing
  uint32_t receive_error = 0;
  std::vector<ReceiveBuffers> ready_receives;  ///< not sent yet; here `source` names the destination
  std::vector<EarlySend> early_sends;          ///< FAR-3
  std::vector<EarlyArrival> early_arrivals;    ///< the same
  std::vector<uint32_t> announced;             ///< hosts that have announced, ever
  std::vector<uint32_t> done_sources;          ///< hosts that have written, or failed to
  ExchangeTimes times;                         ///< while its run is traced
};

class TransferManager : private ExecutorPart, private Receiver, private PeerWaiter {
 public:
  TransferManager(const ExecutorPart& part, LaunchMemory& memory, Dataflow& flow, ReceiveQueue& receives,
                  PeerBook& peers)
      : ExecutorPart(part), memory_(memory), flow_(flow), receives_(receives), peers_(peers) {
    peers_.add(*this);
  }

  /// A transfer of a new run: opens it, and announces its receive.
  void prepare(NodeRef ref);
  /// A transfer that is ready: moves its value within the host, or lets it be sent when it is ready.
  void start(NodeRef ref);
  /// The source value of a transfer is ready, or has failed with `error`.
  void source_settled(uint64_t key, uint32_t error);
  /// GANG-2: whether a transfer before this call still needs something that this host could not do after the launch.
  bool owes_before(const Run& run, const NodeRecord& node);
  /// A send that was under way is over.
  void sent(const Sent& sent);
  /// FAR-3: writes what came early for receives that have memory now. Returns for how many. Not while a run is
  /// prepared, because what depends on it may not be in its queues yet.
  uint32_t place_early();
  /// All that a host on another machine sends in a transfer has come. Does nothing for a transfer that does not wait
  /// for it, as one that has failed.
  void arrived(Arrived&& arrived);

  // Executor has the contracts of these.
  Status on_receive_ready(uint64_t order, uint32_t node, uint32_t host, std::span<const uint64_t> offsets);
  Status on_receive_done(uint64_t order, uint32_t node, uint32_t host, Outcome outcome, std::string_view text);

  /// Exchanges under way.
  size_t count() const { return pending_.size(); }
  /// Transfers started, ever.
  uint64_t started() const { return started_; }
  /// nullptr: there is none.
  const PendingTransfer* find(uint64_t key) const;
  /// Drops all values, and forgets all transfers.
  void clear();
  /// For debug builds and tests.
  void validate() const;

 private:
  bool is_local(const Plan& plan, const NodeRecord& node) const;
  bool has_part(const PendingTransfer& transfer, uint32_t host, bool as_source) const;
  void start_local(NodeRef ref, Run& run, const NodeRecord& node, uint32_t error);
  void trace_move(NodeRef ref, Run& run, const NodeRecord& node, Value moved);
  /// Announces the receive. See Receiver.
  bool take_memory(uint64_t key) override;
  void place(uint64_t key, const EarlyArrival& arrival);
  void try_send(uint64_t key);
  void send_early(uint64_t key);
  bool announced_early_send(uint64_t key, EarlySend& send, std::span<const uint64_t> offsets);
  bool settle_early_send(uint64_t key, const Sent& sent);
  void end_send(uint64_t key, uint32_t destination, Outcome outcome, std::string_view text,
                Notice notice = Notice::kNeeded);
  void source_done(uint64_t key, uint32_t host, Outcome outcome, std::string_view text);
  void finish_receive(uint64_t key);
  void finish(uint64_t key);
  void miss(uint32_t run, const Lost& lost) override;
  void miss_in(uint64_t key, const Lost& lost);
  void trim_sends();

  LaunchMemory& memory_;
  Dataflow& flow_;
  ReceiveQueue& receives_;
  PeerBook& peers_;
  std::unordered_map<uint64_t, PendingTransfer> pending_;  ///< by order and global node
  EarlySends early_;
  std::vector<uint64_t> placeable_;          ///< receives that have memory, and early arrivals
  std::deque<uint64_t> unsourced_, unsent_;  ///< GANG-2: sends without their source; sends not done
  uint64_t started_ = 0;
};

}  // namespace pathways
