/// What a host says to other machines, and hears from them: records of hosts there, and completions for clients there.
///
/// FAR-2: see host.h. A record from another machine names the incarnation of its sender; the link of that machine says
/// it, so no host can speak for another one.
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>

#include "base/status.h"
#include "host/host.h"

namespace pathways {

namespace {

/// The longest FutureDoneRecord: every other byte of the value is this host's.
constexpr size_t kMostFutureDone = sizeof(FutureDoneRecord) + ReadBackArea::kLargeBytes / 2 * (sizeof(ValueRun) + 8);

}  // namespace

void Host::open_far(std::vector<int32_t> far, size_t hosts, ControllerBlock* controller) {
  if (far.size() != hosts || own_.peers() != hosts || !own_.to_far().is_there() || !own_.from_far().is_there()) {
    throw Error(Status::kInvalid, "a host of a cluster with other machines needs rings to them, and to know of all " +
                                      std::to_string(hosts) + " hosts where they are; it knows of " +
                                      std::to_string(far.size()));
  }
  if (to_controller_.max_record() < kMostFutureDone) {
    throw Error(Status::kInvalid,
                "a host of a cluster with other machines needs a ring to the controller of records of " +
                    std::to_string(kMostFutureDone) + " bytes");
  }
  far_ = std::move(far);
  closed_far_.assign(hosts, false);
  from_far_ = own_.from_far().consumer();
  to_far_ = Outbox(own_.to_far().producer(), &controller->doorbell, &controller->ready_bitmap, options_.host);
}

/// Does the records from other machines. What is wrong with a record closes the channel from its sender alone (PEER-1);
/// what is wrong with the ring itself, or with a header, is the link's fault, and closes all.
uint32_t Host::drain_far() {
  uint32_t done = 0;
  std::string fault;
  try {
    while (fault.empty() && from_far_.valid()) {
      const std::span<const std::byte> bytes = from_far_.try_take(peer_record_);
      if (bytes.empty()) return done;
      if (bytes.size() < sizeof(FarHeader) || !is_far(read_record<FarHeader>(bytes).host)) {
        fault = "the link brought a record of no host on another machine";
        break;
      }
      const auto from = read_record<FarHeader>(bytes);
      const bool is_known = is_far_there(from.host) && from.incarnation == far_[from.host] && !closed_far_[from.host];
      const std::string wrong = is_known ? take_peer(from.host, bytes.subspan(sizeof from)) : std::string();
      from_far_.pop();
      ++done;
      if (!wrong.empty()) close_peer(from.host, wrong);
    }
  } catch (const Error& error) {  // the ring itself is corrupt (RING-5)
    fault = error.what();
  }
  if (fault.empty()) return done;
  from_far_ = {};
  far_fault_ = fault;
  for (uint32_t peer = 0; peer < far_.size(); ++peer) {
    if (is_far_there(peer)) close_peer(peer, fault);
  }
  return done;
}

/// Only the whole host writes a value, but of an array over several hosts each writes its share. To know which bytes
/// these are, the value is written twice, over zeros and over ones: the bytes that come out alike are written ones.
Status Host::read_back_far(Handle future, const WriteValue& write) {
  struct Slots {
    std::array<std::byte, ReadBackArea::kSmallBytes> small;
    std::array<std::byte, ReadBackArea::kLargeBytes> large;
  };
  const bool has_large = future.index() < ReadBackArea::kLargeSlots;
  thread_local Slots zeros, ones;
  Status status = Status::kOk;
  for (Slots* slots : {&zeros, &ones}) {
    const auto fill = slots == &zeros ? std::byte{0} : std::byte{0xff};
    slots->small.fill(fill);
    slots->large.fill(fill);
    status = write({slots->small.data(), has_large ? slots->large.data() : nullptr});
    if (status != Status::kOk) return status;
  }
  far_value_ = {future, false, 0, std::move(far_value_.bytes)};
  far_value_.bytes.clear();
  const auto gather = [&](std::span<const std::byte> one, std::span<const std::byte> other) {
    for (size_t at = 0; at < one.size();) {
      const auto first = std::mismatch(one.begin() + static_cast<std::ptrdiff_t>(at), one.end(),
                                       other.begin() + static_cast<std::ptrdiff_t>(at), std::not_equal_to<>());
      const auto begin = static_cast<size_t>(first.first - one.begin());
      const auto last = std::mismatch(first.first, one.end(), first.second);
      const auto end = static_cast<size_t>(last.first - one.begin());
      if (begin == end) return;
      const ValueRun run{static_cast<uint32_t>(begin), static_cast<uint32_t>(end - begin)};
      const auto* header = reinterpret_cast<const std::byte*>(&run);
      far_value_.bytes.insert(far_value_.bytes.end(), header, header + sizeof run);
      far_value_.bytes.insert(far_value_.bytes.end(), first.first, last.first);
      far_value_.bytes.resize(padded(far_value_.bytes.size()));
      ++far_value_.runs;
      at = end;
    }
  };
  gather(zeros.small, ones.small);
  if (far_value_.runs == 0) {
    far_value_.is_large = true;
    gather(zeros.large, ones.large);
  }
  return Status::kOk;
}

void Host::complete_far(uint32_t client, Handle future) {
  const bool has_value = far_value_.runs != 0 && far_value_.future.raw == future.raw;
  const std::span<const std::byte> value =
      has_value ? std::span<const std::byte>(far_value_.bytes) : std::span<const std::byte>();
  const FutureDoneRecord record{{RecordKind::kFutureDone, 0, client},
                                future.raw,
                                has_value ? far_value_.runs : 0,
                                has_value && far_value_.is_large ? 1u : 0u};
  to_controller_.send(static_cast<uint32_t>(sizeof record + value.size()), [&](std::byte* out) {
    std::memcpy(out, &record, sizeof record);
    if (!value.empty()) std::memcpy(out + sizeof record, value.data(), value.size());
  });
  far_value_.runs = 0;
}

}  // namespace pathways
