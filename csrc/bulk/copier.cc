#include "bulk/copier.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "base/check.h"

namespace pathways {
namespace {

constexpr uint64_t kLongRow = 4 << 10;      // shorter rows use the cache: streaming 1 KiB rows took 1.6 times as long
constexpr uint64_t kStreamedJob = 4 << 20;  // a shorter job is still in a cache when its reader reads it

/// memcpy with stores that do not load the cache line first.
void stream(std::byte* target, const std::byte* source, uint64_t bytes) {
#if defined(__SSE2__)
  if (const uint64_t head = (16 - reinterpret_cast<uintptr_t>(target) % 16) % 16; head != 0) {
    const uint64_t first = std::min(head, bytes);
    std::memcpy(target, source, first);
    target += first, source += first, bytes -= first;
  }
  for (; bytes >= 64; target += 64, source += 64, bytes -= 64) {
    const auto* from = reinterpret_cast<const __m128i*>(source);
    auto* to = reinterpret_cast<__m128i*>(target);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
#endif
  if (bytes != 0) std::memcpy(target, source, bytes);
}

/// SYNC copier/stream: a release does not order streamed stores. Call this before the release, so that they are visible
/// first (COPY-2).
void finish_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace

Copier::~Copier() { (void)stop(); }

bool Copier::start(Job& job) {
  PW_DCHECK(job.sources.size() == job.copy_plan->source_bytes().size());
  PW_DCHECK(job.targets.size() == job.copy_plan->block_bytes().size());
  if (job.copy_plan->bytes() > kInlineBytes) {
    enqueue(job);
    return false;
  }
  Cursor cursor(std::move(job));
  const bool complete = write(cursor, std::numeric_limits<uint64_t>::max(), false);
  PW_CHECK(complete);
  job = std::move(cursor.job);
  return true;
}

void Copier::enqueue(Job& job) {
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run(); });
    pthread_setname_np(thread_.native_handle(), "pw-copier");
  }
  ++under_way_;
  {
    const std::lock_guard lock(mutex_);
    (job.copy_plan->bytes() <= kShortBytes ? short_ : long_).emplace_back(std::move(job));
  }
  wake_.notify_one();
}

void Copier::wait(std::chrono::nanoseconds time) {
  std::unique_lock lock(mutex_);
  wake_.wait_for(lock, time, [&] { return stopping_; });
}

void Copier::take_done(std::vector<Job>* out) {
  // SYNC copier/done: pairs with run(); the lock orders what was written.
  if (!has_done_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  under_way_ -= done_.size();
  std::move(done_.begin(), done_.end(), std::back_inserter(*out));
  done_.clear();
  has_done_.store(false, std::memory_order_relaxed);
}

std::vector<Copier::Job> Copier::stop() {
  if (thread_.joinable()) {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  std::vector<Job> left = std::move(done_);
  done_.clear();
  for (auto* queue : {&short_, &long_}) {
    for (Cursor& cursor : *queue) left.push_back(std::move(cursor.job));
    queue->clear();
  }
  has_done_.store(false, std::memory_order_relaxed);
  stopping_ = false;
  under_way_ = 0;
  return left;
}

void Copier::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stopping_ || !short_.empty() || !long_.empty(); });
    if (stopping_) return;
    const bool is_short = long_.empty() || (!short_.empty() && short_bytes_ < kChunkBytes);  // COPY-3, COPY-4
    auto& queue = is_short ? short_ : long_;
    Cursor& cursor = queue.front();  // its address stays valid: only this thread takes from the front
    const uint64_t bytes = cursor.job.copy_plan->bytes();
    short_bytes_ = is_short ? short_bytes_ + bytes : 0;
    lock.unlock();
    const bool complete = write(cursor, kChunkBytes, bytes >= kStreamedJob);
    if (complete) finish_streams();
    lock.lock();
    if (!complete) continue;
    done_.push_back(std::move(cursor.job));
    queue.pop_front();
    // SYNC copier/done: pairs with take_done().
    has_done_.store(true, std::memory_order_release);
    lock.unlock();
    ring_();
    lock.lock();
  }
}

bool Copier::write(Cursor& cursor, uint64_t most, bool streams) {
  const Job& job = cursor.job;
  const bool touches = job.copy_plan->bytes() > kInlineBytes;
  CopyRun run;
  while (cursor.walk.next(most, &run)) {
    most -= run.row * run.count;
    const std::byte* source = job.sources[run.source] + run.source_offset;
    std::byte* target = job.targets[run.block] + run.target_offset;
    if (run.row < kLongRow) {
      if (touches && run.target_stride <= kLongRow)
        touched_.touch(target, (run.count - 1) * run.target_stride + run.row);
      copy_rows(target, run.target_stride, source, run.source_stride, run.row, run.count);
      continue;
    }
    for (; run.count != 0; --run.count, source += run.source_stride, target += run.target_stride) {
      if (touches) touched_.touch(target, run.row);
      if (streams) {
        stream(target, source, run.row);
      } else {
        std::memcpy(target, source, run.row);
      }
    }
  }
  return cursor.walk.is_over();
}

}  // namespace pathways
