#include "plan/plan.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <unordered_set>

#include "plan/malformed.h"

namespace pathways {
namespace {

constexpr uint32_t kMagic = 0x4e4c5750;  // "PWLN"
constexpr uint32_t kVersion = 4;

using malformed::refuse;

void require(bool condition, const char* what) {
  if (!condition) refuse(what);
}

}  // namespace

Plan Plan::parse(std::vector<std::byte> block) {
  Plan plan;
  plan.block_ = std::move(block);
  require(plan.block_.size() >= sizeof(PlanHeader), "shorter than its header");
  const PlanHeader& header = plan.header();
  require(header.magic == kMagic, "not a plan (magic number)");
  if (header.version != kVersion) {
    refuse("version " + std::to_string(header.version) + ", this runtime reads " + std::to_string(kVersion));
  }
  const size_t expected = sizeof(PlanHeader) + size_t{header.nodes} * sizeof(NodeRecord) +
                          size_t{header.choices} * sizeof(ChoiceRecord) +
                          size_t{header.predicates} * sizeof(PredicateRecord) +
                          size_t{header.exchanges} * sizeof(ExchangeRecord) + size_t{header.words} * 4;
  if (header.total_bytes != plan.block_.size() || expected != plan.block_.size()) {
    refuse("has " + std::to_string(plan.block_.size()) + " bytes, its tables need " + std::to_string(expected));
  }
  const std::byte* tables = plan.block_.data() + sizeof(PlanHeader);
  plan.nodes_ = reinterpret_cast<const NodeRecord*>(tables);
  tables += size_t{header.nodes} * sizeof(NodeRecord);
  const auto* choices = reinterpret_cast<const ChoiceRecord*>(tables);
  tables += size_t{header.choices} * sizeof(ChoiceRecord);
  const auto* predicates = reinterpret_cast<const PredicateRecord*>(tables);
  tables += size_t{header.predicates} * sizeof(PredicateRecord);
  plan.branches_.set({choices, header.choices}, {predicates, header.predicates});
  plan.exchanges_.set({reinterpret_cast<const ExchangeRecord*>(tables), header.exchanges});
  tables += size_t{header.exchanges} * sizeof(ExchangeRecord);
  plan.words_ = reinterpret_cast<const uint32_t*>(tables);
  plan.validate();
  plan.exchanges_.parse(plan);
  plan.derive();
  return plan;
}

void Plan::validate() const {
  const PlanHeader& h = header();
  require(h.devices >= 1 && h.devices <= kMaxLocalDevices, "a host has 1 to 64 local devices");
  require(h.nodes >= 2, "fewer than two nodes");
  require(h.padding == 0, "PLAN-4, its header has more than this runtime knows");
  const uint64_t known = h.devices == 64 ? ~uint64_t{0} : (uint64_t{1} << h.devices) - 1;
  const auto in_words = [&](uint32_t begin, uint32_t count) { return uint64_t{begin} + count <= h.words; };
  require(in_words(h.argument_begin, h.arguments), "PLAN-4, the argument table leaves the table of words");
  require(in_words(h.result_begin, h.results), "PLAN-4, the result table leaves the table of words");
  require(in_words(h.donated_begin, h.donated), "PLAN-4, the donated arguments leave the table of words");
  for (uint32_t position : donated()) require(position < h.arguments, "PLAN-4, an unknown argument is donated");
  require(h.values <= h.words, "PLAN-4, more values than words to write them with");
  // Each range begins where the last one ended, so no word is counted twice and the derived data stays in proportion.
  uint64_t cursor = 0;
  const auto next_range = [&](uint32_t begin, uint32_t count) {
    const bool fits = begin == cursor && in_words(begin, count);
    cursor += count;
    return fits;
  };
  for (uint32_t value : arguments()) require(value == kNoValue || value < h.values, "argument of an unknown value");
  for (uint32_t value : results()) require(value == kNoValue || value < h.values, "result of an unknown value");

  std::vector<bool> written(h.values, false);
  std::unordered_set<uint32_t> transfers;
  for (uint32_t i = 0; i < h.nodes; ++i) {
    const NodeRecord& n = nodes_[i];
    const bool first = i == 0, last = i + 1 == h.nodes;
    if (n.kind > NodeKind::kPermute) refuse("node", i, "an unknown kind");
    if ((n.kind == NodeKind::kArgument) != first || (n.kind == NodeKind::kResult) != last) {
      refuse("node", i, "PLAN-3, arguments come first, results last, each once");
    }
    if (!next_range(n.input_begin, n.input_count) || !next_range(n.output_begin, n.output_count) ||
        !next_range(n.source_begin, n.source_count) || !next_range(n.destination_begin, n.destination_count)) {
      refuse("node", i, "PLAN-4, a range leaves its place in the table of words");
    }
    if (((n.devices | n.input_devices) & ~known) != 0) refuse("node", i, "PLAN-4, a device the host lacks");
    if (n.kind == NodeKind::kCall && n.devices == 0) refuse("node", i, "a call without local devices");
    if (n.kind == NodeKind::kTransfer || is_exchange(n.kind)) {
      if (n.global_node >= kMaxGlobalNodes) refuse("node", i, "PLAN-4, its number in the program is too big");
      if (!transfers.insert(n.global_node).second) refuse("node", i, "PLAN-4, two transfers of one number");
    }
    if (n.kind == NodeKind::kTransfer) {
      validate_transfer(i);
    } else if (n.source_count + n.destination_count != 0) {
      refuse("node", i, "PLAN-4, only transfers have sources and destinations");
    }
    if (n.gang > 1 || (n.gang != 0 && n.kind != NodeKind::kCall)) refuse("node", i, "PLAN-4, no gang");
    if (n.spread > 1 || (n.spread != 0 && n.kind != NodeKind::kTransfer)) refuse("node", i, "PLAN-4, no spread");
    for (uint32_t value : inputs(n)) {
      if (value >= h.values) refuse("node", i, "PLAN-4, reads an unknown value");
      if (!written[value]) refuse("node", i, "PLAN-2, reads value " + std::to_string(value) + " before it is written");
    }
    for (uint32_t value : outputs(n)) {
      if (value >= h.values) refuse("node", i, "PLAN-4, writes an unknown value");
      if (written[value]) refuse("node", i, "PLAN-1, writes value " + std::to_string(value) + " again");
      written[value] = true;
    }
  }
  for (uint32_t value = 0; value < h.values; ++value) {
    if (!written[value]) refuse("value", value, "PLAN-1, nobody writes it");
  }
  for (const ChoiceRecord& c : branches_.choices()) {
    require(next_range(c.told_begin, c.told_count), "PLAN-4, the hosts that a choice tells leave the table of words");
  }
  for (const ExchangeRecord& r : exchanges_.records()) {
    require(next_range(r.source_begin, r.source_count) && next_range(r.target_begin, r.target_count),
            "PLAN-4, the shards of an exchange leave the table of words");
  }
  require(next_range(h.argument_begin, h.arguments) && next_range(h.result_begin, h.results) &&
              next_range(h.donated_begin, h.donated) && cursor == h.words,
          "PLAN-4, the tables do not fill the table of words");
  // The argument and result nodes repeat the two tables, so they must agree with them.
  const auto is_present = [](uint32_t value) { return value != kNoValue; };
  const auto repeats = [&](std::span<const uint32_t> node, std::span<const uint32_t> table) {
    std::vector<uint32_t> present;
    std::copy_if(table.begin(), table.end(), std::back_inserter(present), is_present);
    return std::equal(node.begin(), node.end(), present.begin(), present.end());
  };
  const NodeRecord &head = nodes_[0], &tail = nodes_[h.nodes - 1];
  require(repeats(outputs(head), arguments()) && head.input_count == 0,
          "the argument node and the argument table differ");
  require(repeats(inputs(tail), results()) && tail.output_count == 0, "the result node and the result table differ");
  branches_.validate(*this);
  branches_.validate_nodes(*this);
}

void Plan::validate_transfer(uint32_t index) const {
  const NodeRecord& n = nodes_[index];
  const auto from = sources(n), to = destinations(n);
  // A transfer has an input exactly when this host sends to some host, and an output exactly when some host sends here.
  if (n.input_count > 1 || n.output_count > 1 || n.input_count + n.output_count == 0 ||
      (n.input_count == 0) != to.empty() || (n.output_count == 0) != from.empty()) {
    refuse("node", index, "PLAN-4, a transfer moves exactly one value, from its sources to its destinations");
  }
  const auto has_repeated = [](std::span<const uint32_t> hosts) {
    return std::unordered_set<uint32_t>(hosts.begin(), hosts.end()).size() != hosts.size();
  };
  if (has_repeated(from) || has_repeated(to)) refuse("node", index, "PLAN-4, a transfer names a host twice");
  const auto has_self = [&](std::span<const uint32_t> hosts) {
    return std::find(hosts.begin(), hosts.end(), header().host) != hosts.end();
  };
  if (has_self(from) != has_self(to)) refuse("node", index, "PLAN-4, sends to itself but does not receive it");
}

void Plan::derive() {
  const PlanHeader& h = header();
  const auto build = [&](std::vector<uint32_t>& begin, std::vector<uint32_t>& items, auto&& each) {
    begin.assign(h.values + 1, 0);
    each([&](uint32_t value, uint32_t) { ++begin[value + 1]; });
    for (uint32_t v = 0; v < h.values; ++v) begin[v + 1] += begin[v];
    items.resize(begin[h.values]);
    std::vector<uint32_t> next(begin.begin(), begin.end() - 1);
    each([&](uint32_t value, uint32_t item) { items[next[value]++] = item; });
  };
  build(consumer_begin_, consumers_, [&](auto&& put) {
    for (uint32_t i = 0; i + 1 < h.nodes; ++i) {
      if (nodes_[i].kind == NodeKind::kSelect) continue;
      for (uint32_t value : inputs(nodes_[i])) put(value, i);
    }
  });
  build(result_begin_, results_, [&](auto&& put) {
    for (uint32_t i = 0; i < h.results; ++i) {
      if (results()[i] != kNoValue) put(results()[i], i);
    }
  });
  readers_.resize(h.values);
  for (uint32_t v = 0; v < h.values; ++v) readers_[v] = static_cast<uint32_t>(consumers(v).size());
  derive_waiting();
  branches_.derive(*this);
}

void Plan::derive_waiting() {
  missing_.resize(nodes().size());
  steps_ = static_cast<uint32_t>(branches_.choices().size());
  gangs_ = 0;
  for (uint32_t i = 0; i < missing_.size(); ++i) {
    const NodeRecord& n = nodes_[i];
    const auto held = n.kind == NodeKind::kCall ? static_cast<uint32_t>(__builtin_popcountll(n.devices)) : 0u;
    missing_[i] = n.input_count + held + (waits_for_predicate(n) ? 1u : 0u);
    if (n.kind == NodeKind::kSelect) {
      missing_[i] = 2;
      for (uint32_t value : inputs(n)) ++readers_[value];
    }
    if (n.kind != NodeKind::kArgument && n.kind != NodeKind::kResult) ++steps_;
    gangs_ += n.gang;
  }
}

void PlanBuilder::add(Node node, ExchangeShape shape) {
  node.kind = shape.routes == Routes::kKnown ? NodeKind::kPermute : NodeKind::kExchange;
  node.computation = static_cast<uint32_t>(exchanges_.size());
  exchanges_.push_back(std::move(shape));
  add(std::move(node));
}

std::vector<std::byte> PlanBuilder::finish() const {
  std::vector<uint32_t> words;
  const auto append = [&](const std::vector<uint32_t>& items) {
    const auto begin = static_cast<uint32_t>(words.size());
    words.insert(words.end(), items.begin(), items.end());
    return begin;
  };
  const auto bound = [](const std::vector<uint32_t>& table) {
    std::vector<uint32_t> present;
    for (uint32_t value : table) {
      if (value != kNoValue) present.push_back(value);
    }
    return present;
  };
  std::vector<NodeRecord> records;
  const auto record = [&](const Node& n) {
    NodeRecord r{};
    r.kind = n.kind;
    r.gang = n.gang ? 1 : 0;
    r.spread = n.spread ? 1 : 0;
    r.computation = n.computation;
    r.global_node = n.global_node;
    r.input_begin = append(n.inputs);
    r.input_count = static_cast<uint32_t>(n.inputs.size());
    r.output_begin = append(n.outputs);
    r.output_count = static_cast<uint32_t>(n.outputs.size());
    r.source_begin = append(n.sources);
    r.source_count = static_cast<uint32_t>(n.sources.size());
    r.destination_begin = append(n.destinations);
    r.destination_count = static_cast<uint32_t>(n.destinations.size());
    r.devices = n.devices;
    r.input_devices = n.input_devices;
    r.predicate = n.predicate;
    records.push_back(r);
  };
  Node head, tail;
  head.kind = NodeKind::kArgument;
  head.outputs = bound(arguments_);
  tail.kind = NodeKind::kResult;
  tail.inputs = bound(results_);
  record(head);
  for (const Node& n : nodes_) record(n);
  record(tail);
  std::vector<ChoiceRecord> choices;
  for (const Choice& c : choices_) {
    choices.push_back({c.number, c.owner, c.source, c.value, c.cases, c.scope, c.first_node, append(c.told),
                       static_cast<uint32_t>(c.told.size()), 0});
  }
  std::vector<ExchangeRecord> exchanges;
  const auto append_ranges = [&](const ShardHosts& side, uint32_t* begin, uint32_t* count) {
    std::vector<uint32_t> flat;
    for (const ShardHosts::Range& range : side.ranges()) flat.insert(flat.end(), {range.first, range.host});
    *begin = append(flat);
    *count = static_cast<uint32_t>(flat.size());
  };
  for (const ExchangeShape& shape : exchanges_) {
    ExchangeRecord r{};
    r.capacity = shape.capacity;
    r.source_rows = shape.source_rows;
    r.source_shards = shape.sources.shards();
    r.target_shards = shape.targets.shards();
    append_ranges(shape.sources, &r.source_begin, &r.source_count);
    append_ranges(shape.targets, &r.target_begin, &r.target_count);
    r.overflow = static_cast<uint32_t>(shape.overflow);
    r.has_unsent = shape.unsent.has_value() ? 1 : 0;
    r.unsent = shape.unsent.value_or(0);
    exchanges.push_back(r);
  }

  PlanHeader h{};
  h.magic = kMagic;
  h.version = kVersion;
  h.host = host_;
  h.devices = devices_;
  h.values = values_;
  h.nodes = static_cast<uint32_t>(records.size());
  h.arguments = static_cast<uint32_t>(arguments_.size());
  h.argument_begin = append(arguments_);
  h.results = static_cast<uint32_t>(results_.size());
  h.result_begin = append(results_);
  h.donated = static_cast<uint32_t>(donated_.size());
  h.donated_begin = append(donated_);
  h.words = static_cast<uint32_t>(words.size());
  h.choices = static_cast<uint32_t>(choices.size());
  h.predicates = static_cast<uint32_t>(predicates_.size());
  h.exchanges = static_cast<uint32_t>(exchanges.size());
  std::vector<std::byte> block;
  const auto write = [&](const auto* items, size_t count) {
    const auto bytes = std::as_bytes(std::span(items, count));
    block.insert(block.end(), bytes.begin(), bytes.end());
  };
  write(&h, 1);
  write(records.data(), records.size());
  write(choices.data(), choices.size());
  write(predicates_.data(), predicates_.size());
  write(exchanges.data(), exchanges.size());
  write(words.data(), words.size());
  const auto total = static_cast<uint32_t>(block.size());
  std::memcpy(block.data() + offsetof(PlanHeader, total_bytes), &total, sizeof total);
  return block;
}

}  // namespace pathways
