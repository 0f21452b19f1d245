/// The controller's handling of deadlines (DEAD-1): runs whose deadline passes, and runs that arrive too late.
#include <algorithm>
#include <cstring>

#include "controller/controller.h"

namespace pathways {
int64_t Controller::deadline_of(std::span<const std::byte> record) {
  const auto header = read_record<RecordHeader>(record);
  int64_t at_ns = 0;
  if (header.kind == RecordKind::kRun && (header.detail & kRunHasDeadline) != 0) {
    std::memcpy(&at_ns, record.data() + record.size() - sizeof at_ns, sizeof at_ns);
  }
  return at_ns;
}

/// The error text for whatever depends on the run on the hosts; the client itself has a better text.
std::string Controller::too_late(std::span<const std::byte> record) const {
  const uint32_t plan = read_record<RunRecord>(record).plan;
  const PlanMemory* memory = memory_of(plan);
  return "DeadlineExceededError: a run of " +
         (memory == nullptr ? "plan " + std::to_string(plan) : "program '" + memory->name + "'") +
         " was not over by its deadline";
}

/// Refuses a run that was read after its deadline: the run gets no place in the order.
void Controller::refuse_late(Client& client, std::span<const std::byte> record) {
  ++stats_.late;
  ++stats_.dropped;
  ++client.retired;
  client.has_unsent = true;
  fail_results(client, record, too_late(record), kFailedByDeadline);
}

/// Notes the deadline of a run, if it has one. Called when the run is ordered, and earlier too when the run is held.
void Controller::watch_deadline(Client& client, std::span<const std::byte> bytes, EntryId id) {
  const int64_t at_ns = deadline_of(bytes);
  if (at_ns == 0) return;
  const RunRecord record = read_record<RunRecord>(bytes);
  Deadlines::Item item;
  item.at_ns = at_ns;
  item.tag = record.tag;
  item.entry = id;
  item.client = client.id;
  item.text = too_late(bytes);
  if (id != Deadlines::kHeld) item.order = sequencer_.entry(id).order;
  item.results.resize(record.results);
  const std::byte* results = bytes.data() + sizeof record + size_t{record.arguments} * sizeof(uint64_t);
  if (record.results != 0) std::memcpy(item.results.data(), results, item.results.size() * sizeof(uint64_t));
  deadlines_.add(std::move(item), [this](const Deadlines::Item& each) { return is_over(each); });
}

bool Controller::is_over(const Deadlines::Item& item) {
  if (item.entry == Deadlines::kHeld) {
    const Client* client = client_of(item.client);
    if (client == nullptr) return true;
    return item.results.empty() ? client->held.empty() : !client->held_handles.contains(item.results.front());
  }
  const Entry& entry = sequencer_.entry(item.entry);
  return entry.order != item.order || (entry.state != EntryState::kWaiting && entry.state != EntryState::kGranted);
}

uint32_t Controller::pass_deadlines() {
  const int64_t now = monotonic_ns();
  uint32_t done = 0;
  for (; !deadlines_.empty() && deadlines_.next_ns() <= now; ++done) {
    const Deadlines::Item item = deadlines_.pop();
    if (!is_over(item)) pass_deadline(item);
  }
  return done;
}

void Controller::pass_deadline(const Deadlines::Item& item) {
  Client* const found = client_of(item.client);
  if (found == nullptr) return;  // the client is gone, so nobody is notified
  Client& client = *found;
  if (item.entry == Deadlines::kHeld) {
    if (cancel_held(client, item.tag, item.text, kFailedByDeadline)) ++stats_.late;
    return;
  }
  ++stats_.late;
  if (sequencer_.entry(item.entry).state == EntryState::kGranted) {  // GANG-1: all its hosts still run it
    for (const uint64_t result : item.results) {
      tell(client, Handle{result}, item.text, kFailedByDeadline);
      client.late.push_back(Handle{result});
    }
    return;
  }
  drop(item.entry, item.text, kFailedByDeadline);
}

/// Fails late results in the client's future table. Otherwise the hosts could complete them before the client, busy or
/// waiting for a core, reads of the failure: a result that was late stays late. Called when the failure's text is in
/// the client's ring.
void Controller::fail_late(Client& client) {
  for (const Handle result : client.late) (void)client.view.futures().fail(result);
  client.late.clear();
}

}  // namespace pathways
