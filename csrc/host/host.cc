#include "host/host.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/status.h"
#include "messages/peer_records.h"

namespace pathways {
namespace {

constexpr std::chrono::microseconds kOverflowLook{100};

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

/// The beginning of an error's text that fits behind a record. `most`: bytes of the longest record.
template <typename Record>
std::span<const std::byte> cut(uint32_t most, std::string_view text) {
  return std::as_bytes(std::span(text.substr(0, std::min(kMostText, most - uint32_t{sizeof(Record)} - 8))));
}

}  // namespace

Host::Host(Options options, std::vector<HostView> hosts, ControllerBlock* controller, Backend backend,
           std::vector<int32_t> far)
    : options_(options),
      own_(hosts.at(options.host)),
      block_(own_.block()),
      inbox_(own_.inbox()),
      to_controller_(own_.outgoing(), &controller->doorbell, &controller->ready_bitmap, options.host),
      executor_({options.host, options.devices, options.device_bytes, options.quirks, options.clock}, backend, *this),
      mailbox_(&block_->doorbell) {
  distance_ns_ = controller->distance_ns;
  to_controller_.set_distance(distance_ns_, options_.clock);
  if (!far.empty()) open_far(std::move(far), hosts.size(), controller);
  if (own_.peers() == 0) return;
  if (own_.peers() != hosts.size()) {
    throw Error(Status::kInvalid,
                "a host has rings from " + std::to_string(own_.peers()) + " hosts, of " + std::to_string(hosts.size()));
  }
  from_peers_.resize(hosts.size());
  to_peers_.resize(hosts.size());
  partial_words_.resize(hosts.size());
  for (uint32_t peer = 0; peer < hosts.size(); ++peer) {
    if (peer == options.host || !hosts[peer].is_there()) continue;
    from_peers_[peer] = own_.from(peer).consumer();
    to_peers_[peer] = Outbox(hosts[peer].from(options.host).producer(), hosts[peer].doorbell());
    to_peers_[peer].set_distance(distance_ns_, options_.clock);
  }
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
      for (uint32_t peer : peers) {
        if (peer == options_.host || peer < to_peers_.size()) continue;
        throw Error(Status::kInvalid, name + " moves data between host " + std::to_string(options_.host) +
                                          " and host " + std::to_string(peer) + ", which it has no ring to");
      }
    }
  }
  for (uint32_t i = 0; i < plan.exchanges().records().size(); ++i) {
    const uint32_t furthest = plan.exchanges().shape(i).hosts().back();
    if (furthest == options_.host || furthest < to_peers_.size()) continue;
    throw Error(Status::kInvalid, name + " exchanges rows between host " + std::to_string(options_.host) +
                                      " and host " + std::to_string(furthest) + ", which it has no ring to");
  }
  for (const ChoiceRecord& choice : plan.branches().choices()) {
    const auto told = plan.told(choice);
    const uint32_t furthest = told.empty() ? choice.source : std::max(choice.source, *std::ranges::max_element(told));
    if (furthest == options_.host || furthest < to_peers_.size()) continue;
    throw Error(Status::kInvalid, name + " tells of branches between host " + std::to_string(options_.host) +
                                      " and host " + std::to_string(furthest) + ", which it has no ring to");
  }
  {
    const std::lock_guard lock(mutex_);
    if (!plans_.insert(id).second) throw Error(Status::kInvalid, name + " is registered already");
  }
  mailbox_.post([this, id, client, plan = std::make_shared<Plan>(std::move(plan))] {
    executor_.add_plan(id, std::move(*plan), client);
  });
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

void Host::attach_client(uint32_t client, const ClientView& view, uint32_t futures, bool is_far) {
  mailbox_.post([this, client, futures, attached = Attached{view.futures(), view.read_back(), is_far}] {
    if (executor_.is_gone(client)) {
      forget_client(client);
      return;
    }
    if (client >= clients_.size()) clients_.resize(client + 1);
    if (!clients_[client].futures.is_there()) attached_.fetch_add(1, std::memory_order_relaxed);
    clients_[client] = attached;
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
  for (uint32_t peer = 0; peer < from_peers_.size(); ++peer) done += drain_peer(peer);
  if (!far_.empty()) done += drain_far();
  done += executor_.poll();
  if (!replacements_.empty()) replace_peers();
  // Peers first: they wait for a value, and waking the controller takes some us if it sleeps.
  const bool is_kept = flush_peers();
  has_overflow_ = to_controller_.flush() || is_kept;
  return done;
}

/// How long to wait until the records that are kept in an outbox may go out.
std::chrono::nanoseconds Host::overflow_look() const {
  if (distance_ns_ == 0) return kOverflowLook;
  precise_timers();
  int64_t due = to_controller_.due();
  for (const Outbox& peer : to_peers_) {
    if (peer.due() != 0 && (due == 0 || peer.due() < due)) due = peer.due();
  }
  const int64_t left = due - options_.clock();
  return left > 0 ? std::chrono::nanoseconds(left) : kOverflowLook;
}

Status Host::wait(uint32_t ticket, std::chrono::nanoseconds timeout, SpinPolicy spin) {
  if (has_overflow_) timeout = std::min(timeout, overflow_look());
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
  if (client < clients_.size() && clients_[client].futures.is_there()) {
    clients_[client] = {};
    attached_.fetch_sub(1, std::memory_order_release);
  }
  executor_.on_client_gone(client);
}

// ----------------------------------------------------------------------------------------------------------- link

void Host::complete(uint32_t client, Handle future) {
  if (client >= clients_.size() || !clients_[client].futures.is_there()) return;
  if (clients_[client].is_far) {
    complete_far(client, future);
  } else {
    (void)clients_[client].futures.complete(future);
  }
}

Status Host::read_back(uint32_t client, Handle future, const WriteValue& write) {
  if (client >= clients_.size() || !clients_[client].futures.is_there()) return Status::kOk;
  const Attached& to = clients_[client];
  if (to.is_far) return read_back_far(future, write);
  ReadBackSlot slot;
  if (!to.read_back.is_there() || !to.read_back.begin_write(to.futures, future, &slot)) return Status::kOk;
  const Status status = write(slot);
  to.read_back.end_write(future);
  return status;
}

void Host::failed(uint32_t client, Handle future, std::string_view text) {
  const auto bytes = cut<FailedRecord>(to_controller_.max_record(), text);
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
                                     time.look,
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

uint32_t Host::most_to(uint32_t host) const {
  return is_far(host) ? to_far_.max_record() - uint32_t{sizeof(FarHeader)} : to_peers_[host].max_record();
}

template <typename Record>
void Host::send_peer(uint32_t host, const Record& record, std::span<const std::byte> behind) {
  if (!is_far(host)) return send(to_peers_[host], record, behind);
  const FarHeader to{host, far_[host]};
  to_far_.send(static_cast<uint32_t>(sizeof to + sizeof record + padded(behind.size())), [&](std::byte* out) {
    std::memcpy(out, &to, sizeof to);
    std::memcpy(out + sizeof to, &record, sizeof record);
    if (!behind.empty()) std::memcpy(out + sizeof to + sizeof record, behind.data(), behind.size());
  });
}

void Host::send_words(RecordKind kind, uint32_t host, uint64_t order, uint32_t node, std::span<const uint64_t> words) {
  if (!has_peer(host)) return;  // the peer is lost
  const size_t most = (most_to(host) - sizeof(WordsRecord)) / sizeof(uint64_t);
  do {
    const auto chunk = words.first(std::min(most, words.size()));
    words = words.subspan(chunk.size());
    const RecordHeader header{kind, static_cast<uint16_t>(words.empty() ? 0 : 1), 0};
    const auto count = static_cast<uint32_t>(chunk.size());
    send_peer(host, WordsRecord{header, order, node, options_.host, count, 0}, std::as_bytes(chunk));
  } while (!words.empty());
}

void Host::send_written(RecordKind kind, uint32_t host, uint64_t order, uint32_t node, Outcome outcome,
                        std::string_view text) {
  if (!has_peer(host)) return;  // the peer is lost
  const auto bytes = cut<WrittenRecord>(most_to(host), text);
  const RecordHeader header{kind, static_cast<uint16_t>(outcome), 0};
  send_peer(host, WrittenRecord{header, order, node, options_.host, static_cast<uint32_t>(bytes.size()), 0}, bytes);
}

void Host::receive_ready(uint32_t host, uint64_t order, uint32_t node, std::span<const uint64_t> offsets) {
  send_words(RecordKind::kReceiveReady, host, order, node, offsets);
}

void Host::receive_done(uint32_t host, uint64_t order, uint32_t node, Outcome outcome, std::string_view text) {
  send_written(RecordKind::kReceiveDone, host, order, node, outcome, text);
}

void Host::exchange_words(uint32_t host, ExchangeWords kind, uint64_t order, uint32_t node,
                          std::span<const uint64_t> words) {
  const bool is_report = kind == ExchangeWords::kReport;
  send_words(is_report ? RecordKind::kExchangeReport : RecordKind::kExchangeDecision, host, order, node, words);
}

void Host::exchange_written(uint32_t host, uint64_t order, uint32_t node, std::string_view error) {
  const Outcome outcome = error.empty() ? Outcome::kDone : Outcome::kFailed;
  send_written(RecordKind::kExchangeWritten, host, order, node, outcome, error);
}

void Host::decided(uint32_t host, uint64_t order, uint32_t choice, const Decision& decision) {
  if (!has_peer(host)) return;  // the peer is lost
  const auto bytes = cut<DecisionRecord>(most_to(host), decision.text);
  const RecordHeader header{RecordKind::kDecision, static_cast<uint16_t>(decision.outcome), 0};
  send_peer(host,
            DecisionRecord{header, order, choice, options_.host, decision.taken, static_cast<uint32_t>(bytes.size())},
            bytes);
}

}  // namespace pathways
