// What the controller knows of a client's handles: Directory.
//   FUT-3  an older generation finds nothing           FindsOnlyTheGenerationThatLives
#include <gtest/gtest.h>

#include <vector>

#include "controller/handle_table.h"

namespace pathways {
namespace {

TEST(Directory, FindsOnlyTheGenerationThatLives) {
  Directory directory(8);
  EXPECT_EQ(directory.find(Handle::make(3, 1)), nullptr);
  Directory::Entry* entry = directory.announce(Handle::make(3, 1), 7);
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->block, Directory::kNoBlock);
  ASSERT_NE(directory.find(Handle::make(3, 1)), nullptr);
  EXPECT_EQ(directory.find(Handle::make(3, 1))->group, 7u);
  directory.announce(Handle::make(3, 2), 9);  // the old meaning was never ended
  EXPECT_EQ(directory.find(Handle::make(3, 1)), nullptr);
  EXPECT_EQ(directory.find(Handle::make(3, 2))->group, 9u);
  directory.forget(*directory.find(Handle::make(3, 2)));
  EXPECT_EQ(directory.find(Handle::make(3, 2)), nullptr);
}

TEST(Directory, RefusesWhatTheClientCannotHave) {
  Directory directory(8);
  EXPECT_EQ(directory.announce(Handle::make(8, 1), 0), nullptr);
  EXPECT_EQ(directory.announce(Handle::make(UINT32_MAX, 1), 0), nullptr);
  EXPECT_NE(directory.announce(Handle::make(7, 1), 0), nullptr);
}

TEST(Directory, NamesEachLiveHandleOnce) {
  Directory directory(64);
  for (uint32_t i = 0; i < 40; i += 3) directory.announce(Handle::make(i, i + 1), i);
  directory.forget(*directory.find(Handle::make(9, 10)));
  std::vector<uint32_t> seen;
  directory.for_each([&](Handle handle, const Directory::Entry& entry) {
    EXPECT_EQ(handle.generation(), handle.index() + 1);
    EXPECT_EQ(entry.group, handle.index());
    seen.push_back(handle.index());
  });
  EXPECT_EQ(seen, (std::vector<uint32_t>{0, 3, 6, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39}));
}

}  // namespace
}  // namespace pathways
