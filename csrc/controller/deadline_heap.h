/// The deadlines of runs, the earliest on top. Deadlines fills and empties it.
///
/// A run that is over in time is not searched for here: its item stays until its deadline passes, or until there are
/// twice as many items as were live at the last sweep. So the runs under way bound the memory, at O(1) per run.
///
/// Invariant: `heap_` is a heap by time, the earliest first.
///
/// Threading: the controller's stepping thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "sequencer/sequencer.h"

namespace pathways {

class DeadlineHeap {
 public:
  static constexpr EntryId kHeld = 0xffffffffu;

  struct Item {
    int64_t at_ns = 0;      ///< by the controller's clock
    uint64_t order = 0;     ///< of the run; by then, its entry may belong to another run
    uint64_t tag = 0;       ///< the client's own number of the run
    EntryId entry = kHeld;  ///< kHeld: the run was held for memory when the deadline was set, or is of a composite
    uint64_t loop = 0;      ///< the number of the composite that the run has begun; 0: none
    uint32_t client = 0;
    std::string text;
    std::vector<uint64_t> results;  ///< handles of the run's results
  };

  bool empty() const { return heap_.empty(); }
  size_t size() const { return heap_.size(); }
  /// The next deadline. Call it only when there is one.
  int64_t next_ns() const { return heap_.front().at_ns; }

  /// `is_over(item)`: whether the item needs no action any more.
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

  void validate() const { PW_CHECK(std::is_heap(heap_.begin(), heap_.end(), later)); }

 private:
  static constexpr size_t kFewest = 64;
  static bool later(const Item& a, const Item& b) { return a.at_ns > b.at_ns; }

  std::vector<Item> heap_;
  size_t sweep_at_ = kFewest;
};

}  // namespace pathways
