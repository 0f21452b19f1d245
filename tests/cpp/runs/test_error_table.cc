// The texts of errors, and the launches that failed: ErrorTable.
//   ERR-1  a launch that failed is known by its age   ALaunchThatFailedIsKnownByItsAge
#include "runs/error_table.h"

#include <gtest/gtest.h>

#include <string>

namespace pathways::test::test_error_table {
namespace {

TEST(ErrorTable, NumbersTextsFromOne) {
  ErrorTable errors;
  const uint32_t first = errors.add("no room"), second = errors.add("host 3 is lost");
  EXPECT_NE(first, 0u);
  EXPECT_NE(second, first);
  EXPECT_EQ(errors.text(first), "no room");
  EXPECT_EQ(errors.text(second), "host 3 is lost");
  errors.validate();
}

TEST(ErrorTable, KeepsTheNewestTexts) {
  ErrorTable errors;
  const uint32_t first = errors.add("the first");
  uint32_t last = first;
  for (int i = 0; i < 5000; ++i) last = errors.add(std::to_string(i));
  EXPECT_EQ(errors.text(last), "4999");
  EXPECT_EQ(errors.text(last - 4000), "999");
  EXPECT_EQ(errors.text(first), "the error's text is no longer kept");
  errors.validate();
}

TEST(ErrorTable, ALaunchThatFailedIsKnownByItsAge) {
  ErrorTable errors;
  const uint32_t error = errors.add("division by zero");
  errors.launch_failed(7, error);
  EXPECT_EQ(errors.of_launch(7), error);
  EXPECT_EQ(errors.of_launch(8), 0u);
  for (uint64_t age = 8; age < 600; ++age) errors.launch_failed(age, error);
  EXPECT_EQ(errors.of_launch(7), 0u);  // too long ago
  EXPECT_EQ(errors.of_launch(599), error);
  errors.validate();
  errors.forget_launches();
  EXPECT_EQ(errors.of_launch(599), 0u);
  EXPECT_EQ(errors.text(error), "division by zero");
}

}  // namespace
}  // namespace pathways::test::test_error_table
