#include "bulk/sending_backend.h"

#include <iterator>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/status.h"
#include "bulk/row_copies.h"
#include "bulk/slow_copier_for_testing.h"

namespace pathways {

void SendingBackend::open(uint32_t host, std::vector<ArenaView> arenas, DoorbellWord* doorbell) {
  host_ = host;
  arenas_ = std::move(arenas);
  far_.resize(arenas_.size());
  early_kept_.resize(arenas_.size());
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
    states[i] = send_one(where, keep, ready_receives[i], copy_plan, key);
  }
  if (keep != nullptr) drop(keep);
}

SendState SendingBackend::send_one(const NodeContext& where, Value keep, const ReceiveBuffers& ready,
                                   const std::shared_ptr<const CopyPlan>& copy_plan, uint64_t key) {
  const auto blocks = copy_plan->block_bytes();
  Copier::Job job{copy_plan, shards_, {}, key, ready.source, nullptr};
  if (shards_.size() != copy_plan->source_bytes().size() || ready.offsets.size() != blocks.size()) {
    error_ = "host " + std::to_string(ready.source) + " announced " + std::to_string(ready.offsets.size()) +
             " blocks for a transfer of " + std::to_string(blocks.size());
    return SendState::kFailed;
  }
  if (is_far(ready.source)) {  // the receiver decides where it is written (FAR-1)
    if (send_remote(where, Remote::kTransfer, ready.source, key, copy_plan, shards_, keep) != Status::kOk)
      return SendState::kFailed;
    bytes_shipped_.fetch_add(copy_plan->bytes(), std::memory_order_relaxed);
    return SendState::kUnderWay;
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    std::byte* target = nullptr;
    if (copy_plan->writes(i)) {
      target = find_block(ready.source, ready.offsets[i], blocks[i]);
      if (target == nullptr) return SendState::kFailed;
    }
    job.targets.push_back(target);
  }
  return start(job, keep);
}

/// Where a host's block is here. nullptr: it is no block of its memory, as the error says.
std::byte* SendingBackend::find_block(uint32_t host, uint64_t offset, uint64_t bytes) {
  const ArenaView arena = host < arenas_.size() ? arenas_[host] : ArenaView();
  std::byte* block = nullptr;
  if (arena.is_there()) block = arena.find(offset, bytes);
  if (!arena.is_there() && host == host_) block = reinterpret_cast<std::byte*>(offset);
  if (block == nullptr) {
    error_ = "host " + std::to_string(host) + " announced offset " + std::to_string(offset) +
             ", which is no block of " + std::to_string(bytes) + " bytes in its memory";
  }
  return block;
}

SendState SendingBackend::start(Copier::Job& job, Value keep) {
  (job.to == host_ ? bytes_kept_ : bytes_sent_).fetch_add(job.copy_plan->bytes(), std::memory_order_relaxed);
  job.keep = retain(keep);
  if (!copier_->start(job)) return SendState::kUnderWay;
  drop(job.keep);
  return SendState::kDone;
}

SendState SendingBackend::write_rows(const NodeContext& where, const RowWrite& write) {
  auto copies = std::make_shared<RowCopies>(write);
  Copier::Job job{{copies, &copies->copy_plan}, {}, {}, write.key, write.host, nullptr};
  for (const RowWrite::Shard& shard : write.shards) job.sources.push_back(shard.rows.data());
  job.sources.push_back(reinterpret_cast<const std::byte*>(copies->numbers.data()));
  if (is_far(write.host)) {
    const Status sent =
        send_remote(where, Remote::kRows, write.host, write.key, job.copy_plan, std::move(job.sources), write.keep);
    if (sent != Status::kOk) return SendState::kFailed;
    bytes_shipped_.fetch_add(copies->copy_plan.bytes(), std::memory_order_relaxed);
    return SendState::kUnderWay;
  }
  const auto blocks = copies->copy_plan.block_bytes();
  job.targets.resize(blocks.size());
  for (size_t i = 0; i < write.rooms.size(); ++i) {
    const Room& room = write.rooms[i];
    for (const size_t half : {size_t{0}, size_t{1}}) {
      const size_t block = size_t{2} * write.places[i] + half;
      if (!copies->copy_plan.writes(block)) continue;
      job.targets[block] = find_block(write.host, half == 0 ? room.rows : room.numbers, blocks[block]);
      if (job.targets[block] == nullptr) return SendState::kFailed;
    }
  }
  return start(job, write.keep);
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

void SendingBackend::set_far(uint32_t host) {
  far_.at(host) = true;
  early_kept_.at(host) = std::make_shared<std::atomic<uint64_t>>(0);
}

/// FAR-3.
uint64_t SendingBackend::early_bytes(const NodeContext& where, uint32_t destination, std::vector<uint64_t>* offsets) {
  if (!is_far(destination)) return 0;
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
  if (!is_far(chunk.host) || message.size() > kMostEarlyChunk || !is_whole(chunk)) return false;
  const auto& kept = early_kept_[chunk.host];
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
