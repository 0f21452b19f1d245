#include "movement/transfer_manager.h"

#include <algorithm>

#include "base/check.h"

namespace pathways {

void TransferManager::prepare(NodeRef ref) {
  Run& run = runs_[ref.run];
  const Plan& plan = run.plan->plan;
  const NodeRecord& node = plan.node(ref.node);
  if (is_local(plan, node)) return;
  const uint64_t key = node_key(run.order, node.global_node);
  const auto [at, is_new] = pending_.try_emplace(key);
  PW_CHECK(is_new);
  PendingTransfer& transfer = at->second;
  transfer.run = ref.run;
  transfer.node = ref.node;
  transfer.sends_left = node.destination_count;
  transfer.receives_left = node.source_count;
  if (queues_.gangs_block() && node.destination_count != 0) {
    trim_sends();
    unsourced_.push_back(key);
    unsent_.push_back(key);
  }
  if (node.output_count == 0) return;
  if (receives_.begin(key, *this)) return;
  transfer.times.was_stalled = true;
}

bool TransferManager::is_local(const Plan& plan, const NodeRecord& node) const {
  const auto sources = plan.sources(node), destinations = plan.destinations(node);
  return node.spread == 0 && sources.size() == 1 && sources[0] == host_ && destinations.size() == 1 &&
         destinations[0] == host_;
}

void TransferManager::start(NodeRef ref) {
  Run& run = runs_[ref.run];
  const Plan& plan = run.plan->plan;
  const NodeRecord& node = plan.node(ref.node);
  const uint32_t input = plan.inputs(node)[0];
  const uint32_t verdict = run.verdict(node);
  const uint32_t error = verdict != 0 ? verdict : run.input_errors[ref.node];
  if (is_local(plan, node)) {
    start_local(ref, run, node, error);
    return;
  }
  ++started_;
  const uint64_t key = node_key(run.order, node.global_node);
  PendingTransfer& transfer = pending_.at(key);
  if (error == 0) {
    transfer.source = refs_.retain(run.values[input]);
    tracker_.add(node.input_devices, {PendingValue::Kind::kSend, false, ref.run, ref.node,
                                      refs_.retain(transfer.source), key, tracker_.age()});
  }
  flow_.read_done(run, plan.inputs(node));
  if (error != 0) source_settled(key, error);
}

/// A transfer within the host.
void TransferManager::start_local(NodeRef ref, Run& run, const NodeRecord& node, uint32_t error) {
  if (error == 0 && !memory_.has_room(*run.plan, node)) {
    if (run.is_traced()) trace_.throttled(run, ref.node, kThrottledByMemory);
    queues_.throttle(ref);
    return;
  }
  ++started_;
  const Plan& plan = run.plan->plan;
  const uint32_t input = plan.inputs(node)[0], output = plan.outputs(node)[0];
  Value moved = nullptr;
  const bool is_traced = run.is_traced() && error != kDead;
  if (is_traced) trace_.launched(run, ref.node, now_ns_());
  if (error != 0) {
    flow_.propagate_error(ref.run, output, error);
  } else if (device_.transfer(run.context(ref.node), run.values[input], &moved) == Status::kOk) {
    memory_.book(run, node.devices, output, moved);
    const uint64_t age = tracker_.next_age();
    if (is_traced) trace_move(ref, run, node, moved);
    flow_.deliver(ref.run, output, moved, node.devices, age);
  } else {
    flow_.propagate_error(ref.run, output, errors_.add(std::string(device_.last_error())));
  }
  if (is_traced && moved == nullptr) trace_.ended(run, ref.node, now_ns_(), true, true);
  flow_.read_done(run, plan.inputs(node));
  flow_.close_step(ref.run);
}

/// Notes the end of a transfer within the host, or sees to it that the end is noticed.
void TransferManager::trace_move(NodeRef ref, Run& run, const NodeRecord& node, Value moved) {
  if (device_.readiness(moved) != Readiness::kPending) {
    trace_.ended(run, ref.node, now_ns_(), false, true);
    return;
  }
  ++run.open;
  tracker_.add(node.devices,
               {PendingValue::Kind::kMove, false, ref.run, ref.node, refs_.retain(moved), 0, tracker_.age()});
}

void TransferManager::source_settled(uint64_t key, uint32_t error) {
  PendingTransfer& transfer = pending_.at(key);
  if (runs_[transfer.run].is_traced()) transfer.times.source_ready_ns = now_ns_();
  transfer.source_ready = true;
  transfer.source_error = error;
  if (error == 0) send_early(key);
  if (!transfer.ready_receives.empty()) {
    try_send(key);
  } else if (transfer.sends_left == 0) {  // nobody is left to send to
    refs_.reset(transfer.source);
    finish(key);
  }
}

bool TransferManager::take_memory(uint64_t key) {
  PendingTransfer& transfer = pending_.at(key);
  Run& run = runs_[transfer.run];
  const NodeRecord& node = run.plan->plan.node(transfer.node);
  std::vector<ReceiveBuffers> receives;
  const Status status = mover_.begin_receive(run.context(transfer.node), &receives);
  if (status == Status::kNoMemory) return false;
  transfer.has_room = status == Status::kOk;
  if (run.is_traced()) transfer.times.announced_ns = now_ns_();
  if (status != Status::kOk) {
    // Announces to the sources a receive without offsets, so that they write nothing and end their part.
    transfer.receive_error = errors_.add(std::string(mover_.last_error()));
    receives.clear();
    for (uint32_t source : run.plan->plan.sources(node)) receives.push_back({source, {}});
  }
  const uint64_t order = run.order;
  const uint32_t global = node.global_node;
  for (ReceiveBuffers& receive : receives) {
    if (receive.source == host_) {
      transfer.ready_receives.push_back(std::move(receive));
    } else if (!peers_.is_dead(receive.source, order)) {
      if (peers_.is_closed(receive.source)) receive.offsets.clear();
      link_.receive_ready(receive.source, order, global, receive.offsets);
    }
  }
  if (!transfer.has_room) transfer.early_arrivals.clear();
  if (!transfer.early_arrivals.empty()) placeable_.push_back(key);
  try_send(key);
  return true;
}

Status TransferManager::on_receive_ready(uint64_t order, uint32_t node, uint32_t host,
                                         std::span<const uint64_t> offsets) {
  const uint64_t key = node_key(order, node);
  const auto at = pending_.find(key);
  if (at == pending_.end()) {  // ERR-1: a transfer that is over here has heard of all its destinations
    link_.receive_done(host, order, node, Outcome::kFailed, peers_.why_refused(order));
    return Status::kOk;
  }
  PendingTransfer& transfer = at->second;
  if (!has_part(transfer, host, false)) return Status::kInvalid;
  if (std::find(transfer.announced.begin(), transfer.announced.end(), host) != transfer.announced.end())
    return Status::kInvalid;
  transfer.announced.push_back(host);
  if (EarlySend* early = EarlySends::find(transfer.early_sends, host);
      early != nullptr && announced_early_send(key, *early, offsets)) {
    return Status::kOk;
  }
  transfer.ready_receives.push_back({host, {offsets.begin(), offsets.end()}});
  try_send(key);
  return Status::kOk;
}

/// Whether a host takes part in a transfer.
bool TransferManager::has_part(const PendingTransfer& transfer, uint32_t host, bool as_source) const {
  const Plan& plan = runs_[transfer.run].plan->plan;
  const NodeRecord& node = plan.node(transfer.node);
  const auto hosts = as_source ? plan.sources(node) : plan.destinations(node);
  return std::find(hosts.begin(), hosts.end(), host) != hosts.end();
}

void TransferManager::try_send(uint64_t key) {
  PendingTransfer& transfer = pending_.at(key);
  if (!transfer.source_ready || transfer.ready_receives.empty()) return;
  const std::vector<ReceiveBuffers> ready_receives = std::move(transfer.ready_receives);
  transfer.ready_receives.clear();
  std::vector<SendState> states(ready_receives.size(), SendState::kFailed);
  std::string text;
  const Outcome failure = transfer.source_error == kDead ? Outcome::kDead : Outcome::kFailed;
  if (failure == Outcome::kFailed && transfer.source_error != 0) {
    text = errors_.text(transfer.source_error);
  } else if (failure == Outcome::kFailed) {
    if (runs_[transfer.run].is_traced()) transfer.times.send_ns = now_ns_();
    // One call sends to all hosts that have announced. The reference to the value stays until the last send is over.
    mover_.send(runs_[transfer.run].context(transfer.node), transfer.source, ready_receives, key, states);
    if (std::find(states.begin(), states.end(), SendState::kFailed) != states.end()) text = mover_.last_error();
  }
  for (size_t i = 0; i < ready_receives.size(); ++i) {  // each end_send may end the transfer
    if (states[i] == SendState::kUnderWay) {
      peers_.send_begins(ready_receives[i].source);
      continue;
    }
    const bool failed = states[i] == SendState::kFailed;
    end_send(key, ready_receives[i].source, failed ? failure : Outcome::kDone,
             failed ? std::string_view(text) : std::string_view());
  }
}

/// A send is over: everything is written to `destination`, or never will be. Notifies the destination if it must.
void TransferManager::end_send(uint64_t key, uint32_t destination, Outcome outcome, std::string_view text,
                               Notice notice) {
  PendingTransfer& transfer = pending_.at(key);
  const Run& run = runs_[transfer.run];
  PW_CHECK(transfer.sends_left > 0);
  if (run.is_traced() && outcome != Outcome::kDead) {
    const bool failed = outcome == Outcome::kFailed;
    trace_.exchanged(run, transfer.node, TraceKind::kSend, destination, transfer.times, now_ns_(), failed);
  }
  if (--transfer.sends_left == 0 && transfer.source_ready) refs_.reset(transfer.source);
  if (destination == host_) {
    source_done(key, destination, outcome, text);
  } else if ((outcome == Outcome::kDone && notice == Notice::kSeen) || peers_.is_dead(destination, run.order)) {
    finish(key);
  } else {
    link_.receive_done(destination, run.order, run.plan->plan.node(transfer.node).global_node, outcome, text);
    finish(key);
  }
}

Status TransferManager::on_receive_done(uint64_t order, uint32_t node, uint32_t host, Outcome outcome,
                                        std::string_view text) {
  const uint64_t key = node_key(order, node);
  const auto at = pending_.find(key);
  // What has come has come, whatever its source says later: a stream may break before the source knows of it.
  const bool has_come =
      at == pending_.end() ? peers_.has_come(order) : std::ranges::count(at->second.done_sources, host) != 0;
  if (has_come && outcome == Outcome::kFailed) return Status::kOk;
  // A source is over only after this host has announced its receive, and this host was prepared then.
  if (at == pending_.end() || host == host_ || !has_part(at->second, host, true)) {
    return Status::kInvalid;
  }
  const Run& run = runs_[at->second.run];
  if (outcome == Outcome::kDead && run.plan->plan.node(at->second.node).predicate == kNoPredicate) {
    return Status::kInvalid;  // PLAN-5: what is always taken is never dead
  }
  const auto& heard = at->second.done_sources;
  if (std::find(heard.begin(), heard.end(), host) != heard.end()) return Status::kInvalid;
  source_done(key, host, outcome, text);
  return Status::kOk;
}

void TransferManager::source_done(uint64_t key, uint32_t host, Outcome outcome, std::string_view text) {
  PendingTransfer& transfer = pending_.at(key);
  PW_CHECK(transfer.receives_left > 0);
  if (const Run& run = runs_[transfer.run]; run.is_traced() && outcome != Outcome::kDead) {
    const bool failed = outcome == Outcome::kFailed;
    trace_.exchanged(run, transfer.node, TraceKind::kReceive, host, transfer.times, now_ns_(), failed);
  }
  transfer.done_sources.push_back(host);
  if (outcome != Outcome::kDone && transfer.receive_error == 0) {
    transfer.receive_error = outcome == Outcome::kDead ? kDead : errors_.add(std::string(text));
  }
  if (--transfer.receives_left == 0) finish_receive(key);
  finish(key);
}

void TransferManager::miss(uint32_t slot, const Lost& lost) {
  const Run& run = runs_[slot];
  for (const NodeRecord& node : run.plan->plan.nodes()) {
    if (node.kind == NodeKind::kTransfer) miss_in(node_key(run.order, node.global_node), lost);
  }
}

/// Counts what a lost peer still owes to a transfer as failed. Nothing is written to a dead one from now on.
void TransferManager::miss_in(uint64_t key, const Lost& lost) {
  auto at = pending_.find(key);
  if (at == pending_.end()) return;
  const auto is_its = [&](const ReceiveBuffers& ready) { return ready.source == lost.host; };
  if (lost.state == LostPeer::kDead && std::erase_if(at->second.ready_receives, is_its) != 0) {
    end_send(key, lost.host, Outcome::kFailed, {});
    at = pending_.find(key);
    if (at == pending_.end()) return;
  }
  PendingTransfer& transfer = at->second;
  if (has_part(transfer, lost.host, true) && std::ranges::count(transfer.done_sources, lost.host) == 0) {
    transfer.is_written |= transfer.has_room && lost.state == LostPeer::kAlive;
    if (transfer.receives_left == 1) receives_.forget(key);  // it needs no memory any more
    source_done(key, lost.host, Outcome::kFailed, lost.text);
    at = pending_.find(key);
    if (at == pending_.end()) return;
  }
  if (has_part(at->second, lost.host, false) && std::ranges::count(at->second.announced, lost.host) == 0) {
    at->second.announced.push_back(lost.host);
    if (EarlySend* early = EarlySends::find(at->second.early_sends, lost.host);
        early != nullptr && early->state == EarlySend::State::kUnderWay) {
      early->given_up = lost.text;  // `sent` follows
      return;
    }
    (void)early_.remove(at->second.early_sends, lost.host);
    end_send(key, lost.host, Outcome::kFailed, lost.text);
  }
}

void TransferManager::finish_receive(uint64_t key) {
  PendingTransfer& transfer = pending_.at(key);
  Run& run = runs_[transfer.run];
  const Plan& plan = run.plan->plan;
  const NodeRecord& node = plan.node(transfer.node);
  const NodeContext where = run.context(transfer.node);
  const uint32_t output = plan.outputs(node)[0];
  Value received = nullptr;
  if (transfer.receive_error != 0) {
    if (transfer.has_room && !transfer.is_written) mover_.abandon_receive(where);
    flow_.propagate_error(transfer.run, output, transfer.receive_error);
  } else if (mover_.finish_receive(where, &received) == Status::kOk) {
    memory_.book(run, node.devices, output, received);
    flow_.deliver(transfer.run, output, received, node.devices, tracker_.next_age());
  } else {
    flow_.propagate_error(transfer.run, output, errors_.add(std::string(mover_.last_error())));
  }
}

/// Earlier gangs are launched already, because this call heads the FIFO of gangs.
bool TransferManager::owes_before(const Run& run, const NodeRecord& node) {
  if (!queues_.blocks(node) || pending_.empty()) return false;
  const uint64_t key = node_key(run.order, node.global_node);
  trim_sends();
  if (!unsourced_.empty() && unsourced_.front() < key) return true;
  if (!queues_.waits_in_launch(node)) return false;
  return receives_.waits_before(key) || (!unsent_.empty() && unsent_.front() < key);
}

/// Removes from the fronts of `unsourced_` and `unsent_` the sends that have their source, or are over.
void TransferManager::trim_sends() {
  const auto trim = [&](std::deque<uint64_t>& keys, auto&& is_owed) {
    while (!keys.empty()) {
      const auto at = pending_.find(keys.front());
      if (at != pending_.end() && at->second.sends_left != 0 && is_owed(at->second)) return;
      keys.pop_front();
    }
  };
  trim(unsourced_,
       [](const PendingTransfer& transfer) { return transfer.source == nullptr && !transfer.source_ready; });
  trim(unsent_, [](const PendingTransfer&) { return true; });
}

void TransferManager::finish(uint64_t key) {
  const auto at = pending_.find(key);
  if (at == pending_.end()) return;
  const PendingTransfer& transfer = at->second;
  if (transfer.sends_left != 0 || transfer.receives_left != 0) return;
  const uint32_t slot = transfer.run;
  const NodeRecord& node = runs_[slot].plan->plan.node(transfer.node);
  if (node.input_count != 0 && !transfer.source_ready) return;  // a lost peer's part may end before the value is ready
  pending_.erase(at);
  flow_.close_step(slot);
}

void TransferManager::sent(const Sent& sent) {
  if (settle_early_send(sent.key, sent)) return;
  end_send(sent.key, sent.destination, sent.error.empty() ? Outcome::kDone : Outcome::kFailed, sent.error, sent.notice);
}

const PendingTransfer* TransferManager::find(uint64_t key) const {
  const auto found = pending_.find(key);
  return found == pending_.end() ? nullptr : &found->second;
}

void TransferManager::clear() {
  for (auto& [key, transfer] : pending_) refs_.reset(transfer.source);
  pending_.clear();
  early_.clear();
  unsourced_.clear();
  unsent_.clear();
  placeable_.clear();
}

void TransferManager::validate() const {
  for (const auto& [key, transfer] : pending_) {
    PW_CHECK(runs_[transfer.run].plan != nullptr && runs_[transfer.run].order == order_of(key));
    PW_CHECK(transfer.source == nullptr || transfer.sends_left != 0 || !transfer.source_ready);
  }
}

}  // namespace pathways
