/// ValueSettler: what happens when a pending value is ready or has failed: results are completed, values are sent,
/// fetches are written. It also finds out why a value failed.
///
///   READ-1  a result that the client wants with its completion is in the client's read-back area before the executor
///           completes it.
///   ERR-1   a value that failed because an input of its launch failed has the error of that input, also when the
///           launch that made the input belongs to another run and was not seen to fail yet.
///
/// Used by the executor, for what the ReadinessTracker finds. Threading: the executor's thread only.
#pragma once

#include <cstdint>
#include <span>

#include "executor/fetch_table.h"
#include "movement/decisions.h"
#include "movement/row_exchanges.h"
#include "movement/transfer_manager.h"
#include "runs/client_objects.h"
#include "runs/dataflow.h"
#include "runs/executor_part.h"

namespace pathways {

class ValueSettler : private ExecutorPart {
 public:
  ValueSettler(const ExecutorPart& part, ClientObjects& objects, Dataflow& flow, TransferManager& transfers,
               RowExchanges& rows, Decisions& decisions, FetchTable& fetches)
      : ExecutorPart(part),
        objects_(objects),
        flow_(flow),
        transfers_(transfers),
        rows_(rows),
        decisions_(decisions),
        fetches_(fetches) {}

  /// Takes over the item's reference.
  void settle(const PendingValue& item, Readiness readiness);
  /// See OutputFinder.
  Value another_output(const PendingValue& item, std::span<const Value> taken);

 private:
  static constexpr uint32_t kNone = 0xffffffffu;

  void trace_end(const PendingValue& item, bool has_failed);
  void count_time(const PendingValue& launch);
  void count_time(Run& run, uint64_t devices, int64_t launched_ns);
  void settle_results(uint32_t slot, uint32_t value, uint32_t error);
  Status read_back(const Run& run, uint32_t result);
  uint32_t failure(const PendingValue& item);
  uint32_t cause(uint32_t slot, uint32_t value);
  static uint32_t maker_of(const Run& run, uint32_t value);
  static uint32_t maker_of(const Run& run, const PendingValue& item);

  ClientObjects& objects_;
  Dataflow& flow_;
  TransferManager& transfers_;
  RowExchanges& rows_;
  Decisions& decisions_;
  FetchTable& fetches_;
};

}  // namespace pathways
