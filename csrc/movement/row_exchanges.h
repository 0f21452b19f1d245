/// RowExchanges: a host's part in the exchanges of rows of its runs, as far as it concerns runs, values and memory.
///
/// ExchangeManager knows which records follow each other; this class gives it what it needs (ExchangePlane), and brings
/// what comes of it into the runs. When a run is prepared, its exchanges take memory for the rows that come, as the
/// receives of transfers do. When the values that an exchange reads are ready, their rows are routed, and the host
/// reports. The backend copies rows straight to their slots.
///
///   GANG-2  before the host launches a gang, other hosts have what they need from its earlier exchanges
///           (`owes_before`). A launch that waits for other hosts inside the call: it has reported, decided, and
///           written. A launch that returns at once: its values are enqueued.
///   ERR-1   a host that refuses a run reports a fault for each exchange of the run, as far as it knows the plan, and
///           answers reports with one.
///   ERR-2   as in movement/exchange_manager.h. A peer that is alive and not believed any more (PEER-1) is told of the
///           failure. It may still write: then the memory is never returned.
///
/// Threading: the executor's thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "movement/exchange_manager.h"
#include "movement/peer_book.h"
#include "movement/receive_queue.h"
#include "runs/dataflow.h"
#include "runs/executor_part.h"
#include "runs/launch_memory.h"

namespace pathways {

class RowExchanges : private ExecutorPart, private ExchangePlane, private Receiver, private PeerWaiter {
 public:
  RowExchanges(const ExecutorPart& part, LaunchMemory& memory, Dataflow& flow, ReceiveQueue& receives, PeerBook& peers)
      : ExecutorPart(part),
        memory_(memory),
        flow_(flow),
        receives_(receives),
        peers_(peers),
        manager_(part.host_, *this) {
    peers_.add(*this);
  }

  /// An exchange of a new run.
  void prepare(NodeRef ref);
  /// The values that it reads exist, or have failed.
  void start(NodeRef ref);
  /// A value that it reads is ready, or has failed with `error`.
  void input_settled(uint64_t key, uint32_t error);
  /// The local devices that the inputs live on.
  uint64_t input_devices(uint64_t key) const;
  /// GANG-2: whether an exchange before this call still needs something that this host could not do after the launch.
  bool owes_before(const Run& run, const NodeRecord& node);
  bool has(uint64_t key) const { return exchanges_.contains(key); }
  /// Rows for a host, which were under way, are written, or will not be.
  void sent(const Sent& sent);
  /// Does what has become possible.
  void go_on();

  // Executor has the contracts of these.
  Status on_words(ExchangeWords kind, uint64_t order, uint32_t node, uint32_t host, std::span<const uint64_t> words);
  Status on_written(uint64_t order, uint32_t node, uint32_t host, std::string_view error);

  /// Exchanges under way.
  size_t count() const { return exchanges_.size(); }
  /// Records sent to other hosts, ever (EXCH-1).
  uint64_t records() const { return records_; }
  /// What an exchange of a live run waits for, for people to read; empty: it is over.
  std::string describe(uint64_t key) const;
  void clear();
  /// For debug builds and tests.
  void validate() const;

 private:
  struct RowExchange {
    uint32_t run, node;
    std::vector<Value> inputs;                     ///< references, until they are read; to the rows until the end
    Value keep = nullptr;                          ///< what keeps the shards of the rows there
    std::vector<std::span<const std::byte>> rows;  ///< by source shard of this host
    std::vector<uint32_t> sources, targets;        ///< the shards of this host, ascending
    uint32_t inputs_left = 0;
    bool is_started = false, has_memory = false, is_over = false;
  };

  // ExchangePlane
  void send_report(uint32_t host, uint64_t exchange, std::vector<uint64_t> words) override;
  void send_decision(uint32_t host, uint64_t exchange, std::vector<uint64_t> words) override;
  void send_written(uint32_t host, uint64_t exchange, std::string_view error) override;
  void write_rows(uint64_t exchange, uint32_t host, std::vector<HostExchange::Move> moves,
                  std::vector<Room> rooms) override;
  void finished(uint64_t exchange, const HostExchange& part) override;
  void failed(uint64_t exchange, std::string_view text, Memory memory) override;
  bool is_dead(uint32_t host, uint64_t exchange) const override { return peers_.is_dead(host, order_of(exchange)); }
  // Receiver
  bool take_memory(uint64_t key) override;
  // PeerWaiter
  void miss(uint32_t slot, const Lost& lost) override;
  void refuse(uint64_t order, const Plan& plan, const std::string& why) override;

  const ExchangeShape& shape_of(const RowExchange& exchange) const;
  void read_inputs(uint64_t key, RowExchange& exchange);
  Status route(uint64_t key, RowExchange& exchange, uint32_t input);
  void end(uint64_t key);
  void close_if_over(uint64_t key);
  void trim_owed();

  LaunchMemory& memory_;
  Dataflow& flow_;
  ReceiveQueue& receives_;
  PeerBook& peers_;
  ExchangeManager manager_;
  std::unordered_map<uint64_t, RowExchange> exchanges_;  ///< by order and global node
  std::vector<Sent> written_;                            ///< writes that were over at once
  std::deque<uint64_t> owed_;                            ///< GANG-2: exchanges by order, the oldest may be over
  uint64_t records_ = 0;
  bool is_going_on_ = false;
};

}  // namespace pathways
