/// A program of the simulation: calls and transfers on slices, before it is split into one plan per host.
///
/// It provides what the compiler provides for real programs: the plan of each host, the group of hosts, and the number
/// of hosts that hold a part of each result. In addition, `evaluate` computes the correct results, one node after the
/// other. All parts of a value have the same checksum, on every host.
///
/// Threading: built by one thread, then const.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan.h"
#include "simulate/modelled_device.h"

namespace pathways {

/// Devices `devices` (a mask of local devices) of each of `hosts` (ascending).
struct ModelledSlice {
  std::vector<uint32_t> hosts;
  uint64_t devices = 1;
};

class ModelledProgram {
 public:
  /// Which source of a transfer sends to which destination.
  enum class Pattern : uint8_t {
    kAllToAll,  ///< each source sends to each destination
    kPairwise,  ///< destination i receives from source i mod n
  };

  uint32_t add_slice(ModelledSlice slice);
  uint32_t add_argument(uint32_t slice);
  /// Adds a call on a slice; its inputs must be on that slice. Returns the first of its `outputs` consecutive values.
  uint32_t add_call(uint32_t slice, std::vector<uint32_t> inputs, uint32_t outputs = 1);
  uint32_t add_transfer(uint32_t value, uint32_t slice, Pattern pattern = Pattern::kPairwise);
  void add_result(uint32_t value) { results_.push_back(value); }

  const std::vector<ModelledSlice>& slices() const { return slices_; }
  uint32_t slice_of(uint32_t value) const { return values_[value].slice; }
  uint32_t value_count() const { return static_cast<uint32_t>(values_.size()); }
  std::span<const uint32_t> arguments() const { return arguments_; }
  std::span<const uint32_t> results() const { return results_; }

  /// The hosts of all slices that the program uses, ascending.
  std::vector<uint32_t> hosts() const;
  std::vector<uint32_t> result_parts() const;
  /// `own_handles`: of runs whose records have only the handles of what lies on the host.
  std::vector<std::byte> plan_of(uint32_t host, uint32_t devices, bool own_handles = false) const;
  /// The communicator of each node of a host's plan. `by_slice[slice]`: the communicator of a slice of several hosts.
  std::vector<uint32_t> communicators_of(uint32_t host, std::span<const uint32_t> by_slice) const;
  /// The checksums of the results of a run of plan `plan_id`, given those of the arguments.
  std::vector<uint64_t> evaluate(uint32_t plan_id, std::span<const uint64_t> arguments) const;
  /// Gang launches of one run on a host.
  uint32_t gangs_of(uint32_t host) const;

 private:
  struct ValueInfo {
    uint32_t slice;
  };
  struct Step {
    NodeKind kind;
    uint32_t slice;         ///< of its outputs
    uint32_t source_slice;  ///< kTransfer
    Pattern pattern;
    std::vector<uint32_t> inputs, outputs;
  };
  bool holds(uint32_t slice, uint32_t host) const;

  std::vector<ModelledSlice> slices_;
  std::vector<ValueInfo> values_;
  std::vector<Step> steps_;
  std::vector<uint32_t> arguments_, results_;
};

/// A chain of `calls` calls on one slice: one argument, one result.
ModelledProgram make_chain(ModelledSlice slice, uint32_t calls);
/// One call on each slice in turn, with a transfer between each two. The result is on the last slice.
ModelledProgram make_pipeline(std::vector<ModelledSlice> slices, ModelledProgram::Pattern pattern);
/// `calls` calls with random inputs on random slices, with transfers where slices differ. Some arguments are results
/// too, and some results are returned twice. The same seed gives the same program.
ModelledProgram make_random_program(const std::vector<ModelledSlice>& slices, uint32_t calls,
                                    const std::vector<uint32_t>& argument_slices, uint64_t seed);

}  // namespace pathways
