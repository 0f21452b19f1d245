/// ReceiveQueue: receives take memory in the order of the runs.
///
/// Otherwise a younger receive could take the last memory and wait for the consumer of an older receive, which waits
/// for memory: a deadlock. Transfers and exchanges of rows share one queue.
///
/// Threading: the executor's thread only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>

namespace pathways {

class Receiver {
 public:
  /// Takes the memory of a receive, or ends its part if it never will get any. False: there is none now.
  virtual bool take_memory(uint64_t key) = 0;

 protected:
  ~Receiver() = default;
};

class ReceiveQueue {
 public:
  /// Takes memory now, or when those before have theirs. True: now.
  bool begin(uint64_t key, Receiver& receiver) {
    if (waiting_.empty() && receiver.take_memory(key)) return true;
    waiting_.push_back({key, &receiver});
    return false;
  }
  /// Gives memory to those that wait, as far as there is some. Returns to how many.
  uint32_t retry() {
    for (uint32_t done = 0;; ++done) {
      if (waiting_.empty()) return done;
      const Waiting first = waiting_.front();
      waiting_.pop_front();  // before the call, which may end other receives
      if (first.receiver->take_memory(first.key)) continue;
      waiting_.push_front(first);
      return done;
    }
  }
  /// The receive needs no memory any more.
  void forget(uint64_t key) {
    std::erase_if(waiting_, [&](const Waiting& each) { return each.key == key; });
  }
  bool is_waiting(uint64_t key) const {
    return std::any_of(waiting_.begin(), waiting_.end(), [&](const Waiting& each) { return each.key == key; });
  }
  /// Whether a receive before this place in the order waits.
  bool waits_before(uint64_t key) const { return !waiting_.empty() && waiting_.front().key < key; }
  void clear() { waiting_.clear(); }

 private:
  struct Waiting {
    uint64_t key;
    Receiver* receiver;
  };
  std::deque<Waiting> waiting_;  ///< by order
};

}  // namespace pathways
