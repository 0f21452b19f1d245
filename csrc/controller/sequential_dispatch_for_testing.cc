/// The controller's half of sequential dispatch (controller/stepper.h): sends gos, and takes the hosts' reports.
#include <cstring>

#include "base/status.h"
#include "controller/controller.h"

namespace pathways {

void Controller::add_plan(uint32_t plan, std::vector<ProgramNode> nodes) {
  if (!stepper_) return;
  for (const ProgramNode& node : nodes) {
    for (const uint32_t host : node.hosts) {
      if (host < hosts_.size()) continue;
      throw Error(Status::kInvalid, "plan " + std::to_string(plan) + " names host " + std::to_string(host) +
                                        ", the cluster has " + std::to_string(hosts_.size()));
    }
  }
  mailbox_.post([this, plan, nodes = std::move(nodes)] { stepper_->add_plan(plan, nodes); });
}

/// Replaces `forward`: entries leave one after the other, each when all steps of the run before it are done.
void Controller::forward_in_turn(const Entry& entry, EntryId id, std::span<const std::byte> record) {
  stepper_->waiting().push_back({id, entry, {record.begin(), record.end()}});
  if (Client* client = client_of(entry.client)) client->waiting.add(1, record.size());
  step_on();
}

void Controller::step_on() {
  while (true) {
    while (const Stepper::Step* step = stepper_->next()) {
      const GoRecord go{{RecordKind::kGo, 0, stepper_->client()}, stepper_->order(), step->last, 0};
      stats_.records_out += step->hosts_to_notify.size();
      for (const uint32_t h : step->hosts_to_notify) {
        if (hosts_[h].is_lost) continue;
        outbox_of(h).send(sizeof go, [&](std::byte* out) { std::memcpy(out, &go, sizeof go); });
      }
    }
    if (stepper_->is_busy() || stepper_->waiting().empty()) return;
    const Stepper::Waiting first = std::move(stepper_->waiting().front());
    stepper_->waiting().pop_front();
    if (Client* client = client_of(first.entry.client)) client->waiting.remove(1, first.record.size());
    RunRecord run{};
    const bool is_run = first.entry.kind == EntryKind::kRun;
    if (is_run) std::memcpy(&run, first.record.data(), sizeof run);
    const bool is_stepped = is_run && stepper_->knows(run.plan);
    forward(first.entry, first.id, first.record, is_stepped ? kRunStepwise : uint16_t{0});
    if (is_stepped) stepper_->begin(first.id, first.entry.order, first.entry.client, run.plan);
  }
}

/// False when the record is invalid.
bool Controller::enqueued(uint32_t host, const EnqueuedRecord& record) {
  if (!stepper_ || record.host != host || record.tag > UINT32_MAX ||
      !stepper_->enqueued(static_cast<EntryId>(record.tag), record.node, host)) {
    return false;
  }
  step_on();
  return true;
}

}  // namespace pathways
