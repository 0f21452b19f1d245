// Copier: a thread that writes rectangles of arrays into other memory. Use it for the bytes of transfers, so that a
// host's enqueue thread does not wait for them: it starts a job and goes on. The caller itself writes small jobs at
// once.
//
// Threading: one thread, the owner, calls start(), take_done() and stop(). The copier's own thread makes the copies.
// The first job that needs this thread creates it; it never uses Python (GIL-1). The thread calls `ring` after each
// completed job.
//
// Invariants
//   COPY-1 (reported) the completion of each job is reported exactly once: start() returns true, or take_done() or
//                     stop() returns the job.
//   COPY-2 (visible)  a thread that has the completion of a job sees all bytes that the job wrote, and may pass them to
//                     another process.
//   COPY-3 (short)    a short job (at most kShortBytes) overtakes long ones. It waits for the chunk (kChunkBytes) of a
//                     long job that is being written, and for one more chunk per kChunkBytes of short jobs before it.
//   COPY-4 (long)     while a long job waits, the copier writes its next chunk as soon as kChunkBytes of short jobs
//                     were written since the last chunk of a long job. So less than 2 n kChunkBytes of short jobs
//                     overtake a long job of n chunks. Long jobs are written in the order of their start.
//
// How it writes: chunks of kChunkBytes. Stores bypass the cache (non-temporal) where rows are long and the job does not
// fit into a cache anyway. Pages that this process has not touched yet are mapped many at a time (touched_pages.h).
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
#include <utility>
#include <vector>

#include "bulk/copy_plan.h"
#include "memory/touched_pages.h"

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
    uint64_t key = 0;                       ///< for the owner's use, as is `to`
    uint32_t to = 0;
    void* keep = nullptr;  ///< what keeps the sources alive; the owner releases it when the job is reported
  };

  explicit Copier(std::function<void()> ring) : ring_(std::move(ring)) {}
  virtual ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  /// True: the job is written. False: it is under way, and take_done() will return it.
  [[nodiscard]] virtual bool start(Job& job);
  /// Appends the finished jobs to `out`.
  void take_done(std::vector<Job>* out);
  /// Ends the thread, and returns every job that was not reported yet, written or not.
  std::vector<Job> stop();
  [[nodiscard]] uint64_t under_way() const { return under_way_; }

 protected:
  struct Cursor {
    explicit Cursor(Job what) : job(std::move(what)), walk(*job.copy_plan) {}
    Job job;
    CopyWalk walk;
  };

  /// Gives a job to the copier's thread.
  void enqueue(Job& job);
  /// Writes at most `most` bytes of the job. True: it is complete.
  virtual bool write(Cursor& cursor, uint64_t most, bool streams);
  /// The copier's thread waits, or until stop().
  void wait(std::chrono::nanoseconds time);

 private:
  void run();

  const std::function<void()> ring_;
  uint64_t under_way_ = 0;  // owner
  std::thread thread_;      // owner
  std::mutex mutex_;        // guards the members below, except touched_
  std::condition_variable wake_;
  std::deque<Cursor> short_, long_;
  uint64_t short_bytes_ = 0;  // bytes of the short jobs begun since the last chunk of a long job
  std::vector<Job> done_;
  std::atomic<bool> has_done_{false};
  bool stopping_ = false;
  TouchedPages touched_;  // the copier's thread only
};

}  // namespace pathways
