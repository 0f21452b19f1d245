// A small stateless model checker: runs the real code of the core, on 2 or 3 modelled threads, through every
// interleaving of its atomic operations.
//
// How: each thread is a fiber. Before an atomic operation it stops and says what it is about to do; the scheduler picks
// who goes on. A run is a list of such choices; depth-first search over the choices, replaying a prefix, visits every
// list that matters. Sleep sets leave out runs that differ only in the order of independent steps (Godefroid, "Partial-
// order methods", 1996). A run in which nobody can go on is a deadlock or a lost wake-up (futex waits never time out).
//
// What it sees
//   - every interleaving of the atomic operations and futex calls, without a bound on preemptions
//   (Memory::kInterleaved);
//   - with Memory::kBuffered also stores that become visible late: each thread has a store buffer whose entries leave
//   it
//     in any order that release stores and same-address stores allow (so x86-TSO and PSO: store-load and store-store
//     reordering). A seq_cst store, an update with release and a futex call empty it first;
//   - data races: happens-before by vector clocks over the acquire and release orders that the code really names, for
//     the plain memory that it declares by model_read() and model_write(). So a missing acquire or release is found
//     although the machine that runs the test would hide it.
// What it does not see: load-load reordering of relaxed loads without plain data, spurious compare-exchange failures,
// and more threads or steps than the test has. ThreadSanitizer watches the same code with real threads.
//
// A thread that spins must say cpu_relax() each time round: it then goes on only after somebody wrote something.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace pathways::model {

enum class Memory : std::uint8_t { kInterleaved, kBuffered };

/// One run's threads, made anew by the setup function for every run.
class Program {
 public:
  /// Zeroed memory, 64-byte aligned, until the run ends. Every atomic that threads share lives here.
  void* memory(std::size_t bytes);
  /// A T in such memory.
  template <class T, class... Args>
  T& make(Args&&... args) {
    static_assert(std::is_trivially_destructible_v<T>, "nobody destroys it");
    return *new (memory(sizeof(T))) T(std::forward<Args>(args)...);
  }

  void thread(std::function<void()> body) { threads.push_back(std::move(body)); }
  /// Called when all threads have ended.
  void finally(std::function<void()> check) { at_end.push_back(std::move(check)); }

  std::vector<std::function<void()>> threads;
  std::vector<std::function<void()>> at_end;

 private:
  std::size_t used_ = 0;
};

struct Result {
  std::uint64_t runs = 0;       // complete ones, no two equivalent
  std::uint64_t redundant = 0;  // cut short by sleep sets
  std::uint64_t steps = 0;
  bool complete = false;  // false when stopped by `max_runs` or by an error
  std::string error;      // the first broken requirement, race or deadlock, with the run's steps; empty if none
};

/// Explores the program that `setup` builds. Stops at the first error.
Result explore(Memory memory, const std::function<void(Program&)>& setup, std::uint64_t max_runs = 3'000'000);

/// States a requirement, in a thread or at the end; `text` is what is reported.
void require(bool holds, const char* text);

}  // namespace pathways::model
