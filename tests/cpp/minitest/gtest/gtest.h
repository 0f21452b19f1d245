// A stand-in for GoogleTest. Why it exists: the native tests must also run on a machine where nobody is root, and so
// nobody can install libgtest-dev. CMake uses GoogleTest where it finds it, else this stand-in, and prints which. Tests
// say `#include <gtest/gtest.h>` and do not know which one they got.
//
// There is what the tests use, and nothing else compiles: TEST, TEST_F; EXPECT_ and ASSERT_ of TRUE, FALSE, EQ, NE, LT,
// LE, GT, GE; EXPECT_ of THROW, NO_THROW, DEATH with plain text; ADD_FAILURE, SCOPED_TRACE; --gtest_filter=PATTERN. It
// has main(), so one file of an executable includes it.
//
// Threading: EXPECT_ may fail on any thread; ASSERT_ returns from the function it stands in.
#pragma once

#include <fnmatch.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <syncstream>
#include <type_traits>
#include <utility>
#include <vector>

namespace testing {
namespace internal {

inline std::vector<std::pair<std::string, void (*)()>> g_tests;
inline std::atomic<bool> g_failed, g_failed_fatally;  // the test that runs
inline thread_local std::vector<std::string> t_traces;

/// Reports `text` for file:line when a message is assigned to it.
struct Failure {
  const char* file;
  int line;
  std::string text;
  bool is_fatal;
  void operator=(const std::ostringstream& message) const {  // void, so that it can be returned from a void function
    std::osyncstream out(std::cout);
    out << file << ':' << line << ": " << text << ' ' << message.str() << '\n';
    for (const std::string& trace : t_traces) out << "    in " << trace << '\n';
    g_failed = true;
    if (is_fatal) g_failed_fatally = true;
  }
};

struct Trace {
  explicit Trace(const std::ostringstream& message) { t_traces.push_back(message.str()); }
  ~Trace() { t_traces.pop_back(); }
};

// Each check returns what is wrong; an empty text: nothing is.
inline std::string is(const char* text, bool wanted, bool got) {
  return got == wanted ? "" : std::string("expected ") + text + " to be " + (wanted ? "true" : "false");
}

template <class T>
void show(std::ostream& out, const T& value) {
  if constexpr (requires { out << value; }) {
    out << value;
  } else if constexpr (std::is_enum_v<T>) {
    out << "enumerator " << static_cast<long long>(value);
  } else {
    out << "an object of " << sizeof(T) << " bytes";
  }
}
template <class Op, class A, class B>
std::string compare(Op holds, const char* text, const A& a, const B& b) {
  if (holds(a, b)) return "";
  std::ostringstream wrong;
  wrong << std::boolalpha << "expected " << text << ", got ";
  show(wrong, a);
  wrong << " and ";
  show(wrong, b);
  return wrong.str();
}

template <class Wanted>
std::string throws(const std::function<void()>& body) {
  try {
    body();
  } catch (const Wanted&) {
    return "";
  }
  return "it threw nothing";
}
inline std::string throws_nothing(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return std::string("it threw: ") + error.what();
  }
  return "";
}

inline std::string dies(const std::function<void()>& body, const std::string& wanted) {
  std::FILE* const said = std::tmpfile();
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(::fileno(said), STDERR_FILENO);
    body();
    std::_Exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  std::string text(1 << 16, '\0');
  std::rewind(said);
  text.resize(std::fread(text.data(), 1, text.size(), said));
  std::fclose(said);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return "it did not die";
  if (text.find(wanted) == std::string::npos) return "it died, but did not say \"" + wanted + "\": " + text;
  return "";
}

}  // namespace internal

class Test {
 public:
  virtual ~Test() = default;
  static bool HasFailure() { return internal::g_failed; }
  static bool HasFatalFailure() { return internal::g_failed; }  // ASSERT and EXPECT count alike
  template <class T>
  static void minitest_run() {
    T test;
    test.SetUp();
    if (!internal::g_failed_fatally) test.TestBody();
    test.TearDown();
  }

 protected:
  virtual void SetUp() {}
  virtual void TearDown() {}
  virtual void TestBody() = 0;
};

}  // namespace testing

int main(int argc, char** argv) {
  using namespace testing::internal;
  const std::string option = "--gtest_filter=", given = argc > 1 ? argv[1] : option + "*";
  int failed = 0;
  for (const auto& [name, run] : g_tests) {
    if (::fnmatch(given.c_str() + option.size(), name.c_str(), 0) != 0) continue;
    std::cout << "[ RUN      ] " << name << std::endl;
    g_failed = g_failed_fatally = false;
    const std::string wrong = throws_nothing(run);
    if (!wrong.empty()) Failure{name.c_str(), 0, wrong, true} = std::ostringstream();
    std::cout << (g_failed ? "[  FAILED  ] " : "[       OK ] ") << name << std::endl;
    failed += g_failed ? 1 : 0;
  }
  std::cout << failed << " tests failed" << std::endl;
  return failed == 0 ? 0 : 1;
}

#define MINITEST_DEFINE(suite, name, parent)                                                \
  struct suite##_##name##_Test : parent {                                                   \
    using parent::SetUp, parent::TearDown;                                                  \
    void TestBody() override;                                                               \
  };                                                                                        \
  static const auto& minitest_##suite##_##name = ::testing::internal::g_tests.emplace_back( \
      #suite "." #name, &::testing::Test::minitest_run<suite##_##name##_Test>);             \
  void suite##_##name##_Test::TestBody()
#define TEST(suite, name) MINITEST_DEFINE(suite, name, ::testing::Test)
#define TEST_F(suite, name) MINITEST_DEFINE(suite, name, suite)

#define MINITEST_FAILURE(text, is_fatal) \
  ::testing::internal::Failure{__FILE__, __LINE__, text, is_fatal} = std::ostringstream()
// The switch keeps an `else` behind the macro from joining its `if`.
#define MINITEST_CHECK(check, is_fatal, leave)                     \
  switch (const std::string wrong = ::testing::internal::check; 0) \
  default:                                                         \
    if (!wrong.empty()) leave MINITEST_FAILURE(wrong, is_fatal)
#define MINITEST_OP(name, op, a, b) compare(std::name<>(), #a " " #op " " #b, a, b)

#define SCOPED_TRACE(text) const ::testing::internal::Trace minitest_trace(std::ostringstream() << text)
#define ADD_FAILURE() MINITEST_FAILURE("failed", false)
#define EXPECT_TRUE(x) MINITEST_CHECK(is(#x, true, static_cast<bool>(x)), false, )
#define EXPECT_FALSE(x) MINITEST_CHECK(is(#x, false, static_cast<bool>(x)), false, )
#define EXPECT_EQ(a, b) MINITEST_CHECK(MINITEST_OP(equal_to, ==, a, b), false, )
#define EXPECT_NE(a, b) MINITEST_CHECK(MINITEST_OP(not_equal_to, !=, a, b), false, )
#define EXPECT_LT(a, b) MINITEST_CHECK(MINITEST_OP(less, <, a, b), false, )
#define EXPECT_LE(a, b) MINITEST_CHECK(MINITEST_OP(less_equal, <=, a, b), false, )
#define EXPECT_GT(a, b) MINITEST_CHECK(MINITEST_OP(greater, >, a, b), false, )
#define EXPECT_GE(a, b) MINITEST_CHECK(MINITEST_OP(greater_equal, >=, a, b), false, )
#define ASSERT_TRUE(x) MINITEST_CHECK(is(#x, true, static_cast<bool>(x)), true, return)
#define ASSERT_FALSE(x) MINITEST_CHECK(is(#x, false, static_cast<bool>(x)), true, return)
#define ASSERT_EQ(a, b) MINITEST_CHECK(MINITEST_OP(equal_to, ==, a, b), true, return)
#define ASSERT_NE(a, b) MINITEST_CHECK(MINITEST_OP(not_equal_to, !=, a, b), true, return)
#define ASSERT_LT(a, b) MINITEST_CHECK(MINITEST_OP(less, <, a, b), true, return)
#define ASSERT_LE(a, b) MINITEST_CHECK(MINITEST_OP(less_equal, <=, a, b), true, return)
#define ASSERT_GT(a, b) MINITEST_CHECK(MINITEST_OP(greater, >, a, b), true, return)
#define ASSERT_GE(a, b) MINITEST_CHECK(MINITEST_OP(greater_equal, >=, a, b), true, return)
#define EXPECT_THROW(statement, type) MINITEST_CHECK(throws<type>([&] { statement; }), false, )
#define EXPECT_NO_THROW(statement) MINITEST_CHECK(throws_nothing([&] { statement; }), false, )
#define EXPECT_DEATH(statement, text) MINITEST_CHECK(dies([&] { statement; }, text), false, )
