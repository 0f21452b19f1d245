/// ReadinessTracker: the pending values of a host. It checks each enqueued value until XLA has computed it, and then
/// whatever waits for that value goes on.
///
/// Each set of devices has a ready queue of pending values, in the order in which their values were enqueued. `poll`
/// checks the front of each ready queue, and settles what is ready.
///
///   LOOK-1  the executor reports a value as ready when it saw the value ready, or saw a value ready that was computed
///           from it. Launches on one set of devices are chained when each takes a result of the one before; the last
///           one answers for the whole chain. XLA gives a launch the error of its inputs, so a launch without an error
///           shows that its inputs had none. A donated value tells nothing about its launch. Another output of that
///           launch answers instead, or else the launch that took the value over. The latter may be a gang, which waits
///           for other hosts. So pending values between the two that have a value of their own are settled before it
///           (GANG-2).
///
/// Used by whatever makes values (`add`), and by the executor (`poll`), which says how a pending value is settled.
/// Threading: the executor's thread only. Allocation: none per node in the steady state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "device/device.h"
#include "runs/value_refs.h"

namespace pathways {

/// One thing to do when a value is ready.
struct PendingValue {
  /// kMove: a transfer within the host; only of a traced run, to notice its end.
  /// kDecision: the scalar of a choice. kRows: what an exchange of rows reads.
  enum class Kind : uint8_t { kNode, kStandIn, kValue, kSend, kFetch, kPut, kMove, kDecision, kRows } kind;
  bool counts;     ///< kNode, kStandIn: it is a launch in flight on the ready queue's devices
  uint32_t run;    ///< slot; kPut: the client
  uint32_t index;  ///< node, value, choice, or fetch slot
  Value value;     ///< a reference that this pending value owns
  uint64_t key;    ///< kSend, kRows: the exchange; kPut: the handle
  uint64_t age;    ///< of the value
  /// LOOK-1: this value was computed from the one before it in the ready queue.
  bool chained = false;
  /// LOOK-1: the age of the launch that took over this value. The pending value of that launch, further down the
  /// ready queue, answers for this one. 0: no launch took it over.
  uint64_t taken_by = 0;
  int64_t launched_ns = 0;  ///< kNode, kStandIn: when its launch began
  bool was_ready = false;   ///< the value was seen to be ready before it was added, without an error
  /// MEM-1: what a launch that moves its input reads, which takes memory until the copy is there: a second reference
  /// that this pending value owns. nullptr: the launch computes, and takes its inputs' memory in its turn.
  Value held = nullptr;
};

/// Knows the outputs of launches. It is asked only when a value was donated, or deleted otherwise.
class OutputFinder {
 public:
  /// Another output of the launch that `item` stands for, one that still tells something and is not among `taken`
  /// (sorted); nullptr: there is none. Later runs of the plan use that output too.
  virtual Value another_output(const PendingValue& item, std::span<const Value> taken) = 0;

 protected:
  ~OutputFinder() = default;
};

class ReadinessTracker {
 public:
  ReadinessTracker(Device& device, ValueRefs& refs, OutputFinder& outputs)
      : device_(device), refs_(refs), outputs_(outputs) {}

  /// Launches, transfers, puts and tasks are counted: each gives its values a new age. This is the newest age.
  uint64_t age() const { return age_; }
  uint64_t next_age() { return ++age_; }

  /// Takes over the item's reference. `input_ages`: of the values from which the item's value is computed.
  void add(uint64_t devices, const PendingValue& item, std::span<const uint64_t> input_ages = {});
  /// The newest launch, which was made on `devices`, has taken over the inputs at `positions`. True: it answers for one
  /// of them, so the caller must `add` a pending value of that launch.
  bool take_over(uint64_t devices, std::span<const uint32_t> positions, std::span<const Value> inputs,
                 std::span<const uint64_t> input_ages);

  /// Settles the oldest pending values of each ready queue that are ready or have failed. Calls
  /// `settle(item, readiness)` for each, which takes over the item's reference and may add pending values. Returns how
  /// many there were.
  template <typename Settle>
  uint32_t poll(Settle&& settle) {
    uint32_t done = 0;
    for (size_t i = 0; i < queues_.size(); ++i) done += settle_ready(i, settle);  // settling may add ready queues
    return done;
  }

  /// The oldest values that are not ready yet, one or two per ready queue.
  void watched(std::vector<Value>* out) const;
  /// Values half way down each ready queue.
  void watched_half_way(std::vector<Value>* out) const;
  /// The pending value of a launch, by the age of the launch, or by its run and node; nullptr: there is none.
  const PendingValue* find_launch(uint64_t age) const;
  const PendingValue* find_launch(uint32_t run, uint32_t node) const;
  uint64_t waiting() const { return waiting_; }
  /// Drops all pending values.
  void clear();
  /// For debug builds and tests.
  void validate() const;

 private:
  static constexpr size_t kMostAtOnce = 64;  ///< pending values of a ready queue that one check may settle

  /// The pending values of one set of devices. They become ready in the order in which they were enqueued. So only the
  /// first ones are checked, and the last of a chain answers for the whole chain. They are sorted by age, so that a
  /// late request for an old value does not wait for younger values.
  struct ReadyQueue {
    uint64_t devices;
    bool moves;  ///< what is moved to another memory becomes ready beside what is computed
    std::deque<PendingValue> pending;
  };
  /// The pending values at the front that may be settled now, because the last of them is ready or the first failed.
  struct Front {
    size_t count;
    Readiness readiness;
  };

  ReadyQueue* queue_of(uint64_t devices, bool moves = false);
  static size_t chain_length(const ReadyQueue& queue);
  static size_t answering(const ReadyQueue& queue, size_t at);
  static std::optional<size_t> first_between(const ReadyQueue& queue);
  bool use_another_output(PendingValue& item);
  Readiness look(size_t queue, size_t at);
  Front look_at_front(size_t queue);
  Readiness take_between(size_t queue);

  /// Settles what is ready at the front of a ready queue. Returns the number of pending values settled.
  template <typename Settle>
  uint32_t settle_ready(size_t queue, Settle&& settle) {
    uint32_t done = 0;
    while (!queues_[queue].pending.empty()) {
      auto [count, readiness] = look_at_front(queue);
      if (readiness == Readiness::kPending) {
        readiness = take_between(queue);
        if (readiness == Readiness::kPending) return done;
        for (const PendingValue& item : settling_) {
          --waiting_;
          settle(item, item.taken_by == 0 ? readiness : Readiness::kReady);  // may add ready queues
          ++done;
        }
        continue;
      }
      for (; count != 0; --count, ++done) {
        const PendingValue item = queues_[queue].pending.front();
        queues_[queue].pending.pop_front();
        --waiting_;
        settle(item, readiness);  // may add ready queues
      }
    }
    return done;
  }

  Device& device_;
  ValueRefs& refs_;
  OutputFinder& outputs_;
  std::vector<ReadyQueue> queues_;
  uint64_t waiting_ = 0;
  uint64_t age_ = 0;
  std::vector<size_t> between_;         ///< scratch of take_between()
  std::vector<PendingValue> settling_;  ///< what take_between() took
  std::vector<Value> taken_;            ///< scratch of take_over()
};

}  // namespace pathways
