#include "movement/exchange_manager.h"

#include <algorithm>

#include "base/check.h"

namespace pathways {
namespace {

bool has(const std::vector<uint32_t>& hosts, uint32_t host) {
  return std::find(hosts.begin(), hosts.end(), host) != hosts.end();
}

}  // namespace

ExchangeManager::Part* ExchangeManager::find(uint64_t exchange) {
  const auto at = parts_.find(exchange);
  return at != parts_.end() ? at->second.get() : nullptr;
}

/// The exchange, if this host's part of it may still change.
ExchangeManager::Part* ExchangeManager::find_open(uint64_t exchange) {
  Part* part = find(exchange);
  return part != nullptr && !part->has_reported && !part->is_cancelled ? part : nullptr;
}

void ExchangeManager::prepare(uint64_t exchange, const ExchangeShape& shape, uint32_t node) {
  PW_CHECK(shape.has_part(host_) && find(exchange) == nullptr);
  const std::vector<uint32_t> hosts = shape.hosts();
  const uint32_t coordinating = hosts[node % hosts.size()];
  Part& part = *parts_.emplace(exchange, std::make_unique<Part>(shape, host_, coordinating)).first->second;
  const bool is_mine = coordinating == host_;
  if (is_mine) part.coordinator = std::make_unique<ExchangeCoordinator>(shape);
  progress_->begin(exchange, is_mine ? static_cast<uint32_t>(hosts.size()) : 0);
  touched_.push_back(exchange);
}

void ExchangeManager::add_source(uint64_t exchange, ShardRouting routing) {
  Part* part = find_open(exchange);
  if (part == nullptr) return;
  part->here.add_source(std::move(routing));
  touched_.push_back(exchange);
}

void ExchangeManager::add_rooms(uint64_t exchange, std::vector<Room> rooms) {
  Part* part = find_open(exchange);
  if (part == nullptr) return;
  part->rooms = rooms;
  part->here.add_rooms(std::move(rooms));
  touched_.push_back(exchange);
}

void ExchangeManager::expect(uint64_t exchange, uint32_t target, std::span<const int32_t> origins) {
  Part* part = find_open(exchange);
  if (part == nullptr) return;
  part->here.expect(target, origins);
  touched_.push_back(exchange);
}

void ExchangeManager::fail(uint64_t exchange, std::string text) {
  Part* part = find_open(exchange);
  if (part == nullptr) return;
  part->is_cancelled = true;
  part->here.fail_source(std::move(text));
  touched_.push_back(exchange);
}

void ExchangeManager::report_if_ready(uint64_t exchange, Part& part) {
  if (part.has_reported || part.is_decided || !part.here.can_report()) return;
  part.has_reported = true;
  if (part.coordinator_host == host_) {
    take_report(exchange, part, part.here.report());
  } else if (!plane_.is_dead(part.coordinator_host, exchange)) {
    plane_.send_report(part.coordinator_host, exchange, encode(part.here.report()));
  }
}

/// Throws Error(kInvalid), and takes nothing, if the report is none of this exchange.
void ExchangeManager::take_report(uint64_t exchange, Part& part, HostReport report) {
  const uint32_t from = report.host;
  part.coordinator->take(std::move(report));
  part.reported.push_back(from);
  progress_->reported(exchange);
}

/// The coordinator reports a fault for another host.
void ExchangeManager::report_for(uint64_t exchange, Part& part, uint32_t host, std::string text) {
  if (has(part.reported, host)) return;
  HostReport report;
  report.host = host;
  report.fault = {ExchangeFault::Kind::kSourceFailed, 0, 0, 0, std::move(text)};
  take_report(exchange, part, std::move(report));
}

Status ExchangeManager::on_report(uint64_t exchange, uint32_t from, std::span<const uint64_t> words) {
  Part* part = find(exchange);
  if (part == nullptr || part->coordinator == nullptr || from == host_) return Status::kInvalid;
  try {
    HostReport report = parse_report(words);
    if (report.host != from) return Status::kInvalid;
    take_report(exchange, *part, std::move(report));
  } catch (const Error&) {
    return Status::kInvalid;
  }
  return Status::kOk;
}

void ExchangeManager::send_decisions(uint64_t exchange, Part& part) {
  const auto decisions = part.coordinator->decide();
  part.coordinator.reset();
  for (const auto& decision : decisions) {
    if (decision.first == host_) {
      decide(exchange, part, decision.second);
    } else if (!plane_.is_dead(decision.first, exchange)) {
      plane_.send_decision(decision.first, exchange, encode(decision.second));
    }
  }
}

Status ExchangeManager::on_decision(uint64_t exchange, uint32_t from, std::span<const uint64_t> words) {
  Part* part = find(exchange);
  if (part == nullptr || from != part->coordinator_host || from == host_ || part->is_decided || !part->has_reported) {
    return Status::kInvalid;
  }
  try {
    HostDecision decision = parse_decision(words);
    for (const uint32_t writer : part->written) {
      if (!has(decision.writers, writer)) return Status::kInvalid;
    }
    decide(exchange, *part, std::move(decision));
  } catch (const Error&) {
    return Status::kInvalid;
  }
  return Status::kOk;
}

/// Throws Error(kInvalid), and does nothing, if it is no decision for this host.
void ExchangeManager::decide(uint64_t exchange, Part& part, HostDecision decision) {
  part.here.decide(std::move(decision));
  part.is_decided = true;
  const HostDecision& decided = *part.here.decision();
  progress_->decided(exchange, static_cast<uint32_t>(decided.writers.size()));
  if (decided.fault.is_there()) part.error = decided.fault.describe(part.shape.targets.shards());
  for (const auto& [host, text] : part.gave_up) {
    if (has(decided.writers, host) && !has(part.written, host)) mark_written(exchange, part, host, text);
  }
  for (const uint32_t host : part.lost) {
    if (has(decided.writers, host) && !has(part.written, host)) {
      fail_writer(part, exchange, host, "pw.exchange: a host that sends rows is lost");
    }
  }
  for (const uint32_t host : part.here.target_hosts()) {
    if (plane_.is_dead(host, exchange)) continue;
    std::vector<Room> rooms;
    for (const Room& room : host == host_ ? part.rooms : decided.rooms) {
      if (part.shape.targets.host_of(room.target) == host) rooms.push_back(room);
    }
    ++part.writes_left;
    plane_.write_rows(exchange, host, part.here.moves(host), std::move(rooms));
  }
}

void ExchangeManager::rows_written(uint64_t exchange, uint32_t host, std::string_view error) {
  Part* part = find(exchange);
  PW_CHECK(part != nullptr && part->writes_left != 0);
  --part->writes_left;
  touched_.push_back(exchange);
  if (host == host_) {
    mark_written(exchange, *part, host, error);
  } else if (!plane_.is_dead(host, exchange)) {
    plane_.send_written(host, exchange, error);
  }
}

Status ExchangeManager::on_written(uint64_t exchange, uint32_t from, std::string_view error) {
  Part* part = find(exchange);
  const bool has_failed = part == nullptr || (part->is_decided && !part->here.decision().has_value());
  if (has_failed) return Status::kOk;
  if (from == host_ || has(part->written, from)) return Status::kInvalid;
  const bool is_writer = !part->is_decided || has(part->here.decision()->writers, from);
  // A host that gave up before it knew its targets tells all of them.
  if (!error.empty() && part->shape.has_part(from) && part->is_decided && !is_writer) return Status::kOk;
  if (!error.empty() && part->shape.has_part(from) && !part->is_decided) {
    part->gave_up.emplace_back(from, std::string(error));
    return Status::kOk;
  }
  if (!part->has_reported) return Status::kInvalid;
  if (part->is_decided ? !has(part->here.decision()->writers, from) : part->shape.sources.count_on(from) == 0) {
    return Status::kInvalid;
  }
  mark_written(exchange, *part, from, error);
  return Status::kOk;
}

void ExchangeManager::mark_written(uint64_t exchange, Part& part, uint32_t from, std::string_view error) {
  part.written.push_back(from);
  if (!error.empty() && !part.error.has_value()) part.error = std::string(error);
  progress_->written(exchange);
}

/// The rows of a lost host do not come any more.
void ExchangeManager::fail_writer(Part& part, uint64_t exchange, uint32_t host, std::string_view text) {
  if (!plane_.is_dead(host, exchange)) part.may_be_written = part.may_be_written || !part.rooms.empty();
  mark_written(exchange, part, host, text);
}

void ExchangeManager::lose(uint64_t exchange, uint32_t host, const std::string& text) {
  Part* at = find(exchange);
  if (at == nullptr || !at->shape.has_part(host)) return;
  Part& part = *at;
  if (has(part.lost, host)) return;
  part.lost.push_back(host);
  touched_.push_back(exchange);
  if (part.coordinator != nullptr) report_for(exchange, part, host, text);
  if (part.is_decided) {
    const HostDecision* decision = part.here.decision().has_value() ? &*part.here.decision() : nullptr;
    if (decision != nullptr && has(decision->writers, host) && !has(part.written, host)) {
      fail_writer(part, exchange, host, text);
    }
  } else if (host == part.coordinator_host) {
    lose_coordinator(exchange, part, text);
  }
}

/// No decision will come. Other hosts may have theirs, and write to this one if it gave them memory. A coordinator that
/// is alive may decide that this host writes: then its targets must hear that it does not.
void ExchangeManager::lose_coordinator(uint64_t exchange, Part& part, std::string_view text) {
  const bool is_told = !plane_.is_dead(part.coordinator_host, exchange);
  if (is_told && !part.has_reported) {
    HostReport report{host_};
    report.fault = {ExchangeFault::Kind::kSourceFailed, 0, 0, 0, std::string(text)};
    plane_.send_report(part.coordinator_host, exchange, encode(report));
  } else if (is_told && part.shape.sources.count_on(host_) != 0) {
    for (const auto& target : part.shape.targets.counts()) {
      if (target.first == host_ || plane_.is_dead(target.first, exchange)) continue;
      plane_.send_written(target.first, exchange, text);
    }
  }
  part.is_decided = true;
  part.error = std::string(text);
  part.may_be_written = part.has_reported && part.shape.targets.count_on(host_) != 0;
  part.has_reported = true;
  progress_->decided(exchange, static_cast<uint32_t>(part.written.size()));
}

void ExchangeManager::poll() {
  do {
    const std::vector<uint64_t> touched = std::move(touched_);
    touched_.clear();
    for (const uint64_t exchange : touched) {
      Part* part = find(exchange);
      if (part != nullptr) report_if_ready(exchange, *part);
    }
    over_.clear();
    progress_->propagate(&over_);
    for (const ExchangeProgress::Over& over : over_) {
      Part& part = *find(over.exchange);
      if (over.stage == ExchangeProgress::Stage::kReports) send_decisions(over.exchange, part);
      if (over.stage == ExchangeProgress::Stage::kRows) part.has_rows = true;
      touched_.push_back(over.exchange);
    }
    for (const uint64_t exchange : touched) end_if_over(exchange);
  } while (!touched_.empty());
}

void ExchangeManager::end_if_over(uint64_t exchange) {
  const Part* at = find(exchange);
  if (at == nullptr || !at->has_rows || at->writes_left != 0) return;
  const std::unique_ptr<Part> part = std::move(parts_.at(exchange));
  parts_.erase(exchange);
  if (part->error.has_value()) {
    plane_.failed(exchange, *part->error,
                  part->may_be_written ? ExchangePlane::Memory::kMayBeWritten : ExchangePlane::Memory::kFree);
  } else {
    plane_.finished(exchange, part->here);
  }
}

bool ExchangeManager::owes(uint64_t exchange) const {
  const auto at = parts_.find(exchange);
  if (at == parts_.end()) return false;
  const Part& part = *at->second;
  return !part.has_reported || part.coordinator != nullptr || !part.is_decided || part.writes_left != 0;
}

bool ExchangeManager::has_failed(uint64_t exchange) const {
  const auto at = parts_.find(exchange);
  return at == parts_.end() || at->second->is_cancelled || at->second->is_decided;
}

std::string ExchangeManager::describe(uint64_t exchange) const {
  const auto at = parts_.find(exchange);
  if (at == parts_.end()) return {};
  const Part& part = *at->second;
  if (!part.has_reported) return "it has not reported its rows";
  if (part.coordinator != nullptr) {
    return std::to_string(part.reported.size()) + " of " + std::to_string(part.shape.hosts().size()) +
           " hosts have reported";
  }
  if (!part.is_decided) return "host " + std::to_string(part.coordinator_host) + " has not decided";
  if (part.writes_left != 0) return "it writes to " + std::to_string(part.writes_left) + " hosts";
  return "rows of other hosts are to come";
}

void ExchangeManager::clear() {
  parts_.clear();
  touched_.clear();
  progress_.emplace();
}

}  // namespace pathways
