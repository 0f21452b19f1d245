/// Dispatcher: prepares nodes, and starts what is ready. The executor implements it, for the parts of it whose work
/// makes nodes ready between two records (a transfer that is over, a task that is done), or prepares nodes (sequential
/// dispatch).
///
/// Threading: the executor's thread only.
#pragma once

#include "executor/run_table.h"
#include "plan/plan.h"

namespace pathways {

class Dispatcher {
 public:
  /// A call enters its FIFOs; a transfer announces its receive.
  virtual void prepare_node(NodeRef ref, const NodeRecord& node) = 0;
  /// Launches and starts what is ready. Within a launch or a start of a transfer it does nothing: that goes on to the
  /// next ready node itself.
  virtual void drain() = 0;

 protected:
  ~Dispatcher() = default;
};

}  // namespace pathways
