#include "controller/controller.h"

#include <pthread.h>

#include <algorithm>
#include <future>
#include <memory>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/status.h"
#include "ledger/client_records.h"

namespace pathways {
namespace {

constexpr uint32_t kMostGroups = 1u << 24;
constexpr std::chrono::milliseconds kLook{100};
constexpr std::chrono::milliseconds kHeldLook{20};  // nobody rings when the grace of a held record is over

}  // namespace

Controller::Controller(Options options, ControllerBlock* block, std::vector<HostView> hosts, StatusBlock* status)
    : options_(std::move(options)),
      block_(block),
      status_(status != nullptr ? status : &block->status),
      bells_(&block->doorbell),
      mailbox_(&block->doorbell),
      clients_(bells_, &block->doorbell),
      hosts_(block, hosts, options_),
      end_(status_, mailbox_, clients_),
      ledger_(options_.budgets, options_.devices, hosts_.count()),
      shares_(options_.policy, options_.clock),
      grants_(options_, hosts_, clients_, ledger_, shares_, stats_),
      composites_(ledger_, grants_.sequencer()),
      loops_(composites_, clients_, ledger_, shares_, grants_, hosts_, stats_),
      deadlines_(clients_, ledger_, grants_, loops_, stats_),
      queue_(options_, clients_, ledger_, shares_, grants_, deadlines_, loops_, stats_),
      inbox_(options_, block->ready_bitmap, mailbox_, hosts_, clients_, ledger_, shares_, grants_, queue_, stats_),
      recovery_(hosts_, clients_, ledger_, grants_, loops_, queue_, inbox_) {}

Controller::~Controller() { stop(); }

// ----------------------------------------------------------------------------------------------------------- mail

template <typename Mail>
auto Controller::run_mail(Mail mail) {
  // Shared: the stepping thread may still be leaving the task when this thread has its result.
  auto task = std::make_shared<std::packaged_task<decltype(mail())()>>(std::move(mail));
  mailbox_.post([task] { (*task)(); });
  bool is_running;
  {
    const std::lock_guard lock(mutex_);
    is_running = is_running_;  // if true, stop() still reads the mail after it has set this to false
  }
  if (!is_running) {
    mailbox_.read();
    flush();
  }
  return task->get_future().get();
}

void Controller::add_group(GroupId group, std::vector<uint32_t> hosts) {
  const std::string name = "group " + std::to_string(group);
  if (group >= kMostGroups) throw Error(Status::kInvalid, name + " is above the greatest number, 2^24 - 1");
  if (hosts.empty()) throw Error(Status::kInvalid, name + " needs at least one host");
  std::sort(hosts.begin(), hosts.end());
  if (hosts.back() >= hosts_.count()) {
    throw Error(Status::kInvalid, name + " names host " + std::to_string(hosts.back()) + ", the cluster has " +
                                      std::to_string(hosts_.count()));
  }
  if (std::adjacent_find(hosts.begin(), hosts.end()) != hosts.end()) {
    throw Error(Status::kInvalid, name + " names a host twice");
  }
  mailbox_.post([this, group, hosts = std::move(hosts)] { grants_.add_group(group, hosts); });
}

SpaceSetId Controller::add_space_set(std::vector<SpaceId> spaces) {
  return run_mail([&] { return ledger_.add_space_set(std::move(spaces)); });
}

void Controller::set_budget(std::vector<SpaceId> spaces, uint64_t bytes) {
  run_mail([&] { ledger_.set_budget(std::move(spaces), bytes); });
}

void Controller::set_plan_memory(uint32_t plan, PlanMemory memory) {
  run_mail([&] {
    if (memory.argument_groups) grants_.set_parts(plan, inbox_.group_of(plan, memory.client), memory);
    ledger_.set_plan_memory(plan, std::move(memory));
  });
}

void Controller::register_plan(uint32_t plan, uint32_t client, GroupId group, std::vector<HostDevice> devices) {
  mailbox_.post([this, plan, client, group, devices = std::move(devices)] {
    inbox_.register_plan(plan, client, group);
    shares_.add_plan(plan, client, devices);
  });
}

void Controller::register_composite(uint32_t number, Composite composite) {
  run_mail([&] {
    if (!grants_.has_group(composite.group))
      throw Error(Status::kInvalid, "a composite names a group that nobody made");
    for (CompositeStep& step : composite.steps) {
      if (step.kind != CompositeStep::Kind::kRun) continue;
      step.group = inbox_.group_of(step.plan, composite.client);
      const uint64_t words = step.inputs.size() + 2 * step.outputs.size();
      if (sizeof(RunRecord) + words * sizeof(uint64_t) > hosts_.max_record()) {
        throw Error(Status::kInvalid, "a run of a composite has too many arguments and results for the hosts' rings");
      }
    }
    const uint32_t client = composite.client;
    const GroupId group = composite.group;
    ledger_.set_plan_memory(number, composites_.add(number, std::move(composite)));
    inbox_.register_plan(number, client, group);
  });
}

void Controller::add_client(uint32_t id, const ClientView& view, DoorbellWord* bell, const ClientLimits& limits,
                            ClientPlace place) {
  check(limits);
  {
    const std::lock_guard lock(mutex_);
    const bool is_new = client_ids_.insert(id).second;
    if (!is_new) throw Error(Status::kInvalid, "client " + std::to_string(id) + " was there before: use a new number");
  }
  if (bell == nullptr) bell = &block_->doorbell;
  // Shared, because mail can be copied.
  auto client = std::make_shared<std::unique_ptr<ClientState>>(
      std::make_unique<ClientState>(id, view, bell, hosts_.count(), place));
  mailbox_.post([this, id, limits, client] {
    shares_.add_client(id, limits.weight, limits.priority);
    set_limits(**client, limits);
    clients_.add(std::move(*client));
  });
}

void Controller::limit(uint32_t id, const ClientLimits& limits) {
  check(limits);
  run_mail([&] {
    ClientState* client = clients_.find(id);
    if (client == nullptr) return;
    shares_.change_client(id, limits.weight, limits.priority);
    set_limits(*client, limits);
    queue_.retry_soon();  // so that its held records are tried again
  });
}

/// All limits but those that DeviceShares keeps.
void Controller::set_limits(ClientState& client, const ClientLimits& limits) {
  client.at_quota = limits.at_quota;
  client.credits.set_bounds(limits.runs, limits.bytes);
  ledger_.set_quota(client.id, limits.memory);
}

std::vector<ClientUse> Controller::client_uses() {
  return run_mail([&] {
    std::vector<ClientUse> found;
    for (const auto& client : clients_.all()) found.push_back(use_of(*client));
    return found;
  });
}

ClientUse Controller::use_of(const ClientState& client) const {
  return {.client = client.id,
          .device_ns = client.device_ns,
          .in_flight = client.credits.in_flight(),
          .held = client.held.size(),
          .has_unread = client.is_unread || !client.inbox.was_empty(),
          .memory = ledger_.admission().clients().most_held(client.id),
          .is_waiting = shares_.is_waiting(client.id),
          .tasks = ledger_.holds().count(client.id)};
}

void Controller::remove_client(uint32_t id) {
  run_mail([&] { remove(id); });
}

uint64_t Controller::lose_hosts(std::vector<uint32_t> hosts, std::string text) {
  return run_mail([&] { return recovery_.lose(hosts, text); });
}

void Controller::restore_host(uint32_t host, const HostView& block, std::span<const uint32_t> gone) {
  run_mail([&] { recovery_.restore(host, block, gone); });
}

std::vector<uint32_t> Controller::take_forgotten() {
  return run_mail([&] { return grants_.take_forgotten(); });
}

void Controller::suspend(uint32_t id) {
  run_mail([&] {
    if (ClientState* client = clients_.find(id)) client->is_suspended = true;
    shares_.withdraw(id);
  });
}

void Controller::resume(uint32_t id) {
  run_mail([&] {
    if (ClientState* client = clients_.find(id)) {
      client->is_suspended = false;
      clients_.ready().mark(*client);
    }
    queue_.retry_soon();  // so that its held records are tried again
  });
}

bool Controller::is_quiet(uint32_t id) {
  return run_mail([&] {
    const ClientState* client = clients_.find(id);
    return client == nullptr || client->credits.in_flight() == 0;
  });
}

void Controller::offload(uint32_t id) {
  run_mail([&] { ledger_.offload(id); });
}

std::string Controller::restore(uint32_t id) {
  return run_mail([&] { return restore_blocks(id); });
}

std::vector<RoomRequest> Controller::room_requests(std::span<const uint32_t> suspended) {
  return run_mail([&] {
    std::vector<RoomRequest> found = queue_.room_requests();
    for (const uint32_t id : suspended) {
      const ClientState* client = clients_.find(id);
      if (client == nullptr || (client->held.empty() && client->inbox.was_empty())) continue;
      RoomRequest request{id, false, {}};
      const std::optional<SpaceId> space = ledger_.admission().lacks_room(id);
      request.has_room = !space.has_value();
      if (space) {
        const auto holders = ledger_.admission().clients_on(*space);
        request.holders.assign(holders.begin(), holders.end());
      }
      found.push_back(std::move(request));
    }
    return found;
  });
}

void Controller::refuse_room(uint32_t id) {
  run_mail([&] {
    if (ClientState* client = clients_.find(id)) queue_.refuse_room(*client);
  });
}

void Controller::command_for(uint32_t id, CommandKind kind, std::vector<std::byte> payload) {
  run_mail([&] { send_for(id, kind, payload); });
}

void Controller::start_trace(size_t capacity) {
  run_mail([&] { grants_.trace().start(capacity); });
  status_->is_traced.store(1, std::memory_order_relaxed);
}

void Controller::stop_trace() {
  status_->is_traced.store(0, std::memory_order_relaxed);
  run_mail([&] { grants_.trace().stop(); });
}

OrderTrace::Ring::Taken Controller::take_trace() {
  return run_mail([&] { return grants_.trace().take(); });
}

ControllerStats Controller::stats(uint32_t hosts) {
  return run_mail([&] { return snapshot(std::min(hosts, hosts_.count())); });
}

ControllerStats Controller::snapshot(uint32_t hosts) const {
  ControllerStats stats = stats_;
  stats.clients = clients_.count();
  stats.waiting = grants_.waiting();
  stats.gangs.assign(grants_.gangs().begin(), grants_.gangs().begin() + hosts);
  stats.held = queue_.held();
  stats.unread = inbox_.unread();
  stats.charged = shares_.charged();
  const Admission& admission = ledger_.admission();
  const auto tell = [&](SpaceId first, SpaceId count) {
    for (SpaceId space = first; space < first + count; ++space) {
      stats.live_bytes.push_back(admission.live(space));
      stats.high_water.push_back(admission.high_water(space));
    }
  };
  if (hosts == hosts_.count() || options_.devices >= admission.space_count()) {
    tell(0, admission.space_count());
  } else {  // without a walk through the spaces of hosts that may never come
    tell(0, options_.devices / hosts_.count() * hosts);
    tell(options_.devices, hosts);
  }
  return stats;
}

// -------------------------------------------------------------------------------------------------------- clients

/// OWN-1: drops what the client has waiting, and releases the memory of its buffers for entries that come behind its
/// end. Each host gets a notice behind everything of the client that the host was granted.
void Controller::remove(uint32_t id) {
  if (ClientState* client = clients_.find(id)) {
    clients_.forget(*client);  // from here on nothing is written to its memory
    inbox_.forget(*client);
    queue_.forget(*client);
    grants_.trace().forget(id);
    ledger_.release_all(*client);
    loops_.client_gone(id);
    grants_.drop_all_of(id);
    ledger_.forget_plans_of(id);
    shares_.forget_client(id);
    grants_.forget_plans_of(id);
    clients_.erase(*client);
  }
  grants_.announce_gone(id);
}

/// OWN-1: removes all clients that are marked (Clients::fault), each after the reason was sent to it; the others notice
/// nothing. Returns their number.
uint32_t Controller::evict_faulty() {
  clients_.clear_faults();
  uint32_t done = 0;
  for (size_t i = 0; i < clients_.count();) {
    ClientState& client = *clients_.all()[i];
    if (client.fault.empty()) {
      ++i;
      continue;
    }
    clients_.tell_eviction(client);
    flush();
    remove(client.id);  // this removes it from the list
    ++done;
  }
  return done;
}

std::string Controller::restore_blocks(uint32_t id) {
  SpaceId worst = 0;
  if (ledger_.restore(id, &worst)) return {};
  const Admission& admission = ledger_.admission();
  return "ResourceExhaustedError: client " + std::to_string(id) + "'s buffers find no room on " +
         options_.name_of_space(worst) + " beside the " + std::to_string(admission.live(worst)) + " of " +
         std::to_string(admission.budget(worst)) + " bytes that others hold or run there; try again later";
}

void Controller::send_for(uint32_t id, CommandKind kind, std::span<const std::byte> payload) {
  ClientState* client = clients_.find(id);
  if (client == nullptr) return;
  const std::vector<std::byte> record = controller_command(id, kind, payload);
  ++stats_.commands;
  // One entry per host, so that none waits for another one. A lost host has nothing that the command could mean
  // (ERR-2).
  for (uint32_t h = 0; h < hosts_.count(); ++h) {
    if (hosts_.is_lost(h)) continue;
    grants_.submit(*client, record, kOneHost | h, EntryKind::kCommand, 0);
  }
}

// --------------------------------------------------------------------------------------------------------- passes

uint32_t Controller::step() {
  mailbox_.read();
  uint32_t done = inbox_.drain_hosts();
  clients_.ready().compare_near();
  done += inbox_.drain_clients();
  if (const int64_t now = options_.clock(); done == 0 || clients_.ready().is_due(now)) {
    clients_.ready().compare_all(clients_.all(), now);
    done += inbox_.drain_clients();
  }
  if (clients_.has_faults()) done += evict_faulty();
  if (!deadlines_.empty()) done += deadlines_.pass(queue_, options_.clock());
  done += advance_loops();
  if (queue_.has_held()) queue_.retry();
  done += enter_picked();
  if (inbox_.unread() != 0) done += inbox_.readable();
  ++stats_.passes;
  flush();
#if defined(PATHWAYS_DCHECK)
  validate();
#endif
  return done + (clients_.has_faults() ? 1 : 0);  // a faulty client is evicted in the next pass
}

uint32_t Controller::advance_loops() {
  const uint32_t done = loops_.advance();
  for (const uint32_t id : loops_.take_ordered()) {
    if (ClientState* client = clients_.find(id)) queue_.go_on(*client);
  }
  return done;
}

/// SHARE-2: lets runs enter whose turn it is. Returns the number of records.
uint32_t Controller::enter_picked() {
  uint32_t done = 0;
  while (const auto picked = shares_.pick()) {
    ClientState* client = clients_.find(*picked);
    if (client == nullptr) continue;
    if (client->loop != 0) {
      done += loops_.advance(*client);
      continue;
    }
    if (client->is_suspended) continue;
    if (client->held.empty()) {
      done += inbox_.drain_client(*client);
    } else {
      queue_.retry_picked(*client);
      ++done;
    }
  }
  return done;
}

void Controller::flush() {
  hosts_.flush();
  clients_.flush();
}

bool Controller::is_idle() const {
  return grants_.is_idle() && loops_.empty() && !hosts_.has_unsent() && !clients_.has_overflow();
}

/// Checks what each class says that it keeps: in the first passes, and then in some, because it looks at every client,
/// host and entry.
void Controller::validate() const {
  constexpr uint64_t kFirst = 64, kEvery = 64;
  if (stats_.passes > kFirst && stats_.passes % kEvery != 0) return;
  clients_.validate();
  hosts_.validate();
  ledger_.validate();
  grants_.validate();
  loops_.validate();
  deadlines_.validate();
  shares_.validate();
  queue_.validate();
  inbox_.validate();
}

// --------------------------------------------------------------------------------------------------- life and end

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

/// How long the thread may sleep when nobody rings.
std::chrono::nanoseconds Controller::time_to_sleep() const {
  std::chrono::nanoseconds limit = kLook;
  if (queue_.has_held()) limit = kHeldLook;
  if (hosts_.has_unsent()) limit = hosts_.next_look();
  if (clients_.has_undelivered()) limit = std::min<std::chrono::nanoseconds>(limit, kOverflowLook);
  if (const int64_t next = shares_.next_ns(); next != INT64_MAX) {
    limit = std::min(limit, std::chrono::nanoseconds(std::max<int64_t>(0, next - options_.clock())));
  }
  if (const int64_t next = next_deadline_ns(); next != INT64_MAX) {
    limit = std::min(limit, std::chrono::nanoseconds(std::max<int64_t>(0, next - options_.clock())));
  }
  return limit;
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
    (void)bells_.wait(is_broken ? kLook : time_to_sleep(), spin);
  }
}

}  // namespace pathways
