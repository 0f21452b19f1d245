// Which failures nobody has read.
//
//   UNREAD-1  Failures.OnceForAllResultsOfARun, AReadOfOneIsAReadOfAll, TheSameTextLaterIsAnotherFailure
//   UNREAD-2  Failures.WhatWasReleasedBeforeItFailed, WhatIsReportedOnceMoreAfterTheRelease
//   UNREAD-3  Failures.WhatWasCancelledAndTokens
#include <gtest/gtest.h>

#include "client/failures.h"

namespace pathways::test::test_failures {
namespace {

constexpr int64_t kLater = Failures::kTogether.count() + 1;
Handle handle(uint32_t index) { return Handle::make(index, 1); }

/// "text (futures)" of each failure that is told.
std::vector<std::string> told(Failures& failures, int64_t now_ns, bool all = false) {
  std::vector<std::string> out;
  for (const Failures::Unread& each : failures.take_unread(now_ns, all)) {
    out.push_back(each.text + " (" + std::to_string(each.futures) + ")");
  }
  return out;
}
using Texts = std::vector<std::string>;

TEST(Failures, OnceForAllResultsOfARun) {
  Failures failures;
  for (uint32_t i = 0; i < 3; ++i) failures.add(handle(i), "boom", 0);
  EXPECT_EQ(told(failures, kLater), Texts{});  // somebody may still read it
  failures.release(handle(0));
  failures.release(handle(1));
  EXPECT_EQ(told(failures, kLater), Texts{});
  failures.release(handle(2));
  EXPECT_EQ(told(failures, kLater), Texts{"boom (3)"});
  EXPECT_EQ(told(failures, 3 * kLater), Texts{});
  EXPECT_TRUE(failures.is_empty());
}

TEST(Failures, AReadOfOneIsAReadOfAll) {
  for (const bool before : {false, true}) {  // whether the other one is released before the read
    Failures failures;
    failures.add(handle(0), "boom", 0);
    failures.add(handle(1), "boom", 1);
    failures.add(handle(2), "else", 1);
    if (before) failures.release(handle(1));
    EXPECT_EQ(failures.read(handle(0)), "boom");
    if (!before) failures.release(handle(1));
    failures.release(handle(0));
    failures.release(handle(2));
    EXPECT_EQ(told(failures, 2 * kLater), Texts{"else (1)"});
  }
  Failures failures;
  EXPECT_EQ(failures.read(handle(0)), "");
}

TEST(Failures, ALookIsNoRead) {
  for (const bool is_read : {false, true}) {
    Failures failures;
    failures.add(handle(0), "boom", 0);
    EXPECT_EQ(failures.text_of(handle(0)), "boom");
    EXPECT_EQ(failures.text_of(handle(1)), "");
    failures.release(handle(0));
    if (is_read) failures.mark_read("boom");
    EXPECT_EQ(told(failures, 2 * kLater), is_read ? Texts{} : Texts{"boom (1)"});
  }
}

TEST(Failures, AReadAlsoOfWhatFailedEarlier) {
  Failures failures;
  failures.add(handle(0), "boom", 0);
  failures.add(handle(1), "boom", kLater);  // what depends on it failed later: another failure with its text
  failures.release(handle(0));
  EXPECT_EQ(failures.read(handle(1)), "boom");
  failures.release(handle(1));
  EXPECT_EQ(told(failures, 3 * kLater), Texts{});
}

TEST(Failures, TheSameTextLaterIsAnotherFailure) {
  Failures failures;
  failures.add(handle(0), "boom", 0);
  EXPECT_EQ(failures.read(handle(0)), "boom");
  failures.release(handle(0));
  failures.add(handle(1), "boom", kLater);
  failures.release(handle(1));
  EXPECT_EQ(told(failures, kLater + 1), Texts{});  // more may join it
  EXPECT_EQ(told(failures, 3 * kLater), Texts{"boom (1)"});
}

TEST(Failures, AFutureThatJoinsIsWaitedFor) {
  Failures failures;
  failures.add(handle(0), "boom", 0);
  failures.release(handle(0));
  failures.add(handle(1), "boom", 1);
  EXPECT_EQ(told(failures, 2 * kLater), Texts{});
  EXPECT_EQ(failures.read(handle(1)), "boom");
  failures.release(handle(1));
  EXPECT_EQ(told(failures, 4 * kLater), Texts{});
}

TEST(Failures, WhatWasReleasedBeforeItFailed) {
  Failures failures;
  failures.add_released(handle(0), "on host 0", 0);
  failures.add_released(handle(0), "on host 1", 1);  // another host's word of the same future
  failures.add_released(handle(1), "on host 0", 1);
  EXPECT_EQ(told(failures, 1), Texts{});
  EXPECT_EQ(told(failures, kLater), Texts{"on host 0 (2)"});
  EXPECT_EQ(told(failures, 2 * kLater), Texts{});
}

TEST(Failures, WhatIsReportedOnceMoreAfterTheRelease) {
  Failures failures;
  failures.add(handle(0), "too late, as the client knows by itself", 0);
  EXPECT_NE(failures.read(handle(0)), "");
  failures.release(handle(0));
  failures.add_released(handle(0), "too late, as the controller says", 1);
  EXPECT_EQ(told(failures, 2 * kLater), Texts{});
}

TEST(Failures, WhatWasCancelledAndTokens) {
  Failures failures;
  failures.add(handle(0), "CancelledError: the run was cancelled", 0);
  failures.release(handle(0));
  failures.add_released(handle(1), "CancelledError: the run was cancelled before it started", 0);
  failures.forget(handle(2), true);  // it fails later
  failures.add_released(handle(2), "the save was given up", 1);
  failures.add(handle(3), "the read failed", 1);
  failures.forget(handle(3), false);
  failures.add(handle(4), "boom", 1);  // an array and its token
  failures.add(handle(5), "boom", 1);
  failures.release(handle(4));
  failures.forget(handle(5), false);
  EXPECT_EQ(told(failures, 2 * kLater), Texts{"boom (1)"});
}

TEST(Failures, TheEndTellsWhatIsStillThere) {
  Failures failures;
  failures.add(handle(0), "kept", 0);
  failures.add(handle(1), "read", 0);
  failures.add(handle(2), "dropped", 0);
  (void)failures.read(handle(1));
  failures.release(handle(2));
  EXPECT_EQ(told(failures, 1, true), (Texts{"dropped (1)", "kept (1)"}));
  failures.release(handle(0));
  EXPECT_EQ(told(failures, 2 * kLater, true), Texts{});
}

}  // namespace
}  // namespace pathways::test::test_failures
