// What the fuzz targets share: a mutator, where its choices come from, and how long a target runs.
//
//   FUZZ(Name) { while (fuzz.next()) { ... one input, by what fuzz chooses ... } }
//
// Choices come from a seeded generator: PATHWAYS_TEST_SEED repeats a run. PATHWAYS_FUZZ_SECONDS is for all targets of
// all executables together, PATHWAYS_FUZZ_EACH for each one; without them each target gets a moment, so that every run
// of the tests tries some. Each target prints how many inputs it tried. Build them with AddressSanitizer (`make fuzz`):
// a target proves that nothing is read or written out of bounds.
//
// Guided by coverage (`make fuzz-guided`, with Clang), the choices are bytes of libFuzzer's, and a target is a short
// run for each of its inputs. Those that reached new code are kept in `corpus`, in the build's folder, for the next
// run; one that fails is written beside it, and `PATHWAYS_FUZZ_INPUT=FILE` plays it again.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support.h"

namespace pathways::test {

/// Targets in all `test_fuzz_*.cc`, which share the time.
inline constexpr int kTargets = 13;

/// Draws what mutations need, and counts inputs.
class Fuzzer {
 public:
  explicit Fuzzer(const char* target) : target_(target), random_(seed() ^ std::hash<std::string_view>{}(target)) {
    const char *each = std::getenv("PATHWAYS_FUZZ_EACH"), *all = std::getenv("PATHWAYS_FUZZ_SECONDS");
    const double seconds = each != nullptr ? std::atof(each) : all != nullptr ? std::atof(all) / kTargets : 0.5;
    end_ = std::chrono::steady_clock::now() + std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
  }
  /// Guided: the run is over when the choices are.
  explicit Fuzzer(std::span<const std::byte> choices) : target_(nullptr), choices_(choices) {}
  ~Fuzzer() {
    if (is_guided()) return;
    std::printf("fuzz %s: %llu inputs, seed %llu\n", target_, static_cast<unsigned long long>(inputs_),
                static_cast<unsigned long long>(seed()));
    std::fflush(stdout);
    EXPECT_GT(inputs_, 0u);
  }
  Fuzzer(const Fuzzer&) = delete;
  Fuzzer& operator=(const Fuzzer&) = delete;

  bool is_guided() const { return target_ == nullptr; }
  /// One more input? At least one, unless guided.
  bool next() {
    if (is_guided()) {
      if (is_over()) return false;
      (void)chosen(1);  // an input that takes no choice is not tried for ever
      return true;
    }
    return inputs_++ == 0 || std::chrono::steady_clock::now() < end_;
  }
  uint64_t draw() { return is_guided() ? chosen(sizeof(uint64_t)) : random_(); }
  size_t below(size_t n) {
    const size_t width = n <= 0x100 ? 1 : n <= 0x10000 ? 2 : sizeof(uint64_t);  // each byte is one that can be varied
    return static_cast<size_t>((is_guided() ? chosen(width) : random_()) % n);
  }
  /// A count of what a target must reach, or it proves nothing. One input of libFuzzer's need not reach it.
  void must_reach(uint64_t count) const {
    if (!is_guided()) {
      EXPECT_GT(count, 0u);
    }
  }

  /// A number that is likely to break something.
  uint64_t odd_number() {
    static constexpr uint64_t kOdd[] = {0,          1,          2,          7,          8,          63,
                                        64,         255,        4096,       0x7fffffff, 0x80000000, 0xffffffff,
                                        1ull << 32, 1ull << 47, 1ull << 62, INT64_MAX,  1ull << 63, UINT64_MAX};
    const uint64_t number = kOdd[below(std::size(kOdd))];
    return below(3) == 0 ? number + below(17) - 8 : number;
  }

  /// Changes some bytes: bits, words, runs of bytes. Guided, it changes none when all choices were taken.
  void mutate(std::span<std::byte> bytes) {
    if (bytes.empty() || is_over()) return;
    for (size_t change = 1 + below(4); change != 0; --change) {
      const size_t at = below(bytes.size());
      switch (below(4)) {
        case 0:
          bytes[at] ^= static_cast<std::byte>(1u << below(8));
          break;
        case 1: {
          const uint64_t number = odd_number();
          const size_t aligned = at / 8 * 8, width = below(2) == 0 ? 8 : 4;
          if (aligned + width <= bytes.size()) std::memcpy(bytes.data() + aligned, &number, width);
          break;
        }
        case 2: {
          const size_t from = below(bytes.size()),
                       count = below(std::min(bytes.size() - std::max(at, from), size_t{64}));
          std::memmove(bytes.data() + at, bytes.data() + from, count);
          break;
        }
        default:
          bytes[at] = static_cast<std::byte>(draw());
      }
    }
  }
  /// The same, and sometimes another length.
  void mutate(std::vector<std::byte>& bytes, size_t most) {
    if (is_over()) return;
    if (below(4) == 0) bytes.resize(below(8) == 0 ? below(most) : std::min(most, bytes.size() + below(24)));
    if (below(6) == 0 && bytes.size() > 8) bytes.resize(bytes.size() - below(bytes.size() - 1));
    mutate(std::span(bytes));
  }

 private:
  bool is_over() const { return is_guided() && choices_.empty(); }
  uint64_t chosen(size_t width) {
    uint64_t number = 0;
    const size_t bytes = std::min(width, choices_.size());
    if (bytes != 0) std::memcpy(&number, choices_.data(), bytes);
    choices_ = choices_.subspan(bytes);
    return number;
  }

  const char* target_;  ///< nullptr: guided
  std::mt19937_64 random_;
  uint64_t inputs_ = 0;
  std::chrono::steady_clock::time_point end_;
  std::span<const std::byte> choices_;
};

using Target = void (*)(Fuzzer&);

#if !defined(PATHWAYS_GUIDED)
inline void play(const char* name, Target target) {
  const Watchdog watchdog(name, 900s);
  Fuzzer fuzz(name);
  target(fuzz);
}
#else
extern "C" int LLVMFuzzerRunDriver(int* count, char*** arguments, int (*input)(const uint8_t*, size_t));

/// libFuzzer ends the process, so each target has one of its own.
inline void play(const char* name, Target target) {
  static Target played;
  static const char* title;
  static uint64_t inputs;
  played = target, title = name;
  const std::string corpus = std::string("corpus/") + name;
  std::filesystem::create_directories(corpus);
  const pid_t child = ::fork();
  if (child == 0) {
    GTEST_FLAG_SET(break_on_failure, true);
    ::signal(SIGTRAP, [](int) { std::abort(); });  // libFuzzer hears of an abort, not of a trap
    const char *each = std::getenv("PATHWAYS_FUZZ_EACH"), *again = std::getenv("PATHWAYS_FUZZ_INPUT");
    if (std::freopen((corpus + ".log").c_str(), "w", stderr) == nullptr) ::_exit(1);
    std::string words[] = {name,
                           "-max_len=4096",
                           "-timeout=60",
                           std::string("-max_total_time=") + (each != nullptr ? each : "1"),
                           "-artifact_prefix=" + corpus + "-",
                           again != nullptr ? again : corpus};
    std::vector<char*> list;
    for (std::string& word : words) list.push_back(word.data());
    int count = static_cast<int>(list.size());
    (void)std::atexit(
        [] { std::printf("fuzz %s, guided: %llu inputs\n", title, static_cast<unsigned long long>(inputs)); });
    list.push_back(nullptr);
    char** arguments = list.data();
    LLVMFuzzerRunDriver(&count, &arguments, [](const uint8_t* data, size_t size) {
      ++inputs;
      Fuzzer fuzz(std::as_bytes(std::span(data, size)));
      played(fuzz);
      return 0;
    });
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "see " << corpus << ".log and " << corpus << "-*";
}
#endif

/// Defines a target, with `Fuzzer& fuzz`, and its test.
#define FUZZ(Name)                        \
  void Name(Fuzzer& fuzz);                \
  TEST(Fuzz, Name) { play(#Name, Name); } \
  void Name([[maybe_unused]] Fuzzer& fuzz)

/// Memory that ends where no page follows: whoever reads or writes behind it ends by SIGSEGV.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : bytes_((bytes + 4095) / 4096 * 4096) {
    memory_ = static_cast<std::byte*>(
        ::mmap(nullptr, bytes_ + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ::mprotect(memory_ + bytes_, 4096, PROT_NONE);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { ::munmap(memory_, bytes_ + 4096); }
  std::byte* data() { return memory_; }
  size_t size() const { return bytes_; }
  std::span<std::byte> span() { return {memory_, bytes_}; }

 private:
  std::byte* memory_;
  size_t bytes_;
};

}  // namespace pathways::test
