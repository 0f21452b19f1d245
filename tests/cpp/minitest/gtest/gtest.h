// The part of GoogleTest's interface that these tests use, for machines where GoogleTest is not installed. Tests say
// `#include <gtest/gtest.h>` and do not know which one they got; CMake prints it.
//
// There are: TEST, TEST_F, TEST_P with Values, ValuesIn and Bool; EXPECT_ and ASSERT_ of TRUE, FALSE, EQ, NE, LT, LE,
// GT, GE, STREQ, NEAR, DOUBLE_EQ, FLOAT_EQ, THROW, ANY_THROW, NO_THROW, DEATH; FAIL, ADD_FAILURE, SUCCEED, GTEST_SKIP,
// SCOPED_TRACE; --gtest_filter=A.b*:C.* [-D.*], --gtest_list_tests, --gtest_repeat=N. Anything else does not compile.
//
// Threading: EXPECT_ may fail on any thread; ASSERT_ returns from the function it stands in.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <ostream>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace testing {

class Message {
 public:
  template <class T>
  Message& operator<<(const T& value) {
    text_ << value;
    return *this;
  }
  [[nodiscard]] std::string str() const { return text_.str(); }

 private:
  std::ostringstream text_;
};

class AssertionResult {
 public:
  explicit AssertionResult(bool ok, std::string text = {}) : ok_(ok), text_(std::move(text)) {}
  explicit operator bool() const { return ok_; }
  template <class T>
  AssertionResult& operator<<(const T& value) {
    text_ += (Message() << value).str();
    return *this;
  }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  bool ok_;
  std::string text_;
};
inline AssertionResult AssertionSuccess() { return AssertionResult(true); }
inline AssertionResult AssertionFailure() { return AssertionResult(false); }

class Test {
 public:
  virtual ~Test() = default;
  static void SetUpTestSuite() {}
  static void TearDownTestSuite() {}
  static bool HasFailure();
  static bool HasFatalFailure();
  void minitest_run() {
    SetUp();
    if (!HasFatalFailure()) TestBody();
    TearDown();
  }

 protected:
  virtual void SetUp() {}
  virtual void TearDown() {}
  virtual void TestBody() = 0;
};

template <class T>
class TestWithParam : public Test {
 public:
  using ParamType = T;
  static const T& GetParam() { return *minitest_param; }
  inline static const T* minitest_param = nullptr;
};

namespace internal {

enum class Kind { kNonFatal, kFatal, kSkip, kSuccess };

/// Reports `text` for file:line when a Message is assigned to it.
class Report {
 public:
  Report(Kind kind, const char* file, int line, std::string text)
      : kind_(kind), file_(file), line_(line), text_(std::move(text)) {}
  void operator=(const Message& message) const;  // void, so that `return Report() = Message()` fits void functions

 private:
  Kind kind_;
  const char* file_;
  int line_;
  std::string text_;
};

class Trace {
 public:
  Trace(const char* file, int line, const Message& message);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;
};

bool add_test(const std::string& suite, const std::string& name, std::function<void()> run, void (*up)(),
              void (*down)());

template <class Fixture>
bool add_test_of(const char* suite, const char* name) {
  return add_test(suite, name, [] { Fixture().minitest_run(); }, &Fixture::SetUpTestSuite, &Fixture::TearDownTestSuite);
}

template <class T>
std::string show(const T& value) {
  if constexpr (requires(std::ostream& out) { out << value; }) {
    return (Message() << value).str();
  } else if constexpr (std::is_enum_v<T>) {
    return "enumerator " + std::to_string(static_cast<long long>(value));
  } else {
    return "an object of " + std::to_string(sizeof(T)) + " bytes";
  }
}
inline std::string show(bool value) { return value ? "true" : "false"; }
inline std::string show(std::nullptr_t) { return "nullptr"; }

template <class A, class B, class Op>
AssertionResult compare(const char* op, const char* a_text, const char* b_text, const A& a, const B& b, Op holds) {
  if (holds(a, b)) return AssertionSuccess();
  return AssertionFailure() << "expected " << a_text << ' ' << op << ' ' << b_text << ", got " << show(a) << " and "
                            << show(b);
}
inline AssertionResult truth(const char* text, bool got, bool wanted) {
  return got == wanted ? AssertionSuccess() : AssertionFailure() << "expected " << text << " to be " << show(wanted);
}
inline AssertionResult truth(const char* text, const AssertionResult& got, bool wanted) {
  return truth(text, static_cast<bool>(got), wanted) << ' ' << got.text();
}
template <class T>
AssertionResult truth(const char* text, const T& got, bool wanted) {
  return truth(text, static_cast<bool>(got), wanted);
}
inline AssertionResult near(double a, double b, double most) {
  return std::abs(a - b) <= most ? AssertionSuccess()
                                 : AssertionFailure() << "expected " << a << " within " << most << " of " << b;
}
inline double ulps(double a) { return 4 * std::abs(std::nextafter(a, INFINITY) - a); }
inline double ulps(float a) {
  return 4 * std::abs(static_cast<double>(std::nextafterf(a, INFINITY)) - static_cast<double>(a));
}
inline AssertionResult same_text(const char* a, const char* b) {
  return std::strcmp(a, b) == 0 ? AssertionSuccess()
                                : AssertionFailure() << "expected \"" << b << "\", got \"" << a << '"';
}
enum class Throws { kThat, kAny, kNothing };
template <class E>
AssertionResult throws(Throws wanted, const std::function<void()>& body) {
  std::string got = "nothing";
  try {
    body();
    if (wanted == Throws::kNothing) return AssertionSuccess();
  } catch (const std::exception& error) {
    if (wanted == Throws::kAny) return AssertionSuccess();
    if constexpr (!std::is_void_v<E>) {
      if (wanted == Throws::kThat && dynamic_cast<const std::remove_cvref_t<E>*>(&error) != nullptr)
        return AssertionSuccess();
    }
    got = error.what();
  } catch (...) {
    if (wanted == Throws::kAny) return AssertionSuccess();
    got = "something that is no std::exception";
  }
  return AssertionFailure() << "expected another exception behaviour, it threw " << got;
}
AssertionResult dies(const std::function<void()>& body, const std::string& pattern);

/// TEST_P bodies wait here until INSTANTIATE_TEST_SUITE_P; the order of the two does not matter.
template <class Suite>
struct Params {
  using T = typename Suite::ParamType;
  struct Body {
    const char* name;
    void (*run)();
  };
  static std::vector<Body>& bodies() {
    static std::vector<Body> list;
    return list;
  }
  static bool add(const char* name, void (*run)()) {
    bodies().push_back({name, run});
    return true;
  }
  /// One ordinary test that runs every body with every value.
  static bool instantiate(const char* prefix, const char* suite, std::vector<T> list) {
    return add_test(
        std::string(prefix) + '/' + suite, "all",
        [list = std::move(list)] {
          for (const T& value : list) {
            for (const Body& body : bodies()) {
              const Trace trace(__FILE__, __LINE__, Message() << body.name << " with " << show(value));
              Suite::minitest_param = &value;
              body.run();
            }
          }
        },
        &Suite::SetUpTestSuite, &Suite::TearDownTestSuite);
  }
};

template <class... T>
struct ValuesOf {
  std::tuple<T...> list;
  template <class To>
  operator std::vector<To>() const {  // NOLINT: it is what Values() gives
    return std::apply([](const auto&... each) { return std::vector<To>{static_cast<To>(each)...}; }, list);
  }
};

}  // namespace internal

template <class... T>
internal::ValuesOf<T...> Values(T... list) {
  return {{list...}};
}
template <class C>
auto ValuesIn(const C& list) {
  return std::vector<std::remove_cvref_t<decltype(*std::begin(list))>>(std::begin(list), std::end(list));
}
inline std::vector<bool> Bool() { return {false, true}; }

}  // namespace testing

#define MINITEST_CLASS(suite, name) suite##_##name##_Test
#define MINITEST_DEFINE(suite, name, parent)                                        \
  class MINITEST_CLASS(suite, name) : public parent {                               \
   private:                                                                         \
    void TestBody() override;                                                       \
    static const bool registered_;                                                  \
  };                                                                                \
  const bool MINITEST_CLASS(suite, name)::registered_ =                             \
      ::testing::internal::add_test_of<MINITEST_CLASS(suite, name)>(#suite, #name); \
  void MINITEST_CLASS(suite, name)::TestBody()
#define TEST(suite, name) MINITEST_DEFINE(suite, name, ::testing::Test)
#define TEST_F(suite, name) MINITEST_DEFINE(suite, name, suite)
#define TEST_P(suite, name)                                                                                 \
  class MINITEST_CLASS(suite, name) : public suite {                                                        \
   private:                                                                                                 \
    void TestBody() override;                                                                               \
    static const bool registered_;                                                                          \
  };                                                                                                        \
  const bool MINITEST_CLASS(suite, name)::registered_ = ::testing::internal::Params<suite>::add(#name, [] { \
    MINITEST_CLASS(suite, name)                                                                             \
    ().minitest_run();                                                                                      \
  });                                                                                                       \
  void MINITEST_CLASS(suite, name)::TestBody()
#define INSTANTIATE_TEST_SUITE_P(prefix, suite, ...) \
  static const bool minitest_##prefix##_##suite =    \
      ::testing::internal::Params<suite>::instantiate(#prefix, #suite, __VA_ARGS__)

#define MINITEST_REPORT(kind, text) \
  ::testing::internal::Report(::testing::internal::Kind::kind, __FILE__, __LINE__, text) = ::testing::Message()
#define MINITEST_EXPECT(result)                                                       \
  switch (0)                                                                          \
  case 0:                                                                             \
  default:                                                                            \
    if (const ::testing::AssertionResult minitest_result = (result); minitest_result) \
      ;                                                                               \
    else                                                                              \
      MINITEST_REPORT(kNonFatal, minitest_result.text())
#define MINITEST_ASSERT(result)                                                       \
  switch (0)                                                                          \
  case 0:                                                                             \
  default:                                                                            \
    if (const ::testing::AssertionResult minitest_result = (result); minitest_result) \
      ;                                                                               \
    else                                                                              \
      return MINITEST_REPORT(kFatal, minitest_result.text())

#define ADD_FAILURE() MINITEST_REPORT(kNonFatal, "failed")
#define FAIL() return MINITEST_REPORT(kFatal, "failed")
#define SUCCEED() MINITEST_REPORT(kSuccess, "")
#define GTEST_SKIP() return MINITEST_REPORT(kSkip, "skipped")
#define MINITEST_JOIN2(a, b) a##b
#define MINITEST_JOIN(a, b) MINITEST_JOIN2(a, b)
#define SCOPED_TRACE(message)                                                                   \
  const ::testing::internal::Trace MINITEST_JOIN(minitest_trace_, __LINE__)(__FILE__, __LINE__, \
                                                                            ::testing::Message() << message)

#define MINITEST_COMPARE(op, a, b)                \
  ::testing::internal::compare(#op, #a, #b, a, b, \
                               [](const auto& x, const auto& y) { return static_cast<bool>(x op y); })
#define MINITEST_THROWS(type, how, ...) \
  ::testing::internal::throws<type>(::testing::internal::Throws::how, [&] { __VA_ARGS__; })

#define EXPECT_TRUE(x) MINITEST_EXPECT(::testing::internal::truth(#x, x, true))
#define EXPECT_FALSE(x) MINITEST_EXPECT(::testing::internal::truth(#x, x, false))
#define EXPECT_EQ(a, b) MINITEST_EXPECT(MINITEST_COMPARE(==, a, b))
#define EXPECT_NE(a, b) MINITEST_EXPECT(MINITEST_COMPARE(!=, a, b))
#define EXPECT_LT(a, b) MINITEST_EXPECT(MINITEST_COMPARE(<, a, b))
#define EXPECT_LE(a, b) MINITEST_EXPECT(MINITEST_COMPARE(<=, a, b))
#define EXPECT_GT(a, b) MINITEST_EXPECT(MINITEST_COMPARE(>, a, b))
#define EXPECT_GE(a, b) MINITEST_EXPECT(MINITEST_COMPARE(>=, a, b))
#define EXPECT_STREQ(a, b) MINITEST_EXPECT(::testing::internal::same_text(a, b))
#define EXPECT_NEAR(a, b, most) MINITEST_EXPECT(::testing::internal::near(a, b, most))
#define EXPECT_DOUBLE_EQ(a, b) \
  MINITEST_EXPECT(::testing::internal::near(a, b, ::testing::internal::ulps(static_cast<double>(b))))
#define EXPECT_FLOAT_EQ(a, b) \
  MINITEST_EXPECT(::testing::internal::near(a, b, ::testing::internal::ulps(static_cast<float>(b))))
#define EXPECT_THROW(statement, type) MINITEST_EXPECT(MINITEST_THROWS(type, kThat, statement))
#define EXPECT_ANY_THROW(statement) MINITEST_EXPECT(MINITEST_THROWS(void, kAny, statement))
#define EXPECT_NO_THROW(statement) MINITEST_EXPECT(MINITEST_THROWS(void, kNothing, statement))
#define EXPECT_DEATH(statement, pattern) MINITEST_EXPECT(::testing::internal::dies([&] { statement; }, pattern))
#define ASSERT_TRUE(x) MINITEST_ASSERT(::testing::internal::truth(#x, x, true))
#define ASSERT_FALSE(x) MINITEST_ASSERT(::testing::internal::truth(#x, x, false))
#define ASSERT_EQ(a, b) MINITEST_ASSERT(MINITEST_COMPARE(==, a, b))
#define ASSERT_NE(a, b) MINITEST_ASSERT(MINITEST_COMPARE(!=, a, b))
#define ASSERT_LT(a, b) MINITEST_ASSERT(MINITEST_COMPARE(<, a, b))
#define ASSERT_LE(a, b) MINITEST_ASSERT(MINITEST_COMPARE(<=, a, b))
#define ASSERT_GT(a, b) MINITEST_ASSERT(MINITEST_COMPARE(>, a, b))
#define ASSERT_GE(a, b) MINITEST_ASSERT(MINITEST_COMPARE(>=, a, b))
#define ASSERT_STREQ(a, b) MINITEST_ASSERT(::testing::internal::same_text(a, b))
#define ASSERT_NEAR(a, b, most) MINITEST_ASSERT(::testing::internal::near(a, b, most))
#define ASSERT_THROW(statement, type) MINITEST_ASSERT(MINITEST_THROWS(type, kThat, statement))
#define ASSERT_NO_THROW(statement) MINITEST_ASSERT(MINITEST_THROWS(void, kNothing, statement))
#define ASSERT_DEATH(statement, pattern) MINITEST_ASSERT(::testing::internal::dies([&] { statement; }, pattern))
