#include "executor/executor.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/status.h"

namespace pathways {
namespace {

constexpr uint32_t kStuckPolls = 64;
[[maybe_unused]] constexpr uint64_t kValidatePolls = 64;  // debug builds check all parts this often

}  // namespace

Executor::Executor(Options options, Backend backend, HostLink& link)
    : options_(options),
      backend_(backend),
      link_(link),
      ledger_(options.devices),
      refs_(backend.device, ledger_),
      plans_(backend.device, ledger_),
      memory_(ledger_, options.device_bytes),
      queues_(runs_, options.devices, options.quirks),
      tracker_(backend.device, refs_, *this),
      part_{options.host, options.clock, backend.device, backend.mover, backend.work, link,   *this, ledger_,
            refs_,        errors_,       runs_,          queues_,       tracker_,     clock_, trace_},
      objects_(part_),
      flow_(part_, plans_, objects_),
      peers_(options.host),
      decisions_(part_, flow_, peers_),
      transfers_(part_, memory_, flow_, receives_, peers_),
      rows_(part_, memory_, flow_, receives_, peers_),
      launcher_(part_, objects_, memory_, flow_, transfers_, rows_, decisions_),
      puts_(part_, objects_, memory_, options.longest_put_wait),
      tasks_(part_, objects_),
      fetches_(part_, objects_, tasks_),
      commands_(part_, objects_, puts_, fetches_, tasks_),
      settler_(part_, objects_, flow_, transfers_, rows_, decisions_, fetches_) {
  PW_CHECK(options.devices >= 1 && options.devices <= kMaxLocalDevices);
}

Executor::~Executor() { clear(); }

void Executor::clear() {
  backend_.mover.stop_sends();  // the sends read the values
  runs_.clear(refs_);
  tracker_.clear();
  transfers_.clear();
  rows_.clear();
  receives_.clear();
  decisions_.clear();
  peers_.clear();
  objects_.clear();
  errors_.forget_launches();
  queues_.clear();
  launcher_.clear();
  puts_.clear();
  fetches_.clear();
  tasks_.clear();
  commands_.clear();
  plans_.forget_runs();
}

// ---------------------------------------------------------------------------------------------- plans and clients

void Executor::add_plan(uint32_t id, Plan plan, uint32_t client) {
  if (plans_.find(id) != nullptr) {
    throw Error(Status::kInvalid, "plan " + std::to_string(id) + " is registered already");
  }
  if (plan.host() != options_.host || plan.devices() != options_.devices) {
    throw Error(Status::kInvalid, "plan " + std::to_string(id) + " is for host " + std::to_string(plan.host()) +
                                      " of " + std::to_string(plan.devices()) + " devices; this is host " +
                                      std::to_string(options_.host) + " of " + std::to_string(options_.devices));
  }
  if (is_gone(client)) {
    backend_.device.forget_plan(id);
    return;
  }
  plans_.add(id, std::move(plan), client);
}

void Executor::set_compiled(uint32_t id, std::optional<std::string> error, PlanSizes sizes) {
  PlanEntry* entry = plans_.set_compiled(id, std::move(error), std::move(sizes));
  if (entry == nullptr) return;
  for (uint32_t slot : entry->waiting) {
    const auto nodes = entry->plan.nodes();
    for (uint32_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i].kind == NodeKind::kCall) queues_.satisfy({slot, i}, WaitedFor::kCompilation);
    }
  }
  entry->waiting.clear();
  drain();
}

void Executor::on_client_gone(uint32_t id) {
  if (!objects_.is_gone(id)) {
    if (objects_.end_client(id)) plans_.close_accounts_of(id);
    puts_.forget(id);
    commands_.forget(id);
    clock_.forget(id);
    plans_.remove_plans_of(id);
  }
  backend_.work.forget_client(id);
}

/// An object is defined or has failed: what waits for it goes on.
void Executor::wake(const ObjectWaiter& waiter, const Object& object) {
  if (waiter.kind == ObjectWaiter::Kind::kFetch) {
    fetches_.start(waiter.index, object);
  } else {
    flow_.argument_settled(waiter.index, waiter.value, object);
  }
}

void Executor::on_command(const CommandRecord& record, std::span<const std::byte> payload) {
  LocalClient* c = objects_.client(record.header.client);
  if (c == nullptr) {
    link_.command_over(record);
    return;
  }
  commands_.on_command(*c, record, payload);
  drain();
}

// ---------------------------------------------------------------------------------------------------------- peers

Status Executor::on_receive_ready(uint64_t order, uint32_t node, uint32_t host, std::span<const uint64_t> offsets) {
  return drained(peers_.hear(order, host, offsets,
                             [=, this](auto words) { return transfers_.on_receive_ready(order, node, host, words); }));
}

Status Executor::on_receive_done(uint64_t order, uint32_t node, uint32_t host, Outcome outcome, std::string_view text) {
  return drained(transfers_.on_receive_done(order, node, host, outcome, text));
}

Status Executor::on_exchange_words(ExchangeWords kind, uint64_t order, uint32_t node, uint32_t host,
                                   std::span<const uint64_t> words) {
  return drained(
      peers_.hear(order, host, words, [=, this](auto kept) { return rows_.on_words(kind, order, node, host, kept); }));
}

Status Executor::on_exchange_written(uint64_t order, uint32_t node, uint32_t host, std::string_view error) {
  return drained(peers_.hear(order, host, std::span(error), [=, this](auto text) {
    return rows_.on_written(order, node, host, {text.data(), text.size()});
  }));
}

Status Executor::on_decision(uint64_t order, uint32_t choice, uint32_t host, const Decision& decision) {
  const auto take = [=, this, told = decision](auto text) {
    return decisions_.on_decision(order, choice, host, {told.outcome, told.taken, {text.data(), text.size()}});
  };
  return drained(peers_.hear(order, host, std::span(decision.text), take));
}

Status Executor::drained(Status status) {
  if (status == Status::kOk) drain();
  return status;
}

void Executor::lose(std::span<const uint32_t> hosts, std::string_view text, LostPeer state) {
  const std::vector<uint32_t> runs = live_runs();
  for (const uint32_t slot : runs) ++runs_[slot].open;  // none ends before all have heard of it
  peers_.lose(hosts, text, state, runs);
  for (const uint32_t slot : runs) flow_.close_step(slot);
  drain();
}

std::vector<uint32_t> Executor::live_runs() const {
  std::vector<uint32_t> slots;
  for (uint32_t slot = 0; slot < runs_.size(); ++slot) {
    if (runs_[slot].plan != nullptr) slots.push_back(slot);
  }
  std::ranges::sort(slots, {}, [&](uint32_t slot) { return runs_[slot].order; });
  return slots;
}

// ----------------------------------------------------------------------------------------------------------- runs

void Executor::on_run(const RunRecord& record, const uint64_t* handles, int64_t read_ns) {
  ++run_records_;
  peers_.run_comes(record.order);
  if (const std::string why = unsound(record, handles); !why.empty()) {
    for (uint32_t i = 0; i < record.results; ++i) {
      link_.failed(record.header.client, Handle{handles[record.arguments + i]}, why);
    }
    const PlanEntry* entry = plans_.find(record.plan);
    if (entry != nullptr) release_donated(record, handles, entry->plan);
    peers_.refuse(record.order, entry == nullptr ? nullptr : &entry->plan, why);
    link_.run_done(record.header.client, record.tag, 0, 1, {}, {});  // it has launched none of its gangs
    return;
  }
  prepare(record, handles, read_ns);
}

std::string Executor::unsound(const RunRecord& record, const uint64_t* handles) {
  const auto where = [&] { return " on host " + std::to_string(options_.host); };
  const PlanEntry* entry = plans_.find(record.plan);
  if (entry == nullptr) return "plan " + std::to_string(record.plan) + " is not known" + where();
  const Plan& plan = entry->plan;
  if (record.arguments != plan.argument_count() || record.results != plan.result_count()) {
    return "plan " + std::to_string(record.plan) + " takes " + std::to_string(plan.argument_count()) +
           " arguments and gives " + std::to_string(plan.result_count()) + " results, the run has " +
           std::to_string(record.arguments) + " and " + std::to_string(record.results) + where();
  }
  if (const LocalClient* c = objects_.client(record.header.client)) {
    for (uint32_t i = 0; i < record.results; ++i) {
      if (!c->may_name(Handle{handles[record.arguments + i]})) return "a result's handle is out of range" + where();
    }
  }
  return {};
}

void Executor::prepare(const RunRecord& record, const uint64_t* handles, int64_t read_ns) {
  PlanEntry& entry = *plans_.find(record.plan);
  const Plan& plan = entry.plan;
  const uint32_t slot = runs_.acquire();
  Run& run = runs_[slot];
  plans_.begin_run(entry, record.header.client);
  run.plan = &entry;
  run.order = record.order;
  run.tag = record.tag;
  run.client = record.header.client;
  run.open = plan.step_count() + 1;  // one is for this function
  run.gangs = 0;
  run.busy_ns = run.counted_ns = run.launched_ns = 0;
  run.begin(plan);
  run.dispatched_ns = 0;
  if (trace_.is_on()) trace_.begin(run, read_ns);
  run.results.assign(handles + record.arguments, handles + record.arguments + record.results);
  run.wanted.clear();
  if ((record.header.detail & kRunWanted) != 0) {
    const uint64_t* mask = handles + record.arguments + record.results;
    run.wanted.assign(mask, mask + (record.results + 63) / 64);
  }

  if (LocalClient* c = objects_.client(run.client)) {
    const auto results = plan.results();
    for (uint32_t i = 0; i < results.size(); ++i) {
      if (results[i] == kNoValue) continue;
      objects_.make(*c, Handle{run.results[i]}, ObjectState::kAnnounced).maker = run.order;
    }
  }
  const auto nodes = plan.nodes();
  if (!entry.compiled) {
    entry.waiting.push_back(slot);
    for (uint32_t i = 0; i < nodes.size(); ++i) run.missing[i] += nodes[i].kind == NodeKind::kCall ? 1U : 0U;
  }
  for (uint32_t i = 1; i + 1 < nodes.size(); ++i) prepare_node({slot, i}, nodes[i]);  // PLAN-3
  decisions_.begin(slot);
  const auto arguments = plan.arguments();
  for (uint32_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] != kNoValue) flow_.bind_argument(slot, arguments[i], Handle{handles[i]});
  }
  release_donated(record, handles, plan);
  peers_.run_is_here(record.order, slot);
  flow_.close_step(slot);
  drain();
}

/// MEM-4: from here on only the run has its donated arguments. MEM-7: the ledger has released them, even if the run is
/// refused.
void Executor::release_donated(const RunRecord& record, const uint64_t* handles, const Plan& plan) {
  LocalClient* c = objects_.client(record.header.client);
  if (c == nullptr) return;
  for (const uint32_t position : plan.donated()) {
    if (position >= record.arguments) continue;
    if (Object* object = c->objects.find(Handle{handles[position]})) objects_.release(*c, *object);
  }
}

void Executor::prepare_node(NodeRef ref, const NodeRecord& node) {
  if (node.kind == NodeKind::kCall) {
    queues_.enter(ref, node);
  } else if (node.kind == NodeKind::kTransfer) {
    transfers_.prepare(ref);
  } else if (is_exchange(node.kind)) {
    rows_.prepare(ref);
  }
}

void Executor::drain() {
  if (is_paused_) return;
  queues_.start_ready([&](NodeRef ref) {
    const NodeKind kind = runs_[ref.run].plan->plan.node(ref.node).kind;
    if (kind == NodeKind::kCall) {
      is_paused_ = !launcher_.launch(ref);
    } else if (kind == NodeKind::kTransfer) {
      transfers_.start(ref);
    } else if (is_exchange(kind)) {
      rows_.start(ref);
    } else {
      decisions_.select(ref);
    }
    // The next launch would delay the send, or the decision.
    const bool is_due = decisions_.take_enqueued() || kind == NodeKind::kTransfer || is_exchange(kind);
    if (is_due && queues_.computes_in_launch() && !is_looking_) look();
    return !is_paused_;
  });
}

void Executor::on_launched(uint64_t order, uint32_t node, std::span<const Value> made,
                           const std::optional<std::string>& error) {
  launcher_.on_launched(order, node, made, error);
  drain();
}

uint32_t Executor::look() {
  is_looking_ = true;
  clock_.begin_batch();
  const uint32_t settled =
      tracker_.poll([&](const PendingValue& item, Readiness readiness) { settler_.settle(item, readiness); });
  clock_.end_batch();
  is_looking_ = false;
  return settled;
}

uint32_t Executor::move_on() {
  sent_.clear();
  backend_.mover.take_sent(&sent_);
  for (const Sent& sent : sent_) {
    peers_.send_ends(sent.destination);
    if (rows_.has(sent.key)) {
      rows_.sent(sent);
    } else {
      transfers_.sent(sent);
    }
  }
  arrived_.clear();
  backend_.mover.take_arrived(&arrived_);
  for (Arrived& arrived : arrived_) transfers_.arrived(std::move(arrived));
  const uint32_t begun = receives_.retry();
  if (begun != 0) rows_.go_on();
  return static_cast<uint32_t>(sent_.size() + arrived_.size()) + begun + transfers_.place_early();
}

uint32_t Executor::poll() {
  is_paused_ = false;
  uint32_t done = look();
  done += move_on();
  done += puts_.retry();
  const uint64_t starts = launcher_.launches() + transfers_.started();
  queues_.retry_throttled();
  drain();
  // The order admits only what fits, so memory becomes free when the work under way is done. If nothing is under way,
  // the sizes that the order was given are wrong, or a put waits for memory of a value that another host has not taken
  // yet, and that host may wait for this one. Then this host goes on without enough memory: otherwise it could stand
  // still for ever.
  if (queues_.has_ready()) ++done;  // it goes on in the next call
  const bool is_busy = done != 0 || tracker_.waiting() != 0 || launcher_.attended() != 0 ||
                       launcher_.launches() + transfers_.started() != starts;
  // What a later run waits for may wait itself for the launch that has no room.
  const auto throttled = queues_.throttled();
  const bool is_alone = !throttled.empty() && transfers_.count() == 0 && rows_.count() == 0 &&
                        !decisions_.awaits_peers(runs_[throttled[0].run].order);
  const bool is_stuck = !is_busy && (puts_.is_waiting() || is_alone);
  stuck_polls_ = is_stuck ? stuck_polls_ + 1 : 0;
  if (stuck_polls_ > kStuckPolls) {
    stuck_polls_ = 0;
    if (puts_.is_waiting()) {
      puts_.make_first();
    } else {
      ++overfull_;
      memory_.set_overfill(true);
      queues_.retry_first_throttled();
    }
    drain();
    memory_.set_overfill(false);
  }
  ++polls_;
#if defined(PATHWAYS_DCHECK)
  if (polls_ % kValidatePolls == 0) validate();
#endif
  return done;
}

ExecutorStats Executor::stats() const {
  ExecutorStats stats;
  stats.runs = run_records_;
  stats.launches = launcher_.launches();
  stats.gangs = launcher_.gangs();
  stats.transfers = transfers_.started();
  stats.objects = objects_.count();
  stats.live_runs = runs_.live();
  stats.waiting = tracker_.waiting();
  stats.exchanges = transfers_.count() + rows_.count();
  stats.exchange_records = rows_.records();
  stats.overfull = overfull_ + puts_.overfull();
  stats.tasks = tasks_.count();
  return stats;
}

void Executor::validate() const {
  errors_.validate();
  runs_.validate();
  queues_.validate();
  tracker_.validate();
  objects_.validate();
  peers_.validate();
  transfers_.validate();
  rows_.validate();
  decisions_.validate();
}

}  // namespace pathways
