#include "controller/deadlines.h"

#include <utility>

#include "controller/admission_queue.h"
#include "ledger/client_records.h"

namespace pathways {

std::string Deadlines::too_late(std::span<const std::byte> run) const {
  const uint32_t plan = read_record<RunRecord>(run).plan;
  const PlanMemory* memory = ledger_.memory_of(plan);
  return "DeadlineExceededError: a run of " +
         (memory == nullptr ? "plan " + std::to_string(plan) : "program '" + memory->name + "'") +
         " was not over by its deadline";
}

void Deadlines::watch(const ClientState& client, std::span<const std::byte> bytes, EntryId id, uint64_t loop) {
  const int64_t at_ns = deadline_of(bytes);
  if (at_ns == 0) return;
  DeadlineHeap::Item item;
  item.at_ns = at_ns;
  item.tag = read_record<RunRecord>(bytes).tag;
  item.entry = id;
  item.loop = loop;
  item.client = client.id;
  item.text = too_late(bytes);
  if (id != DeadlineHeap::kHeld) item.order = grants_.entry(id).order;
  item.results = results_of(bytes);
  heap_.add(std::move(item), [this](const DeadlineHeap::Item& each) { return is_over(each); });
}

bool Deadlines::is_over(const DeadlineHeap::Item& item) const {
  if (item.loop != 0) return !loops_.may_end(item.loop);
  if (item.entry == DeadlineHeap::kHeld) {
    const ClientState* client = clients_.find(item.client);
    if (client == nullptr) return true;
    return item.results.empty() ? client->held.empty() : !client->held.names(item.results.front());
  }
  const Entry& entry = grants_.entry(item.entry);
  return entry.order != item.order || (entry.state != EntryState::kWaiting && entry.state != EntryState::kGranted);
}

uint32_t Deadlines::pass(AdmissionQueue& queue, int64_t now) {
  uint32_t done = 0;
  for (; !heap_.empty() && heap_.next_ns() <= now; ++done) {
    const DeadlineHeap::Item item = heap_.pop();
    if (!is_over(item)) pass(item, queue);
  }
  return done;
}

void Deadlines::pass(const DeadlineHeap::Item& item, AdmissionQueue& queue) {
  if (item.loop != 0) {
    ++stats_.late;
    loops_.end(item.loop, item.text, kFailedByDeadline);
    return;
  }
  ClientState* const client = clients_.find(item.client);
  if (client == nullptr) return;  // the client is gone, so nobody is notified
  if (item.entry == DeadlineHeap::kHeld) {
    if (queue.drop_held(*client, item.tag, item.text, kFailedByDeadline)) ++stats_.late;
    return;
  }
  ++stats_.late;
  if (grants_.entry(item.entry).state == EntryState::kGranted) {  // GANG-1: all its hosts still run it
    for (const uint64_t result : item.results) {
      clients_.tell(*client, Handle{result}, item.text, kFailedByDeadline);
      clients_.is_late(*client, Handle{result});
    }
    return;
  }
  grants_.drop(item.entry, item.text, kFailedByDeadline);
}

}  // namespace pathways
