#include "bulk/sending_backend.h"

#include <iterator>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/status.h"
#include "bulk/row_copies.h"
#include "bulk/slow_copier_for_testing.h"

namespace pathways {

void SendingBackend::open(uint32_t host, const std::vector<ArenaView>& arenas, DoorbellWord* doorbell) {
  host_ = host;
  paths_.resize(arenas.size());
  early_kept_.resize(arenas.size());
  for (uint32_t there = 0; there < arenas.size(); ++there) open_memory(there, arenas[there]);
  doorbell_ = doorbell;
  copier_ = std::make_unique<Copier>([doorbell] { doorbell->ring(); });
}

void SendingBackend::slow_copies_for_testing(std::chrono::nanoseconds delay) {
  PW_CHECK(copier_->under_way() == 0);
  copier_ = std::make_unique<SlowCopierForTesting>([doorbell = doorbell_] { doorbell->ring(); }, delay);
}

void SendingBackend::add_copy_plan(uint32_t plan, uint32_t route, uint32_t destination,
                                   std::span<const uint64_t> words) {
  auto copy_plan = std::make_shared<const CopyPlan>(CopyPlan::parse(words));
  const std::lock_guard lock(mutex_);
  copy_plans_[{plan, route, destination}] = std::move(copy_plan);
}

void SendingBackend::forget_copy_plans(uint32_t plan) {
  const std::lock_guard lock(mutex_);
  copy_plans_.erase(copy_plans_.lower_bound({plan, 0, 0}), copy_plans_.lower_bound({plan + 1, 0, 0}));
}

std::shared_ptr<const CopyPlan> SendingBackend::copy_plan_of(const NodeContext& where, uint32_t destination) {
  const std::lock_guard lock(mutex_);
  const auto found = copy_plans_.find({where.plan, where.computation, destination});
  return found == copy_plans_.end() ? nullptr : found->second;
}

void SendingBackend::send(const NodeContext& where, Value in, std::span<const ReceiveBuffers> ready_receives,
                          uint64_t key, std::span<SendState> states) {
  Value keep = nullptr;
  for (size_t i = 0; i < ready_receives.size(); ++i) {
    states[i] = SendState::kDone;
    if (ready_receives[i].offsets.empty()) continue;
    const auto copy_plan = copy_plan_of(where, ready_receives[i].source);
    if (copy_plan == nullptr) {
      error_ = "host " + std::to_string(ready_receives[i].source) + " wants what no route brings there";
      states[i] = SendState::kFailed;
      continue;
    }
    if (copy_plan->has_direct() && direct(where, in) != Status::kOk) {
      states[i] = SendState::kFailed;
      continue;
    }
    if (copy_plan->bytes() == 0) continue;
    if (keep == nullptr) {
      shards_.clear();
      if (shards(where, in, &shards_, &keep) != Status::kOk) {
        for (; i < ready_receives.size(); ++i) states[i] = SendState::kFailed;
        break;
      }
    }
    states[i] = start(where, Remote::kTransfer, {copy_plan, shards_, {}, key, ready_receives[i].source, nullptr},
                      ready_receives[i].offsets, keep);
  }
  if (keep != nullptr) drop(keep);
}

SendState SendingBackend::start(const NodeContext& where, Remote what, Copier::Job job,
                                std::span<const uint64_t> offsets, Value keep) {
  const size_t blocks = job.copy_plan->block_bytes().size();
  if (job.to < paths_.size() && job.sources.size() == job.copy_plan->source_bytes().size() &&
      offsets.size() == blocks) {
    return (this->*paths_[job.to].send)(where, what, job, offsets, keep);
  }
  error_ = "host " + std::to_string(job.to) + " announced " + std::to_string(offsets.size()) +
           " blocks for a transfer of " + std::to_string(blocks);
  return SendState::kFailed;
}

SendState SendingBackend::copy(const NodeContext&, Remote, Copier::Job& job, std::span<const uint64_t> offsets,
                               Value keep) {
  const ArenaView& arena = paths_[job.to].arena;
  const auto blocks = job.copy_plan->block_bytes();
  job.targets.resize(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (!job.copy_plan->writes(i)) continue;
    if (arena.is_there()) job.targets[i] = arena.find(offsets[i], blocks[i]);
    if (!arena.is_there() && job.to == host_) job.targets[i] = reinterpret_cast<std::byte*>(offsets[i]);
    if (job.targets[i] != nullptr) continue;
    error_ = "host " + std::to_string(job.to) + " announced offset " + std::to_string(offsets[i]) +
             ", which is no block of " + std::to_string(blocks[i]) + " bytes in its memory";
    return SendState::kFailed;
  }
  (job.to == host_ ? bytes_kept_ : bytes_sent_).fetch_add(job.copy_plan->bytes(), std::memory_order_relaxed);
  job.keep = retain(keep);
  if (!copier_->start(job)) return SendState::kUnderWay;
  drop(job.keep);
  return SendState::kDone;
}

/// The receiver decides where it is written (FAR-1).
SendState SendingBackend::stream(const NodeContext& where, Remote what, Copier::Job& job, std::span<const uint64_t>,
                                 Value keep) {
  const Status sent = send_remote(where, what, job.to, job.key, job.copy_plan, std::move(job.sources), keep);
  if (sent != Status::kOk) return SendState::kFailed;
  bytes_shipped_.fetch_add(job.copy_plan->bytes(), std::memory_order_relaxed);
  return SendState::kUnderWay;
}

SendState SendingBackend::write_rows(const NodeContext& where, const RowWrite& write) {
  auto copies = std::make_shared<RowCopies>(write);
  Copier::Job job{{copies, &copies->copy_plan}, {}, {}, write.key, write.host, nullptr};
  for (const RowWrite::Shard& shard : write.shards) job.sources.push_back(shard.rows.data());
  job.sources.push_back(reinterpret_cast<const std::byte*>(copies->numbers.data()));
  std::vector<uint64_t> offsets(copies->copy_plan.block_bytes().size());
  for (size_t i = 0; i < write.rooms.size(); ++i) {
    const size_t block = size_t{2} * write.places[i];
    offsets.at(block) = write.rooms[i].rows;
    offsets.at(block + 1) = write.rooms[i].numbers;
  }
  return start(where, Remote::kRows, std::move(job), offsets, write.keep);
}

void SendingBackend::take_sent(std::vector<Sent>* out) {
  copier_->take_done(&done_);
  for (const Copier::Job& job : done_) {
    out->push_back({job.key, job.to});
    drop(job.keep);
  }
  done_.clear();
  // SYNC backend/remote_send_done: pairs with remote_send_done(); the lock orders what was written.
  if (!has_remote_sends_done_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  has_remote_sends_done_.store(false, std::memory_order_relaxed);
  std::move(remote_sends_done_.begin(), remote_sends_done_.end(), std::back_inserter(*out));
  remote_sends_done_.clear();
}

void SendingBackend::remote_send_done(uint64_t key, uint32_t destination, std::string error) {
  {
    const std::lock_guard lock(mutex_);
    remote_sends_done_.push_back({key, destination, std::move(error), Notice::kSeen});
    // SYNC backend/remote_send_done: pairs with take_sent().
    has_remote_sends_done_.store(true, std::memory_order_release);
  }
  doorbell_->ring();
}

void SendingBackend::open_stream(uint32_t host) {
  paths_.at(host) = {&SendingBackend::stream};
  early_kept_.at(host) = std::make_shared<std::atomic<uint64_t>>(0);
}

/// FAR-3.
uint64_t SendingBackend::early_bytes(const NodeContext& where, uint32_t destination, std::vector<uint64_t>* offsets) {
  if (early_kept_.at(destination) == nullptr) return 0;
  const auto copy_plan = copy_plan_of(where, destination);
  if (copy_plan == nullptr || copy_plan->bytes() == 0 || copy_plan->has_direct()) return 0;
  const uint64_t room = OutgoingTransfer(where.order, 0, host_, copy_plan, {}).room();
  if (room > kMostEarlyChunk) return 0;
  offsets->assign(copy_plan->block_bytes().size(), 0);  // the receiver decides where it is written (FAR-1)
  return room;
}

void SendingBackend::arrived(uint64_t order, uint32_t node, uint32_t source) {
  {
    const std::lock_guard lock(mutex_);
    arrived_.push_back({order, node, source});
    // SYNC backend/arrived: pairs with take_arrived().
    has_arrived_.store(true, std::memory_order_release);
  }
  doorbell_->ring();
}

bool SendingBackend::keep_early(const Chunk& chunk, std::span<const std::byte> message) {
  const auto kept = chunk.host < early_kept_.size() ? early_kept_[chunk.host] : nullptr;
  if (kept == nullptr || message.size() > kMostEarlyChunk || !is_whole(chunk)) return false;
  if (kept->fetch_add(message.size(), std::memory_order_relaxed) + message.size() > kMostEarly) {
    kept->fetch_sub(message.size(), std::memory_order_relaxed);
    return false;
  }
  {
    const std::lock_guard lock(mutex_);
    arrived_.push_back({chunk.order, chunk.node, chunk.host, EarlyChunk(message, kept)});
    // SYNC backend/arrived: pairs with take_arrived().
    has_arrived_.store(true, std::memory_order_release);
  }
  doorbell_->ring();
  return true;
}

void SendingBackend::take_arrived(std::vector<Arrived>* out) {
  // SYNC backend/arrived: pairs with arrived() and keep_early(); the lock orders what was written.
  if (!has_arrived_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  has_arrived_.store(false, std::memory_order_relaxed);
  std::move(arrived_.begin(), arrived_.end(), std::back_inserter(*out));
  arrived_.clear();
}

void SendingBackend::stop_sends() {
  for (const Copier::Job& job : copier_->stop()) drop(job.keep);
}

}  // namespace pathways
