/// Runs that must be over by a moment, the earliest on top.
///
///   DEAD-1  a run with a deadline that is not over when it passes fails at its client at once, exactly then: one that
///           no host was granted is dropped in its place in the order, one that was granted goes on on all its hosts
///           (GANG-1).
///
/// A run that is over in time is not looked for here: its item stays until its moment comes, or until there are twice
/// as many items as there were live ones; so the memory is bounded by the runs under way, at O(1) per run.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "sequencer/sequencer.h"

namespace pathways {

class Deadlines {
 public:
  static constexpr EntryId kHeld = 0xffffffffu;

  struct Item {
    int64_t at_ns = 0;      ///< monotonic_ns()
    uint64_t order = 0;     ///< of the run: its entry may be another's by then
    uint64_t tag = 0;       ///< the client's number of it
    EntryId entry = kHeld;  ///< kHeld: it waited for memory when the deadline was set
    uint32_t client = 0;
    std::string text;
    std::vector<uint64_t> results;  ///< handles
  };

  bool empty() const { return heap_.empty(); }
  size_t size() const { return heap_.size(); }
  /// The next moment; only when there is one.
  int64_t next_ns() const { return heap_.front().at_ns; }

  /// `is_over(item)`: nothing is to be done for it any more.
  template <typename IsOver>
  void add(Item item, IsOver&& is_over) {
    if (heap_.size() >= sweep_at_) {
      std::erase_if(heap_, is_over);
      std::make_heap(heap_.begin(), heap_.end(), later);
      sweep_at_ = std::max<size_t>(kFewest, 2 * heap_.size());
    }
    heap_.push_back(std::move(item));
    std::push_heap(heap_.begin(), heap_.end(), later);
  }

  Item pop() {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    Item item = std::move(heap_.back());
    heap_.pop_back();
    return item;
  }

 private:
  static constexpr size_t kFewest = 64;
  static bool later(const Item& a, const Item& b) { return a.at_ns > b.at_ns; }

  std::vector<Item> heap_;
  size_t sweep_at_ = kFewest;
};

}  // namespace pathways
