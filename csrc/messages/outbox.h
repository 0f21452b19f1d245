/// The sending end of a ring: it never waits, never loses a record, and never reorders records.
///
/// The outbox keeps the records that do not fit in the ring now, and sends them first at the next flush. So a slow
/// reader costs its writer memory and not time. The credits of the clients that cause the records bound that memory
/// (messages/credits.h). `flush` makes records visible and wakes the reader: once per batch, not once per record.
///
/// `set_distance` makes each record visible only some time after it was sent. It models processes that are far apart,
/// on one machine. The owner of the outbox must then flush again at the time that `due` returns.
///
/// Threading: one writer thread.
#pragma once

#include <chrono>
#include <cstring>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "messages/ready_bitmap.h"
#include "sync/byte_ring.h"
#include "sync/doorbell.h"

namespace pathways {

class Outbox {
 public:
  Outbox() = default;
  /// `ready_bitmap`: if given, `ready_bit` is set there between publishing and ringing, so that a reader of many rings
  /// knows which rings to read.
  Outbox(ByteRing* ring, DoorbellWord* doorbell, ReadyBitmap* ready_bitmap = nullptr, uint32_t ready_bit = 0)
      : Outbox(ring->claim_producer(), doorbell, ready_bitmap, ready_bit) {}
  Outbox(ByteRing::Producer producer, DoorbellWord* doorbell, ReadyBitmap* ready_bitmap = nullptr,
         uint32_t ready_bit = 0)
      : producer_(std::move(producer)), doorbell_(doorbell), ready_bitmap_(ready_bitmap), ready_bit_(ready_bit) {}
  Outbox(Outbox&&) = default;
  Outbox& operator=(Outbox&&) = default;

  /// Sends one record of `bytes` bytes; `fill` writes it. Throws Error(kInvalid) when it can never fit.
  template <typename Fill>
  void send(uint32_t bytes, Fill&& fill) {
    is_dirty_ = is_dirty_ || distance_ns_ == 0;
    if (overflow_.empty() && distance_ns_ == 0) {
      const std::span<std::byte> room = producer_.try_reserve(bytes);
      if (!room.empty()) {
        fill(room.data());
        ++in_ring_;
        return;
      }
    }
    std::vector<std::byte>& kept = overflow_.emplace_back(bytes);
    overflow_bytes_ += bytes;
    fill(kept.data());
    if (distance_ns_ != 0) due_.push_back(clock_() + distance_ns_);
  }

  /// Publishes what was sent and wakes the reader if it sleeps. True while some records are still kept here.
  bool flush() {
    return flush([](uint64_t) {});
  }
  /// Calls `published(count)` when records have become visible, before it wakes the reader. `count`: all records so
  /// far.
  template <typename Published>
  bool flush(Published&& published) {
    if (!overflow_.empty()) drain();
    if (is_dirty_) {
      producer_.publish();
      published(in_ring_);
      if (ready_bitmap_ != nullptr) ready_bitmap_->mark(ready_bit_);
      doorbell_->ring();
      is_dirty_ = false;
    }
    return !overflow_.empty();
  }

  /// Call it before anything is sent. Without a distance, an outbox needs no clock.
  void set_distance(int64_t ns, Clock clock) {
    distance_ns_ = ns;
    clock_ = clock;
  }
  /// When the oldest record that is kept here may be sent, by the clock; 0: at once, or no record is kept.
  int64_t due() const { return due_.empty() ? 0 : due_.front(); }

  /// TRUST-1: the reader's end of the ring is invalid. Drops what the reader has not read, to make room for one last
  /// record.
  void forget_reader() {
    overflow_.clear();
    overflow_bytes_ = 0;
    due_.clear();
    producer_.forget_consumer();
  }

  bool is_connected() const { return doorbell_ != nullptr; }
  bool has_overflow() const { return !overflow_.empty(); }
  /// Bytes of the records that are kept here.
  uint64_t overflow_bytes() const { return overflow_bytes_; }
  /// The longest record that `send` takes.
  uint32_t max_record() const { return producer_.max_record(); }

 private:
  void drain() {
    while (!overflow_.empty()) {
      if (!due_.empty() && due_.front() > clock_()) return;
      const std::vector<std::byte>& kept = overflow_.front();
      const std::span<std::byte> room = producer_.try_reserve(static_cast<uint32_t>(kept.size()));
      if (room.empty()) return;
      std::memcpy(room.data(), kept.data(), kept.size());
      overflow_bytes_ -= kept.size();
      ++in_ring_;
      overflow_.pop_front();
      if (!due_.empty()) due_.pop_front();
      is_dirty_ = true;
    }
  }

  ByteRing::Producer producer_;
  DoorbellWord* doorbell_ = nullptr;
  ReadyBitmap* ready_bitmap_ = nullptr;
  uint32_t ready_bit_ = 0;
  std::deque<std::vector<std::byte>> overflow_;
  uint64_t overflow_bytes_ = 0;
  uint64_t in_ring_ = 0;  ///< records that were written to the ring, in all
  int64_t distance_ns_ = 0;
  Clock clock_ = nullptr;    ///< only with a distance
  std::deque<int64_t> due_;  ///< with a distance: when each record of overflow_ may be sent
  bool is_dirty_ = false;
};

}  // namespace pathways
