// What the native tests share: a printed seed, a watchdog, aligned memory, child processes.
//
// A stress test takes its randomness from seed() (PATHWAYS_TEST_SEED repeats a run), runs for a short fixed number of
// steps, and holds a Watchdog: it never asserts a maximum time, but a hang ends with a message instead of a time-out.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "memory/segment.h"

namespace pathways::test {

using namespace std::chrono_literals;

#if defined(PATHWAYS_SANITIZED)
inline constexpr int kStressScale = 3;  // sanitizers are 5 to 20 times slower
#else
inline constexpr int kStressScale = 5;
#endif

/// The seed of this run, printed once.
inline std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const char* given = std::getenv("PATHWAYS_TEST_SEED");
    const std::uint64_t fresh = given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device{}();
    std::printf("PATHWAYS_TEST_SEED=%llu\n", static_cast<unsigned long long>(fresh));
    std::fflush(stdout);
    return fresh;
  }();
  return value;
}

/// Bytes that tell where they belong.
inline std::vector<std::byte> pattern(size_t bytes, uint64_t seed) {
  std::vector<std::byte> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>((i * 131 + i / 251 + seed) & 0xff);
  return data;
}

/// Time for what takes a Clock: it stands still until the test lets some pass. So what a test says of deadlines, graces
/// and distances holds on a machine that stops anywhere for a second. There is one such time in the process.
inline std::atomic<std::int64_t> test_time_ns{3'600'000'000'000};
inline std::int64_t test_clock() { return test_time_ns.load(std::memory_order_relaxed); }
inline void let_pass(std::chrono::nanoseconds time) { test_time_ns.fetch_add(time.count(), std::memory_order_relaxed); }

/// Aborts the process when it lives longer than `limit`.
class Watchdog {
 public:
  explicit Watchdog(const char* what, std::chrono::seconds limit = 240s)
      : thread_([this, what, limit] {
          std::unique_lock lock(mutex_);
          if (done_.wait_for(lock, limit, [this] { return over_; })) return;
          std::fprintf(stderr, "watchdog: %s hangs (seed %llu)\n", what, static_cast<unsigned long long>(seed()));
          std::abort();
        }) {}
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    done_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool over_ = false;
  std::thread thread_;
};

/// A child process that runs `body` and exits with what it returns; fork it before starting threads. It is killed when
/// this object goes. The body uses no EXPECT_ (nobody would see it) and starts no thread.
class Child {
 public:
  explicit Child(const std::function<int()>& body) : pid_(::fork()) {
    if (pid_ == 0) {
      ::alarm(240);  // the child's own watchdog
      std::_Exit(body());
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (pid_ > 0) kill();
  }

  /// The exit code, or -signal.
  int wait() {
    int status = 0;
    if (pid_ <= 0 || ::waitpid(pid_, &status, 0) != pid_) return -1000;
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  /// kill -9, and wait for the end.
  void kill() {
    ::kill(pid_, SIGKILL);
    wait();
  }

 private:
  pid_t pid_;
};

/// The same memory once more, at another address: what another process would see.
inline Segment second_view(const Segment& segment) { return Segment::attach(::dup(segment.fd())); }

}  // namespace pathways::test
