#include "sync/byte_ring.h"

#include <new>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/status.h"

namespace pathways {

static_assert(sizeof(ByteRing) % kCacheLine == 0);

namespace {

void check_capacity(std::uint32_t capacity) {
  if (capacity < ByteRing::kMinCapacity || capacity > ByteRing::kMaxCapacity || (capacity & (capacity - 1)) != 0) {
    throw Error(Status::kInvalid,
                "ring capacity: expected a power of two from 4096 to 2^30, got " + std::to_string(capacity));
  }
}

void check_alignment(const void* memory) {
  if (memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % kCacheLine != 0) {
    throw Error(Status::kInvalid, "ring memory: expected a 64-byte aligned address");
  }
}

std::uint32_t claim_role(Atomic<std::uint32_t>& role, Atomic<std::uint32_t>& claims, const char* name) {
  std::uint32_t number = claims.fetch_add(1, std::memory_order_relaxed) + 1;
  if (number == 0) number = 1;
  std::uint32_t nobody = 0;
  // SYNC byte_ring/claim: pairs with byte_ring/hand_back; the last holder's positions are visible.
  if (!role.compare_exchange(nobody, number, std::memory_order_acquire, std::memory_order_relaxed)) {
    throw Error(Status::kInvalid, std::string("ring ") + name + ": expected a free role, but it is claimed already");
  }
  return number;
}

void hand_role_back(Atomic<std::uint32_t>& role, std::uint32_t claim) noexcept {
  std::uint32_t mine = claim;  // after reset_roles() another claim may hold the role: then leave it
  // SYNC byte_ring/hand_back: pairs with byte_ring/claim.
  role.compare_exchange(mine, 0, std::memory_order_release, std::memory_order_relaxed);
}

}  // namespace

std::size_t ByteRing::bytes_for(std::uint32_t capacity) {
  check_capacity(capacity);
  return sizeof(ByteRing) + capacity;
}

ByteRing* ByteRing::create(void* memory, std::uint32_t capacity) {
  check_capacity(capacity);
  check_alignment(memory);
  return new (memory) ByteRing(capacity);
}

ByteRing* ByteRing::attach(void* memory, std::size_t room) {
  check_alignment(memory);
  if (room < sizeof(ByteRing)) throw_corrupt_ring("room", room);
  auto* ring = std::launder(reinterpret_cast<ByteRing*>(memory));
  if (ring->magic_ != kMagic) throw_corrupt_ring("magic number", ring->magic_);
  if (ring->version_ != kVersion) throw_corrupt_ring("version", ring->version_);
  const RingBlock block = ring->checked_block(room);
  const std::uint64_t head = ring->head_.load(std::memory_order_acquire);
  const std::uint64_t tail = ring->tail_.load(std::memory_order_acquire);
  if (tail < head || tail - head > block.capacity) throw_corrupt_ring("distance of tail and head", tail - head);
  return ring;
}

RingBlock ByteRing::checked_block(std::size_t room) const {
  const auto capacity = copied_once(capacity_);
  check_capacity(capacity);
  if (room < sizeof(ByteRing) || room - sizeof(ByteRing) < capacity) throw_corrupt_ring("capacity", capacity);
  auto* self = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(this));
  return {self + sizeof(ByteRing), capacity};
}

ByteRing::Producer ByteRing::claim_producer(std::size_t room) {
  const RingBlock block = checked_block(room);
  return {this, block, claim_role(producer_claim_, claims_, "producer")};
}
ByteRing::Consumer ByteRing::claim_consumer(std::size_t room) {
  const RingBlock block = checked_block(room);
  return {this, block, claim_role(consumer_claim_, claims_, "consumer")};
}

void ByteRing::reset_roles() noexcept {
  producer_claim_.store(0, std::memory_order_release);
  consumer_claim_.store(0, std::memory_order_release);
}

void ByteRing::validate() const {
  const std::uint64_t head = head_.load(std::memory_order_acquire);
  const std::uint64_t tail = tail_.load(std::memory_order_acquire);
  const RingBlock block = checked_block(SIZE_MAX);
  if (tail < head || tail - head > block.capacity) throw_corrupt_ring("distance of tail and head", tail - head);
  block.validate(head, tail);
}

// ---- Producer

ByteRing::Producer::Producer(ByteRing* ring, RingBlock block, std::uint32_t claim)
    : ring_(ring), block_(block), claim_(claim) {
  write_ = ring->tail_.load(std::memory_order_acquire);
  head_seen_ = ring->head_.load(std::memory_order_acquire);
  if (write_ % 8 != 0 || head_seen_ > write_ || write_ - head_seen_ > block_.capacity)
    throw_corrupt_ring("tail", write_);
}

ByteRing::Producer& ByteRing::Producer::operator=(Producer&& other) noexcept {
  Producer taken(std::move(other));
  swap(taken);
  return *this;
}

void ByteRing::Producer::swap(Producer& other) noexcept {
  std::swap(ring_, other.ring_);
  std::swap(block_, other.block_);
  std::swap(write_, other.write_);
  std::swap(head_seen_, other.head_seen_);
  std::swap(claim_, other.claim_);
}

void ByteRing::Producer::hand_back() noexcept {
  if (ring_ != nullptr) hand_role_back(ring_->producer_claim_, claim_);
  ring_ = nullptr;
}

bool ByteRing::Producer::refresh(std::uint64_t need) {
  // SYNC byte_ring/reuse: pairs with byte_ring/release; the consumer no longer reads what the producer will overwrite.
  head_seen_ = ring_->head_.load(std::memory_order_acquire);
  if (head_seen_ > write_ || write_ - head_seen_ > block_.capacity) throw_corrupt_ring("head", head_seen_);
  return write_ + need - head_seen_ <= block_.capacity;
}

void ByteRing::Producer::throw_too_big(std::uint32_t bytes) const {
  throw Error(Status::kInvalid,
              "ring record: expected 1 to " + std::to_string(max_record()) + " bytes, got " + std::to_string(bytes));
}

// ---- Consumer

ByteRing::Consumer::Consumer(ByteRing* ring, RingBlock block, std::uint32_t claim)
    : ring_(ring), block_(block), claim_(claim) {
  read_ = ring->head_.load(std::memory_order_acquire);
  if (read_ % 8 != 0) throw_corrupt_ring("head", read_);
  tail_seen_ = read_;
  released_ = read_;
}

ByteRing::Consumer& ByteRing::Consumer::operator=(Consumer&& other) noexcept {
  Consumer taken(std::move(other));
  swap(taken);
  return *this;
}

void ByteRing::Consumer::swap(Consumer& other) noexcept {
  std::swap(ring_, other.ring_);
  std::swap(block_, other.block_);
  std::swap(read_, other.read_);
  std::swap(tail_seen_, other.tail_seen_);
  std::swap(released_, other.released_);
  std::swap(front_, other.front_);
  std::swap(claim_, other.claim_);
}

void ByteRing::Consumer::hand_back() noexcept {
  if (ring_ == nullptr) return;
  // Release the popped records. Not after reset_roles(): then the head may be another consumer's.
  if (released_ != read_ && ring_->consumer_claim_.load(std::memory_order_relaxed) == claim_) release();
  hand_role_back(ring_->consumer_claim_, claim_);
  ring_ = nullptr;
}

bool ByteRing::Consumer::refresh() {
  // SYNC byte_ring/consume: pairs with byte_ring/publish; the records up to the tail are written.
  const std::uint64_t tail = ring_->tail_.load(std::memory_order_acquire);
  if (tail < read_ || tail - released_ > block_.capacity || tail % 8 != 0) throw_corrupt_ring("tail", tail);
  tail_seen_ = tail;
  if (tail != read_) return true;
  if (released_ != read_) release();
  return false;
}

}  // namespace pathways
