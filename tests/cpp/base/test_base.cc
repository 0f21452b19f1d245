// base/
//   STATUS  names and exceptions                          Status.*
//   FUT-3   a handle keeps index and generation apart     Handle.PacksIndexAndGeneration
//   CHECK   a broken law aborts with its text             Check.*
//   TOKEN   a process knows itself, a child is another    Process.*
#include <gtest/gtest.h>

#include "base/check.h"
#include "base/ids.h"
#include "base/process.h"
#include "base/status.h"
#include "support.h"

namespace pathways::test::test_base {
namespace {

TEST(Status, HasANameForEachValue) {
  EXPECT_EQ(to_string(Status::kOk), "Ok");
  EXPECT_EQ(to_string(Status::kNoMemory), "NoMemory");
  EXPECT_EQ(to_string(Status::kFailed), "Failed");
}

TEST(Status, ErrorCarriesStatusAndText) {
  try {
    throw_errno(Status::kNoMemory, "opening x", ENOENT);
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kNoMemory);
    EXPECT_EQ(std::string(error.what()), "opening x: No such file or directory");
  }
}

TEST(Handle, PacksIndexAndGeneration) {
  const Handle handle = Handle::make(0xfffffffe, 0x80000001);
  EXPECT_EQ(handle.index(), 0xfffffffeU);
  EXPECT_EQ(handle.generation(), 0x80000001U);
  EXPECT_TRUE(handle.valid());
  EXPECT_FALSE(Handle{}.valid());
  EXPECT_EQ(Handle{handle.raw}, handle);
}

TEST(Check, AbortsWithTheLawThatBroke) {
  const int one = 1;
  PW_CHECK(one == 1);
  EXPECT_DEATH(PW_CHECK(one == 2), "check failed: one == 2");
}

TEST(Process, AChildHasAnotherToken) {
  const std::uint64_t mine = process_token();
  EXPECT_NE(mine, 0U);
  EXPECT_EQ(mine, process_token());
  test::Child child([mine] { return process_token() == mine ? 1 : 0; });
  EXPECT_EQ(child.wait(), 0);
}

}  // namespace
}  // namespace pathways::test::test_base
