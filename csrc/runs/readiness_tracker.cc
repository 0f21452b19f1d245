#include "runs/readiness_tracker.h"

#include <algorithm>

#include "base/check.h"

namespace pathways {

ReadinessTracker::ReadyQueue* ReadinessTracker::queue_of(uint64_t devices, bool moves) {
  const auto queue = std::find_if(queues_.begin(), queues_.end(), [&](const ReadyQueue& each) {
    return each.devices == devices && each.moves == moves;
  });
  return queue == queues_.end() ? nullptr : &*queue;
}

void ReadinessTracker::add(uint64_t devices, const PendingValue& item, std::span<const uint64_t> input_ages) {
  ++waiting_;
  const bool moves = item.held != nullptr;
  ReadyQueue* queue = queue_of(devices, moves);
  if (queue == nullptr) queue = &queues_.emplace_back(ReadyQueue{devices, moves, {}});
  auto& pending = queue->pending;
  if (pending.empty() || pending.back().age <= item.age) {  // the usual case
    const bool is_chained = !pending.empty() && pending.back().kind == PendingValue::Kind::kNode &&
                            std::find(input_ages.begin(), input_ages.end(), pending.back().age) != input_ages.end();
    pending.push_back(item);
    pending.back().chained = is_chained;
    return;
  }
  auto at = std::prev(pending.end());
  while (at != pending.begin() && std::prev(at)->age > item.age) --at;
  at->chained = false;  // another one comes before it now
  pending.insert(at, item);
}

/// The length of the chain at the front: each of its pending values was computed from the one before.
size_t ReadinessTracker::chain_length(const ReadyQueue& queue) {
  const size_t most = std::min(queue.pending.size(), kMostAtOnce);
  size_t length = 1;
  while (length < most && queue.pending[length].chained) ++length;
  return length;
}

/// LOOK-1: the launch that was just made has taken over the inputs at `positions`. From now on these values tell
/// nothing. So a pending value that holds one of them gets another output of its launch, or this launch answers for it.
/// Of an input that no pending value holds, nobody is to be told anything.
bool ReadinessTracker::take_over(uint64_t devices, std::span<const uint32_t> positions, std::span<const Value> inputs,
                                 std::span<const uint64_t> input_ages) {
  ReadyQueue* queue = queue_of(devices);
  if (queue == nullptr) return false;
  bool answers = false;
  taken_.clear();
  for (const uint32_t position : positions) {
    const Value value = inputs[position];
    const uint64_t age = input_ages[position];
    const auto is_younger = [](const PendingValue& item, uint64_t than) { return item.age < than; };
    auto item = std::lower_bound(queue->pending.begin(), queue->pending.end(), age, is_younger);
    for (; item != queue->pending.end() && item->age == age; ++item) {
      if (item->value != value || item->taken_by != 0) continue;
      if (taken_.empty()) {
        for (const uint32_t each : positions) taken_.push_back(inputs[each]);
        std::sort(taken_.begin(), taken_.end());
      }
      if (use_another_output(*item)) continue;
      item->taken_by = age_;
      answers = true;
    }
  }
  return answers;
}

/// Gives the pending value of a launch another output of the launch, one that nobody has taken over. False when there
/// is none.
bool ReadinessTracker::use_another_output(PendingValue& item) {
  if (item.kind != PendingValue::Kind::kNode) return false;
  const Value found = outputs_.another_output(item, taken_);
  if (found == nullptr) return false;
  refs_.retain(found);
  refs_.drop(item.value);
  item.value = found;
  return true;
}

/// LOOK-1: the position of the pending value that answers for the one at `at`: `at` itself, or the launch that took its
/// value over.
size_t ReadinessTracker::answering(const ReadyQueue& queue, size_t at) {
  while (queue.pending[at].taken_by != 0) {
    const uint64_t age = queue.pending[at].taken_by;
    while (queue.pending[at].age < age) ++at;  // it is in the queue: values are settled from the front on
    // A reader that waited for an output of that launch may stand before the launch itself; its value has the same age.
    PW_DCHECK(queue.pending[at].age == age);
  }
  return at;
}

/// The readiness of a pending value. A value that was taken over, as were all other outputs of its launch, is ready
/// when its taker is ready or has failed: nobody can read the value any more.
Readiness ReadinessTracker::look(size_t queue, size_t at) {
  PendingValue& item = queues_[queue].pending[at];
  if (item.taken_by != 0) {
    return look(queue, answering(queues_[queue], at)) == Readiness::kPending ? Readiness::kPending : Readiness::kReady;
  }
  if (item.was_ready) return Readiness::kReady;
  const Readiness readiness = device_.readiness(item.value);
  if (readiness != Readiness::kDeleted) return readiness;
  taken_.clear();  // who deleted it is not known here: a failed launch, or another user of the array
  return use_another_output(item) ? device_.readiness(item.value) : Readiness::kReady;
}

/// A long part of the chain at the front that its last value answers for, and what that value says. Most looks find
/// nothing ready, and end at the front.
ReadinessTracker::Front ReadinessTracker::look_at_front(size_t queue) {
  const size_t chain = chain_length(queues_[queue]), half = chain / 2;
  const Readiness last = look(queue, chain - 1);
  // A failure counts only at the front, so that the first value that failed is reported with its own error.
  if (last == Readiness::kReady || chain == 1) return {chain, last};
  const Readiness first = look(queue, 0);
  if (first == Readiness::kReady && half > 1 && look(queue, half - 1) == Readiness::kReady) return {half, first};
  return {1, first};
}

/// LOOK-1: when a pending value further down answers for the front, the position of the first pending value before that
/// one which has a value of its own.
std::optional<size_t> ReadinessTracker::first_between(const ReadyQueue& queue) {
  const size_t answer = answering(queue, 0);
  for (size_t at = 0; at < answer; ++at) {
    if (queue.pending[at].taken_by == 0) return at;
  }
  return std::nullopt;
}

/// GANG-2: the launch that answers for the front may be a gang. Another host may need a send that is pending between
/// the two before it can launch its part of the gang. So a pending value between the two is settled out of turn when it
/// is ready, together with those that it answers for. Moves them to `settling_`, and returns the readiness of that
/// value.
Readiness ReadinessTracker::take_between(size_t queue) {
  const std::optional<size_t> own = first_between(queues_[queue]);
  if (!own) return Readiness::kPending;
  const Readiness readiness = look(queue, *own);
  if (readiness == Readiness::kPending) return readiness;
  auto& pending = queues_[queue].pending;
  between_.clear();
  for (size_t at = 0; at <= *own; ++at) {
    if (answering(queues_[queue], at) == *own) between_.push_back(at);
  }
  settling_.clear();
  for (const size_t at : between_) settling_.push_back(pending[at]);
  for (auto at = between_.rbegin(); at != between_.rend(); ++at) {
    pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(*at));
    if (*at < pending.size()) pending[*at].chained = false;  // another one comes before it now
  }
  return readiness;
}

const PendingValue* ReadinessTracker::find_launch(uint64_t age) const {
  for (const ReadyQueue& queue : queues_) {
    for (const PendingValue& item : queue.pending) {
      if (item.kind == PendingValue::Kind::kNode && item.age == age) return &item;
    }
  }
  return nullptr;
}

const PendingValue* ReadinessTracker::find_launch(uint32_t run, uint32_t node) const {
  for (const ReadyQueue& queue : queues_) {
    for (const PendingValue& item : queue.pending) {
      if (item.kind == PendingValue::Kind::kNode && item.run == run && item.index == node) return &item;
    }
  }
  return nullptr;
}

void ReadinessTracker::watched(std::vector<Value>* out) const {
  out->clear();
  for (const ReadyQueue& queue : queues_) {
    if (queue.pending.empty()) continue;
    out->push_back(queue.pending[answering(queue, 0)].value);
    if (const auto own = first_between(queue)) out->push_back(queue.pending[*own].value);
  }
}

void ReadinessTracker::watched_half_way(std::vector<Value>* out) const {
  out->clear();
  for (const ReadyQueue& queue : queues_) {
    if (queue.pending.empty()) continue;
    out->push_back(queue.pending[answering(queue, queue.pending.size() / 2)].value);
    if (const auto own = first_between(queue)) out->push_back(queue.pending[*own].value);
  }
}

void ReadinessTracker::clear() {
  for (ReadyQueue& queue : queues_) {
    for (PendingValue& item : queue.pending) {
      refs_.reset(item.value);
      refs_.reset(item.held);
    }
    queue.pending.clear();
  }
  waiting_ = 0;
}

void ReadinessTracker::validate() const {
  uint64_t waiting = 0;
  for (const ReadyQueue& queue : queues_) {
    waiting += queue.pending.size();
    uint64_t last = 0;
    for (size_t at = 0; at < queue.pending.size(); ++at) {
      const PendingValue& item = queue.pending[at];
      PW_CHECK(item.value != nullptr && item.age >= last && item.age <= age_);
      if (at != 0 && item.chained) PW_CHECK(queue.pending[at - 1].kind == PendingValue::Kind::kNode);
      if (item.taken_by != 0) PW_CHECK(queue.pending[answering(queue, at)].taken_by == 0);  // LOOK-1
      last = item.age;
    }
  }
  PW_CHECK(waiting == waiting_);
}

}  // namespace pathways
