#include "link/link.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/status.h"
#include "link/link_pool.h"

namespace pathways {
namespace {

constexpr int64_t kPingNs = 1'000'000'000;
constexpr int64_t kLookNs = 5'000'000;               ///< between two looks for memory that is free again
constexpr int64_t kTripCountsNs = 30'000'000'000;    ///< for how long the shortest round trip tells the clocks apart
constexpr uint64_t kLongestTripNs = 60'000'000'000;  ///< that can be: who is silent for so long is gone

}  // namespace

Link::Link(Clock clock) : clock_(clock) { heard_at_ns_ = clock_(); }

void Link::refuse(const std::string& why) { throw Error(Status::kInvalid, "a link brought " + why); }

// ---------------------------------------------------------------------------------------------------------- collect

size_t Link::collect(std::span<std::byte> out) {
  if (out.size() < kMostFrame) throw Error(Status::kInvalid, "a link collects into at least 1 MiB");
  const size_t bytes = collect_locked(out);
  finish_collect();
  return bytes;
}

size_t Link::collect_locked(std::span<std::byte> out) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) return 0;
  if (has_overflow_) has_overflow_ = flush();
  FrameWriter to(out);
  const int64_t now = clock_();
  if (now >= next_ping_ns_ && to.fits(sizeof now)) {
    std::memcpy(to.begin(FrameKind::kPing, 0, 0, sizeof now), &now, sizeof now);
    next_ping_ns_ = now + kPingNs;
  }
  if (now >= look_ns_) {
    look(now);
    look_ns_ = now + kLookNs / 2;
  }
  if (gathers(now).count() <= 0 && send_queued(to) && send_data(to)) send_records(to);
  stats_.bytes_out += to.used();
  return to.used();
}

void Link::wake() {
  if (pool_ != nullptr) pool_->mark(slot_);
}

void Link::join(std::shared_ptr<LinkPool> pool) {
  slot_ = pool->add(shared_from_this());
  pool_ = std::move(pool);
  joined();
  wake();
}

std::chrono::nanoseconds Link::again_in() {
  const std::lock_guard lock(mutex_);
  if (is_closed_) return std::chrono::nanoseconds::max();
  if (has_overflow_) return std::chrono::nanoseconds(0);
  if (const auto gathers_ns = gathers(clock_()); gathers_ns.count() > 0) return gathers_ns;
  return must_look_soon() ? std::chrono::nanoseconds(kLookNs) : std::chrono::nanoseconds::max();
}

bool Link::precede(std::span<const std::byte>, FrameWriter&) { return true; }

/// Sends the frames of the queue. False: there is no room for more.
bool Link::send_queued(FrameWriter& to) {
  const std::lock_guard lock(queue_mutex_);
  if (is_overrun_) throw Error(Status::kFull, "the other end of a link does not read what it is sent");
  while (!queue_.empty()) {
    const auto& [frame, by] = queue_.front();
    if (!precede(frame, to) || frame.size() > to.left()) return false;
    to.add(frame);
    queued_bytes_ -= frame.size();
    if (by != nullptr && (relayed_bytes_[by] -= frame.size()) == 0) relayed_bytes_.erase(by);
    queue_.pop_front();
  }
  return true;
}

/// Sends the bytes of the block that is under way. True: there is none any more.
bool Link::send_data(FrameWriter& to) {
  while (data_.has_value()) {
    std::vector<BlockPiece>& pieces = data_->pieces;
    if (pieces.empty()) {
      const Block done = std::move(*data_);
      data_.reset();
      sent(done);
      continue;
    }
    BlockPiece& piece = pieces.back();
    const uint64_t room = to.left() > FrameWriter::room_for(sizeof(DataFrame)) + 8
                              ? to.left() - FrameWriter::room_for(sizeof(DataFrame)) - 8
                              : 0;
    const uint64_t size = std::min({piece.bytes, room, uint64_t{kMostData}});
    if (size == 0 && piece.bytes != 0) return false;
    if (size != 0) {
      const DataFrame frame{data_->number, piece.at};
      std::byte* at = to.begin(FrameKind::kData, data_->client, 0, sizeof frame + size);
      std::memcpy(at, &frame, sizeof frame);
      // If the block is gone, nobody will use what is sent instead.
      if (!read_block(*data_, piece.at, {at + sizeof frame, size})) std::memset(at + sizeof frame, 0, size);
      piece.at += size;
      piece.bytes -= size;
    }
    if (piece.bytes == 0) pieces.pop_back();
  }
  return true;
}

bool Link::enqueue(FrameKind kind, uint32_t a, int32_t b, std::span<const std::byte> payload, const Link* by) {
  std::vector<std::byte> frame(FrameWriter::room_for(payload.size()));
  FrameWriter writer(frame);
  std::byte* to = writer.begin(kind, a, b, payload.size());
  if (!payload.empty()) std::memcpy(to, payload.data(), payload.size());
  {
    const std::lock_guard lock(queue_mutex_);
    is_overrun_ = is_overrun_ || queued_bytes_ > kMostKept;
    if (is_overrun_) return true;
    if (by != nullptr) {
      uint64_t& relayed = relayed_bytes_[by];
      if (relayed > kMostRelayed) return false;
      relayed += frame.size();
    }
    queued_bytes_ += frame.size();
    queue_.push_back({std::move(frame), by});
  }
  wake();
  return true;
}

void Link::enqueue_word(FrameKind kind, uint64_t word) {
  (void)enqueue(kind, 0, 0, std::as_bytes(std::span(&word, 1)));
}

// ---------------------------------------------------------------------------------------------------------- deliver

void Link::deliver(std::span<const std::byte> in) {
  std::vector<Relay> relays;
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) return;
    heard_at_ns_ = clock_();
    stats_.bytes_in += in.size();
    take_all(in);
    has_overflow_ = flush();
    if (has_overflow_ || must_look_) wake();
    must_look_ = false;
    relays = std::move(relays_);
    relays_.clear();
  }
  for (const auto& [to, header, payload] : relays) {
    if (to->enqueue(header.kind, header.a, header.b, payload, this)) continue;
    throw Error(Status::kFull, "a link brought more for host " + std::to_string(header.a) + " than its machine takes");
  }
  finish_deliver();
}

/// Takes each whole frame, and keeps the bytes of the last one that is not whole yet.
void Link::take_all(std::span<const std::byte> in) {
  // What was cut off last time is completed first, as far as its frame goes.
  while (!in.empty() || !partial_.empty()) {
    if (!partial_.empty()) {
      size_t whole = sizeof(FrameHeader);
      if (partial_.size() >= whole) whole = FrameWriter::room_for(read_record<FrameHeader>(partial_).bytes);
      const size_t more = std::min(in.size(), whole - std::min(whole, partial_.size()));
      partial_.insert(partial_.end(), in.begin(), in.begin() + static_cast<std::ptrdiff_t>(more));
      in = in.subspan(more);
      if (partial_.size() < sizeof(FrameHeader)) break;
    }
    const std::span<const std::byte> from = partial_.empty() ? in : std::span<const std::byte>(partial_);
    if (from.size() < sizeof(FrameHeader)) {
      partial_.assign(from.begin(), from.end());
      break;
    }
    const auto header = read_record<FrameHeader>(from);
    const size_t whole = FrameWriter::room_for(header.bytes);
    if (whole > kMostFrame) refuse("a frame of " + std::to_string(header.bytes) + " bytes");
    if (from.size() < whole) {
      if (partial_.empty()) {
        partial_.assign(from.begin(), from.end());
        break;
      }
      if (in.empty()) break;
      continue;
    }
    take_common(header, from.subspan(sizeof header, header.bytes));
    if (partial_.empty()) {
      in = in.subspan(whole);
    } else {
      partial_.clear();
    }
  }
}

void Link::take_common(const FrameHeader& header, std::span<const std::byte> payload) {
  if (header.reserved != 0) refuse("a frame with a wrong header");
  if (header.kind == FrameKind::kPing) {
    const PongFrame pong{first_of<int64_t>(payload, "a ping"), clock_()};
    (void)enqueue(FrameKind::kPong, 0, 0, std::as_bytes(std::span(&pong, 1)));
  } else if (header.kind == FrameKind::kPong) {
    take_pong(first_of<PongFrame>(payload, "a pong"));
  } else {
    take(header, payload);
  }
}

/// The other end may have written any numbers.
void Link::take_pong(const PongFrame& pong) {
  const int64_t now = clock_();
  const uint64_t trip = static_cast<uint64_t>(now) - static_cast<uint64_t>(pong.asked_ns);
  if (trip >= kLongestTripNs) return;
  stats_.round_trip_ns = static_cast<int64_t>(trip);
  // The shorter the trip, the surer the time in its middle. Clocks drift, so a trip of long ago says little.
  if (stats_.round_trip_ns > best_trip_ns_ && now - best_trip_at_ns_ < kTripCountsNs) return;
  best_trip_ns_ = stats_.round_trip_ns;
  best_trip_at_ns_ = now;
  stats_.clock_ahead_ns =
      static_cast<int64_t>(static_cast<uint64_t>(pong.there_ns) - static_cast<uint64_t>(now) + trip / 2);
}

/// Writes a record to a ring, or keeps it until there is room (LINK-4).
void Link::keep(Outbox& box, std::span<const std::byte> bytes) {
  if (bytes.size() > box.max_record()) refuse("a record of " + std::to_string(bytes.size()) + " bytes");
  if (box.overflow_bytes() > kMostKept) throw Error(Status::kFull, "nobody reads the records that a link brings");
  box.send(static_cast<uint32_t>(bytes.size()), [&](std::byte* out) { std::memcpy(out, bytes.data(), bytes.size()); });
  ++stats_.records_in;
}

void Link::add_box(Stats& now, const Outbox& box) {
  now.kept += box.overflow_bytes();
  now.most_kept += kMostKept + kMostFrame;
}

// -------------------------------------------------------------------------------------------------------------- life

void Link::close() {
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) return;
    is_closed_ = true;
    forget();
  }
  if (pool_ != nullptr && !is_carried_) pool_->remove(slot_);
}

uint64_t Link::queued_bytes() {
  const std::lock_guard lock(queue_mutex_);
  return queued_bytes_;
}

Link::Stats Link::stats() {
  const std::lock_guard lock(mutex_);
  Stats now = stats_;
  now.heard_ns = clock_() - heard_at_ns_;
  now.most_kept = kMostKept + kMostFrame;
  add_kept(now);
  const std::lock_guard queue_lock(queue_mutex_);
  now.kept += queued_bytes_;
  return now;
}

}  // namespace pathways
