/// Backend: the only interface between the executor and the devices.
///
/// Three classes implement it: the JAX backend (pathways/_host_callbacks.pxi, over executor/sending_backend.h), the
/// modelled device (csrc/simulate), and doubles of tests. A `Value` is the backend's own reference to the local shards
/// of one logical array (with JAX, a `jax.Array`). The executor passes values on and never looks inside. It owes one
/// `drop` for each reference that it was given.
///
/// Each operation is pure virtual: an implementation whose signature differs does not compile.
///
/// Threading: all calls come from the executor's thread, one at a time.
/// Errors: kFailed means that the operation failed and `last_error()` says why. The executor propagates the error to
/// whatever depends on the operation.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "executor/early_chunk.h"
#include "executor/error_table.h"
#include "executor/exchange_io.h"
#include "futures/read_back.h"
#include "messages/records.h"

namespace pathways {

using Value = void*;

/// kDeleted: a later launch has taken over the value's memory (donation), so nothing is known about the value any more.
enum class Readiness : uint8_t { kPending, kReady, kFailed, kDeleted };

/// Which node of which run.
struct NodeContext {
  uint64_t order;
  uint32_t client;
  uint32_t plan;
  uint32_t node;         ///< index in the host's plan
  uint32_t computation;  ///< index of the launchable, or of the host reshard plan
};

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

/// MEM-6: the memory that the order has booked for a buffer: `bytes` on each local device of the mask `devices`.
struct Booked {
  uint64_t devices = 0;
  uint64_t bytes = 0;
};

/// Where `Backend::offload` moves values: off the devices, or back.
enum class Offload : uint8_t { kAway, kBack };

class Backend {
 public:
  virtual ~Backend() = default;

  /// Enqueues one computation on the local devices; `outputs` become new references. Does not wait for values.
  /// kPending: the launch is attended. A thread of the backend makes it, and `Executor::on_launched` is called at its
  /// end. The backend keeps references of its own on `inputs`, and the executor launches nothing else on those devices
  /// meanwhile.
  virtual Status launch(const NodeContext& context, std::span<const Value> inputs, std::span<Value> outputs) = 0;
  /// A value in place of an input that failed, so that every host launches the gang (GANG-1): any value of the input's
  /// type, as a new reference.
  virtual Value placeholder(const NodeContext& context, uint32_t input) = 0;
  virtual Readiness readiness(Value value) = 0;
  /// The number that a ready scalar holds (a truth value is 0 or 1): which branch to take. `value` has a copy of it on
  /// some local device.
  virtual Status read_scalar(Value value, int64_t* out) = 0;
  virtual Value retain(Value value) = 0;
  virtual void drop(Value value) = 0;

  /// A transfer within this host.
  virtual Status transfer(const NodeContext& context, Value input, Value* output) = 0;
  /// Takes memory for the receive buffers of a transfer. kNoMemory: there is none now, ask again.
  virtual Status begin_receive(const NodeContext& context, std::vector<ReceiveBuffers>* receives) = 0;
  /// Writes this host's part of a transfer into the arenas of the destinations that announced their receive; here the
  /// `source` of ReceiveBuffers names the destination. Writes nothing to a destination without offsets. `input` is
  /// ready, and the executor keeps its reference until every send of it is over. Does not wait for large copies: they
  /// go on beside the executor, and `take_sent` reports them by `key`. Sets one state per destination.
  virtual void send(const NodeContext& context, Value input, std::span<const ReceiveBuffers> ready_receives,
                    uint64_t key, std::span<SendState> states) = 0;
  /// Appends to `out` the sends under way that ended since the last call. The thread that ends a send rings the host's
  /// doorbell.
  virtual void take_sent(std::vector<Sent>* out) = 0;
  /// FAR-3: the room that this host's part of a transfer to `destination` takes at the other end while it waits for
  /// memory there, and `offsets` to call `send` with before the receive is announced. 0: it may not be sent then.
  virtual uint64_t early_bytes(const NodeContext& context, uint32_t destination, std::vector<uint64_t>* offsets) = 0;
  /// Appends to `out` what has come from other machines since the last call. The thread that takes it in rings the
  /// host's doorbell.
  virtual void take_arrived(std::vector<Arrived>* out) = 0;
  /// Writes what came early into the receive buffers, which there are now.
  virtual Status place_early(const NodeContext& context, uint32_t source, std::span<const std::byte> chunk) = 0;
  /// Ends all sends under way, written or not, and reports none of them.
  virtual void stop_sends() = 0;
  /// Everything is written: makes the value from the receive buffers.
  virtual Status finish_receive(const NodeContext& context, Value* output) = 0;
  /// A source failed: returns the memory that `begin_receive` took.
  virtual void abandon_receive(const NodeContext& context) = 0;

  // An exchange of rows (plan/exchanges.h); `computation` of the context is its index.
  /// The bytes of the shards that this host has of input number `input`, which is ready, in their order. They stay
  /// there as long as the reference `keep`, which is new.
  virtual Status read_shards(const NodeContext& context, uint32_t input, Value value,
                             std::vector<std::span<const std::byte>>* shards, Value* keep) = 0;
  /// Takes memory for each target shard of this host, in their order: the place of its rows, and of their numbers. The
  /// places are as those of `begin_receive`. kNoMemory: there is none now, ask again.
  virtual Status begin_exchange(const NodeContext& context, std::vector<uint64_t>* places) = 0;
  /// Copies rows, and their numbers, to their slots. kUnderWay: as in `send`.
  virtual SendState write_rows(const NodeContext& context, const RowWrite& write) = 0;
  /// All rows have come: makes the outputs. Without success, it has made none of them.
  virtual Status finish_exchange(const NodeContext& context, const RowResults& results, std::span<Value> outputs) = 0;
  /// The exchange failed: returns the memory that `begin_exchange` took.
  virtual void abandon_exchange(const NodeContext& context) = 0;

  /// Makes a buffer of a client's bytes, and sets `devices` to the local devices that hold it. Fails before it makes
  /// a buffer that needs more than is booked: the client wrote both the payload and what is booked (MEM-6).
  virtual Status put(uint32_t client, std::span<const std::byte> payload, const Booked& booked, Value* output,
                     uint64_t* devices) = 0;
  /// The local devices that will hold the buffer of a put; 0: the payload is invalid, so `put` will fail.
  virtual uint64_t devices_of_put(uint32_t client, std::span<const std::byte> payload) = 0;
  /// There is no memory for a put: returns the memory that its payload leases.
  virtual void refuse_put(uint32_t client, std::span<const std::byte> payload) = 0;
  /// Writes a ready buffer to the place where the client reads it.
  virtual Status fetch(uint32_t client, Value value, std::span<const std::byte> payload) = 0;
  /// There is nothing to read: returns the memory that the payload leases.
  virtual void refuse_fetch(uint32_t client, std::span<const std::byte> payload) = 0;
  /// READ-1: writes this host's part of a ready value into the slot, small or large, that fits the whole value. The
  /// slot holds a C-ordered array, and one host writes each distinct part of it. Writes nothing when the value was
  /// donated meanwhile: nobody can read it.
  virtual Status read_back(Value value, const ReadBackSlot& place) = 0;
  /// Starts work that takes long on a thread of the backend, and returns. If the result is kOk, the backend calls
  /// `Executor::on_task_done` with `task` exactly once, at the end of the work; and before, if the client is to go on
  /// while the backend still keeps the value, `Executor::on_task_answered`. `value` is ready, and its reference stays
  /// the caller's, who keeps it until the end; nullptr: the task reads no value. `booked`: for the buffer that the task
  /// makes (MEM-6), as for `put`; a task that makes none has nothing booked.
  virtual Status start_task(uint32_t client, uint64_t task, Value value, std::span<const std::byte> payload,
                            const Booked& booked) = 0;
  /// Does a command of any other kind, at its place in the order. `plan`: the plan that the command drops, which is
  /// what the controller has gone by (MEM-6); 0: none.
  virtual void command(uint32_t client, uint64_t plan, std::span<const std::byte> payload) = 0;
  /// Moves all values of a client off the devices, or back. Replaces each value by a reference to its stand-in off the
  /// devices, or the reverse. On a failure all values stay as they are. The backend notifies the requester in either
  /// case.
  virtual Status offload(uint32_t client, std::span<Value> values, std::span<const std::byte> payload,
                         Offload where) = 0;

  /// A plan was removed, and no run uses it any more. May be called again for the same plan.
  virtual void forget_plan(uint32_t plan) = 0;
  /// The notice of the client's end has come: the executor does not name the client again, nor touch its memory
  /// (OWN-1).
  /// May be called again for the same client.
  virtual void forget_client(uint32_t client) = 0;

  virtual std::string_view last_error() const = 0;
  /// `maker` made the value whose readiness was kFailed last: adds that to last_error() (ERR-1).
  virtual void explain(const NodeContext& maker) = 0;
};

}  // namespace pathways
