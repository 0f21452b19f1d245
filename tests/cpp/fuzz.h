// What the fuzz targets share: a seeded mutator, and how long a target runs.
//
// PATHWAYS_FUZZ_SECONDS is for all targets of all executables together, PATHWAYS_FUZZ_EACH for each one; without them
// each target gets a moment, so that every run of the tests tries some. PATHWAYS_TEST_SEED repeats a run. Each target
// prints how many inputs it tried. Build them with AddressSanitizer (`make fuzz`): a target proves that nothing is read
// or written out of bounds.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "support.h"

namespace pathways::test {

/// Targets in all `cluster/test_fuzz_*.cc`, which share the time.
inline constexpr int kTargets = 11;

/// Draws what mutations need, and counts inputs.
class Fuzzer {
 public:
  Fuzzer(const char* target, int targets) : target_(target), random_(seed() ^ std::hash<std::string_view>{}(target)) {
    const char *each = std::getenv("PATHWAYS_FUZZ_EACH"), *all = std::getenv("PATHWAYS_FUZZ_SECONDS");
    const double seconds = each != nullptr ? std::atof(each) : all != nullptr ? std::atof(all) / targets : 0.5;
    end_ = std::chrono::steady_clock::now() + std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
  }
  ~Fuzzer() {
    std::printf("fuzz %s: %llu inputs, seed %llu\n", target_, static_cast<unsigned long long>(inputs_),
                static_cast<unsigned long long>(seed()));
    std::fflush(stdout);
    EXPECT_GT(inputs_, 0u);
  }
  Fuzzer(const Fuzzer&) = delete;
  Fuzzer& operator=(const Fuzzer&) = delete;

  /// One more input? At least one.
  bool next() { return inputs_++ == 0 || std::chrono::steady_clock::now() < end_; }
  uint64_t draw() { return random_(); }
  size_t below(size_t n) { return static_cast<size_t>(random_() % n); }
  std::mt19937_64& random() { return random_; }

  /// A number that is likely to break something.
  uint64_t odd_number() {
    static constexpr uint64_t kOdd[] = {0,          1,          2,          7,          8,          63,
                                        64,         255,        4096,       0x7fffffff, 0x80000000, 0xffffffff,
                                        1ull << 32, 1ull << 47, 1ull << 62, INT64_MAX,  1ull << 63, UINT64_MAX};
    const uint64_t number = kOdd[below(std::size(kOdd))];
    return below(3) == 0 ? number + below(17) - 8 : number;
  }

  /// Changes some bytes: bits, words, runs of bytes.
  void mutate(std::span<std::byte> bytes) {
    if (bytes.empty()) return;
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
    if (below(4) == 0) bytes.resize(below(8) == 0 ? below(most) : std::min(most, bytes.size() + below(24)));
    if (below(6) == 0 && bytes.size() > 8) bytes.resize(bytes.size() - below(bytes.size() - 1));
    mutate(std::span(bytes));
  }

 private:
  const char* target_;
  std::mt19937_64 random_;
  uint64_t inputs_ = 0;
  std::chrono::steady_clock::time_point end_;
};

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
