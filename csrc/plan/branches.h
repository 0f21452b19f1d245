/// The branches of a host's plan: which scalar decides which nodes run, who reads the scalar, and who is told.
///
/// A *choice* is a scalar of a run that says which case of a branch is taken. One host, its owner, reads the scalar
/// when it is computed, and tells the others; a host may hand on what it was told. A *predicate* holds if a choice took
/// one case and the enclosing predicate holds. A node with a predicate is taken only if that holds. A select node gives
/// the input of the case that was taken.
///
/// The *scope* of a value is the predicate of the node that writes it; an argument has none. What a node that was not
/// taken would have made is *dead*.
///
/// `Branches` is the part of a `Plan` that knows all this. A plan without choices has an empty one.
///
/// Threading: immutable after the plan was parsed; any thread reads.
///
/// Invariants; `Plan::parse` refuses a violation:
///   PLAN-2  order: the value of a choice is written before each node that depends on the choice, and no such node is
///           before `first_node`. The parent of a predicate and the scope of its choice come before the predicate.
///   PLAN-4  bounds, as in plan/plan.h. Choices are sorted by number. Predicates nest at most kMostNested deep.
///   PLAN-5  nothing dead is read by whoever is taken: a node reads only values of its own scope and of the scopes
///           around it. A select reads, for each case, a value of a scope around itself, or one of the scope of that
///           case. A predicate or select can be read where the value of its choice can be. Results have no scope, so
///           the result of a branch is never dead for a client.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace pathways {

class Plan;

inline constexpr uint32_t kNoPredicate = 0xffffffffu;
inline constexpr uint32_t kNoBit = 0xffffffffu;
inline constexpr uint32_t kPredicateBits = 63;  ///< predicates that the controller compares over a run's hosts
/// The bit of the predicate that says whether a loop goes on behind this run (loops/loops.h). One host reports it.
inline constexpr uint32_t kVerdictBit = 63;
inline constexpr uint64_t kVerdictMask = uint64_t{1} << kVerdictBit;  ///< in RunDoneRecord's `known` and `chosen`
inline constexpr uint32_t kMostNested = 64;

/// A scalar that decides. All hosts that have the choice agree on `number`, `owner`, `cases` and `first_node`.
struct ChoiceRecord {
  uint32_t number;      ///< of the choice in the program, the same on all hosts; below kMaxGlobalNodes
  uint32_t owner;       ///< the host that reads the scalar
  uint32_t source;      ///< the host that tells this host: the owner, or one that hands it on; on the owner itself
  uint32_t value;       ///< on the owner: the local value; elsewhere kNoValue
  uint32_t cases;       ///< the scalar is in [0, cases)
  uint32_t scope;       ///< the scope of the value, or one inside of it; kNoPredicate: none
  uint32_t first_node;  ///< number in the program: from this node on, nodes may depend on the choice
  uint32_t told_begin, told_count;  ///< words: hosts that this host tells
  uint32_t padding;
};
static_assert(sizeof(ChoiceRecord) == 40);

/// It holds if `choice` took `which`, and `parent` holds.
struct PredicateRecord {
  uint32_t choice;  ///< index in the plan's table of choices
  uint32_t which;   ///< the case
  uint32_t parent;  ///< index of the enclosing predicate; kNoPredicate: none
  uint32_t bit;     ///< by which hosts report it: below kPredicateBits, or kVerdictBit, or kNoBit
};
static_assert(sizeof(PredicateRecord) == 16);

class Branches {
 public:
  bool empty() const { return choices_.empty(); }
  std::span<const ChoiceRecord> choices() const { return choices_; }
  std::span<const PredicateRecord> predicates() const { return predicates_; }
  const ChoiceRecord& choice(uint32_t index) const { return choices_[index]; }
  const PredicateRecord& predicate(uint32_t index) const { return predicates_[index]; }
  /// Whether `inner` holds only where `outer` does: they are the same, or `outer` is around `inner`, or is none.
  bool is_within(uint32_t inner, uint32_t outer) const;
  /// The index of the choice with this number; kNoPredicate: there is none.
  uint32_t find(uint32_t number) const;

  // Derived at parse: indices of what depends on the index in brackets, in order, each once.
  /// Calls with this predicate, and transfers with it that have an input.
  std::span<const uint32_t> nodes_of(uint32_t predicate) const { return nodes_of_[predicate]; }
  std::span<const uint32_t> children_of(uint32_t predicate) const { return children_of_[predicate]; }
  std::span<const uint32_t> predicates_of(uint32_t choice) const { return predicates_of_[choice]; }
  std::span<const uint32_t> selects_of(uint32_t choice) const { return selects_of_[choice]; }
  /// Selects that read a value, and choices that it decides.
  std::span<const uint32_t> selects_reading(uint32_t value) const { return selects_reading_[value]; }
  std::span<const uint32_t> choices_reading(uint32_t value) const { return choices_reading_[value]; }

 private:
  friend class Plan;
  /// Lists by key, one behind the other.
  class Lists {
   public:
    std::span<const uint32_t> operator[](uint32_t key) const {
      return {items_.data() + begin_[key], begin_[key + 1] - begin_[key]};
    }
    /// `each(put)` calls put(key, item) for all items, those of one key in order. It is called twice.
    template <typename Each>
    void build(size_t keys, Each&& each);

   private:
    std::vector<uint32_t> begin_, items_;
  };

  void set(std::span<const ChoiceRecord> choices, std::span<const PredicateRecord> predicates) {
    choices_ = choices;
    predicates_ = predicates;
  }
  /// Throws Error(kInvalid) with what is wrong and where. `validate` looks at the tables, `validate_nodes` at the nodes
  /// of a plan that is valid otherwise, with its writers.
  void validate(const Plan& plan) const;
  void validate_nodes(const Plan& plan) const;
  void validate_reads(const Plan& plan, uint32_t node, std::span<const uint32_t> scopes) const;
  void validate_select(const Plan& plan, uint32_t node, std::span<const uint32_t> scopes) const;
  void derive(const Plan& plan);

  std::span<const ChoiceRecord> choices_;
  std::span<const PredicateRecord> predicates_;
  Lists nodes_of_, children_of_, predicates_of_, selects_of_, selects_reading_, choices_reading_;
};

}  // namespace pathways
