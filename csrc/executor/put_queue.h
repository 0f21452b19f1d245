/// PutQueue: makes the buffers that clients put on devices, when the devices have room for them.
///
/// A host launches ahead: it launches a call when there is room, while XLA still computes earlier calls and uses their
/// memory. So a put that the order has admitted may find its devices full for a moment. The put waits until work under
/// way frees memory. Its buffer is announced at once, and readers wait for the buffer.
///
///   MEM-1  a put is booked on its client's account. Puts that share a device are made in their order. While a put
///          waits, no call that takes more memory of its devices is launched. The order admits a put only if
///          it fits beside each admitted run at any point of the run. So the put fits when what is launched is done.
///          But what is launched may wait for a host that waits for this one, so a put waits for `longest_wait` at
///          most. Then it is made without room, and counted.
///   MEM-6  the backend refuses a put whose buffer takes more than the order has booked for it.
///   OWN-1  when the client is gone, its waiting puts are not made: the client's memory, where their bytes are, is
///          given up. Runs that wait for the buffer get an error, and gangs are launched with a placeholder (GANG-1).
///
/// Used by ClientCommands, and by the executor in each poll. Threading: the executor's thread only.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "messages/records.h"
#include "runs/client_objects.h"
#include "runs/executor_part.h"
#include "runs/launch_memory.h"

namespace pathways {

class PutQueue : private ExecutorPart {
 public:
  PutQueue(const ExecutorPart& part, ClientObjects& objects, LaunchMemory& memory,
           std::chrono::nanoseconds longest_wait)
      : ExecutorPart(part), objects_(objects), memory_(memory), longest_wait_(longest_wait) {}

  /// Makes the buffer now, or announces it and makes it later. False: later, so the command is not done yet.
  bool add(LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload);
  /// Makes the buffers that fit now, or have waited for too long. Returns how many.
  uint32_t retry() { return waiting_.empty() ? 0 : make_those_due(); }
  /// Makes the first waiting buffer, although it does not fit.
  void make_first();
  bool is_waiting() const { return !waiting_.empty(); }
  /// Buffers that were made without room.
  uint64_t overfull() const { return overfull_; }
  /// The client is to be offloaded: its buffers are made now, although they do not fit.
  void make_those_of(uint32_t client);
  /// The client is gone.
  void forget(uint32_t client);
  void clear();

 private:
  struct Put {
    CommandRecord record;
    std::vector<std::byte> payload;
    uint64_t devices = 0;
    int64_t since_ns = 0;
    uint64_t maker = 0;  ///< of the object that was announced
  };
  struct Made {
    Value value = nullptr;  ///< nullptr: `error` says why
    uint64_t devices = 0;
    uint64_t age = 0;
    uint32_t error = 0;
  };

  bool must_wait(const CommandRecord& record, std::span<const std::byte> payload, uint64_t* devices);
  Made make(const LocalClient& c, const CommandRecord& record, std::span<const std::byte> payload);
  void define(const Put& put);
  uint32_t make_those_due();
  Put take(size_t at);

  ClientObjects& objects_;
  LaunchMemory& memory_;
  const std::chrono::nanoseconds longest_wait_;
  std::vector<Put> waiting_;  ///< in their order
  uint64_t overfull_ = 0;
};

}  // namespace pathways
