/// A program of the simulation: calls and transfers on slices, before it is split by host.
///
/// It gives what the compiler gives for real programs: the plan of each host, the group of hosts, how many hosts hold a
/// part of each result; and besides, what the results must be (`evaluate`), computed one node after the other.
/// All parts of a value carry the same checksum, on whatever host.
///
/// Threading: built by one thread, then const.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "controller/stepper.h"
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
  /// How a transfer's parts travel.
  enum class Pattern : uint8_t {
    kAllToAll,  ///< each source sends to each destination
    kPairwise,  ///< destination i receives from source i mod n
  };

  uint32_t add_slice(ModelledSlice slice);
  uint32_t add_argument(uint32_t slice);
  /// A call on a slice; its inputs must be on it. Returns the first of its `outputs` consecutive values.
  uint32_t add_call(uint32_t slice, std::vector<uint32_t> inputs, uint32_t outputs = 1);
  uint32_t add_transfer(uint32_t value, uint32_t slice, Pattern pattern = Pattern::kPairwise);
  void add_result(uint32_t value) { results_.push_back(value); }

  const std::vector<ModelledSlice>& slices() const { return slices_; }
  uint32_t slice_of(uint32_t value) const { return values_[value].slice; }
  uint32_t value_count() const { return static_cast<uint32_t>(values_.size()); }
  std::span<const uint32_t> arguments() const { return arguments_; }
  std::span<const uint32_t> results() const { return results_; }

  /// Hosts of any of its slices that it uses, ascending.
  std::vector<uint32_t> hosts() const;
  std::vector<uint32_t> result_parts() const;
  /// Its nodes in order, with the hosts that each concerns.
  std::vector<ProgramNode> nodes() const;
  std::vector<std::byte> plan_of(uint32_t host, uint32_t devices) const;
  /// Per node of a host's plan, its communicator; `by_slice[slice]` names one for slices of several hosts.
  std::vector<uint32_t> communicators_of(uint32_t host, std::span<const uint32_t> by_slice) const;
  /// Results of a run of plan `plan_id`, given the arguments' checksums.
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
/// One call on each slice in turn, a transfer between each two; the result is on the last.
ModelledProgram make_pipeline(std::vector<ModelledSlice> slices, ModelledProgram::Pattern pattern);
/// `calls` calls with random inputs over random slices, transfers where slices differ; some arguments passed through,
/// some results given twice. The same seed gives the same program.
ModelledProgram make_random_program(const std::vector<ModelledSlice>& slices, uint32_t calls,
                                    const std::vector<uint32_t>& argument_slices, uint64_t seed);

}  // namespace pathways
