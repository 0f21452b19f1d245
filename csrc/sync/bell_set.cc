#include "sync/bell_set.h"

#include <algorithm>
#include <array>

namespace pathways {

namespace {

constexpr std::chrono::milliseconds kRelayLook{100};  // on an old kernel a relay may miss the ring of its end

}  // namespace

BellSet::Relay::Relay(DoorbellWord* from, DoorbellWord* to, bool can_wait_on_many) : from_(from) {
  const uint32_t ticket = from->ticket();
  if (can_wait_on_many) {
    both_ = std::make_unique<BellSet>(&end_);
    both_->add(from);
    both_->draw();
  }
  thread_ = std::thread([this, to, ticket] { pass_on(to, ticket); });
}

BellSet::Relay::~Relay() {
  is_over_.store(true, std::memory_order_release);
  from_->ring();
  end_.ring();
  thread_.join();
}

/// The thread. It always takes the next ticket before it rings `to`. So a ring before that ticket is passed on now, and
/// a later one next time.
void BellSet::Relay::pass_on(DoorbellWord* to, uint32_t ticket) {
  while (both_ != nullptr && !is_over_.load(std::memory_order_acquire)) {
    const Status status = both_->wait(std::chrono::nanoseconds::max(), SpinPolicy::sleep_at_once());
    both_->draw();
    if (status == Status::kOk) to->ring();
  }
  while (!is_over_.load(std::memory_order_acquire)) {
    if (from_->wait(ticket, kRelayLook, SpinPolicy::sleep_at_once()) != Status::kOk) continue;
    ticket = from_->ticket();
    to->ring();
  }
}

BellSet::BellSet(DoorbellWord* first, bool can_wait_on_many)
    : can_wait_on_many_(can_wait_on_many && has_futex_waitv()) {
  add(first);
}

void BellSet::add(DoorbellWord* bell) {
  const auto known = std::find_if(bells_.begin(), bells_.end(), [&](const Bell& b) { return b.word == bell; });
  if (known != bells_.end()) {
    ++known->uses;
    return;
  }
  Bell added{bell};
  if (direct_ >= (can_wait_on_many_ ? kMostAtOnce : 1)) {
    added.relay = std::make_unique<Relay>(bell, bells_.front().word, can_wait_on_many_);
  } else {
    ++direct_;
  }
  // The sleeper missed what was rung before this call. An old ticket makes the next wait() return at once.
  added.ticket = bell->ticket() - DoorbellWord::kStep;
  bells_.push_back(std::move(added));
}

void BellSet::remove(DoorbellWord* bell) {
  const auto known = std::find_if(bells_.begin(), bells_.end(), [&](const Bell& b) { return b.word == bell; });
  if (known == bells_.end() || --known->uses != 0) return;
  if (known->relay == nullptr) --direct_;
  bells_.erase(known);
}

void BellSet::draw() noexcept {
  for (Bell& bell : bells_) {
    if (bell.relay == nullptr) bell.ticket = bell.word->ticket();
  }
}

bool BellSet::was_rung() const noexcept {
  // SYNC doorbell/wait: pairs with doorbell/ring.
  return std::any_of(bells_.begin(), bells_.end(),
                     [](const Bell& b) { return b.relay == nullptr && b.word->ticket() != b.ticket; });
}

/// Sets the bit "somebody may sleep" in every word. False: a doorbell was rung.
bool BellSet::park() noexcept {
  for (Bell& bell : bells_) {
    if (bell.relay == nullptr && !bell.word->try_park(bell.ticket)) return false;
  }
  return true;
}

void BellSet::unpark() noexcept {
  for (Bell& bell : bells_) {
    if (bell.relay == nullptr) bell.word->unpark(bell.ticket);
  }
}

FutexResult BellSet::sleep(int64_t deadline_ns) noexcept {
  std::array<FutexWait, kMostAtOnce> waits;
  uint32_t count = 0;
  for (const Bell& bell : bells_) {
    if (bell.relay == nullptr) waits[count++] = {&bell.word->word, bell.ticket | DoorbellWord::kParked};
  }
  return count == 1 ? futex_wait(*waits[0].word, waits[0].expected, deadline_ns)
                    : futex_wait_any({waits.data(), count}, deadline_ns);
}

Status BellSet::wait(std::chrono::nanoseconds timeout, SpinPolicy spin) noexcept {
  if (bells_.size() == 1) return bells_.front().word->wait(bells_.front().ticket, timeout, spin);
  for (uint32_t i = 0; i < spin.spins; ++i) {
    if (was_rung()) return Status::kOk;
    cpu_relax();
  }
  const int64_t yields_end = spin.yield_ns == 0 ? kNoDeadline : deadline_after(std::chrono::nanoseconds(spin.yield_ns));
  for (uint32_t i = 0; i < spin.yields; ++i) {
    if (was_rung()) return Status::kOk;
    thread_yield();
    if (spin.yield_ns != 0 && time_left(yields_end).count() <= 0) break;
  }
  if (timeout.count() <= 0) return was_rung() ? Status::kOk : Status::kTimeout;
  const int64_t deadline = deadline_after(timeout);
  while (true) {
    if (!park()) return Status::kOk;
    const FutexResult result = sleep(deadline);
    if (was_rung() || result == FutexResult::kTimeout) {
      unpark();
      return was_rung() ? Status::kOk : Status::kTimeout;
    }
  }
}

}  // namespace pathways
