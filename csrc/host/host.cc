#include "host/host.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/status.h"

namespace pathways {
namespace {

void expect_size(std::span<const std::byte> bytes, uint64_t expected) {
  if (bytes.size() == expected) return;
  throw Error(Status::kInvalid, "the controller sent a record of " + std::to_string(bytes.size()) +
                                    " bytes, expected " + std::to_string(expected));
}

/// Reads a record of the controller. Throws Error(kInvalid) when `bytes` is shorter than the record.
template <typename Record>
Record read_as(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(Record)) expect_size(bytes, sizeof(Record));
  return read_record<Record>(bytes);
}

/// Sends a record, and the bytes behind it, padded to 8.
template <typename Record>
void send(Outbox& to, const Record& record, std::span<const std::byte> behind = {}) {
  to.send(static_cast<uint32_t>(sizeof record + padded(behind.size())), [&](std::byte* out) {
    std::memcpy(out, &record, sizeof record);
    if (!behind.empty()) std::memcpy(out + sizeof record, behind.data(), behind.size());
  });
}

}  // namespace

Host::Host(Options options, const std::vector<HostView>& hosts, ControllerBlock* controller, Backend backend,
           std::vector<int32_t> epochs)
    : options_(options),
      own_(hosts.at(options.host)),
      block_(own_.block()),
      inbox_(own_.inbox()),
      to_controller_(own_.outgoing(), &controller->doorbell, &controller->ready_bitmap, options.host),
      clients_(ClientEnds::make(own_, to_controller_)),
      peers_(
          options.host, own_, hosts, std::move(epochs), controller, options.clock,
          [this](uint32_t peer, std::span<const std::byte> record) { return take_peer(peer, record); },
          [this](uint32_t peer, const std::string& fault) { close_peer(peer, fault); }),
      executor_({options.host, options.devices, options.device_bytes, options.quirks, options.clock}, backend, *this),
      mailbox_(&block_->doorbell) {
  to_controller_.set_distance(controller->distance_ns, options_.clock);
}

Host::~Host() { executor_.clear(); }

// --------------------------------------------------------------------------------------------------- registration

void Host::add_plan(uint32_t id, Plan plan, uint32_t client) {
  const std::string name = "plan " + std::to_string(id);
  if (plan.host() != options_.host || plan.devices() != options_.devices) {
    throw Error(Status::kInvalid, name + " is for host " + std::to_string(plan.host()) + " of " +
                                      std::to_string(plan.devices()) + " devices; this is host " +
                                      std::to_string(options_.host) + " of " + std::to_string(options_.devices));
  }
  for (const NodeRecord& node : plan.nodes()) {
    for (const auto& peers : {plan.sources(node), plan.destinations(node)}) {
      for (const uint32_t peer : peers) check_reach(name + " moves data", peer);
    }
  }
  for (uint32_t i = 0; i < plan.exchanges().records().size(); ++i) {
    check_reach(name + " exchanges rows", plan.exchanges().shape(i).hosts().back());
  }
  for (const ChoiceRecord& choice : plan.branches().choices()) {
    check_reach(name + " tells of branches", choice.source);
    for (const uint32_t peer : plan.told(choice)) check_reach(name + " tells of branches", peer);
  }
  {
    const std::lock_guard lock(mutex_);
    if (!plans_.insert(id).second) throw Error(Status::kInvalid, name + " is registered already");
  }
  mailbox_.post([this, id, client, plan = std::make_shared<Plan>(std::move(plan))] {
    executor_.add_plan(id, std::move(*plan), client);
  });
}

void Host::check_reach(const std::string& what, uint32_t host) const {
  if (peers_.may_reach(host)) return;
  throw Error(Status::kInvalid, what + " between host " + std::to_string(options_.host) + " and host " +
                                    std::to_string(host) + ", which it has no ring to");
}

void Host::set_compiled(uint32_t id, std::optional<std::string> error, PlanSizes sizes) {
  mailbox_.post(
      [this, id, error = std::move(error), sizes = std::move(sizes)] { executor_.set_compiled(id, error, sizes); });
}

void Host::remove_plan(uint32_t id) {
  {
    const std::lock_guard lock(mutex_);
    plans_.erase(id);
  }
  mailbox_.post([this, id] { executor_.remove_plan(id); });
}

void Host::attach_client(uint32_t client, const ClientView& view, uint32_t futures) {
  mailbox_.post([this, client, futures, view] {
    if (executor_.is_gone(client)) {
      forget_client(client);
      return;
    }
    if (clients_->attach(client, view)) attached_.fetch_add(1, std::memory_order_relaxed);
    executor_.add_client(client, futures);
  });
}

void Host::task_done(uint64_t task, Value made, uint64_t devices, std::optional<std::string> error) {
  mailbox_.post(
      [this, task, made, devices, error = std::move(error)] { executor_.on_task_done(task, made, devices, error); });
}

void Host::task_answered(uint64_t task) {
  mailbox_.post([this, task] { executor_.on_task_answered(task); });
}

void Host::launched(uint64_t order, uint32_t node, std::vector<Value> made, std::optional<std::string> error) {
  mailbox_.post([this, order, node, made = std::move(made), error = std::move(error)] {
    executor_.on_launched(order, node, made, error);
  });
}

// ---------------------------------------------------------------------------------------------------------- steps

uint32_t Host::step() {
  mailbox_.read();
  uint32_t done = 0;
  int64_t begin = 0;  // when the first record was read
  for (; done < options_.batch && (done == 0 || options_.clock() < begin + options_.longest_step.count()); ++done) {
    const std::span<const std::byte> bytes = inbox_.try_take(record_);
    if (bytes.empty()) break;
    if (done == 0) begin = options_.clock();
    mailbox_.read();  // what the record needs was registered before the record was written
    read_ns_ = done == 0 ? begin : 0;
    take(bytes);
    inbox_.pop();
  }
  if (done != 0) inbox_.release();
  done += peers_.drain();
  done += executor_.poll();
  if (!openings_.empty()) open_peers();
  // Peers first: they wait for a value, and waking the controller takes some us if it sleeps.
  const bool is_kept = peers_.flush();
  has_overflow_ = to_controller_.flush() || is_kept;
  return done;
}

Status Host::wait(uint32_t ticket, std::chrono::nanoseconds timeout, SpinPolicy spin) {
  if (has_overflow_) {
    const int64_t due = to_controller_.due(), peers_due = peers_.due();
    const int64_t first = due == 0 || (peers_due != 0 && peers_due < due) ? peers_due : due;
    timeout = std::min(timeout, overflow_look(first, options_.clock));
  }
  return block_->doorbell.wait(ticket, timeout, spin);
}

/// Does a record of the controller. It is checked like a record of anybody else, because the controller's ring lies in
/// memory that other hosts map.
void Host::take(std::span<const std::byte> bytes) {
  const auto header = read_as<RecordHeader>(bytes);
  if (!executor_.may_be_client(header.client)) {
    throw Error(Status::kInvalid, "the controller sent a record of client " + std::to_string(header.client));
  }
  switch (header.kind) {
    case RecordKind::kRun: {
      const auto record = read_as<RunRecord>(bytes);
      expect_size(bytes, sizeof record + words_behind(record) * sizeof(uint64_t));
      executor_.on_run(record, reinterpret_cast<const uint64_t*>(bytes.data() + sizeof record), read_ns_);
      return;
    }
    case RecordKind::kCommand: {
      const auto record = read_as<CommandRecord>(bytes);
      expect_size(bytes, sizeof record + padded(uint64_t{record.bytes}));
      executor_.on_command(record, bytes.subspan(sizeof record, record.bytes));
      return;
    }
    case RecordKind::kClientGone:
      forget_client(header.client);
      return;
    case RecordKind::kHostLost:
      lose_peers(bytes);
      return;
    default:
      throw Error(Status::kInvalid,
                  "the controller sent a record of kind " + std::to_string(static_cast<int>(header.kind)));
  }
}

/// OWN-1: this host gives up the client's memory only here, at the notice of the client's end. A completion of
/// earlier work may come late, and it needs that memory.
void Host::forget_client(uint32_t client) {
  if (clients_->forget(client)) attached_.fetch_sub(1, std::memory_order_release);
  executor_.on_client_gone(client);
}

// ----------------------------------------------------------------------------------------------------------- link

void Host::complete(uint32_t client, Handle future) { clients_->complete(client, future); }

void Host::fetched(uint32_t client, Handle token, std::span<const BlockPiece> written) {
  clients_->fetched(client, token, written);
}

Status Host::read_back(uint32_t client, Handle future, const WriteValue& write) {
  return clients_->read_back(client, future, write);
}

void Host::failed(uint32_t client, Handle future, std::string_view text) {
  const auto bytes = text_bytes(text, to_controller_.max_record() - uint32_t{sizeof(FailedRecord)});
  send(to_controller_,
       FailedRecord{{RecordKind::kFailed, 0, client}, future.raw, static_cast<uint32_t>(bytes.size()), 0}, bytes);
}

void Host::run_done(uint32_t client, uint64_t tag, uint32_t gangs, uint32_t expected, DeviceTime time,
                    const TakenBranches& taken) {
  send(to_controller_, RunDoneRecord{{RecordKind::kRunDone, 0, client},
                                     tag,
                                     gangs,
                                     expected,
                                     options_.host,
                                     time.batch,
                                     time.busy_ns,
                                     taken.sure(),
                                     taken.chosen & taken.sure()});
}

void Host::command_done(uint32_t client, uint64_t bytes) {
  if (client >= commands_done_.size()) commands_done_.resize(client + 1);
  Load& done = commands_done_[client];
  done.add(1, bytes);
  if (!done.is_above(kCommandsDelivered, kCommandBytesDelivered)) return;
  send(to_controller_, CommandsDoneRecord{{RecordKind::kCommandsDone, 0, client}, done.count, done.bytes});
  done = {};
}

void Host::hold_over(uint32_t client, uint64_t hold) {
  send(to_controller_, HoldOverRecord{{RecordKind::kHoldOver, 0, client}, hold});
}

}  // namespace pathways
