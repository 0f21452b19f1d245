/// The part of a run's record that each of its hosts gets: the handles of the arguments and results that lie there.
///
/// Without this, each host would get all handles, so the bytes that a run sends would grow with its hosts times its
/// arguments and results (COST-3). The host's plan numbers the arguments and results in the same order. Hosts on which
/// the same values lie get the same part. A plan whose hosts all hold everything has no RunParts: they get the record
/// as it is.
///
/// Invariant: the positions of a part ascend. Threading: immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ledger/plan_memory.h"
#include "messages/records.h"
#include "sequencer/sequencer.h"

namespace pathways {

class RunParts {
 public:
  /// `group`: the hosts of the plan's runs. nullptr: all of them get everything, or it is not known where the arguments
  /// lie.
  static std::unique_ptr<const RunParts> make(const PlanMemory& memory, GroupId group, const Sequencer& sequencer);

  uint32_t client() const { return client_; }
  /// Bytes of the record for the host at `index` of the group. `head`: what the host gets of a run's fixed fields, but
  /// for the two counts.
  uint32_t bytes(size_t index, const RunRecord& head) const;
  /// Writes this record. `whole`: the client's record, with as many arguments and results as the plan has.
  void write(size_t index, RunRecord head, std::span<const std::byte> whole, std::byte* out) const;

 private:
  struct Part {
    std::vector<uint32_t> arguments, results;  ///< positions in the program
  };
  RunParts(uint32_t client, std::vector<Part> parts, std::vector<uint32_t> part_of)
      : client_(client), parts_(std::move(parts)), part_of_(std::move(part_of)) {}

  static RunRecord with_counts(RunRecord head, const Part& part);

  uint32_t client_;
  std::vector<Part> parts_;
  std::vector<uint32_t> part_of_;  ///< by index of the host in the group
};

}  // namespace pathways
