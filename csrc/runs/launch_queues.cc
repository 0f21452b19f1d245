#include "runs/launch_queues.h"

#include <algorithm>

#include "base/check.h"

namespace pathways {

LaunchQueues::LaunchQueues(RunTable& runs, uint32_t devices, const Quirks& quirks)
    : runs_(runs),
      quirks_(quirks),
      fifos_(devices),
      in_flight_(devices),
      one_device_gangs_(devices),
      several_device_gangs_(devices) {}

void LaunchQueues::enter(NodeRef ref, const NodeRecord& node) {
  if (blocks(node)) {  // GANG-2: it must head the FIFO of gangs too
    ++runs_[ref.run].missing[ref.node];
    enter_fifo(gangs_, ref);
  }
  for_each_device(node.devices, [&](uint32_t d) { enter_fifo(fifos_[d], ref); });
}

void LaunchQueues::leave(const NodeRecord& node) {
  if (blocks(node)) leave_fifo(gangs_);
  for_each_device(node.devices, [&](uint32_t d) { leave_fifo(fifos_[d]); });  // ORD-1: the node heads each
}

void LaunchQueues::enter_fifo(std::deque<NodeRef>& fifo, NodeRef ref) {
  fifo.push_back(ref);
  if (fifo.size() == 1) satisfy(ref, WaitedFor::kEarlierCall);
}

void LaunchQueues::leave_fifo(std::deque<NodeRef>& fifo) {
  fifo.pop_front();
  if (!fifo.empty()) satisfy(fifo.front(), WaitedFor::kEarlierCall);
}

void LaunchQueues::retry_throttled() {
  if (throttled_.empty()) return;
  ready_.insert(ready_.end(), throttled_.begin(), throttled_.end());
  throttled_.clear();
}

void LaunchQueues::retry_first_throttled() {
  ready_.push_back(throttled_.front());
  throttled_.erase(throttled_.begin());
}

bool LaunchQueues::is_full(const NodeRecord& node) const {
  if (quirks_.max_in_flight == 0) return false;
  bool full = false;
  for_each_device(node.devices, [&](uint32_t d) { full |= in_flight_[d] >= quirks_.max_in_flight; });
  return full;
}

bool LaunchQueues::conflicts_with_running_gang(const NodeRecord& node) const {
  if (!blocks(node)) return false;
  const auto& others = std::has_single_bit(node.devices) ? several_device_gangs_ : one_device_gangs_;
  bool conflicts = false;
  for_each_device(node.devices, [&](uint32_t d) { conflicts |= others[d] != 0; });
  return conflicts;
}

/// Adds `by`, which is 1 or -1 (as unsigned), to the number of launches in flight on each device.
void LaunchQueues::count(const NodeRecord& node, uint32_t by) {
  auto& gangs = std::has_single_bit(node.devices) ? one_device_gangs_ : several_device_gangs_;
  for_each_device(node.devices, [&](uint32_t d) {
    in_flight_[d] += by;
    if (node.gang != 0) gangs[d] += by;
  });
}

void LaunchQueues::clear() {
  ready_.clear();
  throttled_.clear();
  for (auto& fifo : fifos_) fifo.clear();
  gangs_.clear();
  for (auto* counts : {&in_flight_, &one_device_gangs_, &several_device_gangs_}) {
    std::fill(counts->begin(), counts->end(), 0u);
  }
}

void LaunchQueues::validate() const {
  for (const auto& fifo : fifos_) {
    for (size_t i = 1; i < fifo.size(); ++i) {
      PW_CHECK(runs_[fifo[i].run].missing[fifo[i].node] != 0);  // only the head can be ready
    }
  }
  for (size_t d = 0; d < in_flight_.size(); ++d) {
    PW_CHECK(quirks_.max_in_flight == 0 || in_flight_[d] <= quirks_.max_in_flight);
    PW_CHECK(one_device_gangs_[d] + several_device_gangs_[d] <= in_flight_[d]);
  }
}

}  // namespace pathways
