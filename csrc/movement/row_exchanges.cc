#include "movement/row_exchanges.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/check.h"

namespace pathways {
namespace {

std::vector<uint32_t> shards_on(const ShardHosts& side, uint32_t host) {
  std::vector<uint32_t> shards;
  if (side.count_on(host) == 0) return shards;
  const auto ranges = side.ranges();
  for (size_t i = 0; i < ranges.size(); ++i) {
    const uint32_t end = i + 1 < ranges.size() ? ranges[i + 1].first : side.shards();
    for (uint32_t shard = ranges[i].first; ranges[i].host == host && shard < end; ++shard) shards.push_back(shard);
  }
  return shards;
}

/// The int32 numbers of a shard.
std::span<const int32_t> numbers_of(std::span<const std::byte> shard) {
  return {reinterpret_cast<const int32_t*>(shard.data()), shard.size() / sizeof(int32_t)};
}

}  // namespace

const ExchangeShape& RowExchanges::shape_of(const RowExchange& exchange) const {
  const Plan& plan = runs_[exchange.run].plan->plan;
  return plan.exchanges().shape(plan.node(exchange.node).computation);
}

void RowExchanges::prepare(NodeRef ref) {
  const Run& run = runs_[ref.run];
  const NodeRecord& node = run.plan->plan.node(ref.node);
  const uint64_t key = node_key(run.order, node.global_node);
  RowExchange& exchange = exchanges_[key];
  exchange.run = ref.run;
  exchange.node = ref.node;
  const ExchangeShape& shape = shape_of(exchange);
  exchange.sources = shards_on(shape.sources, host_);
  exchange.targets = shards_on(shape.targets, host_);
  exchange.inputs_left = node.input_count;
  manager_.prepare(key, shape, node.global_node);
  for (const auto& [host, lost] : peers_.closed()) manager_.lose(key, host, lost.text);  // before this host reports
  if (queues_.gangs_block()) owed_.push_back(key);
  if (!exchange.targets.empty()) (void)receives_.begin(key, *this);
  go_on();
}

bool RowExchanges::take_memory(uint64_t key) {
  RowExchange& exchange = exchanges_.at(key);
  std::vector<uint64_t> places;
  const Status status = mover_.begin_exchange(runs_[exchange.run].context(exchange.node), &places);
  if (status == Status::kNoMemory) return false;
  exchange.has_memory = status == Status::kOk;
  if (exchange.has_memory) {
    PW_CHECK(places.size() == 2 * exchange.targets.size());
    std::vector<Room> rooms;
    for (size_t i = 0; i < exchange.targets.size(); ++i) {
      rooms.push_back({exchange.targets[i], places[2 * i], places[2 * i + 1]});
    }
    manager_.add_rooms(key, std::move(rooms));
  } else {
    manager_.fail(key, std::string(mover_.last_error()));
  }
  return true;
}

void RowExchanges::start(NodeRef ref) {
  Run& run = runs_[ref.run];
  const NodeRecord& node = run.plan->plan.node(ref.node);
  const uint64_t key = node_key(run.order, node.global_node);
  RowExchange& exchange = exchanges_.at(key);
  const auto inputs = run.plan->plan.inputs(node);
  const uint32_t error = run.input_errors[ref.node];
  exchange.is_started = true;
  if (error != 0) {
    exchange.inputs_left = 0;
    if (!exchange.is_over) manager_.fail(key, std::string(errors_.text(error)));
  } else {
    for (uint32_t i = 0; i < inputs.size(); ++i) {
      const bool is_origins = i + 1 == inputs.size() && inputs.size() % 2 == 1;
      exchange.inputs.push_back(refs_.retain(run.values[inputs[i]]));
      tracker_.add(is_origins ? node.devices : node.input_devices,
                   {PendingValue::Kind::kRows, false, ref.run, inputs[i], refs_.retain(exchange.inputs.back()), key,
                    tracker_.age()});
    }
  }
  flow_.read_done(run, inputs);
  close_if_over(key);
  go_on();
}

void RowExchanges::input_settled(uint64_t key, uint32_t error) {
  RowExchange& exchange = exchanges_.at(key);
  PW_CHECK(exchange.inputs_left != 0);
  --exchange.inputs_left;
  if (!exchange.is_over) {
    if (error != 0) {
      manager_.fail(key, std::string(errors_.text(error)));
    } else if (exchange.inputs_left == 0 && !manager_.has_failed(key)) {
      read_inputs(key, exchange);
    }
  }
  close_if_over(key);
  go_on();
}

/// All inputs are ready: routes the rows.
void RowExchanges::read_inputs(uint64_t key, RowExchange& exchange) {
  const auto count = static_cast<uint32_t>(exchange.inputs.size());
  Status status = Status::kOk;
  if (!exchange.sources.empty()) {
    const NodeContext where = runs_[exchange.run].context(exchange.node);
    status = mover_.read_shards(where, 0, exchange.inputs[0], &exchange.rows, &exchange.keep);
  }
  for (uint32_t input = exchange.sources.empty() ? 0 : 1; input < count && status == Status::kOk; ++input) {
    status = route(key, exchange, input);
  }
  if (status != Status::kOk) manager_.fail(key, std::string(mover_.last_error()));
  // The ledger counts the rows until they are written.
  for (uint32_t input = exchange.sources.empty() ? 0 : 1; input < count; ++input) refs_.reset(exchange.inputs[input]);
}

/// Reads the destinations or slots of the host's rows, or the numbers of the rows that its slots expect.
Status RowExchanges::route(uint64_t key, RowExchange& exchange, uint32_t input) {
  const ExchangeShape& shape = shape_of(exchange);
  const bool is_source = !exchange.sources.empty() && input == 1;
  std::vector<std::span<const std::byte>> shards;
  Value keep = nullptr;
  const NodeContext where = runs_[exchange.run].context(exchange.node);
  const Status status = mover_.read_shards(where, input, exchange.inputs[input], &shards, &keep);
  if (status != Status::kOk) return status;
  const auto& numbers = is_source ? exchange.sources : exchange.targets;
  PW_CHECK(shards.size() == numbers.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto items = numbers_of(shards[i]);
    if (!is_source) {
      manager_.expect(key, numbers[i], items);
    } else if (shape.routes == Routes::kKnown) {
      manager_.add_source(key, ShardRouting::along(numbers[i], items, shape.targets.shards(), shape.capacity));
    } else {
      manager_.add_source(key, ShardRouting(numbers[i], items, shape.targets.shards(), shape.unsent));
    }
  }
  device_.drop(keep);
  return Status::kOk;
}

// ---------------------------------------------------------------------------------------------------------- records

Status RowExchanges::on_words(ExchangeWords kind, uint64_t order, uint32_t node, uint32_t host,
                              std::span<const uint64_t> words) {
  const uint64_t key = node_key(order, node);
  if (kind == ExchangeWords::kReport && !exchanges_.contains(key)) {  // an exchange that is over has had all reports
    HostDecision decision;
    decision.fault = {ExchangeFault::Kind::kSourceFailed, 0, 0, 0, peers_.why_refused(order)};
    send_decision(host, key, encode(decision));
    return Status::kOk;
  }
  const Status status =
      kind == ExchangeWords::kReport ? manager_.on_report(key, host, words) : manager_.on_decision(key, host, words);
  if (status == Status::kOk) go_on();
  return status;
}

Status RowExchanges::on_written(uint64_t order, uint32_t node, uint32_t host, std::string_view error) {
  const Status status = manager_.on_written(node_key(order, node), host, error);
  if (status == Status::kOk) go_on();
  return status;
}

void RowExchanges::send_report(uint32_t host, uint64_t exchange, std::vector<uint64_t> words) {
  ++records_;
  link_.exchange_words(host, ExchangeWords::kReport, order_of(exchange), node_of(exchange), words);
}

void RowExchanges::send_decision(uint32_t host, uint64_t exchange, std::vector<uint64_t> words) {
  ++records_;
  link_.exchange_words(host, ExchangeWords::kDecision, order_of(exchange), node_of(exchange), words);
}

void RowExchanges::send_written(uint32_t host, uint64_t exchange, std::string_view error) {
  ++records_;
  link_.exchange_written(host, order_of(exchange), node_of(exchange), error);
}

// ----------------------------------------------------------------------------------------------------------- writes

void RowExchanges::write_rows(uint64_t key, uint32_t host, std::vector<HostExchange::Move> moves,
                              std::vector<Room> rooms) {
  RowExchange& exchange = exchanges_.at(key);
  const ExchangeShape& shape = shape_of(exchange);
  RowWrite write{key,
                 host,
                 exchange.keep,
                 {},
                 shape.source_rows,
                 shape.capacity,
                 std::move(moves),
                 std::move(rooms),
                 {},
                 shape.targets.count_on(host)};
  for (const Room& room : write.rooms) write.places.push_back(shape.targets.place_of(room.target));
  for (size_t i = 0; i < exchange.sources.size(); ++i) write.shards.push_back({exchange.sources[i], exchange.rows[i]});
  const SendState state = mover_.write_rows(runs_[exchange.run].context(exchange.node), write);
  if (state == SendState::kUnderWay) {
    peers_.send_begins(host);
  } else {
    written_.push_back({key, host, state == SendState::kFailed ? std::string(mover_.last_error()) : std::string()});
  }
}

void RowExchanges::sent(const Sent& sent) {
  written_.push_back(sent);
  go_on();
}

/// The manager calls this class, which may come back here: then the outer call goes on.
void RowExchanges::go_on() {
  if (is_going_on_) return;
  is_going_on_ = true;
  do {
    const std::vector<Sent> written = std::move(written_);
    written_.clear();
    for (const Sent& each : written) manager_.rows_written(each.key, each.destination, each.error);
    manager_.poll();
  } while (!written_.empty());
  is_going_on_ = false;
}

// -------------------------------------------------------------------------------------------------------------- ends

void RowExchanges::finished(uint64_t key, const HostExchange& part) {
  RowExchange& exchange = exchanges_.at(key);
  Run& run = runs_[exchange.run];
  const Plan& plan = run.plan->plan;
  const NodeRecord& node = plan.node(exchange.node);
  const ExchangeShape& shape = shape_of(exchange);
  RowResults results;
  results.kept.resize(exchange.targets.size());
  results.offered.resize(exchange.targets.size());
  for (const Arrivals& arrivals : part.decision()->arrivals) {
    const auto at = std::lower_bound(exchange.targets.begin(), exchange.targets.end(), arrivals.target);
    const auto index = static_cast<size_t>(at - exchange.targets.begin());
    results.kept[index] = static_cast<int32_t>(arrivals.kept);
    results.offered[index] = static_cast<int32_t>(arrivals.offered);
  }
  if (shape.routes == Routes::kChosen) {
    for (const uint32_t source : exchange.sources) {
      const std::vector<int64_t> slots = part.slots_of(source);
      results.slots.emplace_back(slots.begin(), slots.end());
    }
  }
  const auto outputs = plan.outputs(node);
  std::vector<Value> made(outputs.size(), nullptr);
  if (mover_.finish_exchange(run.context(exchange.node), results, made) == Status::kOk) {
    for (uint32_t i = 0; i < outputs.size(); ++i) {
      const bool is_slots = shape.routes == Routes::kChosen && !exchange.sources.empty() && i + 1 == outputs.size();
      const uint64_t devices = is_slots ? node.input_devices : node.devices;
      memory_.book(run, devices, outputs[i], made[i]);
      flow_.deliver(exchange.run, outputs[i], made[i], devices, tracker_.next_age());
    }
  } else {
    const uint32_t error = errors_.add(std::string(mover_.last_error()));
    for (const uint32_t output : outputs) flow_.propagate_error(exchange.run, output, error);
  }
  end(key);
}

void RowExchanges::failed(uint64_t key, std::string_view text, Memory memory) {
  RowExchange& exchange = exchanges_.at(key);
  const Run& run = runs_[exchange.run];
  receives_.forget(key);
  if (exchange.has_memory && memory == Memory::kFree) mover_.abandon_exchange(run.context(exchange.node));
  const uint32_t error = errors_.add(std::string(text));
  const auto outputs = run.plan->plan.outputs(run.plan->plan.node(exchange.node));
  for (const uint32_t output : outputs) flow_.propagate_error(exchange.run, output, error);
  end(key);
}

void RowExchanges::end(uint64_t key) {
  RowExchange& exchange = exchanges_.at(key);
  exchange.is_over = true;
  if (exchange.keep != nullptr) device_.drop(exchange.keep);
  exchange.keep = nullptr;
  close_if_over(key);
}

/// An exchange may fail before its values are there (ERR-2). It stays until then, because the tracker names it.
void RowExchanges::close_if_over(uint64_t key) {
  const auto at = exchanges_.find(key);
  if (at == exchanges_.end() || !at->second.is_over || at->second.inputs_left != 0) return;
  for (Value& input : at->second.inputs) refs_.reset(input);
  const uint32_t slot = at->second.run;
  exchanges_.erase(at);
  flow_.close_step(slot);
}

// ------------------------------------------------------------------------------------------------------------- losses

void RowExchanges::refuse(uint64_t order, const Plan& plan, const std::string& why) {
  HostReport report{host_};
  report.fault = {ExchangeFault::Kind::kSourceFailed, 0, 0, 0, why};
  for (const NodeRecord& node : plan.nodes()) {
    if (!is_exchange(node.kind)) continue;
    const std::vector<uint32_t> hosts = plan.exchanges().shape(node.computation).hosts();
    const uint32_t coordinator = hosts[node.global_node % hosts.size()];
    if (coordinator != host_) send_report(coordinator, node_key(order, node.global_node), encode(report));
  }
}

void RowExchanges::miss(uint32_t slot, const Lost& lost) {
  const Run& run = runs_[slot];
  for (const NodeRecord& node : run.plan->plan.nodes()) {
    if (is_exchange(node.kind)) manager_.lose(node_key(run.order, node.global_node), lost.host, lost.text);
  }
  go_on();
}

uint64_t RowExchanges::input_devices(uint64_t key) const {
  const RowExchange& exchange = exchanges_.at(key);
  return runs_[exchange.run].plan->plan.node(exchange.node).input_devices;
}

bool RowExchanges::owes_before(const Run& run, const NodeRecord& node) {
  if (!queues_.blocks(node) || exchanges_.empty()) return false;
  trim_owed();
  const uint64_t key = node_key(run.order, node.global_node);
  for (const uint64_t owed : owed_) {
    if (owed > key) return false;
    const auto at = exchanges_.find(owed);
    if (at == exchanges_.end()) continue;
    if (!at->second.is_started && at->second.inputs_left != 0) return true;
    if (queues_.waits_in_launch(node) && manager_.owes(owed)) return true;
  }
  return false;
}

void RowExchanges::trim_owed() {
  while (!owed_.empty() && !exchanges_.contains(owed_.front())) owed_.pop_front();
}

std::string RowExchanges::describe(uint64_t key) const {
  const auto at = exchanges_.find(key);
  if (at == exchanges_.end()) return {};
  if (!at->second.is_started && at->second.inputs_left != 0) return "its values are not there yet";
  if (at->second.inputs_left != 0) return "its values are computed";
  if (receives_.is_waiting(key)) return "no room to receive";
  return manager_.describe(key);
}

void RowExchanges::clear() {
  for (auto& [key, exchange] : exchanges_) {
    for (Value& input : exchange.inputs) refs_.reset(input);
    if (exchange.keep != nullptr) device_.drop(exchange.keep);
  }
  exchanges_.clear();
  manager_.clear();
  written_.clear();
  owed_.clear();
}

void RowExchanges::validate() const {
  PW_CHECK(written_.empty());
  for (const auto& [key, exchange] : exchanges_) {
    PW_CHECK(runs_[exchange.run].plan != nullptr && runs_[exchange.run].order == order_of(key));
    PW_CHECK(!exchange.is_over || exchange.inputs_left != 0);
  }
}

}  // namespace pathways
