/// The flat plan of one host: the nodes of a program as that host runs them.
///
/// A plan is encoded once (`PlanBuilder`) and validated once (`Plan::parse`). Then it is const, and all its runs share
/// it. It is one block of bytes: a header, the tables of nodes, choices, predicates and exchanges, and the table of
/// words, to whose ranges the others refer. plan/branches.h explains choices and predicates, plan/exchanges.h
/// exchanges. Records have a fixed width, so reading costs an index, and the block can be sent as it is. Everything
/// else here (readers, consumers, initial counters) is derived from the tables when they are parsed, and never sent.
///
/// Threading: immutable after parse; any thread reads.
///
/// Invariants; `Plan::parse` refuses a violation with an `Error(kInvalid)` that names the table and the entry:
///   PLAN-1  single assignment: each value is the output of exactly one node.
///   PLAN-2  order: a node reads only values written by nodes before it.
///   PLAN-3  shape: node 0 is the argument node, the last is the result node, and no other node is of these kinds.
///   PLAN-4  bounds: every index, count and mask lies inside its table. The tables fill the block exactly. The ranges
///           of nodes, choices, exchanges, arguments, results and donated arguments lie in the table of words, one
///           behind the other.
///   PLAN-5  branches: no client and no node that is taken reads a dead value; see plan/branches.h.
///   PLAN-6  exchanges: see plan/exchanges.h.
///   COST-2  the size does not depend on the number of shards: devices are a mask. Only transfers and exchanges name
///           peers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "plan/branches.h"
#include "plan/exchanges.h"

namespace pathways {

inline constexpr uint32_t kNoValue = 0xffffffffu;
inline constexpr uint32_t kMaxLocalDevices = 64;
inline constexpr uint32_t kMaxGlobalNodes = 1u << 20;  ///< for transfers: the executor packs the number into a key

/// What one node asks of a host.
enum class NodeKind : uint8_t {
  kArgument = 0,  ///< binds the arguments' handles to values
  kCall = 1,      ///< one XLA launch over the local devices of a computation
  kTransfer = 2,  ///< moves one value between slices
  kResult = 3,    ///< binds values to the results' handles
  kSelect = 4,    ///< gives the input of the case that a choice took: one input per case, one output, no launch
  kExchange = 5,  ///< sends rows to shards that the program chooses; see plan/exchanges.h
  kPermute = 6,   ///< sends rows along known routes
};

inline bool is_exchange(NodeKind kind) { return kind == NodeKind::kExchange || kind == NodeKind::kPermute; }

/// One node, 64 bytes. Its ranges are ranges of the plan's table of words.
struct NodeRecord {
  NodeKind kind;
  uint8_t gang;          ///< 1 when other hosts launch their part of the same call
  uint16_t spread;       ///< kTransfer: 1 when one end has shards on other hosts; the transfer then goes shard by shard
  uint32_t computation;  ///< kCall: index of the launchable; kTransfer: index of the host's reshard plan; kSelect:
                         ///< index of the choice; kExchange, kPermute: index of the exchange
  uint32_t global_node;  ///< the node's number in the program, the same on all hosts
  uint32_t input_begin, input_count;
  uint32_t output_begin, output_count;
  uint32_t source_begin, source_count;            ///< kTransfer: hosts that send to this one, itself included
  uint32_t destination_begin, destination_count;  ///< kTransfer: hosts that this one sends to, itself included
  uint32_t predicate;                             ///< the node is taken only if this holds; kNoPredicate: always
  uint64_t devices;        ///< local devices that the node's outputs live on; a call occupies them in the order
  uint64_t input_devices;  ///< kTransfer and exchanges: local devices that its input lives on
};
static_assert(sizeof(NodeRecord) == 64);

/// A transfer that only receives waits for no predicate: its sources know whether it is taken.
inline bool waits_for_predicate(const NodeRecord& n) {
  return n.predicate != kNoPredicate &&
         (n.kind == NodeKind::kCall || (n.kind == NodeKind::kTransfer && n.input_count != 0));
}

struct PlanHeader {
  uint32_t magic;
  uint32_t version;
  uint32_t total_bytes;
  uint32_t host;
  uint32_t devices;  ///< local devices of the host
  uint32_t values;
  uint32_t nodes;
  uint32_t words;
  uint32_t arguments;  ///< handles of arguments in the host's record of a run; the value of handle i is
                       ///< words[argument_begin + i]. kNoValue: not on this host, which gets all handles
  uint32_t argument_begin;
  uint32_t results;
  uint32_t result_begin;
  uint32_t donated;  ///< positions of arguments that a run takes over: from then on nobody else has them (MEM-4)
  uint32_t donated_begin;
  uint32_t choices;
  uint32_t predicates;
  uint32_t exchanges;
  uint32_t padding;  ///< 0
};
static_assert(sizeof(PlanHeader) == 72);

class Plan {
 public:
  /// Takes a block and validates it. Throws Error(kInvalid) with what is wrong and where.
  static Plan parse(std::vector<std::byte> block);

  uint32_t host() const { return header().host; }
  uint32_t devices() const { return header().devices; }
  uint32_t value_count() const { return header().values; }
  uint32_t argument_count() const { return header().arguments; }
  uint32_t result_count() const { return header().results; }
  size_t bytes() const { return block_.size(); }
  std::span<const std::byte> block() const { return block_; }

  std::span<const NodeRecord> nodes() const { return {nodes_, header().nodes}; }
  const NodeRecord& node(uint32_t index) const { return nodes_[index]; }
  std::span<const uint32_t> inputs(const NodeRecord& n) const { return words(n.input_begin, n.input_count); }
  std::span<const uint32_t> outputs(const NodeRecord& n) const { return words(n.output_begin, n.output_count); }
  std::span<const uint32_t> sources(const NodeRecord& n) const { return words(n.source_begin, n.source_count); }
  std::span<const uint32_t> destinations(const NodeRecord& n) const {
    return words(n.destination_begin, n.destination_count);
  }
  const Branches& branches() const { return branches_; }
  /// Hosts that this host tells what was chosen.
  std::span<const uint32_t> told(const ChoiceRecord& c) const { return words(c.told_begin, c.told_count); }
  const Exchanges& exchanges() const { return exchanges_; }
  std::span<const uint32_t> source_ranges(const ExchangeRecord& r) const {
    return words(r.source_begin, r.source_count);
  }
  std::span<const uint32_t> target_ranges(const ExchangeRecord& r) const {
    return words(r.target_begin, r.target_count);
  }
  std::span<const uint32_t> arguments() const { return words(header().argument_begin, header().arguments); }
  std::span<const uint32_t> donated() const { return words(header().donated_begin, header().donated); }
  std::span<const uint32_t> results() const { return words(header().result_begin, header().results); }

  // Derived at parse.
  /// Nodes that wait for a value: all that read it, except selects and the result node; a node that reads the value
  /// twice is listed twice.
  std::span<const uint32_t> consumers(uint32_t value) const { return slice(consumer_begin_, consumers_, value); }
  /// Result positions that a value is bound to.
  std::span<const uint32_t> results_of(uint32_t value) const { return slice(result_begin_, results_, value); }
  /// How often each value will be read, by selects too, at the start of a run.
  std::span<const uint32_t> initial_readers() const { return readers_; }
  /// How many things each node waits for at the start of a run: its inputs and its predicate, and for a call the head
  /// of each of its devices. A select waits for its choice, and for the input of the case that was taken.
  std::span<const uint32_t> initial_missing() const { return missing_; }
  /// How many calls, transfers, selects, exchanges and choices there are: all of them must be done before the run is
  /// over on this host.
  uint32_t step_count() const { return steps_; }
  /// How many calls other hosts launch too (GANG-1).
  uint32_t gang_count() const { return gangs_; }

 private:
  const PlanHeader& header() const { return *reinterpret_cast<const PlanHeader*>(block_.data()); }
  std::span<const uint32_t> words(uint32_t begin, uint32_t count) const { return {words_ + begin, count}; }
  static std::span<const uint32_t> slice(const std::vector<uint32_t>& begin, const std::vector<uint32_t>& items,
                                         uint32_t value) {
    return {items.data() + begin[value], begin[value + 1] - begin[value]};
  }
  void validate() const;
  void validate_transfer(uint32_t index) const;
  void derive();
  void derive_waiting();

  std::vector<std::byte> block_;
  const NodeRecord* nodes_ = nullptr;
  const uint32_t* words_ = nullptr;
  Branches branches_;
  Exchanges exchanges_;
  std::vector<uint32_t> consumer_begin_, consumers_, result_begin_, results_, readers_, missing_;
  uint32_t steps_ = 0, gangs_ = 0;
};

/// Writes the block that `Plan::parse` reads. Add the nodes in order; the builder adds the argument and the result
/// node.
class PlanBuilder {
 public:
  PlanBuilder(uint32_t host, uint32_t devices, uint32_t values) : host_(host), devices_(devices), values_(values) {}

  struct Node {
    NodeKind kind = NodeKind::kCall;
    bool gang = false;
    bool spread = false;
    uint32_t computation = 0;
    uint32_t global_node = 0;
    std::vector<uint32_t> inputs, outputs, sources, destinations;
    uint64_t devices = 0;
    uint64_t input_devices = 0;
    uint32_t predicate = kNoPredicate;
  };
  struct Choice {  ///< see ChoiceRecord
    uint32_t number = 0, owner = 0, source = 0;
    uint32_t value = kNoValue;
    uint32_t cases = 2;
    uint32_t scope = kNoPredicate;
    uint32_t first_node = 0;
    std::vector<uint32_t> told;
  };

  /// `values[i]` is the local value of argument i, or kNoValue.
  void set_arguments(std::vector<uint32_t> values) { arguments_ = std::move(values); }
  void set_results(std::vector<uint32_t> values) { results_ = std::move(values); }
  void set_donated(std::vector<uint32_t> positions) { donated_ = std::move(positions); }
  void add(Node node) { nodes_.push_back(std::move(node)); }
  /// A node kExchange or kPermute, by the routes of its shape, which has the rows of a source shard for both.
  void add(Node node, ExchangeShape shape);
  /// Returns the index of the choice; the numbers of choices go up.
  uint32_t add(Choice choice) {
    choices_.push_back(std::move(choice));
    return static_cast<uint32_t>(choices_.size() - 1);
  }
  /// Returns the index of the predicate.
  uint32_t add(const PredicateRecord& predicate) {
    predicates_.push_back(predicate);
    return static_cast<uint32_t>(predicates_.size() - 1);
  }
  std::vector<std::byte> finish() const;

 private:
  uint32_t host_, devices_, values_;
  std::vector<uint32_t> arguments_, results_, donated_;
  std::vector<Node> nodes_;
  std::vector<Choice> choices_;
  std::vector<PredicateRecord> predicates_;
  std::vector<ExchangeShape> exchanges_;
};

}  // namespace pathways
