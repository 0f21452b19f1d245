/// The composites that clients have registered: checked, and their memory known.
///
///   TRUST-1  a composite is its client's, and so is each plan in it. `add` walks through it, with few iterations of
///            each loop, before any run of it is taken: so no client's composite reads what is not there, or takes what
///            it was not given, and each hidden buffer is taken by a run on all its hosts. Each loop has a run, so that
///            no call walks without end; and a trial that would be long is refused before it begins.
///   MEM-2    a composite is admitted as a whole. Its need on a memory space is the most that it takes there at any
///            step: its owned buffers and the peak of the run, and the eager bytes of the runs in flight. The need is
///            reserved from its admission to its end, as eager bytes are, because other clients' runs come between its
///            runs. Its results are its peak: they are blocks from its admission on, as its donated arguments are.
///
/// Controller adds them, by mail. Loops finds them. Threading: the controller's stepping thread only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include "ledger/group_cover.h"
#include "ledger/memory_ledger.h"
#include "ledger/plan_memory.h"
#include "loops/composite.h"

namespace pathways {

class Composites {
 public:
  static constexpr size_t kMostSteps = 4096, kMostValues = 1 << 16, kMostDepth = 16;
  static constexpr uint32_t kMostParallel = 256;
  static constexpr size_t kMostTried = 1 << 20;  ///< values that the steps of a trial read and make, and 16 per run

  Composites(const MemoryLedger& ledger, const Sequencer& sequencer) : ledger_(ledger), cover_(sequencer) {}

  /// Checks a composite whose steps know their plans' groups. Returns its memory; the caller registers it as a plan's.
  /// Throws Error(kInvalid).
  PlanMemory add(uint32_t number, Composite composite);
  /// nullptr: the number is no composite's.
  std::shared_ptr<const Composite> find(uint32_t number) const {
    const auto found = known_.find(number);
    return found == known_.end() ? nullptr : found->second;
  }
  void forget(uint32_t number) { known_.erase(number); }
  void forget_client(uint32_t client) {
    std::erase_if(known_, [&](const auto& each) { return each.second->client == client; });
  }
  /// Whether each plan in it is still there.
  bool is_whole(const Composite& composite) const;

 private:
  /// A walk in which each loop has few iterations, and its need.
  struct Trial;

  void check(const Composite& composite) const;
  void check_run(const Composite& composite, const CompositeStep& step) const;
  void check_carries(const Composite& composite) const;
  static Composite shortened(const Composite& composite);
  static void bind(Composite& composite);
  static void find_unread(Composite& composite);
  static void find_finals(Composite& composite);

  const MemoryLedger& ledger_;
  GroupCover cover_;
  std::unordered_map<uint32_t, std::shared_ptr<const Composite>> known_;
};

}  // namespace pathways
