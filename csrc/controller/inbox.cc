/// The controller's reading half: records from clients and hosts, and what happens to senders of invalid records.
#include <algorithm>
#include <cstring>

#include "base/status.h"
#include "controller/controller.h"

namespace pathways {
namespace {

constexpr uint32_t kBatch = 256;       // records taken from one ring in one pass
constexpr uint32_t kMostCancels = 32;  // taken of one client in one pass: each cancel is a search
constexpr uint32_t kMostText = 4096;   // bytes of one error text
constexpr uint32_t kLeastText = 256;

}  // namespace

// -------------------------------------------------------------------------------------------------------- clients

uint32_t Controller::drain_clients() {
  uint32_t done = 0;
  for (auto& client : clients_) {
    if (!client->is_suspended) done += drain_client(*client);
    done += drain_cancels(*client);
  }
  if (has_faults_) done += evict_faulty();
  return done;
}

uint32_t Controller::evict_faulty() {
  has_faults_ = false;
  uint32_t done = 0;
  for (size_t i = 0; i < clients_.size();) {
    if (clients_[i]->fault.empty()) {
      ++i;
    } else {
      evict(*clients_[i]);  // this removes it from the list
      ++done;
    }
  }
  return done;
}

uint32_t Controller::drain_client(Client& client) {
  uint32_t done = 0;
  unread_ -= client.is_unread ? 1U : 0U;
  client.is_unread = false;
  try {
    for (; done < kBatch; ++done) {
      if (is_full(client)) {
        client.is_unread = true;
        ++unread_;
        break;
      }
      const std::span<const std::byte> bytes = client.inbox.try_take(client_record_);
      if (bytes.empty() || !take(client, bytes)) break;
      client.inbox.pop();
    }
  } catch (const Error& error) {  // its ring is corrupt
    fault(client, error.what());
  }
  if (done != 0) client.inbox.release();
  return done;
}

/// The controller does not read a client that is suspended or has too much under way, but it always takes the client's
/// cancels.
uint32_t Controller::drain_cancels(Client& client) {
  uint32_t done = 0;
  try {
    while (done < kMostCancels && client.cancelled.size() < kMostRuns && client.fault.empty()) {
      const std::span<const std::byte> bytes = client.cancels.try_take(client_record_);
      if (bytes.empty()) break;
      if (bytes.size() != sizeof(CancelRecord) || read_record<RecordHeader>(bytes).kind != RecordKind::kCancel) {
        fault(client, "a record among its cancels is none");
        break;
      }
      cancel(client, read_record<CancelRecord>(bytes).tag);
      client.cancels.pop();
      ++done;
    }
  } catch (const Error& error) {  // its ring is corrupt
    fault(client, error.what());
  }
  if (done != 0) client.cancels.release();
  return done;
}

// -------------------------------------------------------------------------------------------------------- credits

/// FLOW-1: the client has as much under way as allowed. The hosts will finish that work, so this ends.
bool Controller::is_behind(const Client& client) {
  return client.full_hosts != 0 || client.in_flight >= kMostRuns ||
         client.waiting.is_above(kMostWaiting, kMostWaitingBytes);
}

bool Controller::is_full(const Client& client) {
  return is_behind(client) || client.holding.is_above(kMostHeld, kMostHeldBytes) ||
         client.outbox.overflow_bytes() >= kMostUndeliveredBytes;
}

/// How many clients can be read further, now that this pass has done some of their work.
uint32_t Controller::read_on() const {
  return static_cast<uint32_t>(std::count_if(clients_.begin(), clients_.end(), [](const auto& client) {
    return client->is_unread && !client->is_suspended && !is_full(*client);
  }));
}

/// Counts a command of the client as sent to a host.
void Controller::give(Client* client, uint32_t h, uint64_t bytes) {
  if (client->on_host.empty()) client->on_host.resize(hosts_.size());
  Load& load = client->on_host[h];
  const bool was_full = load.is_above(kMostCommands, kMostCommandBytes);
  load.add(1, bytes);
  if (!was_full && load.is_above(kMostCommands, kMostCommandBytes)) ++client->full_hosts;
}

void Controller::commands_done(uint32_t h, const CommandsDoneRecord& record) {
  Client* client = client_of(record.header.client);
  if (client == nullptr || client->on_host.empty()) return;
  Load& load = client->on_host[h];
  const bool was_full = load.is_above(kMostCommands, kMostCommandBytes);
  load.remove(record.count, record.bytes);
  if (was_full && !load.is_above(kMostCommands, kMostCommandBytes)) --client->full_hosts;
}

/// False when the record must wait, for mail or for lost hosts, or when the client is to be evicted because of the
/// record.
bool Controller::take(Client& client, std::span<const std::byte> bytes) {
  if (std::string why = unsound(bytes); !why.empty()) {
    fault(client, std::move(why));
    return false;
  }
  const auto header = read_record<RecordHeader>(bytes);
  const bool is_run = header.kind == RecordKind::kRun;
  const GroupId group = is_run ? read_record<RunRecord>(bytes).group : read_record<CommandRecord>(bytes).group;
  const SpaceSetId set = is_run ? kNoSpaceSet : read_record<CommandRecord>(bytes).space_set;
  if (!sequencer_.has_group(group) || (set != kNoSpaceSet && !admission_.has_set(set))) {
    // A group or a set is registered before a client writes the first record that names it. So if it is unknown here,
    // the registration is in the mail.
    if (!mailbox_.has_mail()) {
      fault(client, "a record names group " + std::to_string(group) + " or space set " + std::to_string(set) +
                        ", which nobody made");
    }
    return false;
  }
  bool may_be_in_the_mail = false;
  if (std::string why = foreign(client, bytes, &may_be_in_the_mail); !why.empty()) {
    if (!may_be_in_the_mail || !mailbox_.has_mail()) fault(client, std::move(why));
    return false;
  }
  if (is_run && lost_ != 0 && is_stranded(group)) return false;  // surviving hosts must not wait with it
  if (stepper_ && is_run && !stepper_->knows(read_record<RunRecord>(bytes).plan) && mailbox_.has_mail()) {
    return false;  // its plan may be in the mail
  }
  ++(is_run ? stats_.runs : stats_.commands);
  bool is_cancelled = false;
  if (is_run) {
    const uint64_t tag = read_record<RunRecord>(bytes).tag;
    client.newest = std::max(client.newest, tag);
    is_cancelled = !client.cancelled.empty() && client.cancelled.erase(tag) != 0;
  }
  if (!client.held.empty()) {
    hold(client, bytes);
    if (is_cancelled) cancel(client, read_record<RunRecord>(bytes).tag);
    return true;
  }
  if (is_cancelled) {
    refuse_cancelled(client, bytes);
    return true;
  }
  if (const int64_t deadline = deadline_of(bytes); deadline != 0 && deadline <= monotonic_ns()) {
    refuse_late(client, bytes);
    return true;
  }
  Verdict verdict;
  SpaceId worst = 0;
  if (!admit(client, bytes, &verdict, &worst)) {
    if (verdict == Verdict::kNever) {
      refuse(client, bytes, verdict, worst);
    } else {
      client.held_since = 0;
      holding_.push_back(&client);
      hold(client, bytes);
      admission_version_ = UINT64_MAX;  // retries it with the other held records: its memory spaces may be claimed
    }
  }
  return true;
}

/// Marks a client to be evicted at the end of this pass, or in the next.
void Controller::fault(Client& client, std::string why) {
  if (client.fault.empty()) client.fault = std::move(why);
  has_faults_ = true;
}

/// The client's ring from the controller is invalid: drops what would still be sent there.
void Controller::silence(Client& client, std::string_view why) {
  client.is_mute = true;
  client.late.clear();
  client.outbox.forget_reader();
  fault(client, std::string(why));
}

/// Why a valid record is not this client's to send; empty when the client may send it (TRUST-1).
std::string Controller::foreign(const Client& client, std::span<const std::byte> bytes,
                                bool* may_be_in_the_mail) const {
  const auto header = read_record<RecordHeader>(bytes);
  uint64_t plan = 0;
  const bool is_run = header.kind == RecordKind::kRun;
  if (is_run) {
    plan = read_record<RunRecord>(bytes).plan;
  } else if (static_cast<CommandKind>(header.detail) == CommandKind::kBackend) {
    plan = read_record<CommandRecord>(bytes).token;  // the plan that the command drops
    if (plan == 0) return {};
  } else {
    return {};
  }
  const bool is_known = plan < plan_owners_.size() && plan_owners_[plan].client != UINT32_MAX;
  if (!is_known) {
    *may_be_in_the_mail = true;
    return options_.knows_plans ? "a record names plan " + std::to_string(plan) + ", which is not registered" : "";
  }
  const PlanOwner& owner = plan_owners_[plan];
  if (owner.client != client.id) return "a record names plan " + std::to_string(plan) + ", which is another client's";
  if (is_run && read_record<RunRecord>(bytes).group != owner.group) {
    return "a run of plan " + std::to_string(plan) + " names group " +
           std::to_string(read_record<RunRecord>(bytes).group) + ", but the plan's hosts are group " +
           std::to_string(owner.group);
  }
  return {};
}

/// Why a client's record is invalid; empty when it is valid.
std::string Controller::unsound(std::span<const std::byte> bytes) const {
  if (bytes.size() < sizeof(RecordHeader)) return "a record is shorter than its header";
  const auto header = read_record<RecordHeader>(bytes);
  const auto expect = [&](uint64_t size) {
    return bytes.size() == size ? std::string()
                                : "a record of kind " + std::to_string(static_cast<int>(header.kind)) + " has " +
                                      std::to_string(bytes.size()) + " bytes, expected " + std::to_string(size);
  };
  if (bytes.size() > max_record_) {
    return "a record of " + std::to_string(bytes.size()) + " bytes does not fit the hosts' rings, which take " +
           std::to_string(max_record_);
  }
  switch (header.kind) {
    case RecordKind::kRun: {
      if (bytes.size() < sizeof(RunRecord)) return expect(sizeof(RunRecord));
      const auto record = read_record<RunRecord>(bytes);
      if ((header.detail & ~(kRunWanted | kRunHasDeadline)) != 0) {
        return "a run has the unknown flags " + std::to_string(header.detail);
      }
      return expect(sizeof record + words_behind(record) * sizeof(uint64_t));
    }
    case RecordKind::kCommand: {
      if (bytes.size() < sizeof(CommandRecord)) return expect(sizeof(CommandRecord));
      if (const auto kind = static_cast<CommandKind>(header.detail);
          kind < CommandKind::kPut || kind > CommandKind::kRename) {
        return "a command is of kind " + std::to_string(header.detail) + ", which clients do not send";
      }
      if (read_record<CommandRecord>(bytes).is_refused != 0) return "a command says that the controller refused it";
      return expect(sizeof(CommandRecord) + ((uint64_t{read_record<CommandRecord>(bytes).bytes} + 7) & ~uint64_t{7}));
    }
    default:
      return "a record is of kind " + std::to_string(static_cast<int>(header.kind)) + ", which clients do not send";
  }
}

/// OWN-1: evicts this client alone, and sends it the reason.
void Controller::evict(Client& client) {
  const uint32_t id = client.id;
  client.is_mute = false;  // for the record with the reason
  tell(client, Handle{}, "the controller put client " + std::to_string(id) + " out: " + client.fault);
  flush();
  drop_client(id);
}

void Controller::tell(Client& client, Handle handle, std::string_view text, uint16_t detail) {
  // A client that does not read its ring gets shorter error texts (FLOW-1).
  const uint32_t most = client.outbox.overflow_bytes() < kMostUndeliveredBytes ? kMostText : kLeastText;
  text = text.substr(0, std::min(most, client.outbox.max_record() - uint32_t{sizeof(FailedRecord)} - 8));
  const auto bytes = static_cast<uint32_t>(text.size());
  say(client, static_cast<uint32_t>(sizeof(FailedRecord)) + padded(bytes), [&](std::byte* out) {
    const FailedRecord record{{RecordKind::kFailed, detail, client.id}, handle.raw, bytes, 0};
    std::memcpy(out, &record, sizeof record);
    std::memcpy(out + sizeof record, text.data(), bytes);
  });
}

// ---------------------------------------------------------------------------------------------------------- hosts

uint32_t Controller::drain_hosts() {
  // SYNC ready/collect: a host publishes before it marks its bit.
  block_->ready_bitmap.collect(&ready_bitmap_);
  uint32_t done = 0;
  size_t left = 0;
  for (const uint32_t h : ready_bitmap_) {
    if (h >= hosts_.size()) continue;  // a bit carries no data: there is no such ring
    const uint32_t taken = drain_host(h);
    done += taken;
    if (taken == kBatch) ready_bitmap_[left++] = h;  // there may be more
  }
  ready_bitmap_.resize(left);
  return done;
}

uint32_t Controller::drain_host(uint32_t index) {
  Host& host = hosts_[index];
  if (host.is_lost) return 0;
  uint32_t done = 0;
  for (; done < kBatch; ++done) {
    const std::span<const std::byte> bytes = host.inbox.try_take(host_record_);
    if (bytes.empty()) break;
    take(index, bytes);
    host.inbox.pop();
  }
  if (done != 0) host.inbox.release();
  return done;
}

void Controller::take(uint32_t index, std::span<const std::byte> bytes) {
  const auto refuse = [&](const char* what) {
    throw Error(Status::kInvalid, "host " + std::to_string(index) + " sent " + what);
  };
  if (bytes.size() < sizeof(RecordHeader)) refuse("a record shorter than its header");
  const auto header = read_record<RecordHeader>(bytes);
  if (header.kind == RecordKind::kRunDone) {
    if (bytes.size() != sizeof(RunDoneRecord)) refuse("a completion of the wrong size");
    const auto record = read_record<RunDoneRecord>(bytes);
    if (record.host != index || record.tag > UINT32_MAX ||
        !sequencer_.is_running_on(static_cast<EntryId>(record.tag), index)) {
      refuse("a completion of a run that does not run");
    }
    run_done(index, record);
  } else if (header.kind == RecordKind::kCommandsDone) {
    if (bytes.size() != sizeof(CommandsDoneRecord)) refuse("a count of commands of the wrong size");
    commands_done(index, read_record<CommandsDoneRecord>(bytes));
  } else if (header.kind == RecordKind::kEnqueued) {
    if (bytes.size() != sizeof(EnqueuedRecord)) refuse("a report of the wrong size");
    if (!enqueued(index, read_record<EnqueuedRecord>(bytes))) refuse("a report of a call that nobody waits for");
  } else if (header.kind == RecordKind::kFailed) {
    if (bytes.size() < sizeof(FailedRecord)) refuse("a short record");
    const auto record = read_record<FailedRecord>(bytes);
    Client* client = client_of(header.client);
    if (client == nullptr || !Handle{record.handle}.valid()) return;
    const auto* text = reinterpret_cast<const char*>(bytes.data() + sizeof record);
    tell(*client, Handle{record.handle}, {text, std::min<size_t>(record.bytes, bytes.size() - sizeof record)});
  } else {
    refuse("a record of a kind that hosts do not send");
  }
}

}  // namespace pathways
