/// A composite: a program with loops, as runs of plans. And the walk through it, run by run.
///
/// A client calls a composite as it calls a plan, with one record. The controller makes a run of a plan of each step
/// that the walk comes to (loops/loops.h). Values are numbered: the arguments first. A step is
///
///   kRun    a run of `plan`: reads the values `inputs`, makes the values `outputs`
///   kLoop   begins a loop of `count` iterations: `inputs` are the first carry, `outputs` the values as which the
///           body reads the carry. A loop that `is_decided` may end earlier: before each iteration a run says whether
///           it begins. For the first iteration this run is the step before the loop, for the others the step before
///           the loop's end. A loop that *runs ahead* is decided too, but its body is one run that looks itself whether
///           it is to do anything: if not, it hands its carry on as it was, and says so with its end. So the walk gives
///           more such runs before it knows of the first ones, and there is always at least one.
///   kEnd    ends the loop's body: `inputs` are the new carry, `outputs` the values as which it is read behind the loop
///
/// Loops nest. What is carried is bound anew, never copied. The values that are made in a body are gone at its end,
/// but for those that are carried.
///
/// A *buffer* is what a value names; several values may name one. A buffer is owned, if the composite has to see to its
/// end: it was made by a run and is no result of the composite, or it is a donated argument.
///
/// Invariants of the walk:
///   WALK-1  each owned buffer is given up once: it is taken by one run that donates it, or it is in `released()` when
///           no value names it any more. A value that nothing reads any more names nothing.
///   WALK-2  no run reads a buffer that a run before it has taken.
///   WALK-3  a result of the composite is made by one run; `result_of` says by which. No run inside a loop that is
///           decided does, because nobody knows beforehand which iteration is the last.
///   WALK-4  between a run that decides and its verdict, the walk gives no run. Of a loop that runs ahead it gives as
///           many runs as did something, and kAhead more, but no more than `parallel` of which nobody knows; and none
///           when one of them has done nothing. So what runs for nothing is bounded by what runs for something.
///
/// Pure: no thread, no clock, no I/O. Threading: one thread; a Composite is immutable once it is registered.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "sequencer/sequencer.h"

namespace pathways {

struct CompositeStep {
  enum class Kind : uint8_t { kRun, kLoop, kEnd };
  Kind kind = Kind::kRun;
  uint32_t plan = 0;        ///< kRun
  uint64_t count = 0;       ///< kLoop: iterations, at least 1
  bool is_decided = false;  ///< kLoop: it may have fewer iterations
  bool is_ahead = false;    ///< kLoop, is_decided: it runs ahead
  std::vector<uint32_t> inputs, outputs;

  // What `Composites::add` finds out.
  GroupId group = 0;                ///< kRun: the hosts of the plan
  uint32_t partner = 0;             ///< kLoop: its end; kEnd: its loop
  std::vector<uint32_t> locals;     ///< kEnd: the values that are gone behind an iteration
  std::vector<uint32_t> unread;     ///< values that nothing reads behind the step; of a kEnd, behind its loop
  std::vector<int32_t> finals;      ///< kRun: by output: the composite's result if all loops around are at their last
  std::vector<uint32_t> donated;    ///< kRun: positions of inputs that the run takes
  bool is_taken_everywhere = true;  ///< kRun: all hosts of the composite drop what the run takes
  bool decides = false;             ///< kRun: whether a loop that is decided has another iteration
};

struct Composite {
  std::string name;
  uint32_t client = 0;
  GroupId group = 0;  ///< all hosts of its plans
  uint32_t arguments = 0;
  uint32_t values = 0;
  uint32_t parallel = 10;         ///< runs that may be ordered and not over
  std::vector<uint32_t> donated;  ///< positions of arguments that it may take
  std::vector<uint32_t> results;  ///< values
  std::vector<CompositeStep> steps;
};

class CompositeWalk {
 public:
  static constexpr uint64_t kAhead = 2;  ///< runs of a loop that runs ahead before any of them is known to do something

  /// `arguments`: their handles; that of a donated one is there once. `composite` and what it holds must outlive the
  /// walk.
  CompositeWalk(const Composite& composite, std::span<const uint64_t> arguments);

  /// The run that is next; nullptr: there is none, or the walk waits for a verdict. It may add to `released`.
  const CompositeStep* next();
  /// The handles that the next run reads. COST-3: O(their number).
  std::span<const uint64_t> inputs();
  /// The result of the composite that the next run makes as this output; -1: none.
  int32_t result_of(uint32_t output) const { return many_left_ == 0 ? composite_.steps[at_].finals[output] : -1; }
  /// The next run has its place in the order, and makes buffers with these handles.
  void ran(std::span<const uint64_t> outputs);

  /// WALK-4: whether nothing more may have its place before a verdict is known.
  bool is_waiting() const { return is_waiting_ || is_far_ahead(); }
  /// What the last run decides: whether the next iteration begins.
  void decide(bool goes_on) {
    is_waiting_ = false;
    goes_on_ = goes_on;
  }
  /// The loop that runs ahead of which the last run is, by a number of its own; 0: it is of none.
  uint64_t ahead() const { return is_within_ahead() ? ahead_.number : 0; }
  /// A run of the loop that ran ahead with this number is over: whether it did something. Does nothing when the walk
  /// has left that loop.
  void tell(uint64_t number, bool did_something);

  /// Handles of owned buffers that no value names any more, and that no run has taken. The caller empties it.
  std::vector<uint64_t>& released() { return released_; }
  /// Handles of owned buffers that a run has taken, since the caller has emptied it.
  std::vector<uint64_t>& taken() { return taken_; }
  /// Calls f(handle) for each owned buffer that was not given up.
  template <typename F>
  void for_each_owned(F&& f) const {
    for (const Buffer& buffer : buffers_) {
      if (buffer.names != 0 && buffer.is_owned && !buffer.is_taken) f(buffer.handle);
    }
  }
  /// What is wrong with the composite; nullptr: nothing so far. Then the walk is over.
  const char* wrong() const { return wrong_; }
  bool is_over() const { return at_ == composite_.steps.size() || wrong_ != nullptr; }

 private:
  static constexpr uint32_t kNone = 0xffffffffu;
  struct Buffer {
    uint64_t handle = 0;
    uint32_t names = 0;  ///< values, and places in `carry_`
    uint32_t reads = 0;  ///< scratch of `inputs`: how often the run reads it
    bool is_owned = false;
    bool is_taken = false;
  };
  struct Turns {
    uint32_t loop = 0;  ///< step
    uint64_t left = 0;  ///< iterations, this one included
  };

  /// The loop that runs ahead in which the walk is. There is none around it that does, since its body is one run.
  struct Ahead {
    uint64_t number = 0;
    uint64_t known = 0;    ///< its runs that did something
    uint64_t unknown = 0;  ///< its runs of which nobody knows
    bool is_over = false;  ///< one of them did nothing
  };

  bool is_within_ahead() const { return !turns_.empty() && composite_.steps[turns_.back().loop].is_ahead; }
  bool is_far_ahead() const;
  uint32_t add(uint64_t handle, bool is_owned);
  void name(uint32_t value, uint32_t buffer);
  void unname(uint32_t buffer);
  void forget(uint32_t value);
  void forget_unread(const CompositeStep& step);
  void begin_loop(const CompositeStep& step);
  void end_iteration(const CompositeStep& step);

  const Composite& composite_;
  size_t at_ = 0;
  std::vector<uint32_t> named_;  ///< by value: its buffer
  std::vector<Buffer> buffers_;
  std::vector<uint32_t> free_;  ///< buffers
  std::vector<Turns> turns_;    ///< the loops around, the outermost first
  uint32_t many_left_ = 0;      ///< those of them with a count that are not at their last iteration
  bool is_waiting_ = false;
  bool goes_on_ = false;  ///< what the last run that decides said
  Ahead ahead_;
  std::vector<uint32_t> carry_;  ///< scratch
  std::vector<uint64_t> inputs_, released_, taken_;
  const char* wrong_ = nullptr;
};

}  // namespace pathways
