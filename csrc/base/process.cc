#include "base/process.h"

#include <pthread.h>
#include <sys/random.h>
#include <unistd.h>

#include <atomic>
#include <ctime>

namespace pathways {
namespace {

// Does not use sync/atomic.h: base lies below sync, and this word orders no other data between threads.
std::atomic<std::uint64_t> g_token{0};

std::uint64_t new_token() noexcept {
  std::uint64_t token = 0;
  if (::getrandom(&token, sizeof token, GRND_NONBLOCK) != static_cast<ssize_t>(sizeof token) || token == 0) {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    token = (static_cast<std::uint64_t>(::getpid()) << 32) ^ static_cast<std::uint64_t>(now.tv_nsec) ^
            (static_cast<std::uint64_t>(now.tv_sec) << 20);
  }
  return token | 1;
}

}  // namespace

std::uint64_t process_token() noexcept {
  std::uint64_t token = g_token.load(std::memory_order_relaxed);
  if (token != 0) return token;
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { g_token.store(0, std::memory_order_relaxed); });
  static_cast<void>(registered);
  const std::uint64_t fresh = new_token();
  return g_token.compare_exchange_strong(token, fresh, std::memory_order_relaxed) ? fresh : token;
}

}  // namespace pathways
