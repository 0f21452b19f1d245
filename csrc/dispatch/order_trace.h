/// OrderTrace: when each traced run was submitted, ordered and granted, and what it waited for. Off by default.
///
/// Inbox and AdmissionQueue report what keeps a client's next record out of the order; Grants reports what is ordered,
/// granted and dropped. Of one client only the next record is known to wait: those behind it wait for it.
///
///   TRACE-1 (counted)  see base/trace_ring.h
///   TRACE-3 (whole)    a run that was ordered while the trace was on has one record: when it is granted or dropped, or
///                      when the trace stops. A record that is still kept out then has one too, with `order` 0.
///
/// `submitted_ns` comes from the client (kRunHasSubmitted). It is data: it may be anything up to the time at which the
/// controller ordered the run (TRUST-1).
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/trace_ring.h"
#include "messages/records.h"
#include "sequencer/sequencer.h"
#include "sync/atomic.h"

namespace pathways {

/// Why a client's next record is kept out of the order; several may hold.
enum OrderWait : uint16_t {
  kWaitsForTurn = 1,     ///< the policy (SHARE-2)
  kWaitsForMemory = 2,   ///< MEM-2
  kWaitsForCredits = 4,  ///< its client has as much under way as it may (FLOW-1)
  kWaitsForHosts = 8,    ///< lost hosts (ERR-2)
};

enum class OrderOutcome : uint16_t { kGranted = 0, kDropped = 1, kNotGranted = 2, kNotOrdered = 3 };

/// All times in nanoseconds of the controller's clock; 0: it did not happen, or is not known.
struct OrderTraceRecord {
  uint64_t order;
  uint32_t client;
  uint32_t plan;
  uint32_t group;
  uint16_t waits;  ///< OrderWait, from `next_ns` to `ordered_ns`
  OrderOutcome outcome;
  int64_t submitted_ns;
  int64_t next_ns;  ///< it was seen to be its client's next record, and was kept out
  int64_t ordered_ns;
  int64_t granted_ns;
};
static_assert(sizeof(OrderTraceRecord) == 56);

class OrderTrace {
 public:
  using Ring = TraceRing<OrderTraceRecord>;

  explicit OrderTrace(Clock clock) : clock_(clock) {}

  bool is_on() const { return ring_.is_on(); }
  void start(size_t capacity);
  void stop();
  Ring::Taken take() { return ring_.take(); }

  // Call these only while the trace is on.
  /// The client's next record is kept out of the order.
  void waits(uint32_t client, OrderWait why);
  /// The client's next record is in the order, as `entry`. `is_granted`: it was granted in the same moment, so that
  /// `left` does nothing for it.
  void ordered(uint32_t client, EntryId id, const Entry& entry, std::span<const std::byte> record, bool is_granted);
  /// A run that waited for its grant was granted to its hosts, or dropped.
  void left(EntryId id, OrderOutcome outcome);
  void forget(uint32_t client) { waiting_.erase(client); }

 private:
  struct Waiting {
    int64_t since_ns;
    uint16_t waits;
  };

  const Clock clock_;
  Ring ring_;
  std::unordered_map<uint32_t, Waiting> waiting_;  ///< by client: its next record, while that is kept out
  std::vector<OrderTraceRecord> ordered_;          ///< by entry; `order` 0: none that waits for its grant
};

}  // namespace pathways
