#include "exchange/host_exchange.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/status.h"

namespace pathways {

HostExchange::HostExchange(const ExchangeShape& shape, uint32_t host)
    : shape_(shape),
      host_(host),
      source_shards_(shape.sources.count_on(host)),
      target_shards_(shape.targets.count_on(host)) {}

void HostExchange::add_source(ShardRouting routing) {
  PW_CHECK(shape_.sources.host_of(routing.source()) == host_);
  PW_CHECK(routings_.empty() || routings_.back().source() < routing.source());
  if (routing.bad().has_value() && !fault_.has_value() && shape_.routes == Routes::kKnown) {
    bad_route(routing.source(), "row " + std::to_string(routing.bad()->row) + " of source shard " +
                                    std::to_string(routing.source()) + " goes to slot " +
                                    std::to_string(routing.bad()->destination));
  } else if (routing.bad().has_value() && !fault_.has_value()) {
    fault_ = {ExchangeFault::Kind::kBadDestination, routing.source(), routing.bad()->row, routing.bad()->destination};
  }
  routings_.push_back(std::move(routing));
}

void HostExchange::fail_source(std::string text) {
  fault_ = {ExchangeFault::Kind::kSourceFailed, 0, 0, 0, std::move(text)};
}

void HostExchange::add_rooms(std::vector<Room> rooms) {
  PW_CHECK(rooms.size() == target_shards_);
  rooms_ = std::move(rooms);
}

void HostExchange::bad_route(uint32_t shard, const std::string& what) {
  fault_ = {ExchangeFault::Kind::kBadRoutes, shard, 0, 0,
            "pw.exchange: " + what + ", which is not there: expected the routes of one exchange, unchanged"};
}

void HostExchange::expect(uint32_t target, std::span<const int32_t> origins) {
  PW_CHECK(shape_.routes == Routes::kKnown && shape_.targets.host_of(target) == host_);
  PW_CHECK(origins.size() == shape_.capacity);
  ++expecting_;
  struct Origin {
    uint32_t source, slot, row;
  };
  std::vector<Origin> expected;
  for (uint32_t slot = 0; slot < origins.size(); ++slot) {
    const int32_t number = *static_cast<const volatile int32_t*>(&origins[slot]);
    if (number == -1) continue;
    if (number < 0 || static_cast<uint64_t>(number) >= uint64_t{shape_.sources.shards()} * shape_.source_rows) {
      if (!fault_.has_value()) {
        bad_route(target, "slot " + std::to_string(slot) + " of target shard " + std::to_string(target) +
                              " expects row " + std::to_string(number));
      }
      return;
    }
    const auto row = static_cast<uint32_t>(number);
    expected.push_back({row / shape_.source_rows, slot, row % shape_.source_rows});
  }
  std::stable_sort(expected.begin(), expected.end(),  // those of one source stay in the order of their slots
                   [](const Origin& a, const Origin& b) { return a.source < b.source; });
  for (size_t i = 0; i < expected.size();) {
    Batch& batch = expected_.emplace_back(Batch{expected[i].source, target, 0});
    RouteDigest digest;
    for (; i < expected.size() && expected[i].source == batch.source; ++i) {
      digest.add(expected[i].slot, expected[i].row);
      ++batch.rows;
    }
    batch.digest = digest.value();
  }
}

bool HostExchange::can_report() const {
  if (fault_.has_value() && fault_->kind == ExchangeFault::Kind::kSourceFailed) return true;
  if (shape_.routes == Routes::kKnown && expecting_ != target_shards_) return false;
  return routings_.size() == source_shards_ && rooms_.size() == target_shards_;
}

HostReport HostExchange::report() const {
  PW_CHECK(can_report());
  HostReport report{host_};
  if (fault_.has_value()) {
    report.fault = *fault_;
    return report;
  }
  for (const ShardRouting& routing : routings_) {
    report.batches.insert(report.batches.end(), routing.batches().begin(), routing.batches().end());
  }
  report.rooms = rooms_;
  report.expected = expected_;
  return report;
}

const ShardRouting* HostExchange::routing_of(uint32_t source) const {
  const auto at = std::lower_bound(routings_.begin(), routings_.end(), source,
                                   [](const ShardRouting& each, uint32_t wanted) { return each.source() < wanted; });
  return at != routings_.end() && at->source() == source ? &*at : nullptr;
}

void HostExchange::check(const HostDecision& decision) const {
  const auto require = [&](bool holds, const char* law) {
    if (!holds) throw Error(Status::kInvalid, "EXCH-3, a decision for host " + std::to_string(host_) + law);
  };
  require(!decision_.has_value(), " comes twice");
  if (decision.fault.is_there()) {
    require(decision.ranges.empty() && decision.writers.empty(), " fails and moves rows");
    return;
  }
  require(can_report() && !fault_.has_value(), " comes before its report, or passes over its fault");
  const SlotRange* last = nullptr;
  for (const SlotRange& range : decision.ranges) {
    require(
        last == nullptr || last->source < range.source || (last->source == range.source && last->target < range.target),
        " moves rows twice");
    last = &range;
    const ShardRouting* routing = routing_of(range.source);
    if (routing == nullptr) throw Error(Status::kInvalid, "EXCH-3, a decision moves rows of another host");
    require(range.target < shape_.targets.shards() && range.rows != 0 &&
                range.rows <= routing->rows_for(range.target).size(),
            " moves rows that it has not");
    require(
        shape_.routes == Routes::kChosen || (range.first == 0 && range.rows == routing->rows_for(range.target).size()),
        " leaves known routes");
    require(uint64_t{range.first} + range.rows <= shape_.capacity, " goes beyond the capacity");
    const auto room = std::lower_bound(decision.rooms.begin(), decision.rooms.end(), range.target,
                                       [](const Room& each, uint32_t wanted) { return each.target < wanted; });
    require(room != decision.rooms.end() && room->target == range.target, " names no memory for a shard");
  }
  const Arrivals* earlier = nullptr;
  bool has_rows = false;
  for (const Arrivals& arrivals : decision.arrivals) {
    require(earlier == nullptr || earlier->target < arrivals.target, " brings rows to a shard twice");
    earlier = &arrivals;
    has_rows |= arrivals.kept != 0;
    require(arrivals.target < shape_.targets.shards() && shape_.targets.host_of(arrivals.target) == host_ &&
                arrivals.kept <= shape_.capacity && arrivals.kept <= arrivals.offered,
            " brings rows to a shard that has no room for them");
  }
  const uint32_t* before = nullptr;
  for (const uint32_t& writer : decision.writers) {
    require(shape_.sources.count_on(writer) != 0 && (before == nullptr || *before < writer),
            " names a writer twice, or one without rows");
    before = &writer;
  }
  require(has_rows == !decision.writers.empty(), " brings rows without a writer, or has a writer without rows");
  require(shape_.routes == Routes::kChosen || is_expected(decision), " brings other rows than known routes say");
}

/// Known routes: the decision brings what the target shards of this host expect, from the hosts of its sources.
bool HostExchange::is_expected(const HostDecision& decision) const {
  std::vector<Arrivals> arrivals;
  std::vector<uint32_t> writers;
  for (const Batch& batch : expected_) {  // by target
    if (arrivals.empty() || arrivals.back().target != batch.target) arrivals.push_back({batch.target, 0, 0});
    arrivals.back().kept += batch.rows;
    arrivals.back().offered += batch.rows;
    writers.push_back(shape_.sources.host_of(batch.source));
  }
  std::sort(writers.begin(), writers.end());
  writers.erase(std::unique(writers.begin(), writers.end()), writers.end());
  return arrivals == decision.arrivals && writers == decision.writers;
}

void HostExchange::decide(HostDecision decision) {
  check(decision);
  decision_ = std::move(decision);
  for (const SlotRange& range : decision_->ranges) target_hosts_.push_back(shape_.targets.host_of(range.target));
  std::sort(target_hosts_.begin(), target_hosts_.end());
  target_hosts_.erase(std::unique(target_hosts_.begin(), target_hosts_.end()), target_hosts_.end());
}

std::vector<HostExchange::Move> HostExchange::moves(uint32_t target_host) const {
  PW_CHECK(decision_.has_value());
  std::vector<Move> moves;
  for (const SlotRange& range : decision_->ranges) {
    if (shape_.targets.host_of(range.target) != target_host) continue;
    const ShardRouting& routing = *routing_of(range.source);
    const auto rows = routing.rows_for(range.target), slots = routing.slots_for(range.target);
    for (uint32_t i = 0; i < range.rows; ++i) {
      moves.push_back({range.source, rows[i], range.target, slots.empty() ? range.first + i : slots[i]});
    }
  }
  return moves;
}

std::vector<int64_t> HostExchange::slots_of(uint32_t source) const {
  PW_CHECK(decision_.has_value());
  const ShardRouting* routing = routing_of(source);
  PW_CHECK(routing != nullptr);
  std::vector<int64_t> slots(routing->row_count(), -1);
  for (const SlotRange& range : decision_->ranges) {
    if (range.source != source) continue;
    const auto rows = routing->rows_for(range.target);
    for (uint32_t i = 0; i < range.rows; ++i) {
      slots[rows[i]] = int64_t{range.target} * shape_.capacity + range.first + i;
    }
  }
  return slots;
}

}  // namespace pathways
