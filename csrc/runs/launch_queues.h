/// LaunchQueues: in which order the calls of a host are launched, which nodes are ready, and what is in flight.
///
/// A call enters the FIFO of each local device that it holds when it is prepared, and leaves them when it is launched
/// or has failed. To head a FIFO is one of the things that a call waits for (RunTable::satisfy). A node that waits for
/// nothing more is ready. A ready node that must not start yet is throttled, and tried again later.
///
///   ORD-1   calls enter the device FIFOs in the order of the records, and leave a FIFO only from its head.
///   ASY-1   the executor itself waits for nothing. What cannot go on stays in a list, and `poll` tries it again.
///   GANG-2  where launching a gang blocks what the host does next, all gangs have one FIFO more, whatever devices they
///           hold. So the host launches gangs in the order.
///   GANG-3  where gangs block, a gang on one local device and a gang on several never run at the same time on a
///           shared device: the later one is launched when the earlier one has run. Collectives among the same devices
///           are paired by the order in which they run, and XLA's CPU client does not order these two kinds. If they
///           ran together, collectives of different gangs would be paired: wrong values, or a crash.
///
/// Threading: the executor's thread only. Allocation: none per node in the steady state.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "device/device.h"
#include "plan/plan.h"
#include "runs/run_table.h"

namespace pathways {

class LaunchQueues {
 public:
  /// Without `quirks.max_in_flight`, launches in flight are not counted.
  LaunchQueues(RunTable& runs, uint32_t devices, const Quirks& quirks);

  /// A node waits for one thing less; `what` it was.
  void satisfy(NodeRef ref, WaitedFor what = WaitedFor::kInput) {
    if (!runs_.satisfy(ref)) return;
    ready_.push_back(ref);
    if (Run& run = runs_[ref.run]; run.is_traced()) run.times[ref.node].waited_for = what;
  }
  /// The call waits from now on until it heads its FIFOs.
  void enter(NodeRef ref, const NodeRecord& node);
  /// The call, which heads its FIFOs, leaves them. They go on to the next call.
  void leave(const NodeRecord& node);

  /// Calls `start(ref)` for each ready node, the oldest first, and for those that become ready meanwhile, until a call
  /// returns false: the others stay ready. A call from within `start` does nothing.
  template <typename Start>
  void start_ready(Start&& start) {
    if (starting_) return;
    starting_ = true;
    size_t started = 0;
    for (bool goes_on = true; goes_on && started < ready_.size(); ++started) {  // ready_ grows meanwhile
      const NodeRef ref = ready_[started];
      goes_on = start(ref);
    }
    ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(started));
    starting_ = false;
  }
  bool has_ready() const { return !ready_.empty(); }

  /// The node, which was ready, must wait for something that no node tells it of.
  void throttle(NodeRef ref) { throttled_.push_back(ref); }
  std::span<const NodeRef> throttled() const { return throttled_; }
  /// All throttled nodes are ready again.
  void retry_throttled();
  /// The first throttled node is ready again.
  void retry_first_throttled();

  bool gangs_block() const { return quirks_.gangs_block; }
  /// GANG-2: launching this call blocks what the host does next.
  bool blocks(const NodeRecord& node) const { return node.gang != 0 && quirks_.gangs_block; }
  /// GANG-2: the launch of this call waits for the other hosts inside the call.
  bool waits_in_launch(const NodeRecord& node) const { return blocks(node) && std::has_single_bit(node.devices); }
  /// Whether a launch may compute within the call: then its outputs are ready when it returns.
  bool computes_in_launch() const { return quirks_.computes_in_launch && fifos_.size() == 1; }
  /// Whether a device of the call has as many launches in flight as it may have.
  bool is_full(const NodeRecord& node) const;
  /// GANG-3: whether a gang of the other kind (one local device, or several) is running on a device of this node.
  bool conflicts_with_running_gang(const NodeRecord& node) const;
  /// Launches in flight are counted.
  bool counts() const { return quirks_.max_in_flight != 0; }
  void begin_launch(const NodeRecord& node) { count(node, 1); }
  void end_launch(const NodeRecord& node) { count(node, ~uint32_t{0}); }

  void clear();
  /// Checks ORD-1. For debug builds and tests.
  void validate() const;

 private:
  template <typename F>
  static void for_each_device(uint64_t mask, F&& f) {
    for (; mask != 0; mask &= mask - 1) f(static_cast<uint32_t>(std::countr_zero(mask)));
  }
  void enter_fifo(std::deque<NodeRef>& fifo, NodeRef ref);
  void leave_fifo(std::deque<NodeRef>& fifo);
  void count(const NodeRecord& node, uint32_t by);

  RunTable& runs_;
  const Quirks quirks_;
  std::vector<std::deque<NodeRef>> fifos_;  ///< one per local device
  std::deque<NodeRef> gangs_;               ///< GANG-2: all gangs, in the order; only where gangs block
  std::vector<uint32_t> in_flight_;         ///< per local device
  /// GANG-3: running gangs per local device: on this device only, and on several devices of this host.
  std::vector<uint32_t> one_device_gangs_, several_device_gangs_;
  std::vector<NodeRef> ready_;
  std::vector<NodeRef> throttled_;
  bool starting_ = false;
};

}  // namespace pathways
