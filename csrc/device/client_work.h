/// ClientWork: the seam between the executor and what clients ask beside runs: puts, fetches, tasks, commands. What a
/// class does not override is refused. Threading and errors: see device/device.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "device/device.h"
#include "futures/read_back.h"

namespace pathways {

/// MEM-6: the memory that the order has booked for a buffer: `bytes` on each local device of the mask `devices`.
struct Booked {
  uint64_t devices = 0;
  uint64_t bytes = 0;
};

/// The block of memory that a command leases to this host: an offset in its arena for the client. 0 bytes: none.
struct Leased {
  uint64_t at = 0, bytes = 0;
};

/// Where `ClientWork::offload` moves values: off the devices, or back.
enum class Offload : uint8_t { kAway, kBack };

class ClientWork {
 public:
  using Bytes = std::span<const std::byte>;

  virtual ~ClientWork() = default;

  /// Makes a buffer of a client's bytes, and sets `devices` to the local devices that hold it. Fails before it makes
  /// a buffer that needs more than is booked: the client wrote both the payload and what is booked (MEM-6).
  virtual Status put(uint32_t /*client*/, Bytes, const Leased&, const Booked&, Value* /*output*/,
                     uint64_t* /*devices*/) {
    return Status::kFailed;
  }
  /// The local devices that will hold the buffer of a put; 0: the payload is invalid, so `put` will fail.
  virtual uint64_t devices_of_put(uint32_t /*client*/, Bytes) { return 0; }
  /// There is no memory for a put: returns the memory that it leases.
  virtual void refuse_put(uint32_t /*client*/, Bytes, const Leased&) {}
  /// Writes a ready buffer to the place where the client reads it, and adds to `written` which bytes of the block these
  /// are.
  virtual Status fetch(uint32_t /*client*/, Value, Bytes, const Leased&, std::vector<BlockPiece>* /*written*/) {
    return Status::kFailed;
  }
  /// There is nothing to read: returns the memory that the fetch leases.
  virtual void refuse_fetch(uint32_t /*client*/, Bytes, const Leased&) {}
  /// READ-1: writes this host's part of a ready value into the slot, small or large, that fits the whole value. The
  /// slot holds a C-ordered array, and one host writes each distinct part of it and tells the slot so. Writes nothing
  /// when the value was donated meanwhile: nobody can read it.
  virtual Status read_back(Value, const ReadBackSlot&) { return Status::kFailed; }
  /// Starts work that takes long on a thread of the backend, and returns. If the result is kOk, the backend calls
  /// `Executor::on_task_done` with `task` exactly once, at the end of the work; and before, if the client is to go on
  /// while the backend still keeps the value, `Executor::on_task_answered`. `value` is ready, and its reference stays
  /// the caller's, who keeps it until the end; nullptr: the task reads no value. `booked`: for the buffer that the task
  /// makes (MEM-6), as for `put`; a task that makes none has nothing booked.
  virtual Status start_task(uint32_t /*client*/, uint64_t /*task*/, Value, Bytes, const Booked&) {
    return Status::kFailed;
  }
  /// Does a command of any other kind, at its place in the order. `plan`: the plan that the command drops, which is
  /// what the controller has gone by (MEM-6); 0: none.
  virtual void command(uint32_t /*client*/, uint64_t /*plan*/, Bytes) {}
  /// Moves all values of a client off the devices, or back. Replaces each value by a reference to its stand-in off the
  /// devices, or the reverse. On a failure all values stay as they are. The backend notifies the requester in either
  /// case.
  virtual Status offload(uint32_t /*client*/, std::span<Value>, Bytes, Offload) { return Status::kFailed; }
  /// The notice of the client's end has come: the executor does not name the client again, nor touch its memory
  /// (OWN-1). May be called again for the same client.
  virtual void forget_client(uint32_t) {}

  virtual std::string_view last_error() const { return kRefused; }
};

}  // namespace pathways
