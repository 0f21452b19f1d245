// What a model test states: a program holds in every interleaving, or a broken one is caught.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <string>

#include "model.h"

namespace pathways::model {

/// Nothing goes wrong, under both memories, and every run was seen.
inline void expect_holds(const std::function<void(Program&)>& setup) {
  for (const Memory memory : {Memory::kInterleaved, Memory::kBuffered}) {
    const char* name = memory == Memory::kBuffered ? "with store buffers" : "interleaved";
    const Result result = explore(memory, setup);
    std::printf("  %-18s %8llu runs, %8llu cut short, %9llu steps\n", name,
                static_cast<unsigned long long>(result.runs), static_cast<unsigned long long>(result.redundant),
                static_cast<unsigned long long>(result.steps));
    EXPECT_EQ(result.error, "") << name;
    EXPECT_TRUE(result.complete) << name << ": stopped after " << result.runs << " runs";
    EXPECT_GT(result.runs, 1U) << name << ": there is nothing to interleave";
  }
}

/// The checker finds an error that says `what`.
inline void expect_caught(Memory memory, const std::function<void(Program&)>& setup, const char* what) {
  const Result result = explore(memory, setup);
  EXPECT_NE(result.error.find(what), std::string::npos)
      << "expected \"" << what << "\" after " << result.runs << " runs, got \"" << result.error << '"';
}

}  // namespace pathways::model
