// AwaitedFutures: whose part of a future is not over.
//
//   LINK-2   a part is over once, and only that of a host that has one
//   LINK-3   a fetch is answered, whatever its client has made of the token's index meanwhile
#include <gtest/gtest.h>

#include "link/awaited_futures.h"
#include "support.h"

namespace pathways::test::test_awaited_futures {
namespace {

constexpr uint32_t kClient = 7;

void fetch(AwaitedFutures& to, Handle token) {
  CommandRecord record{};
  record.header = {RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kFetch), kClient};
  record.token = token.raw;
  to.sent(std::as_bytes(std::span(&record, 1)));
}

void put(AwaitedFutures& to, Handle buffer) {
  CommandRecord record{};
  record.header = {RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kPut), kClient};
  record.handle = buffer.raw;
  to.sent(std::as_bytes(std::span(&record, 1)));
}

TEST(AwaitedFutures, APartIsOverOnce) {
  AwaitedFutures awaited;
  put(awaited, Handle::make(3, 1));
  EXPECT_FALSE(awaited.take(kClient, Handle::make(4, 1)));
  EXPECT_FALSE(awaited.take(kClient, Handle::make(3, 2)));
  EXPECT_FALSE(awaited.take(kClient + 1, Handle::make(3, 1)));
  EXPECT_TRUE(awaited.take(kClient, Handle::make(3, 1)));
  EXPECT_FALSE(awaited.take(kClient, Handle::make(3, 1)));
}

TEST(AwaitedFutures, AFetchThatItsClientHasLeft) {
  AwaitedFutures awaited;
  fetch(awaited, Handle::make(3, 1));
  put(awaited, Handle::make(3, 2));
  fetch(awaited, Handle::make(3, 3));
  EXPECT_TRUE(awaited.take(kClient, Handle::make(3, 1)));
  EXPECT_TRUE(awaited.take(kClient, Handle::make(3, 3)));
  EXPECT_FALSE(awaited.take(kClient, Handle::make(3, 3)));
}

TEST(AwaitedFutures, NothingIsAwaitedOfAClientThatIsGone) {
  AwaitedFutures awaited;
  fetch(awaited, Handle::make(3, 1));
  put(awaited, Handle::make(4, 1));
  const RecordHeader gone{RecordKind::kClientGone, 0, kClient};
  awaited.sent(std::as_bytes(std::span(&gone, 1)));
  EXPECT_FALSE(awaited.take(kClient, Handle::make(3, 1)));
  EXPECT_FALSE(awaited.take(kClient, Handle::make(4, 1)));
}

}  // namespace
}  // namespace pathways::test::test_awaited_futures
