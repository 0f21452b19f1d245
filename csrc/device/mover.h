/// Mover: the seam between the executor and what carries bytes between hosts: transfers, and exchanges of rows. What a
/// class does not override is refused. Threading and errors: see device/device.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "device/device.h"
#include "device/early_chunk.h"
#include "device/exchange_io.h"

namespace pathways {

/// Where one source host must write: offsets into this host's arena, in the order of the host reshard plan's blocks.
struct ReceiveBuffers {
  uint32_t source;
  std::vector<uint64_t> offsets;
};

/// The state of a send to one destination: over (kDone, kFailed), or under way. `take_sent` reports the latter later.
enum class SendState : uint8_t { kDone, kUnderWay, kFailed };

/// Whether a destination sees by itself that everything is written there: a receive done is sent only if it does not.
enum class Notice : uint8_t { kNeeded, kSeen };

/// A send that was under way is over: everything is written, or `error` says why not.
struct Sent {
  uint64_t key;
  uint32_t destination;
  std::string error = {};
  Notice notice = Notice::kNeeded;
};

/// Everything that `source`, on another machine, sends in a transfer has come. It is written, or kept in `chunk`
/// because it came before its receive had memory (FAR-3).
struct Arrived {
  uint64_t order;
  uint32_t node;  ///< its number in the whole program
  uint32_t source;
  std::optional<EarlyChunk> chunk = {};
};

class Mover {
 public:
  virtual ~Mover() = default;

  /// Takes memory for the receive buffers of a transfer. kNoMemory: there is none now, ask again.
  virtual Status begin_receive(const NodeContext&, std::vector<ReceiveBuffers>* /*receives*/) {
    return Status::kFailed;
  }
  /// Writes this host's part of a transfer into the arenas of the destinations that announced their receive; here the
  /// `source` of ReceiveBuffers names the destination. Writes nothing to a destination without offsets. `input` is
  /// ready, and the executor keeps its reference until every send of it is over. Does not wait for large copies: they
  /// go on beside the executor, and `take_sent` reports them by `key`. Sets one state per destination.
  virtual void send(const NodeContext&, Value /*input*/, std::span<const ReceiveBuffers> /*ready_receives*/,
                    uint64_t /*key*/, std::span<SendState> states) {
    std::fill(states.begin(), states.end(), SendState::kFailed);
  }
  /// What is sent to a host from now on is for the one of this epoch: it follows a lost one, or was not there before.
  virtual void peer_opens(uint32_t /*host*/, int32_t /*epoch*/) {}
  /// Appends to `out` the sends under way that ended since the last call. The thread that ends a send rings the host's
  /// doorbell.
  virtual void take_sent(std::vector<Sent>* /*out*/) {}
  /// FAR-3: the room that this host's part of a transfer to `destination` takes at the other end while it waits for
  /// memory there, and `offsets` to call `send` with before the receive is announced. 0: it may not be sent then.
  virtual uint64_t early_bytes(const NodeContext&, uint32_t /*destination*/, std::vector<uint64_t>* /*offsets*/) {
    return 0;
  }
  /// Appends to `out` what has come from other machines since the last call. The thread that takes it in rings the
  /// host's doorbell.
  virtual void take_arrived(std::vector<Arrived>* /*out*/) {}
  /// Writes what came early into the receive buffers, which there are now.
  virtual Status place_early(const NodeContext&, uint32_t /*source*/, std::span<const std::byte> /*chunk*/) {
    return Status::kFailed;
  }
  /// Ends all sends under way, written or not, and reports none of them.
  virtual void stop_sends() {}
  /// Everything is written: makes the value from the receive buffers.
  virtual Status finish_receive(const NodeContext&, Value*) { return Status::kFailed; }
  /// A source failed: returns the memory that `begin_receive` took.
  virtual void abandon_receive(const NodeContext&) {}

  // An exchange of rows (plan/exchanges.h); `computation` of the context is its index.
  /// The bytes of the shards that this host has of input number `input`, which is ready, in their order. They stay
  /// there as long as the reference `keep`, which is new.
  virtual Status read_shards(const NodeContext&, uint32_t /*input*/, Value,
                             std::vector<std::span<const std::byte>>* /*shards*/, Value* /*keep*/) {
    return Status::kFailed;
  }
  /// Takes memory for each target shard of this host, in their order: the place of its rows, and of their numbers. The
  /// places are as those of `begin_receive`. kNoMemory: there is none now, ask again.
  virtual Status begin_exchange(const NodeContext&, std::vector<uint64_t>* /*places*/) { return Status::kFailed; }
  /// Copies rows, and their numbers, to their slots. kUnderWay: as in `send`.
  virtual SendState write_rows(const NodeContext&, const RowWrite& /*write*/) { return SendState::kFailed; }
  /// All rows have come: makes the outputs. Without success, it has made none of them.
  virtual Status finish_exchange(const NodeContext&, const RowResults& /*results*/, std::span<Value> /*outputs*/) {
    return Status::kFailed;
  }
  /// The exchange failed: returns the memory that `begin_exchange` took.
  virtual void abandon_exchange(const NodeContext&) {}

  virtual std::string_view last_error() const { return kRefused; }
};

}  // namespace pathways
