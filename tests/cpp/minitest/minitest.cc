// The runner behind minitest's gtest/gtest.h: registration, reports, filter, death tests, main().
#include <fnmatch.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <regex>

#include "gtest/gtest.h"

namespace testing {
namespace {

struct Registered {
  std::string suite;
  std::string name;
  std::function<void()> run;
  void (*up)();
  void (*down)();
};

std::vector<Registered>& tests() {
  static std::vector<Registered> list;
  return list;
}

std::atomic<int> g_failures{0};
std::atomic<bool> g_fatal{false};
std::atomic<bool> g_skipped{false};
std::mutex g_print;
thread_local std::vector<std::string> t_traces;

bool matches(const std::string& name, const std::string& filter) {
  const auto minus = filter.find('-');
  const auto any = [&](const std::string& patterns) {
    for (std::size_t at = 0; at <= patterns.size();) {
      const auto colon = std::min(patterns.find(':', at), patterns.size());
      if (::fnmatch(patterns.substr(at, colon - at).c_str(), name.c_str(), 0) == 0) return true;
      at = colon + 1;
    }
    return false;
  };
  const std::string wanted = filter.substr(0, minus);
  if (!any(wanted.empty() ? "*" : wanted)) return false;
  return minus == std::string::npos || !any(filter.substr(minus + 1));
}

}  // namespace

bool Test::HasFailure() { return g_failures.load() != 0; }
bool Test::HasFatalFailure() { return g_fatal.load(); }

namespace internal {

void Report::operator=(const Message& message) const {
  if (kind_ == Kind::kSuccess) return;
  const std::lock_guard lock(g_print);
  std::printf("%s:%d: %s %s\n", file_, line_, text_.c_str(), message.str().c_str());
  if (kind_ == Kind::kSkip) {
    g_skipped = true;
    return;
  }
  for (const std::string& trace : t_traces) std::printf("    in %s\n", trace.c_str());
  g_failures.fetch_add(1);
  if (kind_ == Kind::kFatal) g_fatal = true;
}

Trace::Trace(const char* file, int line, const Message& message) {
  t_traces.push_back(std::string(file) + ':' + std::to_string(line) + ": " + message.str());
}
Trace::~Trace() { t_traces.pop_back(); }

bool add_test(const std::string& suite, const std::string& name, std::function<void()> run, void (*up)(),
              void (*down)()) {
  tests().push_back({suite, name, std::move(run), up, down});
  return true;
}

AssertionResult dies(const std::function<void()>& body, const std::string& pattern) {
  int ends[2];
  std::fflush(nullptr);
  if (::pipe(ends) != 0) return AssertionFailure() << "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDERR_FILENO);
    ::close(ends[0]);
    body();
    std::_Exit(0);
  }
  ::close(ends[1]);
  std::string output;
  char buffer[512];
  for (ssize_t got = 0; (got = ::read(ends[0], buffer, sizeof buffer)) > 0;)
    output.append(buffer, static_cast<std::size_t>(got));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return AssertionFailure() << "it did not die";
  if (std::regex_search(output, std::regex(pattern, std::regex::extended))) return AssertionSuccess();
  return AssertionFailure() << "it died, but did not say \"" << pattern << "\": " << output;
}

}  // namespace internal
}  // namespace testing

int main(int argc, char** argv) {
  using namespace testing;
  std::string filter = "*";
  int repeat = 1;
  bool list_only = false;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.rfind("--gtest_filter=", 0) == 0) filter = arg.substr(15);
    if (arg.rfind("--gtest_repeat=", 0) == 0) repeat = std::atoi(arg.c_str() + 15);
    if (arg == "--gtest_list_tests") list_only = true;
  }
  int failed = 0;
  int ran = 0;
  for (int round = 0; round < repeat; ++round) {
    const Registered* last = nullptr;
    for (const Registered& test : tests()) {
      const std::string full = test.suite + '.' + test.name;
      if (!matches(full, filter)) continue;
      if (list_only) {
        std::printf("%s\n", full.c_str());
        continue;
      }
      if (last == nullptr || last->suite != test.suite) {
        if (last != nullptr) last->down();
        test.up();
      }
      last = &test;
      g_failures = 0;
      g_fatal = false;
      g_skipped = false;
      std::printf("[ RUN      ] %s\n", full.c_str());
      std::fflush(stdout);
      const auto start = std::chrono::steady_clock::now();
      try {
        test.run();
      } catch (const std::exception& error) {
        std::printf("%s: uncaught exception: %s\n", full.c_str(), error.what());
        g_failures.fetch_add(1);
      }
      const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
      ++ran;
      failed += g_failures != 0 ? 1 : 0;
      std::printf("[ %s ] %s (%lld ms)\n",
                  g_failures != 0 ? " FAILED "
                  : g_skipped     ? "SKIPPED "
                                  : "      OK",
                  full.c_str(), static_cast<long long>(ms.count()));
      std::fflush(stdout);
    }
    if (last != nullptr) last->down();
  }
  if (!list_only) std::printf("%d tests ran, %d failed\n", ran, failed);
  return failed == 0 ? 0 : 1;
}
