#include "runtime/controller.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <numeric>

#include "base/check.h"
#include "base/status.h"

namespace pathways {
namespace {

constexpr uint32_t kBatch = 256;  // records taken from one ring in one pass
constexpr std::chrono::milliseconds kLook{100};

}  // namespace

Controller::Controller(Options options, ControllerBlock* block, std::vector<HostBlock*> hosts)
    : options_(std::move(options)),
      block_(block),
      sequencer_(static_cast<uint32_t>(hosts.size()), options_.window),
      hosts_(hosts.size()) {
  for (uint32_t h = 0; h < hosts_.size(); ++h) {
    hosts_[h].block = hosts[h];
    hosts_[h].inbox = hosts[h]->ring_to_controller()->claim_consumer();
    hosts_[h].outbox = Outbox(hosts[h]->ring_from_controller(), &hosts[h]->doorbell);
    hosts_[h].island = h < options_.islands.size() ? options_.islands[h] : 0;
  }
  std::vector<uint32_t> all(hosts_.size());
  std::iota(all.begin(), all.end(), 0u);
  sequencer_.add_group(kAllHosts, std::move(all));
}

Controller::~Controller() { stop(); }

// ----------------------------------------------------------------------------------------------------------- mail

void Controller::post_mail(std::function<void()> mail) {
  {
    const std::lock_guard lock(mutex_);
    mail_.push_back(std::move(mail));
    // SYNC controller/mail: pairs with read_mail().
    has_mail_.store(true, std::memory_order_release);
  }
  block_->doorbell.ring();
}

void Controller::read_mail() {
  // SYNC controller/mail: pairs with post_mail().
  if (!has_mail_.load(std::memory_order_acquire)) return;
  std::vector<std::function<void()>> mail;
  {
    const std::lock_guard lock(mutex_);
    mail.swap(mail_);
    has_mail_.store(false, std::memory_order_relaxed);
  }
  for (auto& item : mail) item();
}

void Controller::add_group(GroupId group, std::vector<uint32_t> hosts) {
  if (hosts.empty()) throw Error(Status::kInvalid, "a group needs at least one host");
  for (uint32_t host : hosts) {
    if (host >= hosts_.size()) {
      throw Error(Status::kInvalid, "group " + std::to_string(group) + " names host " + std::to_string(host) +
                                        ", the cluster has " + std::to_string(hosts_.size()));
    }
  }
  post_mail([this, group, hosts = std::move(hosts)] {
    if (!sequencer_.has_group(group)) sequencer_.add_group(group, hosts);
  });
}

void Controller::add_client(uint32_t id, ClientBlock* block) {
  post_mail([this, id, block] {
    auto client = std::make_unique<Client>();
    client->id = id;
    client->block = block;
    client->inbox = block->ring_to_controller()->claim_consumer();
    client->outbox = Outbox(block->ring_from_controller(), &block->futures()->doorbell());
    by_id_[id] = client.get();
    clients_.push_back(std::move(client));
  });
}

void Controller::remove_client(uint32_t id) {
  auto done = std::make_shared<std::promise<void>>();
  auto gone = done->get_future();
  post_mail([this, id, done] {
    drop_client(id);
    done->set_value();
  });
  if (!thread_.joinable()) {
    read_mail();
    flush();
  }
  gone.wait();
}

void Controller::drop_client(uint32_t id) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return;
  Client* client = found->second;
  std::vector<EntryId> waiting;
  for (const auto& [entry, record] : kept_) {
    if (sequencer_.entry(entry).client == id) waiting.push_back(entry);
  }
  by_id_.erase(found);  // from here on nothing is written to its memory
  for (EntryId entry : waiting) {
    sequencer_.cancel(entry);
    settle_granted({}, UINT32_MAX);
  }
  const ClientGoneRecord record{{RecordKind::kClientGone, 0, id}};
  submit_record(*client, std::as_bytes(std::span{&record, 1}), kAllHosts, EntryKind::kNote, 0);
  std::erase_if(clients_, [&](const auto& c) { return c.get() == client; });
}

// --------------------------------------------------------------------------------------------------------- passes

uint32_t Controller::step() {
  read_mail();
  uint32_t done = 0;
  for (uint32_t h = 0; h < hosts_.size(); ++h) done += drain_host(h);
  for (size_t i = 0; i < clients_.size(); ++i) done += drain_client(*clients_[i]);
  ++stats_.passes;
  flush();
  return done;
}

uint32_t Controller::drain_client(Client& client) {
  uint32_t done = 0;
  for (; done < kBatch; ++done) {
    const std::span<const std::byte> bytes = client.inbox.try_front();
    if (bytes.empty()) break;
    RecordHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    switch (header.kind) {
      case RecordKind::kRun: {
        RunRecord record;
        std::memcpy(&record, bytes.data(), sizeof record);
        ++stats_.runs;
        submit_record(client, bytes, record.group, EntryKind::kRun, record.tag);
        break;
      }
      case RecordKind::kNote: {
        NoteRecord record;
        std::memcpy(&record, bytes.data(), sizeof record);
        ++stats_.notes;
        submit_record(client, bytes, record.group, EntryKind::kNote, 0);
        break;
      }
      case RecordKind::kCancel: {
        CancelRecord record;
        std::memcpy(&record, bytes.data(), sizeof record);
        cancel(client.id, record.tag);
        break;
      }
      default:
        throw Error(Status::kInvalid, "client " + std::to_string(client.id) + " sent a record of kind " +
                                          std::to_string(static_cast<int>(header.kind)));
    }
    client.inbox.pop();
  }
  if (done != 0) client.inbox.release();
  return done;
}

void Controller::submit_record(Client& client, std::span<const std::byte> record, GroupId group, EntryKind kind,
                               uint64_t tag) {
  if (!sequencer_.has_group(group)) read_mail();  // it was registered before the record was written
  if (!sequencer_.has_group(group)) {
    throw Error(Status::kInvalid,
                "client " + std::to_string(client.id) + " names group " + std::to_string(group) + ", which nobody made");
  }
  const EntryId id = sequencer_.submit(client.id, group, kind, tag);
  const bool was_granted = !sequencer_.granted().empty() && sequencer_.granted().front() == id;
  if (!was_granted) kept_.emplace(id, std::vector<std::byte>(record.begin(), record.end()));
  settle_granted(record, id);
}

void Controller::settle_granted(std::span<const std::byte> fresh, EntryId fresh_id) {
  // Settling retires notes and so frees room for none; the list does not grow while it is walked.
  auto& granted = sequencer_.granted();
  for (const EntryId id : granted) {
    const Entry entry = sequencer_.entry(id);
    const auto kept = kept_.find(id);
    if (entry.state == EntryState::kDropped) {
      ++stats_.dropped;
      retire(entry.client);
    } else {
      forward(entry, id, id == fresh_id ? fresh : std::span<const std::byte>(kept->second));
    }
    if (kept != kept_.end()) kept_.erase(kept);
    sequencer_.settle(id);
  }
  granted.clear();
}

void Controller::forward(const Entry& entry, EntryId id, std::span<const std::byte> record) {
  RecordHeader header;
  std::memcpy(&header, record.data(), sizeof header);
  header.client = entry.client;
  if (entry.kind == EntryKind::kRun) ++stats_.granted;
  for (uint32_t h : sequencer_.hosts_of(entry.group)) {
    ++stats_.records_out;
    hosts_[h].outbox.send(static_cast<uint32_t>(record.size()), [&](std::byte* out) {
      std::memcpy(out, record.data(), record.size());
      std::memcpy(out, &header, sizeof header);
      if (entry.kind == EntryKind::kRun) {
        const uint64_t tag = id;
        std::memcpy(out + offsetof(RunRecord, tag), &tag, sizeof tag);
        std::memcpy(out + offsetof(RunRecord, order), &entry.order, sizeof entry.order);
      }
    });
  }
}

void Controller::retire(uint32_t id) {
  ++stats_.retired;
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return;
  ++found->second->retired;
  found->second->has_news = true;
}

void Controller::cancel(uint32_t client, uint64_t tag) {
  for (const auto& [id, record] : kept_) {
    const Entry& entry = sequencer_.entry(id);
    if (entry.client == client && entry.kind == EntryKind::kRun && entry.tag == tag) {
      sequencer_.cancel(id);
      settle_granted({}, UINT32_MAX);
      return;
    }
  }
}

uint32_t Controller::drain_host(uint32_t index) {
  Host& host = hosts_[index];
  uint32_t done = 0;
  for (; done < kBatch; ++done) {
    const std::span<const std::byte> bytes = host.inbox.try_front();
    if (bytes.empty()) break;
    RecordHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    if (header.kind == RecordKind::kRunDone) {
      RunDoneRecord record;
      std::memcpy(&record, bytes.data(), sizeof record);
      run_done(record);
    } else if (header.kind == RecordKind::kFailed) {
      if (const auto found = by_id_.find(header.client); found != by_id_.end()) {
        found->second->outbox.send(static_cast<uint32_t>(bytes.size()),
                                   [&](std::byte* out) { std::memcpy(out, bytes.data(), bytes.size()); });
      }
    } else {
      throw Error(Status::kInvalid, "host " + std::to_string(index) + " sent a record of kind " +
                                        std::to_string(static_cast<int>(header.kind)));
    }
    host.inbox.pop();
  }
  if (done != 0) host.inbox.release();
  return done;
}

void Controller::run_done(const RunDoneRecord& record) {
  const auto id = static_cast<EntryId>(record.tag);
  Entry& entry = sequencer_.entry(id);
  Host& host = hosts_[record.host];
  host.gangs += record.gangs;
  const auto in_group = sequencer_.hosts_of(entry.group);
  const bool one_island = hosts_[in_group.front()].island == hosts_[in_group.back()].island;
  if (!entry.counted) {
    entry.counted = true;
    entry.gangs = record.gangs;
  } else if (one_island && entry.gangs != record.gangs) {  // GANG-1
    fail("GANG-1 broken: host " + std::to_string(record.host) + " launched " + std::to_string(record.gangs) +
         " gangs of run " + std::to_string(entry.order) + ", another host of its island " +
         std::to_string(entry.gangs) + "; results can no longer be trusted");
  }
  const uint32_t client = entry.client;
  if (sequencer_.complete(id, record.host)) retire(client);
  settle_granted({}, UINT32_MAX);
}

void Controller::flush() {
  for (Host& host : hosts_) host.outbox.flush();
  for (auto& client : clients_) {
    client->outbox.flush();
    if (!client->has_news) continue;
    client->has_news = false;
    // SYNC client/retired: pairs with Client::in_flight() and wait_room().
    client->block->retired.store(client->retired, std::memory_order_seq_cst);
    const uint64_t wanted = client->block->wanted.load(std::memory_order_seq_cst);
    if (wanted != 0 && client->retired >= wanted) client->block->futures()->doorbell().ring();
  }
}

bool Controller::is_idle() const {
  if (sequencer_.live() != 0) return false;
  return std::none_of(hosts_.begin(), hosts_.end(), [](const Host& h) { return h.outbox.has_overflow(); });
}

// --------------------------------------------------------------------------------------------------- life and end

void Controller::finish(ClusterStatus status, std::string_view text) {
  const std::lock_guard lock(finish_mutex_);
  block_->set_status(status, text);
  post_mail([this] {
    for (auto& client : clients_) client->block->futures()->doorbell().ring();
  });
}

void Controller::start() {
  PW_CHECK(!thread_.joinable());
  stopping_.store(false, std::memory_order_relaxed);
  thread_ = std::thread([this] { loop(); });
  pthread_setname_np(thread_.native_handle(), "pw-sequencer");
}

void Controller::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_release);
  block_->doorbell.ring();
  thread_.join();
}

void Controller::loop() {
  const SpinPolicy spin = SpinPolicy::adaptive();
  while (!stopping_.load(std::memory_order_acquire)) {
    const uint32_t ticket = block_->doorbell.ticket();
    uint32_t done = 0;
    try {
      done = step();
    } catch (const std::exception& error) {
      fail(std::string("the controller stopped: ") + error.what());
      read_mail();
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      published_ = stats_;
      published_.clients = clients_.size();
      published_.waiting = kept_.size();
      published_.gangs.clear();
      for (const Host& host : hosts_) published_.gangs.push_back(host.gangs);
    }
    if (done == 0) (void)block_->doorbell.wait(ticket, kLook, spin);
  }
  read_mail();
}

ControllerStats Controller::stats() {
  if (thread_.joinable()) {
    const std::lock_guard lock(mutex_);
    return published_;
  }
  ControllerStats stats = stats_;
  stats.clients = clients_.size();
  stats.waiting = kept_.size();
  for (const Host& host : hosts_) stats.gangs.push_back(host.gangs);
  return stats;
}

}  // namespace pathways
