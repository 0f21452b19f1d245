// What the controller knows of a client's handles: HandleTable.
//   FUT-3  an older generation finds nothing           FindsOnlyTheGenerationThatLives
#include <gtest/gtest.h>

#include <vector>

#include "ledger/handle_table.h"

namespace pathways::test::test_handle_table {
namespace {

TEST(HandleTable, FindsOnlyTheGenerationThatLives) {
  HandleTable handles(8);
  EXPECT_EQ(handles.find(Handle::make(3, 1)), nullptr);
  HandleTable::Entry* entry = handles.announce(Handle::make(3, 1), 7);
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->block, HandleTable::kNoBlock);
  ASSERT_NE(handles.find(Handle::make(3, 1)), nullptr);
  EXPECT_EQ(handles.find(Handle::make(3, 1))->group, 7u);
  handles.announce(Handle::make(3, 2), 9);  // the old meaning was never ended
  EXPECT_EQ(handles.find(Handle::make(3, 1)), nullptr);
  EXPECT_EQ(handles.find(Handle::make(3, 2))->group, 9u);
  handles.forget(*handles.find(Handle::make(3, 2)));
  EXPECT_EQ(handles.find(Handle::make(3, 2)), nullptr);
}

TEST(HandleTable, KnowsWhatIsOver) {
  HandleTable handles(8);
  EXPECT_FALSE(handles.is_over(Handle::make(3, 1))) << "its client may name it next";
  handles.announce(Handle::make(3, 1), 7);
  EXPECT_FALSE(handles.is_over(Handle::make(3, 1)));
  handles.announce(Handle::make(3, 4), 7);
  EXPECT_TRUE(handles.is_over(Handle::make(3, 1)));
  handles.forget(*handles.find(Handle::make(3, 4)));
  EXPECT_TRUE(handles.is_over(Handle::make(3, 4)));
  EXPECT_FALSE(handles.is_over(Handle::make(3, 5)));
  EXPECT_FALSE(handles.is_over(Handle::make(7, 1)));
}

TEST(HandleTable, RefusesWhatTheClientCannotHave) {
  HandleTable handles(8);
  EXPECT_EQ(handles.announce(Handle::make(8, 1), 0), nullptr);
  EXPECT_EQ(handles.announce(Handle::make(UINT32_MAX, 1), 0), nullptr);
  EXPECT_NE(handles.announce(Handle::make(7, 1), 0), nullptr);
}

TEST(HandleTable, NamesEachLiveHandleOnce) {
  HandleTable handles(64);
  for (uint32_t i = 0; i < 40; i += 3) handles.announce(Handle::make(i, i + 1), i);
  handles.forget(*handles.find(Handle::make(9, 10)));
  std::vector<uint32_t> seen;
  handles.for_each([&](Handle handle, const HandleTable::Entry& entry) {
    EXPECT_EQ(handle.generation(), handle.index() + 1);
    EXPECT_EQ(entry.group, handle.index());
    seen.push_back(handle.index());
  });
  EXPECT_EQ(seen, (std::vector<uint32_t>{0, 3, 6, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39}));
}

}  // namespace
}  // namespace pathways::test::test_handle_table
