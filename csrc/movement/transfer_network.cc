/// What a TransferManager does for transfers to and from other machines: early sends, and what has come (FAR-3, see
/// device/early_chunk.h).
#include <algorithm>
#include <optional>
#include <utility>

#include "movement/transfer_manager.h"

namespace pathways {

/// FAR-3: sends to the hosts of other machines that have not announced their receives.
void TransferManager::send_early(uint64_t key) {
  PendingTransfer& transfer = pending_.at(key);
  const Run& run = runs_[transfer.run];
  const NodeContext where = run.context(transfer.node);
  std::vector<ReceiveBuffers> early;
  std::vector<uint64_t> bytes;
  for (const uint32_t destination : run.plan->plan.destinations(run.plan->plan.node(transfer.node))) {
    std::vector<uint64_t> offsets;
    if (std::ranges::count(transfer.announced, destination) != 0 || peers_.is_closed(destination)) continue;
    const uint64_t room = mover_.early_bytes(where, destination, &offsets);
    if (room == 0 || !early_.take(destination, room)) continue;
    early.push_back({destination, std::move(offsets)});
    bytes.push_back(room);
  }
  if (early.empty()) return;
  if (run.is_traced()) transfer.times.send_ns = now_ns_();
  std::vector<SendState> states(early.size(), SendState::kFailed);
  mover_.send(where, transfer.source, early, key, states);
  for (size_t i = 0; i < early.size(); ++i) {
    if (states[i] == SendState::kUnderWay) {
      peers_.send_begins(early[i].source);
      transfer.early_sends.push_back({early[i].source, bytes[i]});
    } else {  // it is sent again when its receive is announced
      early_.return_credit(early[i].source, bytes[i]);
    }
  }
}

/// The receive of an early send is announced. False: it must be sent again.
bool TransferManager::announced_early_send(uint64_t key, EarlySend& send, std::span<const uint64_t> offsets) {
  if (send.state == EarlySend::State::kUnderWay) {
    send.offsets.emplace(offsets.begin(), offsets.end());
    return true;
  }
  const auto removed = early_.remove(pending_.at(key).early_sends, send.destination);
  if (removed->state == EarlySend::State::kFailed) return false;
  // What has no memory there is dropped there, and waits for a receive done.
  end_send(key, removed->destination, Outcome::kDone, {}, offsets.empty() ? Notice::kNeeded : Notice::kSeen);
  return true;
}

/// An early send is over. False: it was none.
bool TransferManager::settle_early_send(uint64_t key, const Sent& sent) {
  PendingTransfer& transfer = pending_.at(key);
  EarlySend* early = EarlySends::find(transfer.early_sends, sent.destination);
  if (early == nullptr) return false;
  if (!early->offsets && !early->given_up) {
    early->state = sent.error.empty() ? EarlySend::State::kKept : EarlySend::State::kFailed;
    return true;
  }
  auto removed = early_.remove(transfer.early_sends, sent.destination);
  if (removed->given_up || peers_.is_dead(sent.destination, order_of(key))) {
    end_send(key, sent.destination, Outcome::kFailed, removed->given_up.value_or(sent.error));
  } else if (removed->offsets->empty()) {
    end_send(key, sent.destination, Outcome::kDone, {});
  } else if (sent.error.empty()) {
    end_send(key, sent.destination, Outcome::kDone, {}, Notice::kSeen);
  } else {
    transfer.ready_receives.push_back({sent.destination, std::move(*removed->offsets)});
    try_send(key);
  }
  return true;
}

void TransferManager::arrived(Arrived&& arrived) {
  if (!peers_.has_come(arrived.order)) {
    if (!arrived.chunk) return;
    const uint64_t bytes = arrived.chunk->bytes().size();
    const auto kept = std::make_shared<Arrived>(std::move(arrived));
    (void)peers_.keep(kept->order, kept->source, bytes, [this, kept] {
      this->arrived(std::move(*kept));
      return Status::kOk;
    });
    return;
  }
  const uint64_t key = node_key(arrived.order, arrived.node);
  const auto at = pending_.find(key);
  if (at == pending_.end()) return;
  PendingTransfer& transfer = at->second;
  if (!has_part(transfer, arrived.source, true) || std::ranges::count(transfer.done_sources, arrived.source) != 0)
    return;
  if (!arrived.chunk) {
    source_done(key, arrived.source, Outcome::kDone, {});
  } else if (transfer.has_room || transfer.receive_error == 0) {
    transfer.early_arrivals.push_back({arrived.source, std::move(*arrived.chunk)});
    if (transfer.has_room) placeable_.push_back(key);
  }
}

uint32_t TransferManager::place_early() {
  if (placeable_.empty()) return 0;  // as in nearly every pass
  const std::vector<uint64_t> keys = std::exchange(placeable_, {});
  for (const uint64_t key : keys) {
    const auto at = pending_.find(key);
    if (at == pending_.end()) continue;
    const std::vector<EarlyArrival> arrivals = std::exchange(at->second.early_arrivals, {});
    for (const EarlyArrival& arrival : arrivals) place(key, arrival);
  }
  return static_cast<uint32_t>(keys.size());
}

/// Writes what came early to the receive's memory, which there is now.
void TransferManager::place(uint64_t key, const EarlyArrival& arrival) {
  const auto at = pending_.find(key);
  if (at == pending_.end() || std::ranges::count(at->second.done_sources, arrival.source) != 0) return;
  const NodeContext where = runs_[at->second.run].context(at->second.node);
  if (mover_.place_early(where, arrival.source, arrival.chunk.bytes()) == Status::kOk) {
    source_done(key, arrival.source, Outcome::kDone, {});
  } else {
    source_done(key, arrival.source, Outcome::kFailed, mover_.last_error());
  }
}

}  // namespace pathways
