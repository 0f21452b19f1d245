#include "memory/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <new>
#include <string>

#include "base/check.h"
#include "memory/arena_block.h"

namespace pathways {

namespace {

constexpr std::uint64_t kTrimBytes = std::uint64_t{8} << 20;  // at most, while the lock is held once

}  // namespace

std::size_t Arena::min_bytes() noexcept {
  static_assert(sizeof(Block) == kHeaderBytes);
  return round_up(sizeof(Arena)) + kHeaderBytes + kAlignment + kHeaderBytes;
}

Arena* Arena::create(void* memory, std::size_t bytes) {
  if (memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % kAlignment != 0) {
    throw Error(Status::kInvalid, "arena memory: expected a 64-byte aligned address");
  }
  if (bytes < min_bytes() || bytes >= (std::uint64_t{1} << 48)) {
    throw Error(Status::kInvalid,
                "arena size: expected " + std::to_string(min_bytes()) + " to 2^48 bytes, got " + std::to_string(bytes));
  }
  const std::uint64_t begin = round_up(sizeof(Arena));
  const std::uint64_t end = (bytes & ~std::uint64_t{kAlignment - 1}) - kHeaderBytes;
  auto* arena = new (memory) Arena(begin, end);
  auto* first = new (arena->block(begin)) Block{};
  first->bytes = end - begin;
  auto* sentinel = new (arena->block(end)) Block{};
  sentinel->before = first->bytes;
  sentinel->become(BlockState::kSentinel);
  arena->insert_free(first);
  return arena;
}

Arena* Arena::attach(void* memory) {
  auto* arena = std::launder(reinterpret_cast<Arena*>(memory));
  if (memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % kAlignment != 0 || arena->magic_ != kMagic) {
    throw Error(Status::kInvalid, "arena: expected memory that Arena::create() initialised");
  }
  return arena;
}

Status Arena::allocate(std::size_t bytes, std::uint64_t* offset) noexcept {
  *offset = 0;
  if (bytes > max_block()) return Status::kInvalid;
  const std::uint64_t need = kHeaderBytes + round_up(std::max<std::uint64_t>(bytes, 1));
  if (need > capacity()) return Status::kInvalid;
  lock_.lock();
  drain_returned();
  Block* found = find_free(need);
  if (found == nullptr) {
    lock_.unlock();
    return Status::kNoMemory;
  }
  remove_free(found);
  const std::uint64_t rest = found->bytes - need;
  if (rest >= kHeaderBytes + kAlignment) {
    found->bytes = need;
    auto* tail = new (after(found)) Block{};
    tail->bytes = rest;
    tail->before = need;
    after(tail)->before = rest;
    insert_free(tail);
  }
  found->references.store(1, std::memory_order_relaxed);
  found->stamp = 0;
  found->become(BlockState::kLive);
  count_in_use(found->bytes);
  *offset = offset_of(found) + kHeaderBytes;
  lock_.unlock();
  return Status::kOk;
}

void Arena::retain(std::uint64_t offset) noexcept {
  const std::uint64_t before = checked_block(offset)->references.fetch_add(1, std::memory_order_relaxed);
  PW_CHECK(before != 0 && (before & kMostReferences) != kMostReferences);  // ARENA-2
}

std::vector<std::uint64_t> Arena::retain_held() {
  std::vector<std::uint64_t> held;
  lock_.lock();
  for (std::uint64_t at = begin_; at != end_; at += block(at)->bytes) {
    Block* here = block(at);
    if (!here->is(BlockState::kLive)) continue;
    // Another process may release the last counted reference meanwhile. Then this loop must not add one.
    std::uint64_t word = here->references.load(std::memory_order_relaxed);
    while ((word & kMostReferences) != 0) {
      PW_CHECK((word & kMostReferences) != kMostReferences);
      if (!here->references.compare_exchange(word, word + 1, std::memory_order_relaxed, std::memory_order_relaxed))
        continue;
      held.push_back(at + kHeaderBytes);
      break;
    }
  }
  lock_.unlock();
  return held;
}

void Arena::release(std::uint64_t offset) noexcept { drop(checked_block(offset), 1); }

void Arena::return_lease(std::uint64_t offset, unsigned borrower) noexcept {
  PW_CHECK(borrower < kBorrowers);
  drop(checked_block(offset), bit_of(borrower));
}

void Arena::lease_out(std::uint64_t offset, std::uint64_t borrowers, std::uint64_t stamp) noexcept {
  PW_CHECK(borrowers < std::uint64_t{1} << kBorrowers && stamp != 0);
  Block* leased = checked_block(offset);
  PW_CHECK(leased->stamp == 0);
  lock_.lock();
  leased->stamp = stamp;
  leased->prev = 0;
  leased->next = leased_head_;
  if (leased_head_ != 0) block(leased_head_)->prev = offset_of(leased);
  leased_head_ = offset_of(leased);
  const std::uint64_t before = leased->references.fetch_add(borrowers << kCountBits, std::memory_order_relaxed);
  lock_.unlock();
  PW_CHECK(before != 0);  // ARENA-2
}

void Arena::reclaim(unsigned borrower, std::uint64_t stamp) noexcept {
  PW_CHECK(borrower < kBorrowers);
  lock_.lock();
  for (std::uint64_t at = leased_head_; at != 0;) {
    Block* leased = block(at);
    at = leased->next;
    // A dead borrower cannot clear its bit any more, and all leases of a successor have higher stamps.
    if (leased->stamp <= stamp && (leased->references.load(std::memory_order_relaxed) & bit_of(borrower)) != 0) {
      drop(leased, bit_of(borrower));  // ARENA-5
    }
  }
  lock_.unlock();
}

/// Takes one counted reference away (`references` is 1), or a borrower's lease (`references` is its bit).
void Arena::drop(Block* freed, std::uint64_t references) noexcept {
  // SYNC arena/release: pairs with itself; all other releasers' uses of the payload come before the last release.
  const std::uint64_t before = freed->references.fetch_sub(references, std::memory_order_acq_rel);
  PW_CHECK((references == 1 ? before & kMostReferences : before & references) != 0);  // ARENA-2
  if (before != references) return;
  in_use_.fetch_sub(freed->bytes, std::memory_order_relaxed);
  freed->become(BlockState::kReturned);
  push_returned(freed, offset_of(freed));
}

void Arena::push_returned(Block* freed, std::uint64_t mine) noexcept {
  std::uint64_t head = returned_.load(std::memory_order_relaxed);
  do {
    freed->next_returned = head;
    // SYNC arena/return: pairs with arena/drain.
  } while (!returned_.compare_exchange_weak(head, mine, std::memory_order_release, std::memory_order_relaxed));
}

std::uint64_t Arena::trim(std::uint64_t from, std::uint64_t* bytes) noexcept {
  static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto base = reinterpret_cast<std::uintptr_t>(this);
  lock_.lock();
  drain_returned();
  std::uint64_t reached = 0;
  for (std::uint64_t at = begin_; at != end_ && reached == 0; at += block(at)->bytes) {
    const Block* here = block(at);
    const std::uint64_t stop = at + here->bytes;
    if (stop <= from || !here->is(BlockState::kFree)) continue;
    // Keep the header, and each page that a neighbour shares.
    const std::uintptr_t first = (base + std::max(at + kHeaderBytes, from) + page - 1) / page * page;
    const std::uintptr_t last = std::min((base + stop) / page * page, first + kTrimBytes);
    if (first >= last) continue;
    auto* pages = reinterpret_cast<void*>(first);
    // MADV_REMOVE frees the pages of shared memory for all processes. Private memory supports MADV_DONTNEED only.
    if (::madvise(pages, last - first, MADV_REMOVE) != 0) (void)::madvise(pages, last - first, MADV_DONTNEED);
    *bytes += last - first;
    reached = last - base;
  }
  lock_.unlock();
  return reached;
}

std::uint32_t Arena::was_references(std::uint64_t offset) const noexcept {
  const std::uint64_t word = checked_block(offset)->references.load(std::memory_order_relaxed);
  return static_cast<std::uint32_t>(word & kMostReferences) +
         static_cast<std::uint32_t>(std::popcount(word >> kCountBits));
}

std::byte* Arena::at(std::uint64_t offset) const noexcept {
  return reinterpret_cast<std::byte*>(checked_block(offset)) + kHeaderBytes;
}

std::size_t Arena::block_bytes(std::uint64_t offset) const noexcept {
  return checked_block(offset)->bytes - kHeaderBytes;
}

// ---- another process's arena (TRUST-1)

ArenaView::ArenaView(void* memory, std::size_t bytes) : arena_(static_cast<Arena*>(memory)), bytes_(bytes) {
  if (memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % Arena::kAlignment != 0 ||
      bytes < Arena::min_bytes() || arena_->magic_ != Arena::kMagic) {
    throw Error(Status::kInvalid, "arena: expected one in " + std::to_string(bytes) + " bytes of memory");
  }
}

Arena::Block* ArenaView::live(std::uint64_t payload) const noexcept {
  if (payload < round_up(sizeof(Arena)) + Arena::kHeaderBytes || payload >= bytes_ ||
      payload % Arena::kAlignment != 0) {
    return nullptr;
  }
  Arena::Block* found = arena_->block(payload - Arena::kHeaderBytes);
  return found->is(BlockState::kLive) ? found : nullptr;
}

std::byte* ArenaView::find(std::uint64_t offset, std::uint64_t bytes) const noexcept {
  const Arena::Block* found = live(offset);
  if (found == nullptr || bytes > bytes_ - offset) return nullptr;
  const std::uint64_t size = found->was_bytes();
  if (size < Arena::kHeaderBytes || size - Arena::kHeaderBytes < bytes) return nullptr;
  return reinterpret_cast<std::byte*>(arena_) + offset;
}

std::byte* ArenaView::find_leased(std::uint64_t offset, std::uint64_t bytes, unsigned borrower) const noexcept {
  std::byte* found = borrower < Arena::kBorrowers ? find(offset, bytes) : nullptr;
  if (found == nullptr) return nullptr;
  const std::uint64_t references =
      arena_->block(offset - Arena::kHeaderBytes)->references.load(std::memory_order_relaxed);
  return (references & bit_of(borrower)) != 0 ? found : nullptr;
}

std::byte* ArenaView::find_lent(std::uint64_t offset, std::uint64_t bytes) const noexcept {
  std::byte* found = find(offset, bytes);
  if (found == nullptr) return nullptr;
  const std::uint64_t references =
      arena_->block(offset - Arena::kHeaderBytes)->references.load(std::memory_order_relaxed);
  return references > kMostReferences ? found : nullptr;
}

bool ArenaView::return_lease(std::uint64_t offset, unsigned borrower) const noexcept {
  Arena::Block* leased = borrower < Arena::kBorrowers ? live(offset) : nullptr;
  if (leased == nullptr) return false;
  // SYNC arena/release: pairs with itself; the last releaser sees that all others are done with the payload.
  const std::uint64_t before = leased->references.fetch_and(~bit_of(borrower), std::memory_order_acq_rel);
  if ((before & bit_of(borrower)) == 0) return false;
  if (before == bit_of(borrower)) returned(leased, offset - Arena::kHeaderBytes);
  return true;
}

bool ArenaView::return_all(std::uint64_t offset, std::uint32_t counted) const noexcept {
  Arena::Block* held = live(offset);
  if (held == nullptr) return false;
  std::uint64_t before = held->references.load(std::memory_order_relaxed), after = 0;
  do {
    if ((before & kMostReferences) < counted || before == 0) return false;
    after = (before & kMostReferences) - counted;
    // SYNC arena/release: pairs with itself; the last releaser sees that all others are done with the payload.
  } while (
      !held->references.compare_exchange_weak(before, after, std::memory_order_acq_rel, std::memory_order_relaxed));
  if (after == 0) returned(held, offset - Arena::kHeaderBytes);
  return true;
}

bool ArenaView::release(std::uint64_t offset) const noexcept {
  Arena::Block* held = live(offset);
  if (held == nullptr) return false;
  std::uint64_t before = held->references.load(std::memory_order_relaxed);
  do {
    if ((before & kMostReferences) == 0) return false;
    // SYNC arena/release: pairs with itself; the last releaser sees that all others are done with the payload.
  } while (!held->references.compare_exchange_weak(before, before - 1, std::memory_order_acq_rel,
                                                   std::memory_order_relaxed));
  if (before == 1) returned(held, offset - Arena::kHeaderBytes);
  return true;
}

/// The last reference is gone. The owner takes the block when it next drains the returned list.
void ArenaView::returned(Arena::Block* freed, std::uint64_t block) const noexcept {
  arena_->in_use_.fetch_sub(freed->was_bytes(), std::memory_order_relaxed);
  freed->become(BlockState::kReturned);
  arena_->push_returned(freed, block);
}

// ---- blocks

Arena::Block* Arena::block(std::uint64_t offset) const noexcept {
  auto* base = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(this));
  return reinterpret_cast<Block*>(base + offset);
}

std::uint64_t Arena::offset_of(const Block* block) const noexcept {
  return static_cast<std::uint64_t>(reinterpret_cast<const std::byte*>(block) -
                                    reinterpret_cast<const std::byte*>(this));
}

Arena::Block* Arena::checked_block(std::uint64_t payload) const noexcept {
  PW_CHECK(payload >= begin_ + kHeaderBytes && payload < end_ && payload % kAlignment == 0);
  Block* found = block(payload - kHeaderBytes);
  PW_CHECK(found->is(BlockState::kLive));
  return found;
}

Arena::Block* Arena::after(const Block* block) const noexcept { return this->block(offset_of(block) + block->bytes); }

void Arena::forget_lease(Block* leased) noexcept {
  if (leased->next != 0) block(leased->next)->prev = leased->prev;
  if (leased->prev != 0) {
    block(leased->prev)->next = leased->next;
  } else {
    leased_head_ = leased->next;
  }
  leased->stamp = 0;
}

// ---- free lists, all under the lock

Arena::SizeClass Arena::class_of(std::uint64_t bytes) noexcept {
  const auto log2 = static_cast<unsigned>(std::bit_width(bytes | 1U << kMinLog2)) - 1;  // no block is smaller
  return {log2 - kMinLog2, static_cast<unsigned>(bytes >> (log2 - kSubBits)) & (kSubs - 1)};
}

void Arena::insert_free(Block* freed) noexcept {
  const auto [level, sub] = class_of(freed->bytes);
  std::uint64_t& head = free_heads_[level][sub];
  freed->become(BlockState::kFree);
  freed->prev = 0;
  freed->next = head;
  if (head != 0) block(head)->prev = offset_of(freed);
  head = offset_of(freed);
  level_bits_ |= std::uint64_t{1} << level;
  sub_bits_[level] |= 1U << sub;
}

void Arena::remove_free(Block* taken) noexcept {
  const auto [level, sub] = class_of(taken->bytes);
  std::uint64_t& head = free_heads_[level][sub];
  if (taken->next != 0) block(taken->next)->prev = taken->prev;
  if (taken->prev != 0) {
    block(taken->prev)->next = taken->next;
  } else {
    head = taken->next;
  }
  if (head != 0) return;
  sub_bits_[level] &= ~(1U << sub);
  if (sub_bits_[level] == 0) level_bits_ &= ~(std::uint64_t{1} << level);
}

Arena::Block* Arena::find_free(std::uint64_t bytes) noexcept {
  // Every block of a class above the class of `bytes` is large enough. In the class itself only some blocks are.
  const auto [level, sub] = class_of(bytes);
  const std::uint64_t own = free_heads_[level][sub];
  if (own != 0 && block(own)->bytes >= bytes) return block(own);
  if (const std::uint32_t subs = sub_bits_[level] & ~((2U << sub) - 1U); subs != 0) {
    return block(free_heads_[level][static_cast<unsigned>(std::countr_zero(subs))]);
  }
  if (const std::uint64_t levels = level_bits_ & ~((std::uint64_t{2} << level) - 1); levels != 0) {
    const auto next = static_cast<unsigned>(std::countr_zero(levels));
    return block(free_heads_[next][static_cast<unsigned>(std::countr_zero(sub_bits_[next]))]);
  }
  for (std::uint64_t at = own; at != 0; at = block(at)->next) {  // ARENA-4: at last, search the class itself
    if (block(at)->bytes >= bytes) return block(at);
  }
  return nullptr;
}

Arena::Block* Arena::merge(Block* freed) noexcept {
  Block* next = after(freed);
  if (next->is(BlockState::kFree)) {
    remove_free(next);
    freed->bytes += next->bytes;
  }
  if (freed->before != 0) {
    Block* previous = block(offset_of(freed) - freed->before);
    if (previous->is(BlockState::kFree)) {
      remove_free(previous);
      previous->bytes += freed->bytes;
      freed->become(BlockState::kReturned);  // no block starts here any more
      freed = previous;
    }
  }
  after(freed)->before = freed->bytes;
  return freed;
}

void Arena::drain_returned() noexcept {
  if (returned_.load(std::memory_order_relaxed) == 0) return;
  // SYNC arena/drain: pairs with arena/return; after this the owner may use the links and payloads.
  std::uint64_t at = returned_.exchange(0, std::memory_order_acquire);
  while (at != 0) {
    Block* freed = block(at);
    at = freed->next_returned;
    PW_CHECK(freed->is(BlockState::kReturned));
    if (freed->stamp != 0) forget_lease(freed);
    insert_free(merge(freed));
  }
}

void Arena::count_in_use(std::uint64_t bytes) noexcept {
  const std::uint64_t used = in_use_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  std::uint64_t high = high_water_.load(std::memory_order_relaxed);
  while (high < used &&
         !high_water_.compare_exchange_weak(high, used, std::memory_order_relaxed, std::memory_order_relaxed)) {
  }
}

std::vector<Arena::Holding> Arena::holdings() noexcept {
  std::vector<Holding> found;
  lock_.lock();
  for (std::uint64_t at = begin_; at != end_; at += block(at)->bytes) {
    const Block* here = block(at);
    if (!here->is(BlockState::kLive)) continue;
    const std::uint64_t word = here->references.load(std::memory_order_relaxed);
    found.push_back({at + kHeaderBytes, here->bytes - kHeaderBytes, static_cast<std::uint32_t>(word & kMostReferences),
                     word >> kCountBits});
  }
  lock_.unlock();
  return found;
}

void Arena::validate() noexcept {
  lock_.lock();
  drain_returned();
  std::uint64_t free_blocks = 0;
  std::uint64_t before = 0;
  bool was_free = false;
  std::uint64_t at = begin_;
  while (at != end_) {
    const Block* here = block(at);
    PW_CHECK(here->bytes >= kHeaderBytes + kAlignment && here->bytes % kAlignment == 0 && here->bytes <= end_ - at);
    PW_CHECK(here->before == before);
    const bool is_free = here->is(BlockState::kFree);
    PW_CHECK(is_free || here->is(BlockState::kLive) || here->is(BlockState::kReturned));
    PW_CHECK(!(is_free && was_free));  // ARENA-3
    free_blocks += is_free ? 1 : 0;
    was_free = is_free;
    before = here->bytes;
    at += here->bytes;
  }
  PW_CHECK(block(end_)->is(BlockState::kSentinel) && block(end_)->before == before);
  for (unsigned level = 0; level < kLevels; ++level) {
    PW_CHECK((sub_bits_[level] != 0) == ((level_bits_ >> level & 1) != 0));
    for (unsigned sub = 0; sub < kSubs; ++sub) {
      PW_CHECK((free_heads_[level][sub] != 0) == ((sub_bits_[level] >> sub & 1) != 0));
      for (std::uint64_t link = free_heads_[level][sub]; link != 0; link = block(link)->next) {
        const auto size_class = class_of(block(link)->bytes);
        PW_CHECK(block(link)->is(BlockState::kFree) && size_class.level == level && size_class.sub == sub);
        PW_CHECK(free_blocks-- != 0);
      }
    }
  }
  PW_CHECK(free_blocks == 0);
  lock_.unlock();
}

}  // namespace pathways
