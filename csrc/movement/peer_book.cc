#include "movement/peer_book.h"

#include <algorithm>

#include "base/check.h"

namespace pathways {

void PeerBook::run_comes(uint64_t order) {
  newest_ = std::max(newest_, order);
  while (!early_.empty() && early_.begin()->first < order) (void)take(early_.begin()->first);
}

void PeerBook::run_is_here(uint64_t order, uint32_t run) {
  if (early_.empty() && closed_.empty()) return;  // as nearly always
  for (const Early& early : take(order)) {
    if (early.record() == Status::kOk) continue;
    miss(run, {early.host,
               "ComputationError: host " + std::to_string(early.host) + " told host " + std::to_string(host_) +
                   " of run " + std::to_string(order) + " what is none of it: the run has no such part, or had it told",
               LostPeer::kAlive});
  }
  for (const auto& [host, lost] : closed_) miss(run, lost);
}

void PeerBook::refuse(uint64_t order, const Plan* plan, const std::string& why) {
  refused_.emplace_back(order, why);
  if (refused_.size() > kRefusedKept) refused_.pop_front();
  if (plan != nullptr) {
    for (PeerWaiter* waiter : waiters_) waiter->refuse(order, *plan, why);
  }
  for (const Early& early : take(order)) (void)early.record();  // who has asked is answered
}

std::string PeerBook::why_refused(uint64_t order) const {
  const auto found = std::ranges::find(refused_, order, &std::pair<uint64_t, std::string>::first);
  if (found != refused_.end()) return found->second;
  return "ComputationError: host " + std::to_string(host_) + " has refused run " + std::to_string(order) +
         ", or has no part in it";
}

Status PeerBook::keep(uint64_t order, uint32_t host, uint64_t bytes, std::function<Status()> record) {
  PW_DCHECK(!has_come(order));
  const auto found = kept_.find(host);
  bytes += kRecordBytes;
  const uint64_t kept = bytes + (found == kept_.end() ? 0 : found->second);
  if (kept > kMostKept) return Status::kInvalid;
  kept_[host] = kept;
  early_[order].push_back({host, bytes, std::move(record)});
  return Status::kOk;
}

std::vector<PeerBook::Early> PeerBook::take(uint64_t order) {
  const auto found = early_.find(order);
  if (found == early_.end()) return {};
  std::vector<Early> taken = std::move(found->second);
  early_.erase(found);
  for (const Early& early : taken) release(early);
  return taken;
}

void PeerBook::release(const Early& early) {
  const auto kept = kept_.find(early.host);
  if ((kept->second -= early.bytes) == 0) kept_.erase(kept);
}

void PeerBook::lose(std::span<const uint32_t> hosts, std::string_view text, LostPeer state,
                    std::span<const uint32_t> runs) {
  std::vector<Lost> lost;
  for (const uint32_t host : hosts) {  // all of them, before any waiter tells one of them something
    if (state == LostPeer::kDead) {
      ended_[host] = newest_;
      closed_.erase(host);
      for (auto at = early_.begin(); at != early_.end();) {
        std::erase_if(at->second, [&](const Early& early) {
          if (early.host == host) release(early);
          return early.host == host;
        });
        at = at->second.empty() ? early_.erase(at) : std::next(at);
      }
    } else if (!closed_.emplace(host, Lost{host, std::string(text), LostPeer::kBefore}).second) {
      continue;
    }
    lost.push_back({host, std::string(text), state});
  }
  for (const uint32_t run : runs) {
    for (const Lost& each : lost) miss(run, each);
  }
}

void PeerBook::miss(uint32_t run, const Lost& lost) {
  for (PeerWaiter* waiter : waiters_) waiter->miss(run, lost);
}

void PeerBook::clear() {
  refused_.clear();
  early_.clear();
  kept_.clear();
  sends_.clear();
}

void PeerBook::validate() const {
  PW_CHECK(refused_.size() <= kRefusedKept);
  PW_CHECK(early_.empty() || early_.begin()->first > newest_);
  std::unordered_map<uint32_t, uint64_t> kept;
  for (const auto& [order, records] : early_) {
    PW_CHECK(!records.empty());
    for (const Early& early : records) kept[early.host] += early.bytes;
  }
  PW_CHECK(kept == kept_);
  for (const auto& [host, order] : ended_) PW_CHECK(order <= newest_);
  for (const auto& [host, lost] : closed_) PW_CHECK(host == lost.host && lost.state == LostPeer::kBefore);
}

}  // namespace pathways
