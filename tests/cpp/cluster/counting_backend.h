// A backend whose devices hold nothing, but know how many bytes they would hold: what the ledger's sums are compared
// with.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "base/check.h"
#include "executor/stub_backend.h"
#include "messages/records.h"

namespace pathways::test {

/// Keeps buffers of so many bytes on each of some devices, and counts them.
class CountingBackend final : public StubBackend {
 public:
  struct Kept {
    uint64_t devices = 0, bytes = 0;
    uint32_t references = 0;
    bool is_taken = false;  ///< a launch has taken it over
    bool fails = false;
  };
  /// What a put brings, or a task makes: nothing says that it is what the client has booked.
  struct Payload {
    uint64_t devices, bytes;
  };
  struct Call {
    std::vector<uint64_t> inputs;  ///< the bytes that its executable was compiled for
    uint64_t output = 0, devices = 0;
    std::vector<uint32_t> donated;
  };
  struct Task {
    uint64_t number;
    std::optional<Payload> makes;
    bool reads = false;  ///< the host keeps its value until its end
    bool is_answered = false;
  };

  /// Bytes on one local device.
  uint64_t bytes_on(uint32_t device) const {
    uint64_t sum = 0;
    for (const Kept& kept : kept_) {
      if (kept.references != 0 && !kept.is_taken && (kept.devices >> device & 1) != 0) sum += kept.bytes;
    }
    return sum;
  }
  Value make(uint64_t devices, uint64_t bytes) {
    const auto free = std::find_if(kept_.begin(), kept_.end(), [](const Kept& kept) { return kept.references == 0; });
    Kept& kept = free != kept_.end() ? *free : kept_.emplace_back();
    kept = {devices, bytes, 1, false, false};
    return &kept;
  }

  Status launch(const NodeContext& where, std::span<const Value> inputs, std::span<Value> outputs) override {
    const Call& call = calls.at(where.plan);
    for (size_t i = 0; i < inputs.size(); ++i) {  // as XLA does
      if (at(inputs[i]).bytes != call.inputs[i] || at(inputs[i]).is_taken) return Status::kFailed;
    }
    if (fail_launches != 0 && --fail_launches == 0) return Status::kFailed;
    for (const uint32_t position : call.donated) at(inputs[position]).is_taken = true;
    for (Value& output : outputs) {
      output = make(call.devices, call.output);
      at(output).fails = fail_values != 0 && --fail_values == 0;
    }
    return Status::kOk;
  }
  Value placeholder(const NodeContext&, uint32_t) override { return make(1, 0); }
  Readiness readiness(Value value) override {
    return at(value).is_taken ? Readiness::kDeleted : at(value).fails ? Readiness::kFailed : Readiness::kReady;
  }
  Value retain(Value value) override {
    ++at(value).references;
    return value;
  }
  void drop(Value value) override {
    PW_CHECK(at(value).references != 0);
    --at(value).references;
  }
  Status put(uint32_t, std::span<const std::byte> bytes, const Leased&, const Booked& booked, Value* output,
             uint64_t* devices) override {
    if (bytes.size() < sizeof(Payload)) return Status::kFailed;
    const auto payload = read_record<Payload>(bytes);
    if (!fits(payload, booked)) return Status::kFailed;
    *devices = payload.devices;
    *output = make(payload.devices, payload.bytes);
    return Status::kOk;
  }
  uint64_t devices_of_put(uint32_t, std::span<const std::byte> bytes) override {
    return bytes.size() < sizeof(Payload) ? 0 : read_record<Payload>(bytes).devices;
  }
  Status fetch(uint32_t, Value, std::span<const std::byte>, const Leased&, std::vector<BlockPiece>*) override {
    return Status::kOk;
  }
  void command(uint32_t, uint64_t, std::span<const std::byte>) override { ++commands; }
  Status start_task(uint32_t, uint64_t number, Value value, std::span<const std::byte> bytes,
                    const Booked& booked) override {
    Task task{number, {}, value != nullptr};
    if (bytes.size() >= sizeof(Payload)) {
      task.makes = read_record<Payload>(bytes);
      if (booked.devices != 0 && !fits(*task.makes, booked)) return Status::kFailed;
      if (booked.devices == 0) task.makes.reset();
    }
    tasks.push_back(task);
    return Status::kOk;
  }

  /// Stand-ins are on no device.
  Status offload(uint32_t, std::span<Value> values, std::span<const std::byte>, Offload where) override {
    std::map<Value, Value> moved;  // what two names mean stays one buffer
    for (const Value value : values) {
      const Kept from = at(value);
      const bool is_away = where == Offload::kAway;
      const uint64_t devices = is_away ? from.devices << kAwayBits : from.devices >> kAwayBits;
      if (moved.contains(value)) {
        retain(moved[value]);
        continue;
      }
      moved[value] = make(devices, from.bytes);
      at(moved[value]).is_taken = from.is_taken;
    }
    for (Value& value : values) {
      const Value from = value;
      value = moved[from];
      drop(from);
    }
    return Status::kOk;
  }

  std::vector<Call> calls;  ///< by plan
  std::deque<Task> tasks;   ///< under way
  uint32_t fail_launches = 0, fail_values = 0;
  uint32_t commands = 0;  ///< that have come

 private:
  static constexpr int kAwayBits = 32;  ///< a stand-in has the devices of its buffer there
  static Kept& at(Value value) { return *static_cast<Kept*>(value); }
  /// MEM-6; see LocalPlacement.fits of the hosts.
  static bool fits(const Payload& what, const Booked& booked) {
    return (what.devices & ~booked.devices) == 0 && what.bytes <= booked.bytes && what.devices != 0;
  }
  std::deque<Kept> kept_;
};

}  // namespace pathways::test
