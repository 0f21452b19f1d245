/// Dispatcher: launches and starts what is ready. The executor implements it, for the parts of it whose work makes
/// nodes ready between two records: a transfer that is over, a task that is done.
///
/// Threading: the executor's thread only.
#pragma once

namespace pathways {

class Dispatcher {
 public:
  /// Within a launch or a start of a transfer it does nothing: that goes on to the next ready node itself.
  virtual void drain() = 0;

 protected:
  ~Dispatcher() = default;
};

}  // namespace pathways
