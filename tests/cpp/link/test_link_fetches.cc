// What hosts of other machines write for a client to read: the bytes come once, before the end of the fetch.
//
//   LINK-3   LinkFetches.Fetches, LinkFetches.AFetchFromSeveralMachines, LinkFetches.PiecesThatAreNone,
//            LinkFetches.ALeaseEndsBehindTheBytes
#include "link/leases.h"

namespace pathways::test::test_link_fetches {
namespace {

TEST(LinkFetches, Fetches) {
  Leases head;
  for (const size_t bytes : {size_t{1}, size_t{300'000}, size_t{2'000'000}}) {
    const uint64_t stamp = bytes, offset = head.block(bytes, 3, stamp);
    const Handle token = head.future(2);
    for (const uint32_t host : {0u, 1u}) {
      head.order(host, head.command(CommandKind::kFetch, 77, token.raw, offset, bytes, stamp));
    }
    head.transmit();
    const Bytes value = pattern(bytes, stamp + 1);
    for (const uint32_t host : {0u, 1u}) {
      const uint64_t at = head.place(host);
      std::byte* here = head.there(0).find_leased(at, bytes, host);
      ASSERT_NE(here, nullptr);
      const size_t half = host == 0 ? 0 : bytes / 2;  // each its share
      std::memcpy(here + half, value.data() + half, host == 0 ? bytes / 2 : bytes - half);
      EXPECT_TRUE(head.there(0).return_lease(at, host));
      head.transmit();
      EXPECT_EQ(head.futures().poll(token), FutureState::kPending);
      EXPECT_TRUE(head.is_lent(offset, host));
      head.complete(host, token, half, host == 0 ? bytes / 2 : bytes - half);
      head.transmit();
      EXPECT_FALSE(head.is_lent(offset, host));
      EXPECT_EQ(head.there(0).find(at, 1) == nullptr, host == 1);
    }
    EXPECT_EQ(head.futures().poll(token), FutureState::kReady);
    EXPECT_EQ(std::memcmp(head.arena().at(offset), value.data(), bytes), 0);
    EXPECT_EQ(head.arena().was_references(offset), 1u);
    head.arena().release(offset);
  }
}

/// Hosts of two machines write one block: of each machine's memory come the bytes that its hosts have written.
TEST(LinkFetches, AFetchFromSeveralMachines) {
  Leases head;
  const size_t third = 200'000, bytes = 3 * third;
  const uint64_t offset = head.block(bytes, 7, 1);
  const Handle token = head.future(3);
  for (const uint32_t host : {0u, 1u, 2u}) {
    head.order(host, head.command(CommandKind::kFetch, 77, token.raw, offset, bytes, 1));
  }
  head.transmit();
  const Bytes value = pattern(bytes, 5);
  const uint64_t before = head[1].at_head->stats().bytes_in;
  for (const uint32_t host : {2u, 0u, 1u}) {
    const uint64_t at = head.place(host);
    std::byte* here = head.there(host / 2).find_leased(at, bytes, host);
    ASSERT_NE(here, nullptr);
    if (host != 1) std::memset(here, 9, bytes);  // what lay there before
    std::memcpy(here + host * third, value.data() + host * third, third);
    head.complete(host, token, host * third, third);
    EXPECT_TRUE(head.there(host / 2).return_lease(at, host));
    head.transmit();
  }
  EXPECT_EQ(head.futures().poll(token), FutureState::kReady);
  EXPECT_EQ(std::memcmp(head.arena().at(offset) + 2 * third, value.data() + 2 * third, third), 0);
  EXPECT_EQ(std::memcmp(head.arena().at(offset) + third, value.data() + third, third), 0);
  EXPECT_LT(head[1].at_head->stats().bytes_in - before, third + third / 50);
}

/// Pieces outside of the block are not read; a completion without pieces brings nothing, and ends the lease.
TEST(LinkFetches, PiecesThatAreNone) {
  Leases head;
  head.hub.add_group(Head::kGroup, {2});
  for (const auto& [at, bytes] : std::initializer_list<BlockPiece>{{1, 64}, {UINT64_MAX, 2}, {0, UINT64_MAX}, {3, 0}}) {
    const uint64_t offset = head.block(64, 4, 1);
    std::memset(head.arena().at(offset), 1, 64);
    const Handle token = head.future();
    head.order(2, head.command(CommandKind::kFetch, 77, token.raw, offset, 64, 1));
    head.transmit();
    const uint64_t place = head.place(2);
    std::memset(head.there(1).find_leased(place, 64, 2), 2, 64);
    if (bytes == 0) {
      put(head[1].hosts.at(2).outgoing,
          joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, Head::kClient}, token.raw, 0, 0}));
    } else {
      head.complete(2, token, at, bytes);
    }
    EXPECT_TRUE(head.there(1).return_lease(place, 2));
    head.transmit();
    EXPECT_EQ(head.futures().poll(token), FutureState::kReady);
    EXPECT_EQ(head.arena().at(offset)[63], std::byte{1});
    EXPECT_FALSE(head.is_lent(offset, 2));
    EXPECT_EQ(head.there(1).find(place, 1), nullptr);
    head.arena().release(offset);
  }
}

TEST(LinkFetches, AFetchThatFailedBringsNothing) {
  Leases head;
  const uint64_t offset = head.block(64, 1, 1);
  std::memset(head.arena().at(offset), 1, 64);
  const Handle token = head.future();
  head.hub.add_group(Head::kGroup, {0});
  head.order(0, head.command(CommandKind::kFetch, 77, token.raw, offset, 64, 1));
  head.transmit();
  const uint64_t at = head.place(0);
  std::memset(head.there(0).find_leased(at, 64, 0), 2, 64);
  EXPECT_TRUE(head.there(0).return_lease(at, 0));
  head.transmit();
  EXPECT_TRUE(head.is_lent(offset, 0));  // not before the fetch is over
  const Bytes failed = joined(FailedRecord{{RecordKind::kFailed, 0, Head::kClient}, token.raw, 0, 0});
  put(head[0].hosts.at(0).outgoing, failed);
  head.transmit();
  EXPECT_EQ(next(head[0].hosts.at(0).reports), failed);
  put(head[0].hosts.at(0).outgoing, failed);
  head.transmit();
  EXPECT_TRUE(next(head[0].hosts.at(0).reports).empty()) << "LINK-2: its part is over once";
  EXPECT_EQ(head.arena().at(offset)[0], std::byte{1});
  EXPECT_FALSE(head.is_lent(offset, 0));
  EXPECT_EQ(head.there(0).find(at, 1), nullptr);
}

/// Else the memory could be another's when the bytes come.
TEST(LinkFetches, ALeaseEndsBehindTheBytes) {
  Leases head;
  const size_t bytes = 900'000;
  head.hub.add_group(Head::kGroup, {0});
  const uint64_t offset = head.block(bytes, 1, 1);
  const Handle token = head.future();
  head.order(0, head.command(CommandKind::kFetch, 77, token.raw, offset, bytes, 1));
  head.transmit();
  const uint64_t at = head.place(0);
  std::memset(head.there(0).find_leased(at, bytes, 0), 2, bytes);
  EXPECT_TRUE(head.there(0).return_lease(at, 0));
  head.complete(0, token, 0, bytes);
  for (int i = 0; i < 5; ++i) {
    pass_time(10'000'000);
    head[0].collect();
  }
  while (head[0].in.left() != 0) {
    head[0].deliver(*head[0].at_head, head[0].in, 1000);
    if (!head.is_lent(offset, 0)) break;
  }
  EXPECT_EQ(head.arena().at(offset)[bytes - 1], std::byte{2});
  head[0].deliver_all();
  EXPECT_EQ(head.futures().poll(token), FutureState::kReady);
  EXPECT_FALSE(head.is_lent(offset, 0));
}

}  // namespace
}  // namespace pathways::test::test_link_fetches
