#include "dispatch/order_trace.h"

#include <algorithm>

#include "ledger/client_records.h"

namespace pathways {

void OrderTrace::start(size_t capacity) {
  waiting_.clear();
  ordered_.clear();
  ring_.start(capacity);
}

void OrderTrace::stop() {
  if (!is_on()) return;
  for (EntryId id = 0; id < ordered_.size(); ++id) left(id, OrderOutcome::kNotGranted);
  for (const auto& [client, waiting] : waiting_) {
    OrderTraceRecord record{};
    record.client = client;
    record.waits = waiting.waits;
    record.outcome = OrderOutcome::kNotOrdered;
    record.next_ns = waiting.since_ns;
    ring_.add(record);
  }
  waiting_.clear();
  ordered_ = {};
  ring_.stop();
}

void OrderTrace::waits(uint32_t client, OrderWait why) {
  const auto [at, is_new] = waiting_.try_emplace(client, Waiting{0, 0});
  if (is_new) at->second.since_ns = clock_();
  at->second.waits |= why;
}

void OrderTrace::ordered(uint32_t client, EntryId id, const Entry& entry, std::span<const std::byte> bytes,
                         bool is_granted) {
  // These may pass the client's next record.
  if (is_command(bytes, CommandKind::kRelease) || is_command(bytes, CommandKind::kFetch)) return;
  const auto waiting = waiting_.empty() ? waiting_.end() : waiting_.find(client);
  if (is_run(bytes)) {
    const auto run = read_record<RunRecord>(bytes);
    const int64_t now = clock_();
    OrderTraceRecord record{.order = entry.order,
                            .client = client,
                            .plan = run.plan,
                            .group = run.group,
                            .waits = 0,
                            .outcome = OrderOutcome::kGranted,
                            .submitted_ns = std::clamp<int64_t>(submitted_ns_of(bytes), 0, now),
                            .next_ns = 0,
                            .ordered_ns = now,
                            .granted_ns = is_granted ? now : 0};
    if (waiting != waiting_.end()) {
      record.waits = waiting->second.waits;
      record.next_ns = std::max(waiting->second.since_ns, record.submitted_ns);
    }
    if (is_granted) {
      ring_.add(record);
    } else {
      if (id >= ordered_.size()) ordered_.resize(id + 1);
      ordered_[id] = record;
    }
  }
  if (waiting != waiting_.end()) waiting_.erase(waiting);
}

void OrderTrace::left(EntryId id, OrderOutcome outcome) {
  if (id >= ordered_.size() || ordered_[id].order == 0) return;
  OrderTraceRecord& record = ordered_[id];
  record.outcome = outcome;
  if (outcome == OrderOutcome::kGranted) record.granted_ns = clock_();
  ring_.add(record);
  record.order = 0;
}

}  // namespace pathways
