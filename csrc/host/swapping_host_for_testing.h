/// A host that breaks ORD-1, for tests: they show with it that a wrong order is found.
///
/// RunSwap stands before what takes the controller's records. It holds back each n-th run until the next run was taken,
/// unless that run takes a result of the run that is held back. Any other record releases the held run first.
///
/// Threading: the thread that takes the records.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "host/host.h"

namespace pathways {

class RunSwap {
 public:
  using Take = std::function<void(std::span<const std::byte>)>;
  /// `take` takes a record with the words behind it.
  RunSwap(uint32_t every, Take take) : every_(every), take_(std::move(take)) {}

  void take(std::span<const std::byte> record);
  /// One more step has passed. The fault does not wait for a second run for ever. `is_idle`: no run is live.
  void poll(bool is_idle);

 private:
  bool needs_held(std::span<const std::byte> record) const;
  void release();

  const uint32_t every_;
  const Take take_;
  uint64_t counter_ = 0;  ///< runs that could have been held back
  std::vector<std::byte> held_;
  uint32_t polls_ = 0;  ///< since it is held back
};

class SwappingHostForTesting final : public Host {
 public:
  SwappingHostForTesting(uint32_t every, Options options, const std::vector<HostView>& hosts,
                         ControllerBlock* controller, Backend backend, std::vector<int32_t> epochs = {})
      : Host(options, hosts, controller, backend, std::move(epochs)),
        swap_(every, [this](std::span<const std::byte> record) { Host::take(record); }) {}

  uint32_t step() override {
    swap_.poll(executor().stats().live_runs == 0);
    return Host::step();
  }

 private:
  void take(std::span<const std::byte> record) override { swap_.take(record); }

  RunSwap swap_;
};

}  // namespace pathways
