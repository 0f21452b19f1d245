/// Sends of the JAX side: from shards that Python names to blocks that a peer named, by parcels made when the plan was
/// registered.
#include "executor/callback_backend.h"

#include <iterator>
#include <string>
#include <utility>

#include "base/status.h"

namespace pathways {

CallbackBackend::CallbackBackend(const BackendCallbacks& callbacks, uint32_t host, std::vector<ArenaView> arenas,
                                 DoorbellWord* doorbell)
    : c_(callbacks),
      host_(host),
      arenas_(std::move(arenas)),
      far_(arenas_.size()),
      doorbell_(doorbell),
      copier_([doorbell] { doorbell->ring(); }) {}

CallbackBackend::~CallbackBackend() { stop_sends(); }

void CallbackBackend::add_parcel(uint32_t plan, uint32_t route, uint32_t destination, std::span<const uint64_t> words) {
  auto parcel = std::make_shared<const Parcel>(Parcel::parse(words));
  const std::lock_guard lock(mutex_);
  parcels_[{plan, route, destination}] = std::move(parcel);
}

void CallbackBackend::forget_plan(uint32_t plan) {
  {
    const std::lock_guard lock(mutex_);
    parcels_.erase(parcels_.lower_bound({plan, 0, 0}), parcels_.lower_bound({plan + 1, 0, 0}));
  }
  c_.forget_plan(c_.self, plan);
}

std::shared_ptr<const Parcel> CallbackBackend::parcel_of(const NodeContext& where, uint32_t destination) {
  const std::lock_guard lock(mutex_);
  const auto found = parcels_.find({where.plan, where.computation, destination});
  return found == parcels_.end() ? nullptr : found->second;
}

void CallbackBackend::send(const NodeContext& where, Value in, std::span<const Landing> posts, uint64_t key,
                           std::span<SendState> states) {
  Value keep = nullptr;
  for (size_t i = 0; i < posts.size(); ++i) {
    states[i] = SendState::kDone;
    if (posts[i].offsets.empty()) continue;
    const auto parcel = parcel_of(where, posts[i].source);
    if (parcel == nullptr) {
      error_ = "host " + std::to_string(posts[i].source) + " wants what no route brings there";
      states[i] = SendState::kFailed;
      continue;
    }
    if (parcel->has_direct() && static_cast<Status>(c_.direct(c_.self, &where, in)) != Status::kOk) {
      states[i] = SendState::kFailed;
      continue;
    }
    if (parcel->bytes() == 0) continue;
    if (keep == nullptr) {
      shards_.clear();
      if (static_cast<Status>(c_.shards(c_.self, &where, in, &shards_, &keep)) != Status::kOk) {
        for (; i < posts.size(); ++i) states[i] = SendState::kFailed;
        break;
      }
    }
    states[i] = send_one(where, keep, posts[i], parcel, key);
  }
  if (keep != nullptr) drop(keep);
}

SendState CallbackBackend::send_one(const NodeContext& where, Value keep, const Landing& post,
                                    const std::shared_ptr<const Parcel>& parcel, uint64_t key) {
  const ArenaView arena = post.source < arenas_.size() ? arenas_[post.source] : ArenaView();
  const auto blocks = parcel->block_bytes();
  Copier::Job job{parcel, shards_, {}, key, post.source, nullptr};
  if (shards_.size() != parcel->source_bytes().size() || post.offsets.size() != blocks.size()) {
    error_ = "host " + std::to_string(post.source) + " posted " + std::to_string(post.offsets.size()) +
             " blocks for a transfer of " + std::to_string(blocks.size());
    return SendState::kFailed;
  }
  if (post.source < far_.size() && far_[post.source]) {  // where it is written is the receiver's to say (FAR-1)
    const int status = c_.carry(c_.self, &where, post.source, key, parcel, shards_, keep);
    if (static_cast<Status>(status) != Status::kOk) return SendState::kFailed;
    bytes_shipped_.fetch_add(parcel->bytes(), std::memory_order_relaxed);
    return SendState::kUnderWay;
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    const uint64_t offset = post.offsets[i];
    std::byte* target = nullptr;
    if (parcel->writes(i)) {
      if (!arena.is_there() && post.source == host_) {
        target = reinterpret_cast<std::byte*>(offset);
      } else if (arena.is_there()) {
        target = arena.find(offset, blocks[i]);
      }
      if (target == nullptr) {
        error_ = "host " + std::to_string(post.source) + " posted offset " + std::to_string(offset) +
                 ", which is no block of " + std::to_string(blocks[i]) + " bytes in its memory";
        return SendState::kFailed;
      }
    }
    job.targets.push_back(target);
  }
  (post.source == host_ ? bytes_kept_ : bytes_sent_).fetch_add(parcel->bytes(), std::memory_order_relaxed);
  job.keep = retain(keep);
  if (!copier_.start(job)) return SendState::kUnderWay;
  drop(job.keep);
  return SendState::kDone;
}

void CallbackBackend::take_sent(std::vector<Sent>* out) {
  copier_.take_done(&done_);
  for (const Copier::Job& job : done_) {
    out->push_back({job.key, job.to});
    drop(job.keep);
  }
  done_.clear();
  // SYNC backend/carried: pairs with carried(); the lock orders what was written.
  if (!has_carried_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  has_carried_.store(false, std::memory_order_relaxed);
  std::move(carried_.begin(), carried_.end(), std::back_inserter(*out));
  carried_.clear();
}

void CallbackBackend::carried(uint64_t key, uint32_t destination, std::string error) {
  {
    const std::lock_guard lock(mutex_);
    carried_.push_back({key, destination, std::move(error)});
    // SYNC backend/carried: pairs with take_sent().
    has_carried_.store(true, std::memory_order_release);
  }
  doorbell_->ring();
}

void CallbackBackend::stop_sends() {
  for (const Copier::Job& job : copier_.stop()) drop(job.keep);
}

}  // namespace pathways
