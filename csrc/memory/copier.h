// Copier: writes rectangles of arrays into other memory beside the thread that asks. Use it for the bytes of transfers:
// a host's enqueue thread says what goes where and goes on; small ones are written at once, by whoever asks.
//
// Threading: start(), take_done() and stop() by one thread, the owner; the copies are made by one thread of the
// copier's own, which is made when it is first needed and knows nothing of Python (GIL-1). `ring` is called on that
// thread after each completion.
//
// Invariants
//   COPY-1 (bounds)   a Parcel that parse() took writes inside its blocks and reads inside its sources only.
//   COPY-2 (told)     each job is told exactly once: by start()'s answer, by take_done(), or by stop().
//   COPY-3 (visible)  who has taken a job's completion sees all that it wrote, and may hand it to another process.
//   COPY-4 (short)    a job of at most kShortBytes waits for one piece (kPieceBytes) of longer ones, not for all.
//
// How it writes: pieces of kPieceBytes, past the cache (non-temporal) where rows are long and the job does not fit into
// a cache anyway; pages that this process has not touched yet are mapped a piece at a time, which costs a third of
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
#include <vector>

namespace pathways {

/// All that one host writes into the blocks of another in one transfer. Immutable.
///
/// As words (64 bits each): `direct`; number of sources, bytes of each; number of blocks, bytes of each; number of
/// rectangles, and each as source, block, offset in the source, offset in the block, bytes in a row, number of
/// dimensions, and per dimension, outermost first: count, stride in the source, stride in the block (bytes).
class Parcel {
 public:
  struct Dimension {
    uint64_t count, source_stride, target_stride;
  };
  struct Rectangle {
    uint32_t source, block;
    uint64_t source_offset, target_offset, row;
    std::vector<Dimension> dimensions;
  };

  /// Throws Error(kInvalid) when a rectangle leaves its source or its block (COPY-1).
  static Parcel parse(std::span<const uint64_t> words);

  /// Some blocks of the receiver, who is the sender too, are shards as they are: nothing is written there.
  bool has_direct() const { return direct_; }
  uint64_t bytes() const { return bytes_; }
  std::span<const uint64_t> source_bytes() const { return sources_; }
  std::span<const uint64_t> block_bytes() const { return blocks_; }
  std::span<const Rectangle> rectangles() const { return rectangles_; }
  /// Whether some rectangle is written into block `block`.
  bool writes(size_t block) const { return written_[block]; }

 private:
  bool direct_ = false;
  uint64_t bytes_ = 0;
  std::vector<uint64_t> sources_, blocks_;
  std::vector<bool> written_;
  std::vector<Rectangle> rectangles_;
};

class Copier {
 public:
  static constexpr uint64_t kInlineBytes = 64 << 10;
  static constexpr uint64_t kPieceBytes = 1 << 20;
  static constexpr uint64_t kShortBytes = kPieceBytes;

  struct Job {
    std::shared_ptr<const Parcel> parcel;
    std::vector<const std::byte*> sources;  ///< one per source of the parcel
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
    Job job;
    size_t rectangle = 0;
    uint64_t row = 0;     ///< of the rectangle, counted over all its dimensions
    uint64_t column = 0;  ///< in bytes
  };

  void run();
  /// Writes about `most` bytes of the job. True: it is complete.
  bool write(Cursor& cursor, uint64_t most, bool streams);
  void touch(std::byte* target, uint64_t bytes);

  const std::function<void()> ring_;
  std::atomic<int64_t> delay_ns_{0};
  uint64_t under_way_ = 0;  // owner
  std::thread thread_;      // owner
  std::mutex mutex_;        // guards what follows, up to touched_
  std::condition_variable wake_;
  std::deque<Cursor> short_, long_;
  std::vector<Job> done_;
  std::atomic<bool> has_done_{false};
  bool stopping_ = false;
  std::unordered_set<uintptr_t> touched_;  // the copier's thread: regions of kPieceBytes / 4 that are mapped
};

}  // namespace pathways
