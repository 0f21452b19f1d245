/// Dataflow: values and errors go from node to node of a run, into its results, and out of it.
///
/// A value that exists is defined: its readers are satisfied, and the results that it is bound to are defined as
/// buffers of the client. A value that failed fails the same. A run is over when all its steps are closed.
///
///   ERR-1  a failed value fails exactly the values and results that depend on it, with the text of the first error.
///   MEM-4  a value is dropped when its last reader has been launched, not before. The object store has references of
///          its own to arguments and results.
///
/// Used by whatever makes, receives or reads values. Threading: the executor's thread only. Allocation: none per node
/// in the steady state.
#pragma once

#include <cstdint>
#include <span>

#include "runs/client_objects.h"
#include "runs/executor_part.h"

namespace pathways {

class Dataflow : private ExecutorPart {
 public:
  Dataflow(const ExecutorPart& part, PlanTable& plans, ClientObjects& objects)
      : ExecutorPart(part), plans_(plans), objects_(objects) {}

  /// An argument of a new run: its value is delivered now, or when the buffer exists.
  void bind_argument(uint32_t slot, uint32_t value, Handle handle);
  /// The buffer that a value of a run waited for is defined or has failed.
  void argument_settled(uint32_t slot, uint32_t value, const Object& object);

  /// A value exists on `devices`. Takes over `ref`.
  void define(uint32_t slot, uint32_t value, Value ref, uint64_t devices, uint64_t age);
  /// Defines a value that no launch of this run made. When the value is a result, the run stays open until it is ready.
  void deliver(uint32_t slot, uint32_t value, Value ref, uint64_t devices, uint64_t age);
  /// A value failed with `error`.
  void propagate_error(uint32_t slot, uint32_t value, uint32_t error);

  /// A node that reads these values has been launched, or has failed.
  void read_done(Run& run, std::span<const uint32_t> values);
  /// A step of the run is done, or a result is settled. The run may be over then, and its slot free.
  void close_step(uint32_t slot);

 private:
  PlanTable& plans_;
  ClientObjects& objects_;
};

}  // namespace pathways
