// The search, the fibers and the modelled memory of model.h.
#include "model.h"

#include <ucontext.h>

#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "base/check.h"
#include "model_steps.h"
#include "sync/atomic.h"

namespace pathways::model {
namespace {

class Checker {
 public:
  Checker(Memory memory, const std::function<void(Program&)>& setup) : memory_(memory), setup_(setup) {}

  Result explore(std::uint64_t max_runs) {
    Result result;
    for (bool more = true; more && error_.empty(); more = backtrack()) {
      if (result.runs >= max_runs) return result;
      const bool whole = run_once();
      ++(whole ? result.runs : result.redundant);
      result.steps += steps_;
    }
    result.error = error_;
    result.complete = error_.empty();
    return result;
  }

  // ---- called by the code under test

  bool in_thread() const noexcept { return current_ != 0; }

  void announce(Op op, const void* where, bool reads_only = false, bool empties = false) noexcept {
    if (!in_thread()) return;
    PW_CHECK(where == nullptr || is_pooled(where));
    Thread& me = threads_[current_];
    me.next = Step{current_, op, where, 0, reads_only, empties, 0};
    yield();
    if (op == Op::kRelax) me.seen.clear();
  }

  std::uint64_t load(const void* where, std::size_t bytes, std::memory_order order) noexcept {
    announce(Op::kLoad, where, true);
    Thread& me = threads_[current_];
    for (auto entry = me.buffer.rbegin(); entry != me.buffer.rend(); ++entry) {
      if (entry->where != where) continue;
      note_seen(me, where);
      return entry->value;  // one's own store
    }
    if (acquires(order)) join(me.clock, location(where).released);
    note_seen(me, where);
    std::uint64_t value = 0;
    std::memcpy(&value, where, bytes);
    return value;
  }

  void store(void* where, std::size_t bytes, std::uint64_t value, std::memory_order order) noexcept {
    const bool waits = order == std::memory_order_seq_cst;
    announce(waits ? Op::kUpdate : Op::kStore, where, false, waits);
    Thread& me = threads_[current_];
    const Buffered entry{where, bytes, value, releases(order), releases(order) ? me.clock : Clock{}, ++me.stores};
    ++me.clock[current_];  // what comes after is not covered by this release
    if (in_thread() && memory_ == Memory::kBuffered && order != std::memory_order_seq_cst) {
      me.buffer.push_back(entry);
      return;
    }
    flush_all(me);
    write(me, entry);
  }

  void begin_update(void* where, std::memory_order order) noexcept {
    announce(Op::kUpdate, where, false, releases(order));
    Thread& me = threads_[current_];
    if (releases(order)) {
      flush_all(me);
    } else {
      flush_where(me, where);
    }
  }

  void end_update(void* where, std::memory_order order, bool wrote) noexcept {
    Thread& me = threads_[current_];
    Location& at = location(where);
    if (acquires(order)) join(me.clock, at.released);
    if (!wrote) return note_seen(me, where);
    if (releases(order)) join(at.released, me.clock);  // an update without release continues the release sequence
    ++me.clock[current_];
    ++at.version;
    note_own_write(me, where);
  }

  bool futex_wait(const void* where, std::uint32_t expected) noexcept {
    announce(Op::kFutexWait, where, false, true);
    if (!in_thread()) {
      fail("a futex wait outside the threads");
      return true;
    }
    Thread& me = threads_[current_];
    flush_all(me);
    std::uint32_t value = 0;
    std::memcpy(&value, where, sizeof value);
    if (value != expected) return false;
    me.state = Thread::State::kAsleep;
    me.asleep_on = where;
    yield();
    return true;
  }

  void futex_wake(const void* where, std::uint32_t count) noexcept {
    announce(Op::kFutexWake, where, false, true);
    flush_all(threads_[current_]);
    for (std::size_t t = 1; t < kMaxThreads && count != 0; ++t) {
      Thread& other = threads_[t];
      if (other.state != Thread::State::kAsleep || other.asleep_on != where) continue;
      other.state = Thread::State::kReady;
      other.next = Step{t, Op::kWoken};
      --count;
    }
  }

  void plain_read(const void* where) noexcept {
    Thread& me = threads_[current_];
    Plain& at = plain(where);
    if (at.written_at > me.clock[at.writer]) fail("data race: a read does not come after the write it reads");
    at.reads[current_] = me.clock[current_];
  }

  void plain_write(const void* where) noexcept {
    Thread& me = threads_[current_];
    Plain& at = plain(where);
    if (at.written_at > me.clock[at.writer]) fail("data race: two writes");
    for (std::size_t t = 0; t < kMaxThreads; ++t) {
      if (at.reads[t] > me.clock[t]) fail("data race: a write does not come after a read");
    }
    at.writer = current_;
    at.written_at = ++me.clock[current_];
  }

  void fail(const std::string& what) noexcept {
    if (!error_.empty() || cut_) return;
    error_ = what + "; steps:";
    constexpr std::size_t kShown = 100;
    const std::size_t from = trace_.size() > kShown ? trace_.size() - kShown : 0;
    if (from != 0) error_ += " ...";
    for (std::size_t i = from; i < trace_.size(); ++i) error_ += describe(trace_[i]);
  }

 private:
  // ---- one run

  bool run_once() {
    for (Thread& thread : threads_) {
      thread.state = Thread::State::kDone;
      thread.buffer.clear();
      thread.clock = Clock{};
      thread.stores = 0;
      thread.seen.clear();
      thread.started = false;
    }
    locations_.clear();
    plains_.clear();
    trace_.clear();
    steps_ = 0;
    depth_ = 0;
    cut_ = false;
    current_ = 0;
    threads_[0].clock[0] = 1;
    Program program;
    setup_(program);
    for (std::size_t t = 1; t <= program.threads.size(); ++t) {
      threads_[t].body = program.threads[t - 1];
      threads_[t].clock = threads_[0].clock;
      threads_[t].clock[t] = 1;
      threads_[t].state = Thread::State::kReady;
      threads_[t].next = Step{t, Op::kStart};
    }
    while (step()) {
    }
    for (std::size_t t = 1; t <= program.threads.size(); ++t) join(threads_[0].clock, threads_[t].clock);
    if (!cut_ && error_.empty()) {
      for (const auto& check : program.at_end) check();
    }
    for (Thread& thread : threads_) thread.body = nullptr;
    return !cut_;
  }

  /// Chooses and takes one step; false when the run is over.
  bool step() {
    enabled_.clear();
    bool all_done = true;
    if (++steps_ > kMaxSteps) {
      fail("no end after " + std::to_string(kMaxSteps) + " steps: a thread spins for ever");
      return false;
    }
    for (std::size_t t = 1; t < kMaxThreads; ++t) {
      Thread& thread = threads_[t];
      if (thread.state != Thread::State::kDone || !thread.buffer.empty()) all_done = false;
      if (thread.state == Thread::State::kReady && (thread.next.op != Op::kRelax || has_news(thread))) {
        if (is_private(thread.next)) {
          // Nobody else sees it and it commutes with everything: it need not be a choice.
          take(thread.next);
          return true;
        }
        enabled_.push_back(footprint(thread));
      }
      for (std::size_t i = 0; i < thread.buffer.size(); ++i) {
        if (!may_leave(thread, i)) continue;
        const Buffered& entry = thread.buffer[i];
        enabled_.push_back(Step{t, Op::kFlush, entry.where, entry.entry, false, false, bit_of(entry.where)});
      }
    }
    if (all_done) return false;
    if (enabled_.empty()) {
      fail("deadlock or lost wake-up: nobody can go on");
      return false;
    }
    take(choose(enabled_));
    return true;
  }

  Step choose(const std::vector<Step>& enabled) {
    if (cut_ || !error_.empty()) return enabled.front();  // only to the end, so that no thread is left half way
    if (depth_ < nodes_.size()) {
      const Node& node = nodes_[depth_++];
      return node.candidates[node.chosen];
    }
    Node node;
    if (depth_ > 0) {
      // A step that was tried before its sibling, or sleeps already, need not be tried after an independent one.
      const Node& parent = nodes_[depth_ - 1];
      const Step& taken = parent.candidates[parent.chosen];
      for (const Step& s : parent.sleep) {
        if (!dependent(s, taken)) node.sleep.push_back(s);
      }
      for (std::size_t i = 0; i < parent.chosen; ++i) {
        if (!dependent(parent.candidates[i], taken)) node.sleep.push_back(parent.candidates[i]);
      }
    }
    for (const Step& s : enabled) {
      bool asleep = false;
      for (const Step& other : node.sleep) asleep = asleep || other == s;
      if (!asleep) node.candidates.push_back(s);
    }
    if (node.candidates.empty()) {
      cut_ = true;
      return enabled.front();
    }
    nodes_.push_back(std::move(node));
    ++depth_;
    return nodes_.back().candidates.front();
  }

  bool backtrack() {
    while (!nodes_.empty()) {
      if (++nodes_.back().chosen < nodes_.back().candidates.size()) return true;
      nodes_.pop_back();
    }
    return false;
  }

  void take(const Step& chosen) {
    trace_.push_back(chosen);
    Thread& thread = threads_[chosen.thread];
    if (chosen.op == Op::kFlush) {
      for (std::size_t i = 0; i < thread.buffer.size(); ++i) {
        if (thread.buffer[i].entry != chosen.entry) continue;
        const Buffered entry = thread.buffer[i];
        thread.buffer.erase(thread.buffer.begin() + static_cast<std::ptrdiff_t>(i));
        write(thread, entry);
        return;
      }
      return;
    }
    resume(chosen.thread);
  }

  bool is_private(const Step& step) const noexcept {
    return step.op == Op::kStart || step.op == Op::kWoken || step.op == Op::kRelax ||
           (step.op == Op::kStore && memory_ == Memory::kBuffered);
  }

  /// The announced operation with what it would touch.
  static Step footprint(const Thread& thread) noexcept {
    Step step = thread.next;
    step.touches = bit_of(step.where);
    if (step.empties) {
      for (const Buffered& entry : thread.buffer) step.touches |= bit_of(entry.where);
    }
    // Any update empties the part of the buffer that is for its own address.
    if (step.op == Op::kUpdate) step.empties = true;
    return step;
  }

  /// Something that the relaxed thread had read has changed.
  bool has_news(const Thread& thread) noexcept {
    for (const Thread::Seen& seen : thread.seen) {
      if (location(seen.where).version != seen.version) return true;
    }
    return false;
  }
  void note_seen(Thread& thread, const void* where) noexcept {
    if (in_thread()) thread.seen.push_back({where, location(where).version});
  }
  /// One's own write is no new value.
  void note_own_write(Thread& thread, const void* where) noexcept {
    for (Thread::Seen& seen : thread.seen) {
      if (seen.where == where) ++seen.version;
    }
  }

  static bool may_leave(const Thread& thread, std::size_t i) noexcept {
    for (std::size_t j = 0; j < i; ++j) {
      if (thread.buffer[i].release || thread.buffer[j].where == thread.buffer[i].where) return false;
    }
    return true;
  }

  // ---- memory

  void write(Thread& thread, const Buffered& entry) noexcept {
    std::memcpy(entry.where, &entry.value, entry.bytes);
    Location& at = location(entry.where);
    at.released = entry.clock;  // empty for a relaxed store: it ends the release sequence
    ++at.version;
    note_own_write(thread, entry.where);
  }
  void flush_all(Thread& thread) noexcept {
    for (const Buffered& entry : thread.buffer) write(thread, entry);
    thread.buffer.clear();
  }
  void flush_where(Thread& thread, const void* where) noexcept {
    std::vector<Buffered> rest;
    for (const Buffered& entry : thread.buffer) {
      if (entry.where == where) {
        write(thread, entry);
      } else {
        rest.push_back(entry);
      }
    }
    thread.buffer = std::move(rest);
  }
  Location& location(const void* where) noexcept { return find(locations_, where); }
  Plain& plain(const void* where) noexcept { return find(plains_, where); }
  template <class T>
  static T& find(std::vector<T>& list, const void* where) noexcept {
    for (T& each : list) {
      if (each.where == where) return each;
    }
    list.push_back(T{where});
    return list.back();
  }

  // ---- fibers: entered by ucontext once, then switched by setjmp and longjmp, which make no system call

  void resume(std::size_t t) {
    current_ = t;
    Thread& thread = threads_[t];
    if (_setjmp(scheduler_) == 0) {
      if (thread.started) _longjmp(thread.context, 1);
      thread.started = true;
      if (thread.stack == nullptr) thread.stack = std::make_unique<char[]>(kStackBytes);
      ::getcontext(&thread.start);
      thread.start.uc_stack.ss_sp = thread.stack.get();
      thread.start.uc_stack.ss_size = kStackBytes;
      thread.start.uc_link = nullptr;
      ::makecontext(&thread.start, &Checker::enter, 0);
      ::setcontext(&thread.start);
    }
    current_ = 0;
  }
  void yield() noexcept {
    Thread& me = threads_[current_];
    if (_setjmp(me.context) == 0) _longjmp(scheduler_, 1);
  }
  static void enter();

  static std::string describe(const Step& step) {
    static constexpr const char* kNames[] = {"start", "load", "store", "update", "relax",
                                             "wait",  "wake", "woken", "flush"};
    char text[64];
    std::snprintf(text, sizeof text, " %zu:%s@%04zx", step.thread, kNames[static_cast<int>(step.op)],
                  reinterpret_cast<std::uintptr_t>(step.where) & 0xffff);
    return text;
  }

  const Memory memory_;
  const std::function<void(Program&)>& setup_;
  std::array<Thread, kMaxThreads> threads_;
  std::vector<Location> locations_;
  std::vector<Plain> plains_;
  std::vector<Step> trace_;
  std::vector<Node> nodes_;
  std::vector<Step> enabled_;  // of the current step; a member only to keep its memory
  std::size_t depth_ = 0;
  std::size_t current_ = 0;
  std::uint64_t steps_ = 0;
  bool cut_ = false;  // the rest of this run is equivalent to one that was seen
  std::string error_;
  std::jmp_buf scheduler_;
};

Checker* g_checker = nullptr;

void Checker::enter() {
  Checker& self = *g_checker;
  Thread& me = self.threads_[self.current_];
  me.body();
  me.state = Thread::State::kDone;
  _longjmp(self.scheduler_, 1);
}

}  // namespace

Result explore(Memory memory, const std::function<void(Program&)>& setup, std::uint64_t max_runs) {
  Checker checker(memory, setup);
  g_checker = &checker;
  Result result = checker.explore(max_runs);
  g_checker = nullptr;
  return result;
}

void* Program::memory(std::size_t bytes) {
  const std::size_t rounded = (bytes + 63) / 64 * 64;
  PW_CHECK(used_ + rounded <= kPoolBytes);
  void* memory = g_pool + used_;
  std::memset(memory, 0, rounded);
  used_ += rounded;
  return memory;
}

void require(bool holds, const char* text) {
  if (!holds) g_checker->fail(text);
}

std::uint64_t on_load(const void* where, std::size_t bytes, std::memory_order order) noexcept {
  if (g_checker != nullptr) return g_checker->load(where, bytes, order);
  std::uint64_t value = 0;
  std::memcpy(&value, where, bytes);
  return value;
}
void on_store(void* where, std::size_t bytes, std::uint64_t value, std::memory_order order) noexcept {
  if (g_checker != nullptr) return g_checker->store(where, bytes, value, order);
  std::memcpy(where, &value, bytes);
}
void begin_update(void* where, std::memory_order order) noexcept {
  if (g_checker != nullptr) g_checker->begin_update(where, order);
}
void end_update(void* where, std::memory_order order, bool wrote) noexcept {
  if (g_checker != nullptr) g_checker->end_update(where, order, wrote);
}
void on_relax() noexcept {
  if (g_checker != nullptr) g_checker->announce(Op::kRelax, nullptr, true);
}
void on_read(const void* where) noexcept {
  if (g_checker != nullptr) g_checker->plain_read(where);
}
void on_write(const void* where) noexcept {
  if (g_checker != nullptr) g_checker->plain_write(where);
}
bool on_futex_wait(const void* where, std::uint32_t expected) noexcept {
  return g_checker == nullptr || g_checker->futex_wait(where, expected);
}
void on_futex_wake(const void* where, std::uint32_t count) noexcept {
  if (g_checker != nullptr) g_checker->futex_wake(where, count);
}

}  // namespace pathways::model
