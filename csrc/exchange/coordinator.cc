#include "exchange/coordinator.h"

#include <algorithm>
#include <string>
#include <unordered_map>

#include "base/check.h"
#include "base/status.h"

namespace pathways {
namespace {

template <typename Items, typename Less>
bool ascends(const Items& items, Less less) {
  return std::adjacent_find(items.begin(), items.end(), [&](const auto& a, const auto& b) { return !less(a, b); }) ==
         items.end();
}

bool by_source(const Batch& a, const Batch& b) {
  return a.source != b.source ? a.source < b.source : a.target < b.target;
}
bool by_target(const Batch& a, const Batch& b) {
  return a.target != b.target ? a.target < b.target : a.source < b.source;
}

}  // namespace

ExchangeCoordinator::ExchangeCoordinator(const ExchangeShape& shape)
    : shape_(shape), hosts_(shape.hosts()), target_shards_(hosts_.size()), has_reported_(hosts_.size()) {
  for (const auto& count : shape_.targets.counts()) target_shards_[index_of(count.first)] = count.second;
}

/// The place of a host in `hosts_`; their number if it has no part in the exchange.
size_t ExchangeCoordinator::index_of(uint32_t host) const {
  const auto at = std::lower_bound(hosts_.begin(), hosts_.end(), host);
  return at != hosts_.end() && *at == host ? static_cast<size_t>(at - hosts_.begin()) : hosts_.size();
}

void ExchangeCoordinator::check(const HostReport& report) const {
  const auto refuse = [&](const char* why) {
    throw Error(Status::kInvalid, "the report of host " + std::to_string(report.host) + " on an exchange " + why);
  };
  const size_t index = index_of(report.host);
  if (index == hosts_.size()) refuse("comes from a host without a part in it");
  if (has_reported_[index]) refuse("comes twice");
  if (report.fault.is_there()) return;
  if (!ascends(report.batches, by_source)) refuse("has its shards out of order");
  for (const Batch& batch : report.batches) {
    if (batch.rows == 0 || batch.source >= shape_.sources.shards() || batch.target >= shape_.targets.shards() ||
        shape_.sources.host_of(batch.source) != report.host) {
      refuse("names a shard that is not the host's, or is not there");
    }
  }
  const auto has_digest = [](const Batch& batch) { return batch.digest != 0; };
  if (shape_.routes == Routes::kChosen && std::any_of(report.batches.begin(), report.batches.end(), has_digest)) {
    refuse("has a digest of routes that nobody knows");
  }
  if (!ascends(report.expected, by_target)) refuse("has what it expects out of order");
  if (shape_.routes == Routes::kChosen && !report.expected.empty()) refuse("expects rows, and does not know which");
  for (const Batch& batch : report.expected) {
    if (batch.rows == 0 || batch.source >= shape_.sources.shards() || batch.target >= shape_.targets.shards() ||
        shape_.targets.host_of(batch.target) != report.host) {
      refuse("expects rows at a shard that is not the host's, or from one that is not there");
    }
  }
  if (report.rooms.size() != target_shards_[index] ||
      !ascends(report.rooms, [](const Room& a, const Room& b) { return a.target < b.target; })) {
    refuse("does not give memory for each target shard");
  }
  for (const Room& room : report.rooms) {
    if (room.target >= shape_.targets.shards() || shape_.targets.host_of(room.target) != report.host) {
      refuse("gives memory for a target shard that is not the host's");
    }
  }
}

void ExchangeCoordinator::take(HostReport report) {
  check(report);
  has_reported_[index_of(report.host)] = true;
  reports_.push_back(std::move(report));
}

ExchangeFault ExchangeCoordinator::first_fault() const {
  const HostReport* first = nullptr;
  for (const HostReport& report : reports_) {  // by host, ascending
    if (!report.fault.is_there()) continue;
    if (first == nullptr || report.fault.kind < first->fault.kind ||
        (report.fault.kind == first->fault.kind && report.fault.kind == ExchangeFault::Kind::kBadDestination &&
         report.fault.shard < first->fault.shard)) {
      first = &report;
    }
  }
  return first != nullptr ? first->fault : ExchangeFault{};
}

std::vector<std::pair<uint32_t, HostDecision>> ExchangeCoordinator::decide() {
  PW_CHECK(reports_.size() == hosts_.size());
  std::sort(reports_.begin(), reports_.end(), [](const HostReport& a, const HostReport& b) { return a.host < b.host; });
  std::vector<std::pair<uint32_t, HostDecision>> decisions;
  for (const uint32_t host : hosts_) decisions.emplace_back(host, HostDecision{});
  ExchangeFault fault = first_fault();
  if (!fault.is_there() && give_slots(decisions, &fault)) return decisions;
  for (auto& decision : decisions) {
    decision.second = {};
    decision.second.fault = fault;
  }
  return decisions;
}

/// Known routes: where what is sent is not what is expected. `sent`: by target.
ExchangeFault ExchangeCoordinator::difference(std::vector<Batch> sent) const {
  std::vector<Batch> expected;
  for (const HostReport& report : reports_) {
    expected.insert(expected.end(), report.expected.begin(), report.expected.end());
  }
  std::sort(expected.begin(), expected.end(), by_target);
  sent.push_back({UINT32_MAX, UINT32_MAX, 0});  // behind all others
  expected.push_back(sent.back());
  const auto at = std::mismatch(sent.begin(), sent.end(), expected.begin(), expected.end());
  if (at.first == sent.end()) return {};
  const Batch& first = by_target(*at.second, *at.first) ? *at.second : *at.first;
  const auto rows = [&](const Batch& batch) {
    return std::to_string(batch.source == first.source && batch.target == first.target ? batch.rows : 0);
  };
  const bool counts_agree = rows(*at.first) == rows(*at.second);  // then it is the digests that do not
  return {ExchangeFault::Kind::kBadRoutes, first.target, 0, 0,
          "pw.exchange: source shard " + std::to_string(first.source) + " sends " + rows(*at.first) +
              " rows to target shard " + std::to_string(first.target) + ", which expects " + rows(*at.second) +
              (counts_agree ? ", but other rows, or in other slots" : "") +
              ": expected the routes of one exchange, unchanged"};
}

/// Returns false, and sets `fault`, if a target shard overflows and may not.
bool ExchangeCoordinator::give_slots(std::vector<std::pair<uint32_t, HostDecision>>& decisions, ExchangeFault* fault) {
  const auto decision_of = [&](uint32_t host) -> HostDecision& { return decisions[index_of(host)].second; };
  std::unordered_map<uint32_t, Room> room_of;
  std::vector<Batch> batches;
  for (const HostReport& report : reports_) {
    batches.insert(batches.end(), report.batches.begin(), report.batches.end());
    for (const Room& room : report.rooms) room_of.emplace(room.target, room);
  }
  std::sort(batches.begin(), batches.end(), by_target);
  const bool is_known = shape_.routes == Routes::kKnown;
  if (is_known && (*fault = difference(batches)).is_there()) return false;
  for (size_t i = 0; i < batches.size();) {
    const uint32_t target = batches[i].target;
    HostDecision& here = decision_of(shape_.targets.host_of(target));
    uint64_t offered = 0;
    for (; i < batches.size() && batches[i].target == target; ++i) {
      const Batch& batch = batches[i];
      const auto first = is_known ? 0 : static_cast<uint32_t>(std::min<uint64_t>(offered, shape_.capacity));
      const uint32_t rows = is_known ? batch.rows : std::min(batch.rows, shape_.capacity - first);
      offered += batch.rows;
      if (rows == 0) continue;
      const uint32_t host = shape_.sources.host_of(batch.source);
      HostDecision& there = decision_of(host);
      there.ranges.push_back({batch.source, target, first, rows});
      if (there.rooms.empty() || there.rooms.back().target != target) there.rooms.push_back(room_of.at(target));
      here.writers.push_back(host);
    }
    if (offered > shape_.capacity && shape_.overflow == Overflow::kError) {
      *fault = {ExchangeFault::Kind::kOverflow, target, offered, shape_.capacity};
      return false;
    }
    here.arrivals.push_back({target, std::min<uint64_t>(offered, shape_.capacity), offered});
  }
  for (auto& decision : decisions) {
    std::vector<uint32_t>& writers = decision.second.writers;
    std::sort(writers.begin(), writers.end());
    writers.erase(std::unique(writers.begin(), writers.end()), writers.end());
    std::sort(decision.second.ranges.begin(), decision.second.ranges.end(), [](const SlotRange& a, const SlotRange& b) {
      return a.source != b.source ? a.source < b.source : a.target < b.target;
    });
  }
  return true;
}

}  // namespace pathways
