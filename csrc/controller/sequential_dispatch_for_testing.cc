#include "controller/sequential_dispatch_for_testing.h"

#include <cstring>
#include <utility>

namespace pathways {

void SequentialDispatchForTesting::wait(const Entry& entry, EntryId id, std::span<const std::byte> record) {
  waiting_.push_back({id, entry, {record.begin(), record.end()}});
  if (ClientState* client = clients_.find(entry.client)) client->credits.record_waits(record.size());
}

std::optional<SequentialDispatchForTesting::Granted> SequentialDispatchForTesting::next() {
  send_gos();
  if (stepper_.is_busy() || waiting_.empty()) return std::nullopt;
  Granted first = std::move(waiting_.front());
  waiting_.pop_front();
  if (ClientState* client = clients_.find(first.entry.client)) client->credits.record_goes(first.record.size());
  if (is_over_ || first.entry.kind != EntryKind::kRun) return first;
  const uint32_t plan = read_record<RunRecord>(first.record).plan;
  if (!stepper_.knows(plan)) return first;
  first.flags = kRunStepwise;
  stepper_.begin(first.id, first.entry.order, first.entry.client, plan);
  return first;
}

void SequentialDispatchForTesting::end() {
  is_over_ = true;
  stepper_.await_nothing();
}

void SequentialDispatchForTesting::send_gos() {
  while (const Stepper::Step* step = stepper_.next()) {
    const GoRecord go{{RecordKind::kGo, 0, stepper_.client()}, stepper_.order(), step->last, 0};
    stats_.records_out += step->hosts_to_notify.size();
    for (const uint32_t h : step->hosts_to_notify) {
      hosts_.outbox_of(h).send(sizeof go, [&](std::byte* out) { std::memcpy(out, &go, sizeof go); });
    }
  }
}

bool SequentialDispatchForTesting::enqueued(uint32_t host, const EnqueuedRecord& record) {
  if (record.host != host || record.tag > UINT32_MAX) return false;
  return is_over_ || stepper_.enqueued(static_cast<EntryId>(record.tag), record.node, host);
}

}  // namespace pathways
