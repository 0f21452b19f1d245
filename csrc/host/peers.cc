#include "host/peers.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stop_token>
#include <utility>

#include "base/status.h"

namespace pathways {
namespace {

constexpr std::chrono::microseconds kOverflowLook{100};

}  // namespace

std::chrono::nanoseconds overflow_look(int64_t due, Clock clock) {
  if (due == 0) return kOverflowLook;
  precise_timers();
  const int64_t left = due - clock();
  return left > 0 ? std::chrono::nanoseconds(left) : kOverflowLook;
}

Peers::Peers(uint32_t self, const HostView& own, const std::vector<HostView>& blocks, std::vector<int32_t> epochs,
             ControllerBlock* controller, Clock clock, Take take, Closed closed)
    : self_(self),
      own_(own),
      distance_ns_(controller->distance_ns),
      clock_(clock),
      take_(std::move(take)),
      closed_(std::move(closed)) {
  if (epochs.empty()) {
    for (const HostView& block : blocks) epochs.push_back(block.is_there() ? 0 : kAbsent);
  }
  if (epochs.size() != blocks.size()) {
    throw Error(Status::kInvalid, "a host knows the epochs of " + std::to_string(epochs.size()) + " hosts, of " +
                                      std::to_string(blocks.size()));
  }
  epoch_ = epochs[self];
  if (own.to_link().is_there() && own.from_link().is_there()) {
    Outbox out(own.to_link().producer(), &controller->doorbell, &controller->ready_bitmap, self);
    link_ = channels_.emplace_back(new Channel{std::move(out), own.from_link().consumer()}).get();
  }
  if (own.peers() == 0 && link_ == nullptr) return;  // there are no channels between hosts
  peers_.resize(blocks.size());
  for (uint32_t host = 0; host < peers_.size(); ++host) {
    if (host == self || epochs[host] == kAbsent) continue;
    check(host, blocks[host], epochs[host]);
    open(host, blocks[host], epochs[host]);
  }
}

void Peers::check(uint32_t host, const HostView& block, int32_t epoch) const {
  const std::string name = "host " + std::to_string(self_);
  if (host >= peers_.size() || host == self_ || epoch < 0) {
    throw Error(Status::kInvalid,
                name + " has no peer " + std::to_string(host) + ", or it has no epoch " + std::to_string(epoch));
  }
  if (block.is_there() && !own_.has_ring_from(host)) {
    throw Error(Status::kInvalid, name + " has no ring from host " + std::to_string(host) + " of its machine");
  }
  if (block.is_there() || link_ != nullptr) return;
  throw Error(Status::kInvalid, name + " has no block of host " + std::to_string(host) + ", and no rings to a link");
}

void Peers::open(uint32_t host, const HostView& block, int32_t epoch) {
  Peer& peer = peers_[host];
  if (block.is_there()) {
    Outbox out(block.from(self_).producer(), block.doorbell());
    out.set_distance(distance_ns_, clock_);
    const PeerHeader only{host, epoch};
    peer.channel = channels_.emplace_back(new Channel{std::move(out), own_.from(host).consumer(), only}).get();
    peer.header = {self_, epoch_};
  } else {
    peer.channel = link_;
    peer.header = {host, epoch};
  }
  peer.epoch = epoch;
  peer.state = State::kOpen;
  if (const std::string fault = peer.channel->fault; !fault.empty()) close(host, fault);
}

void Peers::replace(uint32_t host, const HostView& block, int32_t epoch) {
  lose(host);
  if (block.is_there()) ByteRing::create(own_.from(host).at, own_.peer_ring_bytes());
  open(host, block, epoch);
  if (!block.is_there()) take_early(host, epoch);
}

void Peers::expect(uint32_t host, int32_t epoch) {
  const std::lock_guard lock(mutex_);
  expected_.try_emplace({host, epoch});
}

/// Keeps what an expected peer says. False: the sender is not expected.
bool Peers::keep(const PeerHeader& from, std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  const auto at = expected_.find({from.host, from.epoch});
  if (at == expected_.end()) return false;
  Early& early = at->second;
  early.bytes += bytes.size() + sizeof(std::vector<std::byte>);
  if (early.bytes <= kMostKept) early.records.emplace_back(bytes.begin(), bytes.end());
  return true;
}

void Peers::take_early(uint32_t host, int32_t epoch) {
  Early early;
  {
    const std::lock_guard lock(mutex_);
    if (const auto expected = expected_.extract({host, epoch})) early = std::move(expected.mapped());
  }
  for (const auto& record : early.records) (void)take(*link_, record);
  if (early.bytes <= kMostKept || peers_[host].state != State::kOpen) return;
  close(host, "it said more than " + std::to_string(kMostKept) + " bytes before the loss of its predecessor was known");
}

void Peers::lose(uint32_t host) {
  if (host >= peers_.size()) return;
  const Channel* old = std::exchange(peers_[host], {}).channel;
  std::erase_if(channels_, [&](const auto& channel) { return channel.get() == old && old != link_; });
}

void Peers::close(uint32_t host, const std::string& fault) {
  peers_[host].state = State::kClosed;
  peers_[host].partial_words.clear();
  closed_(host, fault);
}

void Peers::send(uint32_t host, const PeerRecord& record, std::span<const std::byte> behind) {
  const Peer& peer = peers_[host];
  const size_t head = sizeof peer.header + sizeof record;
  peer.channel->out.send(static_cast<uint32_t>(head + padded(behind.size())), [&](std::byte* out) {
    std::memcpy(out, &peer.header, sizeof peer.header);
    std::memcpy(out + sizeof peer.header, &record, sizeof record);
    if (!behind.empty()) std::memcpy(out + head, behind.data(), behind.size());
  });
}

bool Peers::flush() {
  bool is_kept = false;
  for (const auto& channel : channels_) is_kept = channel->out.flush() || is_kept;
  return is_kept;
}

int64_t Peers::due() const {
  int64_t first = 0;
  for (const auto& channel : channels_) {
    const int64_t due = channel->out.due();
    if (due != 0 && (first == 0 || due < first)) first = due;
  }
  return first;
}

void Peers::leave() {
  if (!flush()) return;
  speaker_ = std::jthread([this](const std::stop_token& is_back) {
    std::mutex mutex;
    std::condition_variable_any wake;
    std::unique_lock lock(mutex);
    do {
      (void)wake.wait_for(lock, is_back, overflow_look(due(), clock_), [] { return false; });
    } while (!is_back.stop_requested() && flush());
  });
}

void Peers::come_back() {
  if (!speaker_.joinable()) return;
  speaker_.request_stop();
  speaker_.join();
}

uint32_t Peers::drain() {
  uint32_t done = 0;
  for (const auto& channel : channels_) done += drain(*channel);
  return done;
}

uint32_t Peers::drain(Channel& channel) {
  uint32_t done = 0;
  std::string fault;
  try {
    while (fault.empty() && channel.in.valid()) {
      const std::span<const std::byte> bytes = channel.in.try_take(record_);
      if (bytes.empty()) return done;
      fault = take(channel, bytes);
      channel.in.pop();
      ++done;
    }
  } catch (const Error& error) {  // the ring itself is corrupt (RING-5)
    fault = error.what();
  }
  if (fault.empty()) return done;
  channel.in = {};
  channel.fault = fault;
  for (uint32_t host = 0; host < peers_.size(); ++host) {
    if (peers_[host].state == State::kOpen && peers_[host].channel == &channel) close(host, fault);
  }
  return done;
}

/// PEER-1. Returns what is wrong with the ring; what is wrong with a record is its sender's fault alone.
std::string Peers::take(const Channel& channel, std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(PeerHeader)) return "a record is shorter than its header";
  const auto from = read_record<PeerHeader>(bytes);
  const bool is_present =
      from.host < peers_.size() && peers_[from.host].state == State::kOpen && peers_[from.host].epoch == from.epoch;
  if (!is_present && &channel == link_ && keep(from, bytes)) return {};
  if (!may_bring(channel, from)) {
    return "a record is of host " + std::to_string(from.host) + " in epoch " + std::to_string(from.epoch) +
           ", who does not come this way";
  }
  if (!is_present) return {};
  const std::string wrong = take_(from.host, bytes.subspan(sizeof from));
  if (!wrong.empty()) close(from.host, wrong);
  return {};
}

/// Who is not there now has no channel: what comes late from it is dropped, whatever way it comes.
bool Peers::may_bring(const Channel& channel, const PeerHeader& from) const {
  if (channel.only) return *channel.only == from;
  return from.host < peers_.size() && from.host != self_ &&
         (peers_[from.host].state == State::kAbsent || peers_[from.host].channel == &channel);
}

}  // namespace pathways
