#include "client/client.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/status.h"

namespace pathways {
namespace {

constexpr size_t kReleaseBatch = 16;  // few enough that hosts use memory again while it is in their caches
constexpr std::chrono::microseconds kRoomPoll{200};

}  // namespace

Client::Client(Options options, ClientBlock* block, const StatusBlock* status, DoorbellWord* bell)
    : options_(options),
      window_(options.window),
      block_(block),
      status_(status),
      bell_(bell),
      table_(block->futures()),
      read_back_(block->read_back_area()),
      arena_(block->arena == 0 ? nullptr : block->client_arena()),
      fork_holds_(arena_),
      outgoing_(block->ring_to_controller()->claim_producer()),
      cancels_(block->ring_of_cancels()->claim_producer()),
      inbox_(block->ring_from_controller()->claim_consumer()) {}

void Client::publish() {
  outgoing_.publish();
  bell_->ring();
}

/// READ-1: opens the slots of a run's wanted results, and clears the bit of each result whose slot cannot be opened.
bool Client::open_wanted(const ProgramRef& program, const uint64_t* results, std::span<uint64_t> wanted) {
  uint64_t left = 0;
  for (size_t word = 0; word < wanted.size(); ++word) {
    for (uint64_t bits = wanted[word]; bits != 0; bits &= bits - 1) {
      const size_t result = word * 64 + static_cast<size_t>(std::countr_zero(bits));
      const Handle handle{results[result]};
      if (read_back_ == nullptr || !read_back_->try_open(handle, program.result_bytes[result])) {
        wanted[word] &= ~(bits & -bits);
      }
    }
    left |= wanted[word];
  }
  return left != 0;
}

Status Client::submit(const ProgramRef& program, std::span<const uint64_t> arguments, uint64_t* results,
                      std::span<uint64_t> wanted, int64_t deadline_ns, const ErrorText* too_late) {
  if (in_flight() >= window()) return Status::kFull;
  const auto result_count = static_cast<uint32_t>(program.result_parts.size());
  const size_t handles = arguments.size() + result_count;
  size_t bytes = sizeof(RunRecord) + (handles + wanted.size() + (deadline_ns != 0 ? 1 : 0)) * sizeof(uint64_t);
  if (bytes > outgoing_.max_record()) return Status::kInvalid;
  // A trace must refuse no run: a record that just fits goes without its time.
  const bool is_traced =
      status_->is_traced.load(std::memory_order_relaxed) != 0 && bytes + sizeof(int64_t) <= outgoing_.max_record();
  if (is_traced) bytes += sizeof(int64_t);
  static_assert(sizeof(Handle) == sizeof(uint64_t));
  const std::span<Handle> fresh{reinterpret_cast<Handle*>(results), result_count};
  if (table_->allocate_many(program.result_parts, fresh) != Status::kOk) return Status::kFull;
  if (!wanted.empty() && !open_wanted(program, results, wanted)) {
    bytes -= wanted.size_bytes();
    wanted = {};
  }
  const std::span<std::byte> room = outgoing_.try_reserve(static_cast<uint32_t>(bytes));
  if (room.empty()) {
    for (Handle handle : fresh) (void)table_->release(handle);
    return Status::kFull;
  }
  RunRecord record{};
  record.header = {RecordKind::kRun, 0, options_.id};
  if (!wanted.empty()) record.header.detail |= kRunWanted;
  if (is_traced) record.header.detail |= kRunHasSubmitted;
  if (deadline_ns != 0) record.header.detail |= kRunHasDeadline;
  record.tag = submitted() + 1;
  record.plan = program.plan;
  record.group = program.group;
  record.arguments = static_cast<uint32_t>(arguments.size());
  record.results = result_count;
  std::byte* out = room.data();
  std::memcpy(out, &record, sizeof record);
  out += sizeof record;
  if (!arguments.empty()) std::memcpy(out, arguments.data(), arguments.size_bytes());
  out += arguments.size_bytes();
  if (result_count != 0) std::memcpy(out, results, size_t{result_count} * sizeof(uint64_t));
  out += size_t{result_count} * sizeof(uint64_t);
  if (!wanted.empty()) std::memcpy(out, wanted.data(), wanted.size_bytes());
  out += wanted.size_bytes();
  if (is_traced) {
    const int64_t now_ns = options_.clock();
    std::memcpy(out, &now_ns, sizeof now_ns);
    out += sizeof now_ns;
  }
  if (deadline_ns != 0) {
    std::memcpy(out, &deadline_ns, sizeof deadline_ns);
    for (const Handle handle : fresh) {
      too_late_.insert_or_assign(handle.raw, *too_late);
      watch_deadline(handle, deadline_ns);
    }
  }
  submitted_.store(record.tag, std::memory_order_relaxed);
  publish();
  return Status::kOk;
}

Status Client::cancel(uint64_t tag, std::span<const uint64_t> results, const std::string& text) {
  const std::span<std::byte> room = cancels_.try_reserve(sizeof(CancelRecord));
  if (room.empty()) return Status::kFull;
  const CancelRecord record{{RecordKind::kCancel, 0, options_.id}, tag};
  std::memcpy(room.data(), &record, sizeof record);
  cancels_.publish();
  bell_->ring();
  for (uint64_t raw : results) {
    if (table_->fail(Handle{raw}) == Completion::kReady) failures_.add(Handle{raw}, text, options_.clock());
  }
  return Status::kOk;
}

Status Client::allocate(uint32_t parts, Handle* out) { return table_->allocate(parts, out); }

Status Client::allocate_block(size_t bytes, uint64_t* offset) {
  const auto attempt = [&] {
    const bool has_room =
        kept_elsewhere() == 0 || arena_->bytes_in_use() + kept_elsewhere() + bytes <= arena_->capacity();
    return has_room ? arena_->allocate(bytes, offset) : Status::kNoMemory;
  };
  Status status = attempt();
  if (status == Status::kOk) return status;
  poll_inbox();  // this reclaims the leases of lost hosts
  return attempt();
}

/// The stamp of the lease; 0: the lease has nothing that can be reclaimed.
uint64_t Client::lease_out(const Lease& lease) {
  for (uint32_t i = 0; i < lease.others; ++i) arena_->retain(lease.offset);
  if (lease.borrowers == 0) return 0;
  arena_->lease_out(lease.offset, lease.borrowers, ++last_lease_);
  return last_lease_;
}

Status Client::command(CommandKind kind, uint32_t group, Handle handle, Handle token,
                       std::span<const std::byte> payload, uint32_t space_set, uint64_t space_bytes,
                       const Lease& lease) {
  const auto bytes = static_cast<uint32_t>(payload.size());
  if (sizeof(CommandRecord) + padded(bytes) > outgoing_.max_record()) return Status::kInvalid;
  const std::span<std::byte> room = outgoing_.try_reserve(static_cast<uint32_t>(sizeof(CommandRecord)) + padded(bytes));
  if (room.empty()) return Status::kFull;
  const CommandRecord record{{RecordKind::kCommand, static_cast<uint16_t>(kind), options_.id},
                             handle.raw,
                             token.raw,
                             group,
                             bytes,
                             space_bytes,
                             space_set,
                             0,
                             static_cast<uint16_t>(lease.others),
                             lease_out(lease),
                             0,
                             0,
                             lease.offset + lease.lie,
                             lease.bytes,
                             lease.parts};
  std::memcpy(room.data(), &record, sizeof record);
  if (bytes != 0) std::memcpy(room.data() + sizeof record, payload.data(), bytes);
  publish();
  return Status::kOk;
}

void Client::release(Handle handle, uint32_t group, uint64_t bytes) {
  if (!failures_.is_empty()) failures_.release(handle);
  if (!too_late_.empty()) too_late_.erase(handle.raw);
  if (recent_ == nullptr || recent_group_ != group) {
    recent_ = &releases_[group];
    recent_group_ = group;
  }
  Releases& releases = *recent_;
  releases.handles.push_back(handle.raw);
  releases.bytes += bytes;
  if (releases.handles.size() >= kReleaseBatch || releases.bytes >= options_.release_bytes)
    send_releases(group, releases);
}

void Client::donated(Handle handle) {
  if (!failures_.is_empty()) failures_.release(handle);
  if (!too_late_.empty()) too_late_.erase(handle.raw);
  (void)table_->release(handle);
}

void Client::forget(Handle handle) {
  failures_.forget(handle, poll(handle) == FutureState::kPending);
  (void)table_->release(handle);
}

void Client::send_releases(uint32_t group, Releases& releases) {
  if (releases.handles.empty()) return;
  // In chunks that fit the ring. Handles that find no room now stay for the next call.
  const size_t most = (outgoing_.max_record() - sizeof(CommandRecord)) / sizeof(uint64_t);
  while (!releases.handles.empty()) {
    const size_t count = std::min(most, releases.handles.size());
    const std::span<const uint64_t> piece{releases.handles.data() + releases.handles.size() - count, count};
    if (command(CommandKind::kRelease, group, Handle{}, Handle{}, std::as_bytes(piece)) != Status::kOk) return;
    for (uint64_t raw : piece) (void)table_->release(Handle{raw});
    releases.handles.resize(releases.handles.size() - count);
  }
  releases.bytes = 0;
}

void Client::flush() {
  for (auto& [group, releases] : releases_) send_releases(group, releases);
}

void Client::watch_deadline(Handle handle, int64_t at_ns) {
  const auto later = [](const Timed& a, const Timed& b) { return a.at_ns > b.at_ns; };
  if (timed_.size() >= sweep_timed_at_) {
    std::erase_if(timed_, [&](const Timed& each) { return poll(Handle{each.handle}) != FutureState::kPending; });
    std::make_heap(timed_.begin(), timed_.end(), later);
    sweep_timed_at_ = std::max<size_t>(64, 2 * timed_.size());
  }
  timed_.push_back({at_ns, handle.raw});
  std::push_heap(timed_.begin(), timed_.end(), later);
  next_deadline_.store(timed_.front().at_ns, std::memory_order_relaxed);
}

void Client::pass_deadlines(int64_t now_ns) {
  const auto later = [](const Timed& a, const Timed& b) { return a.at_ns > b.at_ns; };
  while (!timed_.empty() && timed_.front().at_ns <= now_ns) {
    const Handle handle{timed_.front().handle};
    std::pop_heap(timed_.begin(), timed_.end(), later);
    timed_.pop_back();
    const auto words = too_late_.find(handle.raw);
    if (words == too_late_.end() || table_->fail(handle) != Completion::kReady) continue;  // it was over in time
    failures_.add(handle, *words->second, now_ns);
  }
  next_deadline_.store(timed_.empty() ? INT64_MAX : timed_.front().at_ns, std::memory_order_relaxed);
}

void Client::poll_inbox() {
  take_inbox();
  if (timed_.empty()) return;
  if (const int64_t now_ns = options_.clock(); timed_.front().at_ns <= now_ns) pass_deadlines(now_ns);
}

void Client::take_inbox() {
  while (true) {
    const std::span<const std::byte> bytes = inbox_.try_take(record_);
    if (bytes.empty()) return;
    if (bytes.size() < sizeof(RecordHeader)) throw Error(Status::kInvalid, "the controller sent a short record");
    if (read_record<RecordHeader>(bytes).kind == RecordKind::kReclaim) {
      if (bytes.size() < sizeof(ReclaimRecord)) throw Error(Status::kInvalid, "the controller sent a short record");
      const auto record = read_record<ReclaimRecord>(bytes);
      ++losses_;
      if (record.stamp != 0) {
        if (record.host >= Arena::kBorrowers || arena_ == nullptr) {
          throw Error(Status::kInvalid, "the controller sent a lease of host " + std::to_string(record.host));
        }
        arena_->reclaim(record.host, record.stamp);
      }
    } else {
      take_failure(bytes);
    }
    inbox_.pop();
    taken_.store(taken_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
}

void Client::take_failure(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(FailedRecord)) throw Error(Status::kInvalid, "the controller sent a short record");
  const auto record = read_record<FailedRecord>(bytes);
  const auto* text = reinterpret_cast<const char*>(bytes.data() + sizeof record);
  std::string why(text, std::min<size_t>(record.bytes, bytes.size() - sizeof record));
  const Handle handle{record.handle};
  if (record.header.detail == kFailedByDeadline) {
    const auto words = too_late_.find(record.handle);
    if (words != too_late_.end()) why = *words->second;
  }
  if (!handle.valid()) {
    evicted_text_ = std::move(why);
    // SYNC client/evict: pairs with cluster_status().
    evicted_.store(1, std::memory_order_release);
  } else if (const FutureState state = table_->poll(handle);
             state == FutureState::kPending || state == FutureState::kFailed) {
    // The first outcome and the first text stay. A controller on another machine does not know what is ready, so it
    // may report what is.
    // Nobody can read it any more if only the command that releases it has not been sent yet (UNREAD-2).
    const bool is_released = std::any_of(releases_.begin(), releases_.end(), [&](const auto& held) {
      const std::vector<uint64_t>& raws = held.second.handles;
      return std::find(raws.begin(), raws.end(), record.handle) != raws.end();
    });
    if (is_released) {
      failures_.add_released(handle, std::move(why), options_.clock());
    } else {
      failures_.add(handle, std::move(why), options_.clock());
    }
    (void)table_->fail(handle);
  } else if (state == FutureState::kFree) {
    failures_.add_released(handle, std::move(why), options_.clock());
  }
}

FutureState Client::wait(Handle handle, std::chrono::nanoseconds timeout, SpinPolicy spin, Handle source) {
  DoorbellWord& bell = table_->doorbell();
  const uint32_t ticket = bell.ticket();  // END-1a: before the bits
  if (!table_->mark_waited(handle)) return table_->poll(handle);
  if (source.valid() && !table_->mark_waited(source) && table_->poll(source) == FutureState::kFailed) {
    return table_->poll(handle);
  }
  // SYNC client/delivered: pairs with Controller::flush(), which rings after it. A record that comes later
  // rings, and so ends the wait on this ticket.
  const bool has_messages = block_->delivered.load(std::memory_order_acquire) != taken_.load(std::memory_order_relaxed);
  if (has_messages || cluster_status() != ClusterStatus::kUp) return table_->poll(handle);
  const int64_t deadline = next_deadline_.load(std::memory_order_relaxed);
  if (deadline != INT64_MAX) {
    timeout = std::min(timeout, std::chrono::nanoseconds(std::max<int64_t>(0, deadline - options_.clock())));
  }
  (void)bell.wait(ticket, timeout, spin);
  return table_->poll(handle);
}

void Client::wait_room(std::chrono::nanoseconds timeout, SpinPolicy spin) {
  DoorbellWord& bell = table_->doorbell();
  const uint32_t ticket = bell.ticket();
  const uint32_t window = this->window();
  if (in_flight() < window) {
    // There are credits, so ring space or futures are short. Nobody rings for those.
    (void)bell.wait(ticket, std::min<std::chrono::nanoseconds>(timeout, kRoomPoll), SpinPolicy::sleep_at_once());
    return;
  }
  const uint64_t kept = window - std::max(window / 4, 1u);
  const uint64_t wanted = submitted() - std::min(kept, submitted());
  // SYNC client/wanted: this thread stores `wanted` and then loads `retired`; Controller::flush() stores `retired` and
  // then loads `wanted`. So at least one of the two sees the other's store. The ticket was drawn before, so no ring is
  // lost.
  block_->wanted.store(wanted, std::memory_order_seq_cst);
  if (block_->retired.load(std::memory_order_seq_cst) < wanted && cluster_status() == ClusterStatus::kUp) {
    (void)bell.wait(ticket, timeout, spin);
  }
}

}  // namespace pathways
