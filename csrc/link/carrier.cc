#include "link/carrier.h"

#include <algorithm>
#include <cstring>

#include "base/status.h"

namespace pathways {

void Carrier::add(uint32_t number, const std::shared_ptr<Link>& link, std::shared_ptr<Sealer> sealer,
                  const std::string& machine) {
  const auto carried = std::make_shared<Member>(Member{link, std::move(sealer)});
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) throw Error(Status::kClosed, "the relay's link is closed");
    link->pool_ = pool_;
    link->slot_ = slot_;
    link->is_carried_ = true;
    if (!carried_.emplace(number, carried).second) throw Error(Status::kInvalid, "this number is taken");
  }
  link->joined();
  if (!machine.empty()) (void)enqueue(FrameKind::kExpect, number, 0, std::as_bytes(std::span(machine)));
}

void Carrier::start(uint32_t number) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = carried_.find(number); found != carried_.end()) found->second->is_started = true;
  }
  wake();
}

void Carrier::drop(uint32_t number) {
  decltype(carried_)::node_type gone;  // it may be the last owner of its link and sealer, which take locks then
  {
    const std::lock_guard lock(mutex_);
    gone = carried_.extract(number);
    if (!gone.empty()) gone.mapped()->is_over = true;
    if (collected_of_ == number) collected_at_ = collected_end_ = 0;
  }
  if (!gone.empty()) (void)enqueue(FrameKind::kEnd, number, 0, {});
}

std::vector<std::pair<uint32_t, std::string>> Carrier::take_broken() {
  const std::lock_guard lock(mutex_);
  return std::exchange(broken_, {});
}

void Carrier::break_link(uint32_t number, Member& carried, const std::string& why) {
  if (carried.is_over) return;
  carried.is_over = true;
  broken_.emplace_back(number, why);
}

// ---------------------------------------------------------------------------------------------------------- collect

/// Begins with another link each time, so that one with much to say does not keep the others waiting (CARRY-2).
void Carrier::send_records(FrameWriter& to) {
  if (!send_collected(to)) return;
  collected_.resize(kMostFrame);
  auto next = carried_.lower_bound(next_);
  for (size_t i = 0; i < carried_.size(); ++i) {
    if (next == carried_.end()) next = carried_.begin();
    auto& [number, carried] = *next++;
    next_ = number + 1;
    if (!carried->is_started || carried->is_held || carried->is_over) continue;
    try {
      collected_end_ = carried->link->collect(collected_);
    } catch (const Error& error) {
      break_link(number, *carried, error.what());
      continue;
    }
    collected_of_ = number;
    collected_at_ = 0;
    if (!send_collected(to)) return;
  }
}

/// Writes what a link has said, to be sealed. False: there is no room for all of it.
bool Carrier::send_collected(FrameWriter& to) {
  while (collected_at_ != collected_end_) {
    const size_t more = FrameWriter::room_for(Sealer::kBytes) + 8;
    const size_t room = to.left() > more ? to.left() - more : 0;
    const size_t size = std::min({collected_end_ - collected_at_, room, kMostMessage});
    if (size == 0) return false;
    Member& carried = *carried_.at(collected_of_);
    std::byte* at = to.begin(FrameKind::kCarried, collected_of_, 0, size + Sealer::kBytes);
    std::memcpy(at, collected_.data() + collected_at_, size);
    unsealed_.push_back({carried.sealer, carried.sent++, {at, size + Sealer::kBytes}});
    collected_at_ += size;
    ++stats_.records_out;
  }
  return true;
}

void Carrier::finish_collect() {
  for (const auto& [sealer, number, message] : std::exchange(unsealed_, {})) sealer->seal(number, message);
}

// ---------------------------------------------------------------------------------------------------------- deliver

void Carrier::take(const FrameHeader& header, std::span<const std::byte> payload) {
  const auto found = carried_.find(header.a);
  const bool is_known = found != carried_.end() && !found->second->is_over;
  switch (header.kind) {
    case FrameKind::kCarried:
    case FrameKind::kEnd:
      if (is_known) {
        arrived_.push_back({header.a, found->second, header.kind == FrameKind::kEnd, {payload.begin(), payload.end()}});
      } else if (header.kind == FrameKind::kCarried) {
        ++stats_.dropped;
      }
      return;
    case FrameKind::kHold:
      if (!is_known) return;
      found->second->is_held = header.b != 0;
      must_look_ = true;  // so that it is collected
      return;
    default:
      refuse("a frame of kind " + std::to_string(static_cast<int>(header.kind)) + ", which a relay does not send");
  }
}

void Carrier::finish_deliver() {
  bool has_overflow = false;
  for (const auto& [number, carried, is_end, message] : std::exchange(arrived_, {})) {
    std::shared_ptr<Link> link;
    {
      const std::lock_guard lock(mutex_);
      if (is_closed_ || carried->is_over) continue;
      link = carried->link;
    }
    const std::string why = is_end ? "its connection to the relay has ended" : take_message(*carried, *link, message);
    const bool waits = why.empty() && link->again_in() == std::chrono::nanoseconds(0);
    const std::lock_guard lock(mutex_);
    if (!why.empty()) {
      break_link(number, *carried, why);
      continue;
    }
    ++stats_.records_in;
    carried->waits = waits;
    has_overflow_ = has_overflow_ || waits;
    has_overflow = has_overflow || waits;
  }
  if (has_overflow) wake();
}

/// Returns why it breaks the link; empty: it does not. CARRY-1: the number of the message is counted here, not sent.
std::string Carrier::take_message(Member& carried, Link& link, std::span<const std::byte> message) {
  opened_.resize(std::max(message.size(), Sealer::kBytes) - Sealer::kBytes);
  try {
    if (message.size() < Sealer::kBytes || !carried.sealer->open(carried.taken, message, opened_)) {
      return "what the relay brought for it is not what its other end has said";
    }
    ++carried.taken;
    link.deliver(opened_);
  } catch (const Error& error) {
    return "it broke the protocol: " + std::string(error.what());
  }
  return {};
}

/// A link tries its rings again when it is collected.
bool Carrier::flush() {
  bool has_overflow = false;
  for (auto& [number, carried] : carried_) {
    if (!carried->waits) continue;
    carried->waits = !carried->is_over && carried->link->again_in() == std::chrono::nanoseconds(0);
    has_overflow = has_overflow || carried->waits;
  }
  return has_overflow;
}

bool Carrier::must_look_soon() const {
  return std::ranges::any_of(carried_, [](const auto& each) {
    return !each.second->is_over && each.second->link->again_in() != std::chrono::nanoseconds::max();
  });
}

void Carrier::add_kept(Stats& now) const { now.kept += collected_end_ - collected_at_; }

/// The sealers go by `drop`, or with the carrier, because the lock is held here.
void Carrier::forget() {
  collected_at_ = collected_end_ = 0;
  for (auto& [number, carried] : carried_) carried->link.reset();
}

}  // namespace pathways
