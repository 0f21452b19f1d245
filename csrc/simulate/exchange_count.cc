#include "simulate/exchange_count.h"

#include <map>
#include <random>
#include <utility>
#include <vector>

#include "base/status.h"
#include "exchange/coordinator.h"
#include "exchange/host_exchange.h"
#include "exchange/messages.h"
#include "exchange/routing.h"
#include "exchange/shape.h"

namespace pathways {
namespace {

constexpr uint32_t kMostShards = 1 << 16, kMostRows = 64;

ExchangeShape shape_of(const ExchangeCountOptions& options) {
  std::vector<ShardHosts::Range> from, to;
  for (uint32_t shard = 0; shard < options.shards; shard += options.shards_per_host) {
    from.push_back({shard, shard / options.shards_per_host});
    to.push_back({shard, (options.shards + shard) / options.shards_per_host});
  }
  return {{options.shards, std::move(from)},
          {options.shards, std::move(to)},
          options.shards * options.rows,
          Overflow::kError};
}

}  // namespace

ExchangeCount count_exchange(const ExchangeCountOptions& options) {
  if (options.shards == 0 || options.shards > kMostShards || options.shards_per_host == 0 ||
      options.shards % options.shards_per_host != 0 || options.rows == 0 || options.rows > kMostRows) {
    throw Error(Status::kInvalid,
                "an exchange to count has 1 to 65,536 shards, a multiple of those on a host, and 1 to "
                "64 rows per shard");
  }
  const ExchangeShape shape = shape_of(options);
  const std::vector<uint32_t> hosts = shape.hosts();
  const uint32_t coordinating = hosts.front();
  std::mt19937_64 random(options.seed);
  ExchangeCoordinator coordinator(shape);
  std::map<uint32_t, HostExchange> parts;
  for (const uint32_t host : hosts) parts.emplace(host, HostExchange(shape, host));
  for (uint32_t source = 0; source < options.shards; ++source) {
    std::vector<int32_t> destinations(options.rows);
    for (int32_t& each : destinations) each = static_cast<int32_t>(random() % options.shards);
    parts.at(shape.sources.host_of(source)).add_source({source, destinations, options.shards});
  }
  std::map<uint32_t, std::vector<Room>> rooms;
  for (uint32_t target = 0; target < options.shards; ++target) {
    rooms[shape.targets.host_of(target)].push_back({target, 0, 0});
  }
  ExchangeCount count;
  count.hosts = hosts.size();
  for (auto& [host, part] : parts) {
    part.add_rooms(std::move(rooms[host]));
    const std::vector<uint64_t> report = encode(part.report());
    count.words += report.size();
    count.records += host == coordinating ? 0 : 1;
    coordinator.take(parse_report(report));
  }
  for (const auto& [host, decision] : coordinator.decide()) {
    const std::vector<uint64_t> encoded = encode(decision);
    count.words += encoded.size();
    count.records += host == coordinating ? 0 : 1;
    HostExchange& part = parts.at(host);
    part.decide(parse_decision(encoded));
    count.pairs += part.target_hosts().size();  // the two slices share no host
  }
  count.records += count.pairs;
  return count;
}

}  // namespace pathways
