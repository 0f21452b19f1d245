#include "controller/controller.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <numeric>

#include "base/check.h"
#include "base/status.h"

namespace pathways {
namespace {

constexpr uint32_t kMostGroups = 1u << 24;
constexpr std::chrono::milliseconds kLook{100};
constexpr std::chrono::microseconds kOverflowLook{100};  // nobody rings when a full ring has room again
constexpr std::chrono::milliseconds kHeldLook{20};       // nor when the grace of a held record is over

}  // namespace

Controller::Controller(Options options, ControllerBlock* block, std::vector<HostView> hosts, StatusBlock* status)
    : options_(std::move(options)),
      block_(block),
      status_(status != nullptr ? status : &block->status),
      bells_(&block->doorbell),
      sequencer_(static_cast<uint32_t>(hosts.size()), options_.window),
      stepper_(options_.sequential ? std::make_unique<Stepper>(static_cast<uint32_t>(hosts.size())) : nullptr),
      hosts_(hosts.size()),
      admission_(options_.budgets),
      mailbox_(&block->doorbell) {
  if (hosts.empty() || hosts.size() > ReadyBitmap::kBits) {
    throw Error(Status::kInvalid, "a cluster has 1 to 65536 hosts, not " + std::to_string(hosts.size()));
  }
  max_record_ = UINT32_MAX;
  for (uint32_t h = 0; h < hosts_.size(); ++h) {
    hosts_[h].inbox = hosts[h].from_host();
    hosts_[h].outbox = Outbox(hosts[h].to_host(), hosts[h].doorbell());
    hosts_[h].outbox.set_distance(block->distance_ns);
    max_record_ = std::min(max_record_, hosts_[h].outbox.max_record());
  }
  std::vector<uint32_t> all(hosts_.size());
  std::iota(all.begin(), all.end(), 0u);
  ready_bitmap_ = all;  // a host may have sent records before
  sequencer_.add_group(kAllHosts, std::move(all));
}

Controller::~Controller() { stop(); }

// ----------------------------------------------------------------------------------------------------------- mail

void Controller::run_mail(std::function<void()> mail) {
  std::promise<void> done;
  auto result = done.get_future();
  mailbox_.post([&] {
    try {
      mail();
      done.set_value();
    } catch (...) {
      done.set_exception(std::current_exception());
    }
  });
  bool is_running;
  {
    const std::lock_guard lock(mutex_);
    is_running = is_running_;  // if true, stop() still reads the mail after it has set this to false
  }
  if (!is_running) {
    mailbox_.read();
    flush();
  }
  result.get();
}

void Controller::add_group(GroupId group, std::vector<uint32_t> hosts) {
  const std::string name = "group " + std::to_string(group);
  if (group >= kMostGroups) throw Error(Status::kInvalid, name + " is above the greatest number, 2^24 - 1");
  if (hosts.empty()) throw Error(Status::kInvalid, name + " needs at least one host");
  std::sort(hosts.begin(), hosts.end());
  if (hosts.back() >= hosts_.size()) {
    throw Error(Status::kInvalid, name + " names host " + std::to_string(hosts.back()) + ", the cluster has " +
                                      std::to_string(hosts_.size()));
  }
  if (std::adjacent_find(hosts.begin(), hosts.end()) != hosts.end()) {
    throw Error(Status::kInvalid, name + " names a host twice");
  }
  mailbox_.post([this, group, hosts = std::move(hosts)] {
    if (!sequencer_.has_group(group)) sequencer_.add_group(group, hosts);
  });
}

void Controller::register_plan(uint32_t plan, uint32_t client, GroupId group) {
  mailbox_.post([this, plan, client, group] {
    if (plan >= plan_owners_.size()) plan_owners_.resize(std::max<size_t>(size_t{plan} + 1, plan_owners_.size() * 2));
    plan_owners_[plan] = {client, group};
  });
}

void Controller::add_client(uint32_t id, const ClientView& view, DoorbellWord* bell) {
  auto client = std::make_shared<std::unique_ptr<Client>>(std::make_unique<Client>());
  {
    const std::lock_guard lock(mutex_);
    if (!client_ids_.insert(id).second) {
      throw Error(Status::kInvalid,
                  "client " + std::to_string(id) + " was there before; every client has its own number");
    }
  }
  (*client)->id = id;
  (*client)->view = view;
  (*client)->bell = bell != nullptr ? bell : &block_->doorbell;
  (*client)->handles = HandleTable(view.futures().capacity());
  (*client)->inbox = view.from_client();
  (*client)->cancels = view.cancels();
  (*client)->outbox = Outbox(view.to_client(), &view.futures().doorbell());
  mailbox_.post([this, client] {
    if ((*client)->id >= by_id_.size()) by_id_.resize((*client)->id + 1);
    by_id_[(*client)->id] = client->get();
    bells_.add((*client)->bell);
    clients_.push_back(std::move(*client));
  });
}

void Controller::remove_client(uint32_t id) {
  run_mail([this, id] { drop_client(id); });
}

void Controller::drop_client(uint32_t id) {
  if (Client* client = client_of(id)) forget_client(*client);
  // GANG-1: each host gets this notice behind everything of the client that was granted to it, and a gang is granted to
  // all of its hosts at once. The client has nothing waiting any more, and entries of other clients do not concern it,
  // so the notice need not wait behind them. A lost host gets the notice when it is back.
  Client gone;
  gone.id = id;
  const ClientGoneRecord record{{RecordKind::kClientGone, 0, id}};
  for (uint32_t h = 0; h < hosts_.size(); ++h) {
    if (hosts_[h].is_lost || stepper_) {
      submit_record(gone, std::as_bytes(std::span{&record, 1}), kOneHost | h, EntryKind::kCommand, 0);
      continue;
    }
    ++stats_.records_out;
    outbox_of(h).send(sizeof record, [&](std::byte* out) { std::memcpy(out, &record, sizeof record); });
  }
}

/// Drops what the client has waiting, and releases the memory of its buffers for entries that come behind its end.
void Controller::forget_client(Client& client) {
  const uint32_t id = client.id;
  std::vector<EntryId> waiting;
  for (EntryId entry = 0; entry < kept_.size(); ++entry) {
    if (!kept_[entry].empty() && sequencer_.entry(entry).client == id) waiting.push_back(entry);
  }
  by_id_[id] = nullptr;  // from here on nothing is written to its memory
  unread_ -= client.is_unread ? 1U : 0U;
  bells_.remove(client.bell);
  std::erase(holding_, &client);
  client.handles.for_each([&](Handle, HandleTable::Entry& entry) { release_bytes(entry); });
  // The youngest first, so that dropping an older entry grants none of these.
  std::sort(waiting.begin(), waiting.end(),
            [&](EntryId a, EntryId b) { return sequencer_.entry(a).order > sequencer_.entry(b).order; });
  for (const EntryId entry : waiting) {
    sequencer_.cancel(entry);
    settle_granted();
  }
  for (auto& memory : plan_memory_) {
    if (memory != nullptr && memory->client == id) memory.reset();
  }
  std::erase_if(clients_, [&](const auto& c) { return c.get() == &client; });
}

// --------------------------------------------------------------------------------------------------------- passes

uint32_t Controller::step() {
  mailbox_.read();
  uint32_t done = drain_hosts();
  done += drain_clients();
  if (!deadlines_.empty()) done += pass_deadlines();
  if (!holding_.empty()) retry_held();
  if (unread_ != 0) done += read_on();
  ++stats_.passes;
  flush();
  return done + (has_faults_ ? 1 : 0);  // a faulty client is evicted in the next pass
}

EntryId Controller::submit_record(Client& client, std::span<const std::byte> record, GroupId group, EntryKind kind,
                                  uint64_t tag) {
  const EntryId id = sequencer_.submit(client.id, group, kind, tag);
  if (sequencer_.granted().empty()) {
    if (id >= kept_.size()) kept_.resize(id + 1);
    kept_[id].assign(record.begin(), record.end());
    client.waiting.add(1, record.size());
    return id;
  }
  // Only this entry can have been granted: a new entry makes room for no other.
  PW_DCHECK(sequencer_.granted().size() == 1 && sequencer_.granted().front() == id);
  forward_granted(id, record);
  sequencer_.settle(id);
  sequencer_.granted().clear();
  return id;
}

void Controller::forward_granted(EntryId id, std::span<const std::byte> record) {
  if (stepper_) {
    forward_in_turn(sequencer_.entry(id), id, record);
  } else {
    forward(sequencer_.entry(id), id, record);
  }
}

void Controller::settle_granted() {
  // Settling retires commands and dropped entries. It frees no room, so the list does not grow in this loop.
  auto& granted = sequencer_.granted();
  for (const EntryId id : granted) {
    const Entry entry = sequencer_.entry(id);
    if (entry.state == EntryState::kDropped) {
      ++stats_.dropped;
      if (!instead_.empty()) forward_instead(id);
      if (entry.kind == EntryKind::kRun) retire(id, entry.client);
    } else {
      forward_granted(id, kept_[id]);
    }
    if (Client* client = client_of(entry.client)) client->waiting.remove(1, kept_[id].size());
    kept_[id].clear();
    if (kept_[id].capacity() > 4096) kept_[id].shrink_to_fit();
    sequencer_.settle(id);
  }
  granted.clear();
}

/// A host's outbox, which will be flushed at the end of the pass.
Outbox& Controller::outbox_of(uint32_t h) {
  Host& host = hosts_[h];
  if (!host.is_dirty) {
    host.is_dirty = true;
    dirty_.push_back(h);
  }
  return host.outbox;
}

void Controller::forward(const Entry& entry, EntryId id, std::span<const std::byte> record, uint16_t flags) {
  const auto bytes = static_cast<uint32_t>(record.size());
  RecordHeader header;
  std::memcpy(&header, record.data(), sizeof header);
  header.client = entry.client;
  header.detail |= flags;
  const uint64_t tag = id;
  const bool is_run = entry.kind == EntryKind::kRun;
  if (is_run) ++stats_.granted;
  const auto hosts = sequencer_.hosts_of(entry.group);
  Client* client = header.kind == RecordKind::kCommand ? client_of(entry.client) : nullptr;
  if (client != nullptr) keep_command(*client, record, hosts);
  stats_.records_out += hosts.size();
  for (const uint32_t h : hosts) {
    if (client != nullptr) give(client, h, bytes);
    outbox_of(h).send(bytes, [&](std::byte* out) {
      std::memcpy(out, record.data(), bytes);
      std::memcpy(out, &header, sizeof header);
      if (!is_run) return;
      std::memcpy(out + offsetof(RunRecord, tag), &tag, sizeof tag);
      std::memcpy(out + offsetof(RunRecord, order), &entry.order, sizeof entry.order);
    });
  }
}

std::vector<uint32_t> Controller::take_forgotten() {
  std::vector<uint32_t> plans;
  run_mail([&] { plans.swap(forgotten_); });
  return plans;
}

/// Keeps what the controller will need of a command when one of the command's hosts is lost.
void Controller::keep_command(Client& client, std::span<const std::byte> bytes, std::span<const uint32_t> hosts) {
  const auto record = read_record<CommandRecord>(bytes);
  if (record.header.detail == static_cast<uint16_t>(CommandKind::kBackend)) {
    if (record.token != 0) {  // no waiting entry names the plan: a successor need not know it
      forgotten_.push_back(static_cast<uint32_t>(record.token));
    } else if (record.handle != 0) {
      std::vector<std::byte>& definition = client.definitions[record.handle];
      client.defined_bytes += bytes.size() - definition.size();
      definition.assign(bytes.begin(), bytes.end());
      if (client.defined_bytes > kMostDefinedBytes) {
        fault(client, "it described more than " + std::to_string(kMostDefinedBytes >> 20) + " MiB of placements");
      }
    }
  }
  if (record.lease_stamp == 0) return;
  for (const uint32_t h : hosts) {
    if (h < client.lease_stamp.size()) client.lease_stamp[h] = record.lease_stamp;
  }
}

void Controller::retire(EntryId id, uint32_t of_client) {
  ++stats_.retired;
  if (id < admitted_.size() && admitted_[id].memory != nullptr) {
    admission_.leave(admitted_[id].memory->needs, admitted_[id].number);
    admitted_[id].memory.reset();
  }
  Client* client = client_of(of_client);
  if (client == nullptr) return;
  --client->in_flight;
  ++client->retired;
  client->has_unsent = true;
}

constexpr std::string_view kCancelled = "CancelledError: the run was cancelled before it started";

void Controller::cancel(Client& owner, uint64_t tag) {
  if (tag > owner.newest) {  // the run itself is still in the client's ring
    owner.cancelled.insert(tag);
    return;
  }
  for (EntryId id = 0; id < kept_.size(); ++id) {
    if (kept_[id].empty()) continue;
    const Entry& entry = sequencer_.entry(id);
    if (entry.client != owner.id || entry.kind != EntryKind::kRun || entry.tag != tag) continue;
    if (entry.state == EntryState::kWaiting) drop(id, kCancelled);
    return;
  }
  cancel_held(owner, tag, kCancelled);
}

/// Refuses a run whose cancel came before the run: the run gets no place in the order.
void Controller::refuse_cancelled(Client& client, std::span<const std::byte> record) {
  ++stats_.dropped;
  ++client.retired;
  client.has_unsent = true;
  fail_results(client, record, kCancelled);
}

/// Drops a run that waits in the order. No host will ever complete its results. So the controller notifies the client
/// of their failure now, and the hosts in the run's place, before anything that comes behind the run (ERR-1, FUT-3).
void Controller::drop(EntryId id, std::string_view text, uint16_t detail) {
  release_donated(id);
  if (Client* owner = client_of(sequencer_.entry(id).client)) {
    const PlanMemory* memory = id < admitted_.size() ? admitted_[id].memory.get() : nullptr;
    tell_results(*owner, kept_[id], text, detail);
    for (auto& command : failure_commands(owner->id, kept_[id], memory, text))
      instead_[id].push_back(std::move(command));
  }
  sequencer_.cancel(id);
  settle_granted();
}

void Controller::run_done(uint32_t h, const RunDoneRecord& record) {
  const auto id = static_cast<EntryId>(record.tag);
  Entry& entry = sequencer_.entry(id);
  hosts_[h].gangs += record.gangs;
  if (record.expected != 0) {  // GANG-1: all gangs or none, and the same on all hosts
    const bool ganged = record.gangs != 0;
    if (record.gangs != 0 && record.gangs != record.expected) {
      fail("GANG-1 broken: host " + std::to_string(h) + " launched " + std::to_string(record.gangs) + " of the " +
           std::to_string(record.expected) + " gangs of run " + std::to_string(entry.order) +
           "; results can no longer be trusted");
    } else if (entry.counted && entry.ganged != ganged) {
      fail("GANG-1 broken: host " + std::to_string(h) + " launched " + (ganged ? "the" : "no") + " gangs of run " +
           std::to_string(entry.order) + ", another of its hosts " + (ganged ? "none" : "did") +
           "; results can no longer be trusted");
    }
    entry.counted = true;
    entry.ganged = ganged;
  }
  const uint32_t client = entry.client;
  if (stepper_) stepper_->host_done(id, h);
  if (sequencer_.complete(id, h)) retire(id, client);
  if (!sequencer_.granted().empty()) settle_granted();
  if (stepper_) step_on();
}

void Controller::flush() {
  // A host whose ring is full stays in the list.
  std::erase_if(dirty_, [&](uint32_t h) { return !(hosts_[h].is_dirty = hosts_[h].outbox.flush()); });
  has_undelivered_ = false;
  for (auto& client : clients_) {
    const ClientView& view = client->view;
    // SYNC client/delivered: pairs with Client::wait(); the records are there, and the doorbell rings after it.
    const auto published = [&](uint64_t count) { view.delivered().store(count, std::memory_order_release); };
    try {
      if (client->outbox.flush(published)) {
        has_undelivered_ = true;
      } else {
        fail_late(*client);
      }
    } catch (const Error& error) {
      silence(*client, error.what());
    }
    if (!client->has_unsent) continue;
    client->has_unsent = false;
    // SYNC client/retired: pairs with Client::in_flight(); SYNC client/wanted: see Client::wait_room().
    view.retired().store(client->retired, std::memory_order_seq_cst);
    uint64_t wanted = view.wanted().load(std::memory_order_seq_cst);
    if (wanted == 0 || client->retired < wanted) continue;
    (void)view.wanted().compare_exchange(wanted, 0, std::memory_order_relaxed, std::memory_order_relaxed);
    view.futures().doorbell().ring();
  }
}

bool Controller::is_idle() const {
  return sequencer_.live() == 0 && dirty_.empty() && (!stepper_ || stepper_->is_idle()) &&
         std::none_of(clients_.begin(), clients_.end(), [](const auto& c) { return c->outbox.has_overflow(); });
}

// --------------------------------------------------------------------------------------------------- life and end

void Controller::finish(ClusterStatus status, std::string_view text) {
  const std::lock_guard lock(finish_mutex_);
  status_->set_status(status, text);
  mailbox_.post([this] {
    for (auto& client : clients_) client->view.futures().doorbell().ring();
  });
}

void Controller::start() {
  PW_CHECK(!thread_.joinable());
  stopping_.store(false, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    is_running_ = true;
  }
  thread_ = std::thread([this] { loop(); });
  pthread_setname_np(thread_.native_handle(), "pw-sequencer");
}

void Controller::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_release);
  block_->doorbell.ring();
  thread_.join();
  {
    const std::lock_guard lock(mutex_);
    is_running_ = false;
  }
  mailbox_.read();  // mail of callers that still saw is_running_ as true
}

/// How long to wait before records that are kept in some outbox may be sent.
std::chrono::nanoseconds Controller::overflow_look() const {
  if (block_->distance_ns == 0) return kOverflowLook;
  precise_timers();
  int64_t due = 0;
  for (const uint32_t h : dirty_) {
    const int64_t own = hosts_[h].outbox.due();
    if (own != 0 && (due == 0 || own < due)) due = own;
  }
  const int64_t left = due - monotonic_ns();
  return left > 0 ? std::chrono::nanoseconds(left) : kOverflowLook;
}

void Controller::loop() {
  const SpinPolicy spin = SpinPolicy::serve_stream();
  bool is_broken = false;  // then only mail is read: a caller that removes a client or asks for statistics must return
  while (!stopping_.load(std::memory_order_acquire)) {
    bells_.draw();
    uint32_t done = 0;
    try {
      if (is_broken) {
        mailbox_.read();
      } else {
        done = step();
      }
    } catch (const std::exception& error) {
      is_broken = true;
      fail(std::string("the controller stopped: ") + error.what());
      continue;
    }
    if (done != 0) continue;
    std::chrono::nanoseconds limit = kLook;
    if (!holding_.empty()) limit = kHeldLook;
    if (!dirty_.empty()) limit = overflow_look();
    if (has_undelivered_) limit = std::min<std::chrono::nanoseconds>(limit, kOverflowLook);
    if (!deadlines_.empty()) {
      limit = std::min(limit, std::chrono::nanoseconds(std::max<int64_t>(0, deadlines_.next_ns() - monotonic_ns())));
    }
    (void)bells_.wait(is_broken ? kLook : limit, spin);
  }
}

ControllerStats Controller::snapshot() const {
  ControllerStats stats = stats_;
  stats.clients = clients_.size();
  stats.waiting = static_cast<uint64_t>(
      std::count_if(kept_.begin(), kept_.end(), [](const auto& record) { return !record.empty(); }));
  for (const Host& host : hosts_) stats.gangs.push_back(host.gangs);
  for (const Client* client : holding_) stats.held += client->held.size();
  stats.unread = unread_;
  for (SpaceId space = 0; space < admission_.space_count(); ++space) {
    stats.live_bytes.push_back(admission_.live(space));
    stats.high_water.push_back(admission_.high_water(space));
  }
  return stats;
}

ControllerStats Controller::stats() {
  ControllerStats stats;
  run_mail([&] { stats = snapshot(); });
  return stats;
}

}  // namespace pathways
