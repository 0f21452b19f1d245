// The words of the checker: steps and when they may be exchanged, threads with their store buffers, vector clocks.
// Only model.cc includes this file.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace pathways::model {

inline constexpr std::size_t kMaxThreads = 4;  // the setup and end ("main", 0), and up to three more
inline constexpr std::size_t kStackBytes = 128 * 1024;
inline constexpr std::size_t kPoolBytes = 256 * 1024;
inline constexpr std::uint64_t kMaxSteps = 20'000;

// Shared memory of the runs. It begins at the same address in every run: steps are compared by address across runs.
alignas(4096) inline std::byte g_pool[kPoolBytes];

inline bool is_pooled(const void* where) noexcept {
  const auto* at = static_cast<const std::byte*>(where);
  return at >= g_pool && at < g_pool + kPoolBytes;
}

using Clock = std::array<std::uint32_t, kMaxThreads>;

inline void join(Clock& into, const Clock& from) noexcept {
  for (std::size_t i = 0; i < kMaxThreads; ++i) into[i] = std::max(into[i], from[i]);
}

inline bool acquires(std::memory_order order) noexcept {
  return order == std::memory_order_acquire || order == std::memory_order_acq_rel || order == std::memory_order_seq_cst;
}
inline bool releases(std::memory_order order) noexcept {
  return order == std::memory_order_release || order == std::memory_order_acq_rel || order == std::memory_order_seq_cst;
}

enum class Op : std::uint8_t { kStart, kLoad, kStore, kUpdate, kRelax, kFutexWait, kFutexWake, kWoken, kFlush };

/// One thing that can happen next: thread's announced operation, or (kFlush) the leaving of one of its stores.
struct Step {
  std::size_t thread = 0;
  Op op = Op::kStart;
  const void* where = nullptr;
  std::uint64_t entry = 0;  // kFlush: number of the buffered store
  bool reads_only = false;
  bool empties = false;       // an operation that empties the thread's store buffer (or its part for `where`)
  std::uint64_t touches = 0;  // what it reads or writes: one bit for each address, perhaps shared by several

  friend bool operator==(const Step& a, const Step& b) noexcept {
    return a.thread == b.thread && a.op == b.op && a.where == b.where && a.entry == b.entry;
  }
};

/// Steps that may not be exchanged when both can happen. Conservative: true for some that could.
inline bool dependent(const Step& a, const Step& b) noexcept {
  if (a.thread == b.thread) {
    if (a.op != Op::kFlush && b.op != Op::kFlush) return true;
    if (a.op == Op::kFlush && b.op == Op::kFlush) return (a.touches & b.touches) != 0;
    // A store leaving the buffer changes nothing for its own thread, unless that is about to empty the buffer.
    return a.empties || b.empties;
  }
  if (a.reads_only && b.reads_only) return false;
  return (a.touches & b.touches) != 0;
}

/// The address's bit in Step::touches.
inline std::uint64_t bit_of(const void* where) noexcept {
  const auto offset = static_cast<std::uint64_t>(static_cast<const std::byte*>(where) - g_pool) / 4;
  return std::uint64_t{1} << ((offset * 0x9e3779b97f4a7c15U) >> 58);
}

struct Buffered {
  void* where;
  std::size_t bytes;
  std::uint64_t value;
  bool release;
  Clock clock;
  std::uint64_t entry;
};

struct Thread {
  enum class State : std::uint8_t { kReady, kAsleep, kDone };
  State state = State::kDone;
  Step next;
  const void* asleep_on = nullptr;
  struct Seen {
    const void* where;
    std::uint64_t version;
  };
  std::vector<Seen> seen;  // what it read since it last relaxed; a relaxed thread goes on when some of it has changed
  std::vector<Buffered> buffer;
  std::uint64_t stores = 0;  // numbers its buffered stores
  Clock clock{};
  std::function<void()> body;
  std::jmp_buf context;
  ucontext_t start;
  bool started = false;
  std::unique_ptr<char[]> stack;
};

struct Location {
  const void* where;
  std::uint64_t version = 0;  // writes so far
  Clock released{};           // what an acquire load of the current value learns
};

struct Plain {
  const void* where;
  std::size_t writer = 0;
  std::uint32_t written_at = 0;
  Clock reads{};
};

struct Node {
  std::vector<Step> candidates;
  std::size_t chosen = 0;
  std::vector<Step> sleep;
};

}  // namespace pathways::model
