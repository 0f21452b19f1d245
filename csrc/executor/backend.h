/// The one seam to the devices: what the executor asks, whoever answers.
///
/// Two sides exist: JAX (pathways/_core.pyx through `CallbackBackend`) and the modelled device (csrc/simulate). A
/// `Value` is the backend's own reference to the local shards of one logical array (a `jax.Array` there); the executor
/// moves it about, never looks inside, and owes one `drop` for each reference it was given.
///
/// Threading: all calls come from the executor's thread, one at a time.
/// Errors: kFailed means that the operation failed and `last_error()` says why; the executor propagates errors to what
/// depends on it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "futures/read_back.h"

namespace pathways {

using Value = void*;

/// kDeleted: the backend has given the value's memory to a later launch (donation), so nothing is known of it any more.
enum class Readiness : uint8_t { kPending, kReady, kFailed, kDeleted };

/// Which node of which run.
struct NodeContext {
  uint64_t order;
  uint32_t client;
  uint32_t plan;
  uint32_t node;         ///< index in the host's plan
  uint32_t computation;  ///< launchable or route
};

/// Where one source host shall write: offsets into this host's arena, in the route's own order.
struct ReceiveBuffers {
  uint32_t source;
  std::vector<uint64_t> offsets;
};

/// How the writing to one destination stands: done (kDone, kFailed), or to be told by `take_sent` later.
enum class SendState : uint8_t { kDone, kUnderWay, kFailed };

/// A send that was under way is done: all is written, or `error` says why not.
struct Sent {
  uint64_t key;
  uint32_t destination;
  std::string error = {};
};

class Backend {
 public:
  virtual ~Backend() = default;

  /// Enqueues one computation on the local devices; `outputs` become new references. Does not wait for values.
  /// kPending: the backend attends to it on a thread of its own, and `Executor::on_launched` hears of its end. The
  /// backend has references of its own on `inputs`, and nothing else is launched on those devices meanwhile.
  virtual Status launch(const NodeContext& context, std::span<const Value> inputs, std::span<Value> outputs) = 0;
  /// A stand-in for an input that failed, so that a gang stays whole (GANG-1): any value of its type, fresh reference.
  virtual Value placeholder(const NodeContext& context, uint32_t input) = 0;
  virtual Readiness readiness(Value value) = 0;
  virtual Value retain(Value value) = 0;
  virtual void drop(Value value) = 0;

  /// A transfer whose two ends are on this host alone.
  virtual Status transfer(const NodeContext& context, Value input, Value* output) = 0;
  /// Makes room for what a transfer brings here. kNoMemory: not now, ask again.
  virtual Status begin_receive(const NodeContext& context, std::vector<ReceiveBuffers>* receives) = 0;
  /// Writes this host's part of a transfer into the arenas of those who announced, each named by its receive's
  /// `source`; one without offsets gets nothing. `input` is ready, and referenced until every send of it is done. Does
  /// not wait for large copies: those go on beside, and `take_sent` names `key`. One state per post.
  virtual void send(const NodeContext& context, Value input, std::span<const ReceiveBuffers> ready_receives,
                    uint64_t key, std::span<SendState> states) = 0;
  /// Sends under way that were done since the last call, behind what `out` holds. Who makes them rings the host.
  virtual void take_sent(std::vector<Sent>* /*out*/) {}
  /// Ends all sends under way, written or not; none of them is told.
  virtual void stop_sends() {}
  /// Everything has been written: makes the value of it.
  virtual Status finish_receive(const NodeContext& context, Value* output) = 0;
  /// Gives back what `begin_receive` took, when a source failed.
  virtual void abandon_receive(const NodeContext& context) = 0;

  /// Makes a buffer of a client's bytes; says which local devices it lies on.
  virtual Status put(uint32_t client, std::span<const std::byte> payload, Value* output, uint64_t* devices) = 0;
  /// There is no room for a put: gives back the memory that its payload holds.
  virtual void refuse_put(uint32_t /*client*/, std::span<const std::byte> /*payload*/) {}
  /// Writes a ready buffer where the client reads it.
  virtual Status fetch(uint32_t client, Value value, std::span<const std::byte> payload) = 0;
  /// There is nothing to read: gives back the memory that the payload holds.
  virtual void refuse_fetch(uint32_t /*client*/, std::span<const std::byte> /*payload*/) {}

  /// Writes this host's share of a ready value into the slot that fits the whole of it, as a C-ordered array of which
  /// each distinct part is written by one host. A value that was donated meanwhile is left out: nobody can read it.
  virtual Status read_back(Value /*value*/, const ReadBackSlot& /*place*/) { return Status::kInvalid; }

  /// Starts work that takes long, on a thread of the backend's own, and returns; `Executor::on_task_done` hears of its
  /// end by `task`, exactly once if this said kOk. `value` is ready and stays the caller's; nullptr: the task has none,
  /// or makes one.
  virtual Status start_task(uint32_t /*client*/, uint64_t /*task*/, Value /*value*/,
                            std::span<const std::byte> /*payload*/) {
    return Status::kInvalid;
  }

  /// Anything else that has a place in the order.
  virtual void command(uint32_t client, std::span<const std::byte> payload) = 0;

  /// Moves the values of a client off the devices, or back: each becomes another reference, to what stands for it
  /// meanwhile. All of them or none: when it fails the values stay as they are. Tells whoever asked, in either case.
  virtual Status offload(uint32_t /*client*/, std::span<Value> /*values*/, std::span<const std::byte> /*payload*/) {
    return Status::kOk;
  }
  virtual Status restore(uint32_t /*client*/, std::span<Value> /*values*/, std::span<const std::byte> /*payload*/) {
    return Status::kOk;
  }

  /// A plan that was removed is no longer used by any run. May be said again of a plan that is gone already.
  virtual void forget_plan(uint32_t /*plan*/) {}
  /// The order has passed the client's end: nothing here names it again, nor touches its memory (OWN-1). May be said
  /// again.
  virtual void forget_client(uint32_t /*client*/) {}

  virtual std::string_view last_error() const = 0;
  /// The value whose readiness was kFailed last was made by `maker`: from now on last_error() says so too (ERR-1).
  virtual void explain(const NodeContext& /*maker*/) {}
};

/// What the executor tells the rest of the cluster. Implemented over rings by `host/host.h`.
class HostLink {
 public:
  virtual ~HostLink() = default;
  /// This host's part of a buffer is ready, or a fetch is written.
  virtual void complete(uint32_t client, Handle future) = 0;
  virtual void failed(uint32_t client, Handle future, std::string_view text) = 0;
  /// READ-1: where a result's value goes; false: nobody will read it. After true `end_read_back` must follow.
  virtual bool begin_read_back(uint32_t /*client*/, Handle /*future*/, ReadBackSlot* /*place*/) { return false; }
  virtual void end_read_back(uint32_t /*client*/, Handle /*future*/) {}
  /// `gangs` launched of the `expected` that the run has on this host.
  virtual void run_done(uint32_t client, uint64_t tag, uint32_t gangs, uint32_t expected) = 0;
  /// A command of the client's, in a record of so many bytes, is done here, and nothing of it is kept.
  virtual void command_done(uint32_t /*client*/, uint64_t /*bytes*/) {}
  /// A call of a stepwise run has left its devices' FIFOs.
  virtual void enqueued(uint32_t client, uint64_t tag, uint32_t node) = 0;
  /// The owner's thread may be in a launch for long. Until `come_back`, other hosts get what was said to them so far.
  virtual void leave() {}
  virtual void come_back() {}
  virtual void receive_ready(uint32_t host, uint64_t order, uint32_t node, std::span<const uint64_t> offsets) = 0;
  virtual void receive_done(uint32_t host, uint64_t order, uint32_t node, bool failed, std::string_view text) = 0;
};

}  // namespace pathways
