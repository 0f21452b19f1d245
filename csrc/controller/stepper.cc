#include "controller/stepper.h"

#include <algorithm>

#include "base/check.h"

namespace pathways {

void Stepper::add_plan(uint32_t plan, std::span<const ProgramNode> nodes) {
  std::vector<Step> steps;
  Step step;
  for (const ProgramNode& node : nodes) {
    step.last = node.number;
    step.hosts_to_notify.insert(step.hosts_to_notify.end(), node.hosts.begin(), node.hosts.end());
    if (node.is_call || &node == &nodes.back()) {
      std::sort(step.hosts_to_notify.begin(), step.hosts_to_notify.end());
      step.hosts_to_notify.erase(std::unique(step.hosts_to_notify.begin(), step.hosts_to_notify.end()),
                                 step.hosts_to_notify.end());
      if (node.is_call) step.heard = node.hosts;
      steps.push_back(std::move(step));
      step = {};
    }
  }
  plans_.try_emplace(plan, std::move(steps));
}

void Stepper::begin(EntryId run, uint64_t order, uint32_t client, uint32_t plan) {
  PW_DCHECK(!is_busy());
  steps_ = &plans_.at(plan);
  at_ = 0;
  run_ = run;
  order_ = order;
  client_ = client;
  left_ = 0;
  std::fill(over_.begin(), over_.end(), false);
}

const Stepper::Step* Stepper::next() {
  if (steps_ == nullptr || left_ != 0) return nullptr;
  if (at_ == steps_->size()) {
    steps_ = nullptr;
    return nullptr;
  }
  const Step& step = (*steps_)[at_++];
  for (const uint32_t host : step.heard) {
    if (over_[host]) continue;
    awaited_[host] = true;
    ++left_;
  }
  return &step;
}

void Stepper::stop_awaiting(uint32_t host) {
  if (!awaited_[host]) return;
  awaited_[host] = false;
  --left_;
}

bool Stepper::enqueued(EntryId run, uint32_t node, uint32_t host) {
  if (steps_ == nullptr || run != run_ || at_ == 0 || (*steps_)[at_ - 1].last != node || !awaited_[host]) return false;
  stop_awaiting(host);
  return true;
}

void Stepper::host_done(EntryId run, uint32_t host) {
  if (steps_ == nullptr || run != run_) return;
  over_[host] = true;
  stop_awaiting(host);
}

void Stepper::await_nothing() {
  std::fill(over_.begin(), over_.end(), true);
  std::fill(awaited_.begin(), awaited_.end(), false);
  left_ = 0;
}

}  // namespace pathways
