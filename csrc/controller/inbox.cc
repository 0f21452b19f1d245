#include "controller/inbox.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/status.h"
#include "ledger/client_records.h"

namespace pathways {
namespace {

constexpr uint32_t kBatch = 256;       // records taken from one ring in one pass
constexpr uint32_t kMostCancels = 32;  // taken of one client in one pass: each cancel is a search

/// What is wrong with the handles of a run's results; nullptr: nothing. The run's length is right. The ledger could not
/// tell the blocks of two results apart that have one entry of the handle table, and has no entry for a handle that is
/// none of the client's. `named`: scratch, a byte for each index, all 0 before and after.
const char* wrong_results(const HandleTable& handles, std::span<const std::byte> bytes, std::vector<uint8_t>& named) {
  const auto run = read_record<RunRecord>(bytes);
  const size_t first = sizeof run + size_t{run.arguments} * sizeof(Handle);
  const auto handle = [&](uint32_t i) { return Handle{word_at(bytes, first + size_t{i} * sizeof(Handle))}; };
  const char* wrong = nullptr;
  uint32_t count = 0;
  for (; count < run.results; ++count) {
    const uint32_t index = handle(count).index();
    if (!handles.can_name(handle(count))) {
      wrong = "the handle of a run's result is out of range";
      break;
    }
    if (index >= named.size()) named.resize(size_t{index} + 1);
    if (named[index] != 0) {
      wrong = "a run names one handle for two results";
      break;
    }
    named[index] = 1;
  }
  while (count > 0) named[handle(--count).index()] = 0;
  return wrong;
}

/// Whether each handle that a command gives to a buffer can be one of the client's. The command's length is right.
bool names_own_handles(const HandleTable& handles, std::span<const std::byte> bytes) {
  if (makes_buffer(bytes)) return handles.can_name(Handle{read_record<CommandRecord>(bytes).handle});
  if (!is_command(bytes, CommandKind::kRename)) return true;
  const uint64_t size = read_record<CommandRecord>(bytes).bytes;
  for (size_t at = 0; at + 2 * sizeof(Handle) <= size; at += 2 * sizeof(Handle)) {
    if (!handles.can_name(Handle{word_at(bytes, sizeof(CommandRecord) + at)})) return false;
  }
  return true;
}

/// Whether a command names a hidden handle. The command's length is right.
bool names_hidden(std::span<const std::byte> bytes) {
  const auto record = read_record<CommandRecord>(bytes);
  if (Handle{record.handle}.is_hidden() && !is_command(bytes, CommandKind::kBackend)) return true;
  if (!is_command(bytes, CommandKind::kRelease) && !is_command(bytes, CommandKind::kRename)) return false;
  for (size_t at = 0; at + sizeof(Handle) <= record.bytes; at += sizeof(Handle)) {
    if (Handle{word_at(bytes, sizeof record + at)}.is_hidden()) return true;
  }
  return false;
}

}  // namespace

Inbox::Inbox(const ControllerOptions& options, ReadyBitmap& ready_bitmap, const Mailbox& mailbox, HostRings& hosts,
             Clients& clients, MemoryLedger& ledger, DeviceShares& shares, Grants& grants, AdmissionQueue& queue,
             ControllerStats& stats)
    : options_(options),
      ready_bitmap_(ready_bitmap),
      mailbox_(mailbox),
      hosts_(hosts),
      clients_(clients),
      ledger_(ledger),
      shares_(shares),
      grants_(grants),
      queue_(queue),
      stats_(stats),
      ready_hosts_(hosts.count()) {
  std::iota(ready_hosts_.begin(), ready_hosts_.end(), 0u);  // a host may have sent records before
}

void Inbox::register_plan(uint32_t plan, uint32_t client, GroupId group) {
  if (plan >= plan_owners_.size()) plan_owners_.resize(std::max<size_t>(size_t{plan} + 1, plan_owners_.size() * 2));
  plan_owners_[plan] = {client, group};
}

GroupId Inbox::group_of(uint32_t plan, uint32_t client) const {
  if (plan < plan_owners_.size() && plan_owners_[plan].client == client) return plan_owners_[plan].group;
  throw Error(Status::kInvalid, "plan " + std::to_string(plan) + " is none of this client's");
}

// -------------------------------------------------------------------------------------------------------- clients

uint32_t Inbox::drain_clients() {
  uint32_t done = 0;
  for (ClientState* client : clients_.ready().take()) {
    if (client == nullptr) continue;
    ++stats_.looks;
    if (!client->is_suspended) done += drain_client(*client);
    done += drain_cancels(*client);
  }
  return done;
}

uint32_t Inbox::drain_client(ClientState& client) {
  uint32_t done = 0;
  bool is_empty = false;
  unread_ -= client.is_unread ? 1U : 0U;
  client.is_unread = false;
  try {
    for (; done < kBatch && client.fault.empty(); ++done) {
      if (is_full(client)) {
        client.is_unread = true;
        ++unread_;
        if (grants_.trace().is_on() && client.credits.is_behind()) grants_.trace().waits(client.id, kWaitsForCredits);
        break;
      }
      const std::span<const std::byte> bytes = client.inbox.try_take(client_record_);
      is_empty = bytes.empty();
      if (is_empty || !take(client, bytes)) break;
      client.inbox.pop();
    }
  } catch (const Error& error) {  // its ring is corrupt
    clients_.fault(client, error.what());
  }
  if (done != 0) client.inbox.release();
  if (!is_empty) clients_.ready().mark(client);  // READY-2
  return done;
}

/// The controller does not read a client that is suspended or has too much under way, but it always takes the client's
/// cancels.
uint32_t Inbox::drain_cancels(ClientState& client) {
  uint32_t done = 0;
  bool is_empty = false;
  try {
    while (done < kMostCancels && client.cancelled.size() < kMostRuns && client.fault.empty()) {
      const std::span<const std::byte> bytes = client.cancels.try_take(client_record_);
      is_empty = bytes.empty();
      if (is_empty) break;
      if (bytes.size() != sizeof(CancelRecord) || read_record<RecordHeader>(bytes).kind != RecordKind::kCancel) {
        clients_.fault(client, "a record among its cancels is none");
        break;
      }
      cancel(client, read_record<CancelRecord>(bytes).tag);
      client.cancels.pop();
      ++done;
    }
  } catch (const Error& error) {  // its ring is corrupt
    clients_.fault(client, error.what());
  }
  if (done != 0) client.cancels.release();
  if (!is_empty) clients_.ready().mark(client);
  return done;
}

// -------------------------------------------------------------------------------------------------------- credits

bool Inbox::is_full(const ClientState& client) {
  return client.loop != 0 || client.credits.is_behind() || client.held.is_full() ||
         client.outbox.overflow_bytes() >= kMostUndeliveredBytes;
}

uint32_t Inbox::readable() const {
  const auto marked = clients_.ready().marked();  // those that are unread are among them
  return static_cast<uint32_t>(std::count_if(marked.begin(), marked.end(), [](const ClientState* client) {
    return client->is_unread && !client->is_suspended && !is_full(*client);
  }));
}

void Inbox::commands_done(uint32_t host, const CommandsDoneRecord& record) {
  ClientState* client = clients_.find(record.header.client);
  if (client != nullptr) client->credits.commands_done(host, record.count, record.bytes);
}

// -------------------------------------------------------------------------------------------------------- records

/// False when the record must wait, for mail or for lost hosts, or when the client is to be evicted because of the
/// record.
bool Inbox::take(ClientState& client, std::span<const std::byte> bytes) {
  if (std::string why = unsound(client, bytes); !why.empty()) {
    clients_.fault(client, std::move(why));
    return false;
  }
  const auto header = read_record<RecordHeader>(bytes);
  const bool is_run = header.kind == RecordKind::kRun;
  const GroupId group = is_run ? read_record<RunRecord>(bytes).group : read_record<CommandRecord>(bytes).group;
  const SpaceSetId set = is_run ? kNoSpaceSet : read_record<CommandRecord>(bytes).space_set;
  if (!grants_.has_group(group) || (set != kNoSpaceSet && !ledger_.has_set(set))) {
    // A group or a set is registered before a client writes the first record that names it. So if it is unknown here,
    // the registration is in the mail.
    if (!mailbox_.has_mail()) {
      clients_.fault(client, "a record names group " + std::to_string(group) + " or space set " + std::to_string(set) +
                                 ", which nobody made");
    }
    return false;
  }
  bool may_be_in_the_mail = false;
  if (std::string why = foreign(client, bytes, &may_be_in_the_mail); !why.empty()) {
    if (!may_be_in_the_mail || !mailbox_.has_mail()) clients_.fault(client, std::move(why));
    return false;
  }
  const LossText lost = client.lost.named_by(bytes);
  const bool is_refused = is_run && lost != nullptr;
  if (is_run && !is_refused && grants_.is_stranded(group)) {  // surviving hosts must not wait with it
    if (grants_.trace().is_on()) grants_.trace().waits(client.id, kWaitsForHosts);
    return false;
  }
  if (is_run && !may_enter(client, bytes, is_refused)) {
    if (grants_.trace().is_on()) grants_.trace().waits(client.id, kWaitsForTurn);
    return false;
  }
  ++(is_run ? stats_.runs : stats_.commands);
  bool is_cancelled = false;
  if (is_run) {
    const uint64_t tag = read_record<RunRecord>(bytes).tag;
    client.newest = std::max(client.newest, tag);
    is_cancelled = !client.cancelled.empty() && client.cancelled.erase(tag) != 0;
  } else {
    note_dropped_plan(bytes);
  }
  client.lost.follow(bytes, lost);
  if (is_cancelled) {
    queue_.take_cancelled(client, bytes);
  } else if (is_refused) {
    queue_.take_lost(client, bytes, *lost);
  } else {
    queue_.take(client, bytes);
    if (lost != nullptr) clients_.tell(client, Handle{made_by(bytes)}, *lost);
  }
  return true;
}

/// SHARE-2. A run that will not run need not wait for its turn; nor does one that waits behind held records.
bool Inbox::may_enter(const ClientState& client, std::span<const std::byte> bytes, bool is_refused) {
  const auto run = read_record<RunRecord>(bytes);
  if (!client.held.empty()) return true;
  if (is_refused || client.cancelled.contains(run.tag) || is_late(bytes, options_.clock)) {
    shares_.withdraw(client.id);
    return true;
  }
  return shares_.may_enter(client.id, run.plan);
}

void Inbox::cancel(ClientState& client, uint64_t tag) {
  if (tag > client.newest) {  // the run itself is still in the client's ring
    client.cancelled.insert(tag);
  } else {
    queue_.cancel(client, tag);
  }
}

/// Why a valid record is not this client's to send; empty when the client may send it (TRUST-1).
std::string Inbox::foreign(const ClientState& client, std::span<const std::byte> bytes,
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
  if (owner.is_dropped) return "a record names plan " + std::to_string(plan) + ", which its client has dropped";
  const GroupId group = is_run ? read_record<RunRecord>(bytes).group : read_record<CommandRecord>(bytes).group;
  if (group != owner.group) {
    return std::string(is_run ? "a run" : "a command to drop") + " of plan " + std::to_string(plan) + " names group " +
           std::to_string(group) + ", but the plan's hosts are group " + std::to_string(owner.group);
  }
  if (!is_run || !options_.knows_plans) return {};
  const PlanMemory* memory = ledger_.memory_of(static_cast<uint32_t>(plan));
  const auto run = read_record<RunRecord>(bytes);
  const bool is_counted = memory != nullptr && memory->results.size() == run.results && memory->may_have(run.arguments);
  return is_counted ? std::string() : uncounted(bytes);
}

/// Why the ledger cannot count a run (MEM-6), or its hosts cannot get their parts.
std::string Inbox::uncounted(std::span<const std::byte> bytes) const {
  const auto run = read_record<RunRecord>(bytes);
  const PlanMemory* memory = ledger_.memory_of(run.plan);
  if (memory == nullptr) {
    return "a run names plan " + std::to_string(run.plan) +
           ", whose memory is not known: a client must wait until its program is compiled before it runs the program";
  }
  const auto of = [&](uint64_t arguments, uint64_t results) {
    return std::to_string(arguments) + " arguments and " + std::to_string(results) + " results";
  };
  return "a run of plan " + std::to_string(run.plan) + " has " + of(run.arguments, run.results) +
         ", but the plan has " +
         of(memory->argument_groups ? memory->argument_groups->size() : run.arguments, memory->results.size());
}

/// MEM-6: a run that is taken from now on comes behind the command that drops the plan, and with it the ledger's
/// knowledge of the plan's memory. The command itself may still be held.
void Inbox::note_dropped_plan(std::span<const std::byte> bytes) {
  if (!is_command(bytes, CommandKind::kBackend)) return;
  const uint64_t plan = read_record<CommandRecord>(bytes).token;
  if (plan != 0 && plan < plan_owners_.size()) plan_owners_[plan].is_dropped = true;
}

/// Why a client's record is invalid; empty when it is valid.
std::string Inbox::unsound(const ClientState& client, std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(RecordHeader)) return "a record is shorter than its header";
  const auto header = read_record<RecordHeader>(bytes);
  const auto expect = [&](uint64_t size) {
    return bytes.size() == size ? std::string()
                                : "a record of kind " + std::to_string(static_cast<int>(header.kind)) + " has " +
                                      std::to_string(bytes.size()) + " bytes, expected " + std::to_string(size);
  };
  const size_t forwarded = bytes.size() - for_controller_only(header, bytes.size()).bytes;
  if (forwarded > hosts_.max_record()) {
    return "a record of " + std::to_string(forwarded) + " bytes does not fit the hosts' rings, which take " +
           std::to_string(hosts_.max_record());
  }
  switch (header.kind) {
    case RecordKind::kRun: {
      if (bytes.size() < sizeof(RunRecord)) return expect(sizeof(RunRecord));
      const auto record = read_record<RunRecord>(bytes);
      if ((header.detail & ~(kRunWanted | kRunHasSubmitted | kRunHasDeadline)) != 0) {
        return "a run has the unknown flags " + std::to_string(header.detail);
      }
      if (std::string why = expect(sizeof record + words_behind(record) * sizeof(uint64_t)); !why.empty()) return why;
      for (uint32_t i = 0; i < record.arguments; ++i) {
        if (Handle{argument_of(bytes, i)}.is_hidden()) return "a run names a handle that only the controller uses";
      }
      const char* wrong = wrong_results(client.handles, bytes, named_);
      return wrong == nullptr ? "" : wrong;
    }
    case RecordKind::kCommand: {
      if (bytes.size() < sizeof(CommandRecord)) return expect(sizeof(CommandRecord));
      if (const auto kind = static_cast<CommandKind>(header.detail);
          kind < CommandKind::kPut || kind > CommandKind::kRename) {
        return "a command is of kind " + std::to_string(header.detail) + ", which clients do not send";
      }
      if (read_record<CommandRecord>(bytes).is_refused != 0) return "a command says that the controller refused it";
      if (read_record<CommandRecord>(bytes).hold != 0) return "a command has a hold, which the controller gives";
      if (std::string why = expect(bytes_of(read_record<CommandRecord>(bytes))); !why.empty()) return why;
      if (names_hidden(bytes)) return "a command names a handle that only the controller uses";
      return names_own_handles(client.handles, bytes) ? "" : "the handle of a command's buffer is out of range";
    }
    default:
      return "a record is of kind " + std::to_string(static_cast<int>(header.kind)) + ", which clients do not send";
  }
}

// ---------------------------------------------------------------------------------------------------------- hosts

uint32_t Inbox::drain_hosts() {
  // SYNC ready/collect: a host publishes before it marks its bit.
  ready_bitmap_.collect(&ready_hosts_);
  uint32_t done = 0;
  size_t left = 0;
  for (const uint32_t h : ready_hosts_) {
    if (h >= hosts_.count()) continue;  // a bit carries no data: there is no such ring
    const uint32_t taken = drain_host(h);
    done += taken;
    if (taken == kBatch) ready_hosts_[left++] = h;  // there may be more
  }
  ready_hosts_.resize(left);
  return done;
}

uint32_t Inbox::drain_host(uint32_t index) {
  if (hosts_.is_lost(index) || hosts_.has_fault(index)) return 0;
  ByteRing::Consumer& ring = hosts_.from_host(index);
  uint32_t done = 0;
  try {
    for (; done < kBatch; ++done) {
      const std::span<const std::byte> bytes = ring.try_take(host_record_);
      if (bytes.empty()) break;
      take(index, bytes);
      ring.pop();
    }
    if (done != 0) ring.release();
  } catch (const Error& error) {  // FAULT-1: `take` has applied nothing of the record, or the ring is corrupt (RING-5)
    hosts_.fault(index, error.what());
  }
  grants_.settle_times();
  return done;
}

void Inbox::take(uint32_t index, std::span<const std::byte> bytes) {
  const auto refuse = [&](const char* what) {
    throw Error(Status::kInvalid, "host " + std::to_string(index) + " sent " + what);
  };
  if (bytes.size() < sizeof(RecordHeader)) refuse("a record shorter than its header");
  const auto header = read_record<RecordHeader>(bytes);
  if (header.kind == RecordKind::kRunDone) {
    if (bytes.size() != sizeof(RunDoneRecord)) refuse("a completion of the wrong size");
    const auto record = read_record<RunDoneRecord>(bytes);
    if (record.host != index || record.tag > UINT32_MAX ||
        !grants_.is_running_on(static_cast<EntryId>(record.tag), index)) {
      refuse("a completion of a run that does not run");
    }
    grants_.run_done(index, record);
  } else if (header.kind == RecordKind::kCommandsDone) {
    if (bytes.size() != sizeof(CommandsDoneRecord)) refuse("a count of commands of the wrong size");
    commands_done(index, read_record<CommandsDoneRecord>(bytes));
  } else if (header.kind == RecordKind::kHoldOver) {
    if (bytes.size() != sizeof(HoldOverRecord)) refuse("the end of a hold of the wrong size");
    if (!ledger_.holds().over(read_record<HoldOverRecord>(bytes).hold, index))
      refuse("the end of a hold that it has not");
  } else if (header.kind == RecordKind::kFailed) {
    if (bytes.size() < sizeof(FailedRecord)) refuse("a short record");
    const auto record = read_record<FailedRecord>(bytes);
    ClientState* client = clients_.find(header.client);
    if (client == nullptr || !Handle{record.handle}.valid() || Handle{record.handle}.is_hidden()) return;
    const HandleTable::Entry* entry = client->handles.find(Handle{record.handle});
    // SPEAK-1. What is over concerns nobody but a link, which waits for the end of a fetch that its client has left.
    const bool may_fail = entry == nullptr ? client->handles.is_over(Handle{record.handle})
                                           : std::ranges::binary_search(grants_.hosts_of(entry->group), index);
    if (!may_fail) return;
    const auto* text = reinterpret_cast<const char*>(bytes.data() + sizeof record);
    clients_.tell(*client, Handle{record.handle}, {text, std::min<size_t>(record.bytes, bytes.size() - sizeof record)});
  } else {
    refuse("a record of a kind that hosts do not send");
  }
}

void Inbox::validate() const {
  uint32_t unread = 0;
  for (const auto& client : clients_.all()) unread += client->is_unread ? 1U : 0U;
  PW_CHECK(unread == unread_);
}

}  // namespace pathways
