// A backend that refuses every operation. A test overrides what it needs.
#pragma once

#include "simulate/backend_without_exchanges.h"

namespace pathways::test {

class StubBackend : public BackendWithoutExchanges {
 public:
  Status launch(const NodeContext&, std::span<const Value>, std::span<Value>) override { return Status::kFailed; }
  Value placeholder(const NodeContext&, uint32_t) override { return nullptr; }
  Readiness readiness(Value) override { return Readiness::kReady; }
  Status read_scalar(Value, int64_t*) override { return Status::kFailed; }
  Value retain(Value value) override { return value; }
  void drop(Value) override {}
  Status transfer(const NodeContext&, Value, Value*) override { return Status::kFailed; }
  Status begin_receive(const NodeContext&, std::vector<ReceiveBuffers>*) override { return Status::kFailed; }
  void send(const NodeContext&, Value, std::span<const ReceiveBuffers>, uint64_t, std::span<SendState>) override {}
  void take_sent(std::vector<Sent>*) override {}
  uint64_t early_bytes(const NodeContext&, uint32_t, std::vector<uint64_t>*) override { return 0; }
  void take_arrived(std::vector<Arrived>*) override {}
  Status place_early(const NodeContext&, uint32_t, std::span<const std::byte>) override { return Status::kFailed; }
  void stop_sends() override {}
  Status finish_receive(const NodeContext&, Value*) override { return Status::kFailed; }
  void abandon_receive(const NodeContext&) override {}
  Status put(uint32_t, std::span<const std::byte>, const Booked&, Value*, uint64_t*) override {
    return Status::kFailed;
  }
  uint64_t devices_of_put(uint32_t, std::span<const std::byte>) override { return 0; }
  void refuse_put(uint32_t, std::span<const std::byte>) override {}
  Status fetch(uint32_t, Value, std::span<const std::byte>) override { return Status::kFailed; }
  void refuse_fetch(uint32_t, std::span<const std::byte>) override {}
  Status read_back(Value, const ReadBackSlot&) override { return Status::kFailed; }
  Status start_task(uint32_t, uint64_t, Value, std::span<const std::byte>, const Booked&) override {
    return Status::kFailed;
  }
  void command(uint32_t, uint64_t, std::span<const std::byte>) override {}
  Status offload(uint32_t, std::span<Value>, std::span<const std::byte>, Offload) override { return Status::kFailed; }
  void forget_plan(uint32_t) override {}
  void forget_client(uint32_t) override {}
  std::string_view last_error() const override { return "failed"; }
  void explain(const NodeContext&) override {}
};

}  // namespace pathways::test
