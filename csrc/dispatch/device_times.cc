#include "dispatch/device_times.h"

#include "base/check.h"

namespace pathways {

void DeviceTimes::run_done(EntryId id, uint32_t host, uint32_t client, int64_t busy_ns, uint32_t batch) {
  PW_DCHECK(!is_other_batch(host, batch) && id < plan_of_.size());
  busy_ns = std::clamp<int64_t>(busy_ns, 0, kMost_ns);
  batch_ = batch;
  sum_ns_ += busy_ns;
  parts_.push_back({id, host, client, busy_ns});
  batch_plans_.push_back(plan_of_[id]);
}

int64_t& DeviceTimes::usual_ns(uint32_t number, const Part& part) {
  auto plan = plans_.find(number);
  if (plan == plans_.end()) return nobodys_ns_ = 0;  // it was forgotten, and so is what a late run of it took
  std::vector<Usual>& by_host = plan->second.usual;
  const uint32_t host = part.host;
  if (!by_host.empty() && host >= by_host.front().host) {
    const size_t guess = host - by_host.front().host;
    if (guess < by_host.size() && by_host[guess].host == host) return by_host[guess].ns;
  }
  const auto at = std::lower_bound(by_host.begin(), by_host.end(), host,
                                   [](const Usual& each, uint32_t wanted) { return each.host < wanted; });
  if (at != by_host.end() && at->host == host) return at->ns;
  return by_host.insert(at, {host, 0})->ns;
}

void DeviceTimes::learn(int64_t& usual_ns, int64_t took_ns) {
  usual_ns = std::max<int64_t>(1, usual_ns == 0 ? took_ns : usual_ns + (took_ns - usual_ns) / kLearnPart);
}

void DeviceTimes::learn_alone() {
  const Part& only = parts_.front();
  if (only.took_ns != 0) learn(usual_ns(batch_plans_.front(), only), only.took_ns);
}

void DeviceTimes::divide_look() {
  if (sum_ns_ == 0) return;
  // Each part is first the run's usual time.
  int64_t usual = 0;
  bool is_one_plan = true;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const int64_t known = usual_ns(batch_plans_[i], parts_[i]);
    parts_[i].took_ns = known != 0 ? known : kGuess_ns;
    usual += parts_[i].took_ns;
    is_one_plan = is_one_plan && batch_plans_[i] == batch_plans_[0];
  }
  int64_t left_ns = sum_ns_;
  for (size_t i = 0; i < parts_.size(); ++i) {
    int64_t& took_ns = parts_[i].took_ns;
    const double part = static_cast<double>(took_ns) / static_cast<double>(usual);
    const bool is_last = i + 1 == parts_.size();
    took_ns = is_last ? left_ns : std::min(left_ns, static_cast<int64_t>(part * static_cast<double>(sum_ns_)));
    left_ns -= took_ns;
    // A plan that was never measured takes what it can get: the policy must have some estimate.
    int64_t& its_usual = usual_ns(batch_plans_[i], parts_[i]);
    if (took_ns != 0 && (is_one_plan || its_usual == 0)) learn(its_usual, took_ns);
  }
}

}  // namespace pathways
