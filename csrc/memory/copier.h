// Copier: writes rectangles of arrays into other memory beside the thread that asks. Use it for the bytes of transfers:
// a host's enqueue thread says what goes where and goes on; small ones are written at once, by whoever asks.
//
// Threading: start(), take_done() and stop() by one thread, the owner; the copies are made by one thread of the
// copier's own, which is made when it is first needed and knows nothing of Python (GIL-1). `ring` is called on that
// thread after each completion.
//
// Invariants
//   COPY-1 (told)     each job is told exactly once: by start()'s answer, by take_done(), or by stop().
//   COPY-2 (visible)  who has taken a job's completion sees all that it wrote, and may hand it to another process.
//   COPY-3 (short)    a job of at most kShortBytes overtakes longer ones: it waits for the chunk (kChunkBytes) of them
//                     that is being written, and for one more for each kChunkBytes of short ones before it.
//   COPY-4 (long)     while a long job waits, a chunk of it follows as soon as kChunkBytes of short ones have been
//                     written since the last: before a long job of n chunks is done, less than 2 n kChunkBytes of
//                     short ones overtake it. Long jobs take turns in the order of their start.
//
// How it writes: chunks of kChunkBytes, past the cache (non-temporal) where rows are long and the job does not fit into
// a cache anyway; pages that this process has not touched yet are mapped a chunk at a time, which costs a third of
// taking a fault for each (measured: benchmarks/results/transfer-*).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "memory/copy_plan.h"

namespace pathways {

class Copier {
 public:
  static constexpr uint64_t kInlineBytes = 64 << 10;
  static constexpr uint64_t kChunkBytes = 1 << 20;
  static constexpr uint64_t kShortBytes = kChunkBytes;

  struct Job {
    std::shared_ptr<const CopyPlan> copy_plan;
    std::vector<const std::byte*> sources;  ///< one per source of the copy plan
    std::vector<std::byte*> targets;        ///< one per block; nullptr where nothing is written
    uint64_t key = 0;                       ///< the owner's, as is `to`
    uint32_t to = 0;
    void* keep = nullptr;  ///< what keeps the sources alive; the owner lets go of it when the job is told
  };

  explicit Copier(std::function<void()> ring) : ring_(std::move(ring)) {}
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  /// True: it is written. False: under way; take_done() will give it back.
  [[nodiscard]] bool start(Job& job);
  /// Moves finished jobs to the end of `out`.
  void take_done(std::vector<Job>* out);
  /// Ends the thread, and gives back every job that was not told yet, written or not.
  std::vector<Job> stop();
  [[nodiscard]] uint64_t under_way() const { return under_way_; }

  /// Test double, any thread: every job, the smallest too, takes so much longer. 0: none.
  void set_delay(std::chrono::nanoseconds delay) { delay_ns_.store(delay.count(), std::memory_order_relaxed); }

 private:
  struct Cursor {
    explicit Cursor(Job what) : job(std::move(what)), walk(*job.copy_plan) {}
    Job job;
    CopyWalk walk;
  };

  void run();
  /// Writes at most `most` bytes of the job. True: it is complete.
  bool write(Cursor& cursor, uint64_t most, bool streams);
  void touch(std::byte* target, uint64_t bytes);

  const std::function<void()> ring_;
  std::atomic<int64_t> delay_ns_{0};
  uint64_t under_way_ = 0;  // owner
  std::thread thread_;      // owner
  std::mutex mutex_;        // guards what follows, up to touched_
  std::condition_variable wake_;
  std::deque<Cursor> short_, long_;
  uint64_t short_bytes_ = 0;  // of short jobs, begun since the last chunk of a long one
  std::vector<Job> done_;
  std::atomic<bool> has_done_{false};
  bool stopping_ = false;
  std::unordered_set<uintptr_t> touched_;  // the copier's thread: regions of kChunkBytes / 4 that are mapped
};

}  // namespace pathways
