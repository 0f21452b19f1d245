/// Link's sending half: what the rings, the queue and the leases have becomes frames.
#include <algorithm>
#include <string>

#include "base/status.h"
#include "link/link.h"

namespace pathways {
namespace {

constexpr int64_t kPingNs = 1'000'000'000;
constexpr int64_t kLeaseLookNs = 5'000'000;   ///< between two looks for blocks that hosts have returned
constexpr int64_t kOverflowLookNs = 200'000;  ///< between two tries to put what was delivered into a full ring

}  // namespace

size_t Link::collect(std::span<std::byte> out) {
  const std::lock_guard lock(mutex_);
  if (is_closed_) return 0;
  if (out.size() < kMostFrame) throw Error(Status::kInvalid, "a link collects into at least 1 MiB");
  apply_bells();
  bells_.draw();
  if (has_overflow_) flush();
  FrameWriter to(out);
  const int64_t now = clock_();
  if (now >= next_ping_ns_ && to.fits(sizeof now)) {
    std::memcpy(to.begin(FrameKind::kPing, 0, 0, sizeof now), &now, sizeof now);
    next_ping_ns_ = now + kPingNs;
  }
  if (end_ == End::kAgent && now >= look_ns_) send_leases_back();
  send_queued(to);
  if (send_data(to)) {
    // Begin with another host each time, so that a host with much to say does not keep the others waiting.
    auto first = hosts_.lower_bound(next_host_);
    for (size_t i = 0; i < hosts_.size(); ++i) {
      if (first == hosts_.end()) first = hosts_.begin();
      auto& [number, host] = *first++;
      const bool is_done = pump(number, host, to) && pump_far(number, host, to);
      next_host_ = number + 1;
      if (!is_done) break;
    }
  }
  stats_.bytes_out += to.used();
  return to.used();
}

void Link::wait(std::chrono::nanoseconds timeout) {
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) return;
    if (has_overflow_) timeout = std::min(timeout, std::chrono::nanoseconds(kOverflowLookNs));
    const bool has_leases =
        std::ranges::any_of(twins_, [](const auto& twin) { return twin.second.arena.has_leases(); });
    if (has_leases) timeout = std::min(timeout, std::chrono::nanoseconds(kLeaseLookNs));
  }
  (void)bells_.wait(timeout, SpinPolicy::adaptive());
}

void Link::send_queued(FrameWriter& to) {
  const std::lock_guard lock(queue_mutex_);
  if (is_overrun_) throw Error(Status::kFull, "the other end of a link does not read what it is sent");
  while (!queue_.empty() && queue_.front().size() <= to.left()) {
    to.add(queue_.front());
    queued_bytes_ -= queue_.front().size();
    queue_.pop_front();
  }
}

/// Sends what a host's ring has. False: there is no room for more.
bool Link::pump(uint32_t number, FarHost& host, FrameWriter& to) {
  const bool is_home = end_ == End::kHome;
  const FrameKind kind = is_home ? FrameKind::kFromController : FrameKind::kToController;
  bool is_done = true;
  while (true) {
    const std::span<const std::byte> bytes = host.from.try_take(record_);
    if (bytes.empty()) break;
    if (bytes.size() < sizeof(RecordHeader)) throw Error(Status::kInvalid, "a ring has a record without a header");
    const std::span<std::byte> record(record_.data(), bytes.size());
    is_done = (is_home ? lease(number, record, to) : answer_fetch(record, to)) && to.fits(record.size());
    if (!is_done) break;
    if (is_home) move_deadline(record, -clock_());
    std::memcpy(to.begin(kind, number, host.incarnation, record.size()), record.data(), record.size());
    host.from.pop();
    ++stats_.records_out;
  }
  host.from.release();
  return is_done;
}

/// The same for a host's records to hosts of other machines.
bool Link::pump_far(uint32_t number, FarHost& host, FrameWriter& to) {
  if (!host.from_far.valid()) return true;
  bool is_done = true;
  while (true) {
    const std::span<const std::byte> bytes = host.from_far.try_take(record_);
    if (bytes.empty()) break;
    if (bytes.size() < sizeof(FarHeader)) throw Error(Status::kInvalid, "a host wrote a record without a destination");
    is_done = to.fits(bytes.size());
    if (!is_done) break;
    const auto there = read_record<FarHeader>(bytes);
    const FarHeader source{number, host.incarnation};
    std::byte* at = to.begin(FrameKind::kPeer, there.host, there.incarnation, bytes.size());
    std::memcpy(at, &source, sizeof source);
    std::memcpy(at + sizeof source, bytes.data() + sizeof source, bytes.size() - sizeof source);
    host.from_far.pop();
    ++stats_.records_out;
  }
  host.from_far.release();
  return is_done;
}

/// LINK-3: before the first record of a command that leases a block goes out, the lease and the bytes do. True: the
/// record may go.
bool Link::lease(uint32_t number, std::span<const std::byte> bytes, FrameWriter& to) {
  const auto header = read_record<RecordHeader>(bytes);
  if (header.kind == RecordKind::kClientGone) {
    std::erase_if(lent_, [&](const auto& each) { return each.first.first == header.client; });
  }
  if (header.kind != RecordKind::kCommand || bytes.size() < sizeof(CommandRecord)) return true;
  const auto command = read_record<CommandRecord>(bytes);
  const auto kind = static_cast<CommandKind>(header.detail);
  if (command.lease_bytes == 0 || (kind != CommandKind::kPut && kind != CommandKind::kFetch)) return true;
  const bool is_fetch = kind == CommandKind::kFetch;
  const uint64_t handle = is_fetch ? command.token : command.handle;
  const Key key{header.client, command.lease_at};
  if (const auto lent = lent_.find(key);
      lent != lent_.end() && lent->second.handle == handle && lent->second.is_fetch == is_fetch) {
    return send_data(to);  // it has gone out, for another host
  }
  std::vector<uint32_t> here;
  for (const uint32_t host : hub_.group(command.group)) {
    if (hosts_.contains(host) && here.size() < kMostLeases) here.push_back(host);
  }
  if (here.empty()) here.push_back(number);
  const LeaseFrame frame{command.lease_at, command.lease_bytes, is_fetch ? command.token : 0, last_lease_ + 1};
  const size_t hosts_bytes = here.size() * sizeof(uint32_t);
  if (!to.fits(sizeof frame + hosts_bytes)) return false;
  std::byte* at =
      to.begin(FrameKind::kLease, header.client, static_cast<int32_t>(here.size()), sizeof frame + hosts_bytes);
  std::memcpy(at, &frame, sizeof frame);
  std::memcpy(at + sizeof frame, here.data(), hosts_bytes);
  lent_.insert_or_assign(key, Lent{handle, ++last_lease_, command.lease_bytes, is_fetch, std::move(here)});
  if (!is_fetch && command.is_refused == 0) {
    data_ = {header.client, command.lease_at, command.lease_bytes, last_lease_, 0};
  }
  return send_data(to);
}

/// LINK-3: before the last completion of a fetch goes out, the bytes do.
bool Link::answer_fetch(std::span<const std::byte> bytes, FrameWriter& to) {
  const auto header = read_record<RecordHeader>(bytes);
  const bool is_done = header.kind == RecordKind::kFutureDone && bytes.size() >= sizeof(FutureDoneRecord);
  if (!is_done && header.kind != RecordKind::kFailed) return true;
  const auto twin = twins_.find(header.client);
  if (twin == twins_.end() || twin->second.fetches.empty()) return true;
  const uint64_t handle =
      is_done ? read_record<FutureDoneRecord>(bytes).handle : read_record<FailedRecord>(bytes).handle;
  const auto fetch = twin->second.fetches.find(handle);
  if (fetch == twin->second.fetches.end()) return true;
  if (!to.fits(bytes.size())) return false;  // so that this is done once for the record
  if (--fetch->second.left != 0) return true;
  if (is_done) data_ = {header.client, fetch->second.offset, fetch->second.bytes, fetch->second.lease, 0};
  twin->second.fetches.erase(fetch);
  return send_data(to);
}

/// Sends the bytes of the block that is under way. True: there is none any more.
bool Link::send_data(FrameWriter& to) {
  while (data_.has_value()) {
    Data& data = *data_;
    const uint64_t room = to.left() > FrameWriter::room_for(sizeof(DataFrame)) + 8
                              ? to.left() - FrameWriter::room_for(sizeof(DataFrame)) - 8
                              : 0;
    const uint64_t size = std::min({data.bytes - data.at, room, uint64_t{kMostData}});
    if (size == 0 && data.at != data.bytes) return false;
    if (size != 0) {
      const DataFrame frame{data.offset, data.at, data.lease};
      std::byte* at = to.begin(FrameKind::kData, data.client, 0, sizeof frame + size);
      std::memcpy(at, &frame, sizeof frame);
      std::byte* const bytes = at + sizeof frame;
      if (end_ == End::kHome) {
        // If the client is gone, nobody will use what is sent instead.
        if (!hub_.read(data.client, data.offset, data.at, {bytes, size})) std::memset(bytes, 0, size);
      } else {
        const auto twin = twins_.find(data.client);
        const std::byte* from =
            twin == twins_.end() ? nullptr : twin->second.arena.bytes_of(data.offset, data.lease, data.at, size);
        if (from == nullptr) {
          std::memset(bytes, 0, size);
        } else {
          std::memcpy(bytes, from, size);
        }
      }
      data.at += size;
    }
    if (data.at == data.bytes) data_.reset();
  }
  return true;
}

void Link::send_leases_back() {
  look_ns_ = clock_() + kLeaseLookNs / 2;
  for (auto& each : twins_) {
    const uint32_t client = each.first;
    Twin& twin = each.second;
    // LINK-3: what a fetch has written goes before the lease, because the memory may be another's afterwards.
    const auto is_busy = [&](const ArenaTwin::Returned& block) {
      return (data_.has_value() && data_->client == client && data_->lease == block.lease) ||
             std::ranges::any_of(twin.fetches, [&](const auto& fetch) { return fetch.second.lease == block.lease; });
    };
    for (const ArenaTwin::Returned& block : twin.arena.take_returned(is_busy)) {
      const LeaseBackFrame frame{block.offset, block.lease};
      for (const uint32_t host : block.hosts) {
        enqueue(FrameKind::kLeaseBack, client, static_cast<int32_t>(host), std::as_bytes(std::span(&frame, 1)));
      }
    }
  }
}

}  // namespace pathways
