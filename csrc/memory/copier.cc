#include "memory/copier.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "base/check.h"
#include "base/status.h"

namespace pathways {
namespace {

constexpr uint64_t kLongRow = 4 << 10;      // shorter ones go through the cache: streaming rows of 1 KiB took 1.6 times
constexpr uint64_t kStreamedJob = 4 << 20;  // what is shorter is still in a cache when its reader comes
constexpr uint64_t kRegion = Copier::kPieceBytes / 4;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14

/// memcpy with stores that do not fetch the line first.
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

/// SYNC copier/stream: streamed stores are ordered by no release; this makes them visible before one (COPY-3).
void finish_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

/// Reads words in turn. Throws Error(kInvalid) when there are no more.
struct Words {
  std::span<const uint64_t> left;
  uint64_t next() {
    if (left.empty()) throw Error(Status::kInvalid, "a parcel ends too early");
    const uint64_t word = left.front();
    left = left.subspan(1);
    return word;
  }
  std::vector<uint64_t> list() {
    const uint64_t count = next();
    if (count > left.size()) throw Error(Status::kInvalid, "a parcel ends too early");
    std::vector<uint64_t> words(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(count));
    left = left.subspan(count);
    return words;
  }
};

/// a * b + c, or too much.
uint64_t reach(uint64_t a, uint64_t b, uint64_t c) {
  const auto wide = static_cast<unsigned __int128>(a) * b + c;
  return wide > std::numeric_limits<uint64_t>::max() / 2 ? std::numeric_limits<uint64_t>::max() / 2
                                                         : static_cast<uint64_t>(wide);
}

template <size_t kRow>
void write_rows_of(std::byte* target, const std::byte* source, uint64_t count, const Parcel::Dimension& by) {
  for (; count != 0; --count, target += by.target_stride, source += by.source_stride) {
    std::memcpy(target, source, kRow);
  }
}

void write_rows(std::byte* target, const std::byte* source, uint64_t count, uint64_t row, const Parcel::Dimension& by) {
  switch (row) {
    case 1:
      return write_rows_of<1>(target, source, count, by);
    case 2:
      return write_rows_of<2>(target, source, count, by);
    case 4:
      return write_rows_of<4>(target, source, count, by);
    case 8:
      return write_rows_of<8>(target, source, count, by);
    case 16:
      return write_rows_of<16>(target, source, count, by);
    default:
      for (; count != 0; --count, target += by.target_stride, source += by.source_stride) {
        std::memcpy(target, source, row);
      }
  }
}

uint64_t rows_of(const Parcel::Rectangle& rectangle) {
  uint64_t rows = 1;
  for (const Parcel::Dimension& d : rectangle.dimensions) rows *= d.count;
  return rows;
}

}  // namespace

Parcel Parcel::parse(std::span<const uint64_t> words) {
  Words in{words};
  Parcel parcel;
  parcel.direct_ = in.next() != 0;
  parcel.sources_ = in.list();
  parcel.blocks_ = in.list();
  parcel.written_.resize(parcel.blocks_.size());
  const uint64_t count = in.next();
  for (uint64_t i = 0; i < count; ++i) {
    Rectangle r;
    const uint64_t source = in.next(), block = in.next();
    r.source_offset = in.next(), r.target_offset = in.next(), r.row = in.next();
    const uint64_t rank = in.next();
    uint64_t last = reach(1, r.source_offset, r.row), end = reach(1, r.target_offset, r.row), rows = 1;
    for (uint64_t d = 0; d < rank; ++d) {
      const Dimension dimension{in.next(), in.next(), in.next()};
      if (dimension.count == 0) throw Error(Status::kInvalid, "a parcel has a rectangle without rows");
      last = reach(dimension.count - 1, dimension.source_stride, last);
      end = reach(dimension.count - 1, dimension.target_stride, end);
      rows = reach(rows, dimension.count, 0);
      r.dimensions.push_back(dimension);
    }
    if (source >= parcel.sources_.size() || block >= parcel.blocks_.size() || r.row == 0 ||
        last > parcel.sources_[source] || end > parcel.blocks_[block]) {
      throw Error(Status::kInvalid, "rectangle " + std::to_string(i) + " of a parcel is out of bounds (COPY-1)");
    }
    r.source = static_cast<uint32_t>(source), r.block = static_cast<uint32_t>(block);
    parcel.written_[block] = true;
    parcel.bytes_ += rows * r.row;
    parcel.rectangles_.push_back(std::move(r));
  }
  if (!in.left.empty()) throw Error(Status::kInvalid, "a parcel has words behind its end");
  return parcel;
}

Copier::~Copier() { (void)stop(); }

bool Copier::start(Job& job) {
  PW_DCHECK(job.sources.size() == job.parcel->source_bytes().size());
  PW_DCHECK(job.targets.size() == job.parcel->block_bytes().size());
  const uint64_t bytes = job.parcel->bytes();
  if (bytes <= kInlineBytes && delay_ns_.load(std::memory_order_relaxed) == 0) {
    Cursor cursor{std::move(job)};
    const bool complete = write(cursor, std::numeric_limits<uint64_t>::max(), false);
    PW_CHECK(complete);
    job = std::move(cursor.job);
    return true;
  }
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run(); });
    pthread_setname_np(thread_.native_handle(), "pw-copier");
  }
  ++under_way_;
  {
    const std::lock_guard lock(mutex_);
    (bytes <= kShortBytes ? short_ : long_).push_back({std::move(job)});
  }
  wake_.notify_one();
  return false;
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
    auto& queue = short_.empty() ? long_ : short_;
    Cursor& cursor = queue.front();  // stays where it is: only this thread takes from the front
    lock.unlock();
    const uint64_t bytes = cursor.job.parcel->bytes();
    const bool complete = write(cursor, kPieceBytes, bytes >= kStreamedJob);
    if (complete) {
      finish_streams();
      if (const int64_t delay = delay_ns_.load(std::memory_order_relaxed); delay != 0) {
        std::unique_lock waiting(mutex_);
        wake_.wait_for(waiting, std::chrono::nanoseconds(delay), [&] { return stopping_; });
      }
    }
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
  const auto rectangles = job.parcel->rectangles();
  const bool touches = job.parcel->bytes() > kInlineBytes;
  uint64_t written = 0;
  for (; cursor.rectangle < rectangles.size(); ++cursor.rectangle, cursor.row = 0) {
    const Parcel::Rectangle& r = rectangles[cursor.rectangle];
    static constexpr Parcel::Dimension kOneRow{1, 0, 0};
    const Parcel::Dimension& inner = r.dimensions.empty() ? kOneRow : r.dimensions.back();
    const uint64_t rows = rows_of(r);
    while (cursor.row < rows) {  // one turn of the innermost dimension, or what is left of it
      if (written >= most) return false;
      const std::byte* source = job.sources[r.source] + r.source_offset;
      std::byte* target = job.targets[r.block] + r.target_offset;
      uint64_t rest = cursor.row;
      for (size_t d = r.dimensions.size(); d-- != 0; rest /= r.dimensions[d].count) {
        const uint64_t at = rest % r.dimensions[d].count;
        source += at * r.dimensions[d].source_stride;
        target += at * r.dimensions[d].target_stride;
      }
      const uint64_t turn = inner.count - cursor.row % inner.count;
      if (r.row >= kLongRow) {
        const uint64_t bytes = std::min(r.row - cursor.column, most - written);
        if (touches) touch(target + cursor.column, bytes);
        if (streams) {
          stream(target + cursor.column, source + cursor.column, bytes);
        } else {
          std::memcpy(target + cursor.column, source + cursor.column, bytes);
        }
        written += bytes;
        cursor.column += bytes;
        if (cursor.column == r.row) cursor.column = 0, ++cursor.row;
      } else {
        const uint64_t count = std::min(turn, (most - written - 1) / r.row + 1);
        if (touches && inner.target_stride <= kLongRow) touch(target, (count - 1) * inner.target_stride + r.row);
        write_rows(target, source, count, r.row, inner);
        written += count * r.row;
        cursor.row += count;
      }
    }
  }
  return true;
}

void Copier::touch(std::byte* target, uint64_t bytes) {
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(target), end = begin + bytes;
  for (uintptr_t region = begin & ~(kRegion - 1); region < end; region += kRegion) {
    if (touched_.contains(region)) continue;
    const uintptr_t first = std::max(region, begin) & ~(page - 1), last = std::min(region + kRegion, end);
    if (last - first < 2 * page) continue;
    (void)::madvise(reinterpret_cast<void*>(first), last - first, kPopulateWrite);  // an old kernel takes the faults
    if (first <= region && last == region + kRegion) touched_.insert(region);
  }
}

}  // namespace pathways
