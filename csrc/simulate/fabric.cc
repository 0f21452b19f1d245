#include "simulate/fabric.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace pathways {

uint32_t Fabric::add_communicator(std::vector<uint32_t> hosts) {
  const std::lock_guard lock(mutex_);
  std::sort(hosts.begin(), hosts.end());
  Communicator c;
  c.launched.assign(hosts.size(), 0);
  c.hosts = std::move(hosts);
  communicators_.push_back(std::move(c));
  return static_cast<uint32_t>(communicators_.size() - 1);
}

uint64_t Fabric::launch(uint32_t communicator, uint32_t host, uint64_t what, bool waits) {
  std::unique_lock lock(mutex_);
  Communicator& c = communicators_.at(communicator);
  const auto found = std::lower_bound(c.hosts.begin(), c.hosts.end(), host);
  PW_CHECK(found != c.hosts.end() && *found == host);
  const uint64_t k = c.launched[static_cast<size_t>(found - c.hosts.begin())]++;
  if (k - c.log_begin == c.log.size()) c.log.push_back(what);
  const uint64_t paired = c.log[k - c.log_begin];
  if (paired != what) crossed_.fetch_add(1, std::memory_order_relaxed);
  const uint64_t least = *std::min_element(c.launched.begin(), c.launched.end());
  for (; c.log_begin < least; ++c.log_begin) c.log.pop_front();
  joined_.notify_all();
  if (waits) {
    joined_.wait(lock, [&] {
      return std::all_of(c.launched.begin(), c.launched.end(), [&](uint64_t launched) { return launched > k; });
    });
  }
  return paired;
}

uint64_t Fabric::incomplete() {
  const std::lock_guard lock(mutex_);
  uint64_t open = 0;
  for (const Communicator& c : communicators_) open += c.log.size();
  return open;
}

}  // namespace pathways
