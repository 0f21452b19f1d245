#include "controller/device_times.h"

namespace pathways {

void DeviceTimes::settle() {
  if (done_.empty()) return;
  if (done_.size() == 1) {
    const Done& only = done_.front();
    if (ClientState* client = clients_.find(only.client)) client->device_ns += static_cast<uint64_t>(sum_ns_);
    if (only.has_time && only.plan != UINT32_MAX) {
      if (only.plan >= usual_ns_.size()) usual_ns_.resize(only.plan + 1);
      int64_t& usual = usual_ns_[only.plan];
      usual = usual == 0 ? sum_ns_ : std::max<int64_t>(1, usual + (sum_ns_ - usual) / kLearnPart);
    }
  } else if (sum_ns_ != 0) {
    int64_t known = 0, count = 0;
    for (const Done& each : done_) {
      const int64_t usual = usual_ns(each.plan);
      known += usual;
      count += usual != 0 ? 1 : 0;
    }
    const int64_t mean = count == 0 ? 1 : std::max<int64_t>(1, known / count);
    const double whole = static_cast<double>(known + mean * (static_cast<int64_t>(done_.size()) - count));
    for (const Done& each : done_) {
      const int64_t usual = usual_ns(each.plan);
      const double part = static_cast<double>(usual != 0 ? usual : mean) / whole;
      if (ClientState* client = clients_.find(each.client)) {
        client->device_ns += static_cast<uint64_t>(part * static_cast<double>(sum_ns_));
      }
    }
  }
  done_.clear();
  sum_ns_ = 0;
}

}  // namespace pathways
