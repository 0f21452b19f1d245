/// BackendWithoutExchanges: a backend whose exchanges of rows fail. A modelled device has checksums in place of rows.
///
/// Threading: as Backend.
#pragma once

#include "executor/backend.h"

namespace pathways {

class BackendWithoutExchanges : public Backend {
 public:
  Status read_shards(const NodeContext&, uint32_t, Value, std::vector<std::span<const std::byte>>*, Value*) override {
    return Status::kFailed;
  }
  Status begin_exchange(const NodeContext&, std::vector<uint64_t>*) override { return Status::kFailed; }
  SendState write_rows(const NodeContext&, const RowWrite&) override { return SendState::kFailed; }
  Status finish_exchange(const NodeContext&, const RowResults&, std::span<Value>) override { return Status::kFailed; }
  void abandon_exchange(const NodeContext&) override {}
};

}  // namespace pathways
