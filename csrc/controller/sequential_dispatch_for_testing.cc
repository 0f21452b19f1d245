#include "controller/sequential_dispatch_for_testing.h"

#include <cstring>
#include <utility>

namespace pathways {

void SequentialDispatchForTesting::wait(const Entry& entry, EntryId id, std::span<const std::byte> record) {
  stepper_.waiting().push_back({id, entry, {record.begin(), record.end()}});
  if (ClientState* client = clients_.find(entry.client)) client->credits.record_waits(record.size());
}

std::optional<SequentialDispatchForTesting::Ready> SequentialDispatchForTesting::next() {
  send_gos();
  if (stepper_.is_busy() || stepper_.waiting().empty()) return std::nullopt;
  Ready ready{std::move(stepper_.waiting().front()), 0};
  stepper_.waiting().pop_front();
  const Stepper::Waiting& first = ready.entry;
  if (ClientState* client = clients_.find(first.entry.client)) client->credits.record_goes(first.record.size());
  if (first.entry.kind != EntryKind::kRun) return ready;
  const uint32_t plan = read_record<RunRecord>(first.record).plan;
  if (!stepper_.knows(plan)) return ready;
  ready.flags = kRunStepwise;
  stepper_.begin(first.id, first.entry.order, first.entry.client, plan);
  return ready;
}

void SequentialDispatchForTesting::send_gos() {
  while (const Stepper::Step* step = stepper_.next()) {
    const GoRecord go{{RecordKind::kGo, 0, stepper_.client()}, stepper_.order(), step->last, 0};
    stats_.records_out += step->hosts_to_notify.size();
    for (const uint32_t h : step->hosts_to_notify) {
      if (hosts_.is_lost(h)) continue;
      hosts_.outbox_of(h).send(sizeof go, [&](std::byte* out) { std::memcpy(out, &go, sizeof go); });
    }
  }
}

bool SequentialDispatchForTesting::enqueued(uint32_t host, const EnqueuedRecord& record) {
  return record.host == host && record.tag <= UINT32_MAX &&
         stepper_.enqueued(static_cast<EntryId>(record.tag), record.node, host);
}

}  // namespace pathways
