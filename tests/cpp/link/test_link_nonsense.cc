// What makes no sense breaks a link, by name, or counts as for nobody; nothing of it is applied.
//
//   LINK-4   Nonsense.IsRefusedByName, Nonsense.NothingOfACompletionIsApplied, Nonsense.ACorruptRing
//   LINK-2   Nonsense.WhatIsForNobodyIsDropped, Nonsense.HomeWritesOnlyWhatItLent
#include "link/link_ends.h"

namespace pathways::test::test_link_nonsense {
namespace {

TEST(Nonsense, IsRefusedByName) {
  const RecordHeader done{RecordKind::kRunDone, 0, 0};
  const auto completion = [](uint32_t runs, uint32_t is_large, ValueRun run, size_t bytes) {
    Bytes record = joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, Home::kClient}, 1, runs, is_large}, run);
    record.resize(sizeof(FutureDoneRecord) + bytes);
    return record;
  };
  const auto to_home = [](const Bytes& record) { return frame(FrameKind::kToController, 1, 5, record); };
  FrameHeader odd{8, FrameKind::kPing, 1, 0, 0};
  struct Case {
    bool at_home;
    Bytes bytes;
    std::string text;
  };
  const std::vector<Case> cases{
      {true, joined(FrameHeader{kMostFrame, FrameKind::kPing, 0, 0, 0}), "a frame of 1048576 bytes"},
      {false, joined(FrameHeader{UINT32_MAX, FrameKind::kPing, 0, 0, 0}), "a frame of 4294967295 bytes"},
      {true, joined(odd, uint64_t{0}), "a frame with a wrong header"},
      {true, frame(static_cast<FrameKind>(0), 1, 5, joined(done)), "a frame of kind 0"},
      {true, frame(static_cast<FrameKind>(15), 1, 5, joined(done)), "a frame of kind 15"},
      {true, frame(FrameKind::kFromController, 1, 5, joined(done)), "a frame of kind 1, which this end does not take"},
      {true, frame(FrameKind::kLease, 1, 5, joined(done)), "a frame of kind 4"},
      {false, frame(FrameKind::kToController, 1, 5, joined(done)), "a frame of kind 2"},
      {false, frame(FrameKind::kLeaseBack, 1, 5, joined(done)), "a frame of kind 6"},
      {true, to_home({}), "a record of 0 bytes"},
      {true, to_home(Bytes(7)), "a record of 7 bytes"},
      {true, to_home(Bytes(Machine::kSizes.ring_bytes / 2)), "a record of 32768 bytes"},
      {false, frame(FrameKind::kFromController, 1, 5, Bytes(7)), "a record of 7 bytes"},
      {true, frame(FrameKind::kPeer, 1, 5, Bytes(7)), "a record of a host to another of 7 bytes"},
      {false, frame(FrameKind::kLease, Home::kClient, 1, Bytes(31)), "a lease of 31 bytes"},
      {false, frame(FrameKind::kLease, Home::kClient, 0, Bytes(32)), "a lease to 0 hosts"},
      {false, frame(FrameKind::kLease, Home::kClient, 2, Bytes(36)), "a lease to 2 hosts in 4 bytes"},
      {false, frame(FrameKind::kLease, Home::kClient, 1025, Bytes(32 + 4100)), "a lease to 1025 hosts"},
      {false, frame(FrameKind::kLease, Home::kClient, -1, Bytes(36)), "a lease to 4294967295 hosts"},
      {true, frame(FrameKind::kData, Home::kClient, 0, Bytes(23)), "bytes of a block of 23 bytes"},
      {false, frame(FrameKind::kData, Home::kClient, 0, Bytes(23)), "bytes of a block of 23 bytes"},
      {true, frame(FrameKind::kLeaseBack, Home::kClient, 1, Bytes(15)), "a lease back of 15 bytes"},
      {true, frame(FrameKind::kPing, 0, 0, Bytes(7)), "a ping of 7 bytes"},
      {true, frame(FrameKind::kPong, 0, 0, Bytes(15)), "a pong of 15 bytes"},
      {true, to_home(joined(RecordHeader{RecordKind::kFutureDone, 0, Home::kClient}, uint64_t{1})),
       "a completion of 16 bytes that is none"},
      {true, to_home(completion(1, 0, {0, 8}, 8)), "a completion of 32 bytes that is none"},
      {true, to_home(completion(1, 0, {57, 8}, 16)), "a completion of 40 bytes that is none"},
      {true, to_home(completion(1, 0, {8, UINT32_MAX}, 16)), "a completion of 40 bytes that is none"},
      {true, to_home(completion(1, 1, {4096, 8}, 16)), "a completion of 40 bytes that is none"},
      {true, to_home(completion(UINT32_MAX, 0, {0, 8}, 16)), "a completion of 40 bytes that is none"},
      {true, to_home(completion(0, 0, {0, 8}, 16)), "a completion of 40 bytes that is none"},
  };
  for (const Case& each : cases) {
    Home home(1);
    home[0].add_host(1, 5);
    home[0].twin_client(Home::kClient, home.arena_bytes());
    const std::string why = refusal(each.at_home ? *home[0].at_home : *home[0].here, each.bytes);
    EXPECT_NE(why.find(each.text), std::string::npos) << why << ", expected " << each.text;
    EXPECT_TRUE(next(home[0].hosts.at(1).reports).empty());
    EXPECT_TRUE(next(home[0].hosts.at(1).inbox).empty());
  }
}

TEST(Nonsense, NothingOfACompletionIsApplied) {
  Home home(1);
  home[0].add_host(1, 5);
  const Handle future = home.future();
  ReadBackArea& area = *ClientBlock::attach(home.client)->read_back_area();
  ASSERT_TRUE(area.try_open(future, 16));
  std::memset(area.slot(future, 16), 1, 16);
  Bytes record = joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, Home::kClient}, future.raw, 2, 0}, ValueRun{0, 8},
                        uint64_t{0}, ValueRun{64, 8}, uint64_t{0});
  EXPECT_NE(refusal(*home[0].at_home, frame(FrameKind::kToController, 1, 5, record)), "taken");
  EXPECT_EQ(home.futures().poll(future), FutureState::kPending);
  EXPECT_EQ(area.slot(future, 16)[0], std::byte{1});
}

TEST(Nonsense, WhatIsForNobodyIsDropped) {
  const auto drops = [](bool at_home, const Bytes& bytes) {
    Home home(1);
    home[0].add_host(1, 5);
    home[0].twin_client(Home::kClient, home.arena_bytes());
    Link& link = at_home ? *home[0].at_home : *home[0].here;
    EXPECT_EQ(refusal(link, bytes), "taken");
    EXPECT_TRUE(next(home[0].hosts.at(1).reports).empty());
    EXPECT_TRUE(next(home[0].hosts.at(1).inbox).empty());
    EXPECT_TRUE(next(home[0].hosts.at(1).from_far).empty());
    return link.stats().dropped;
  };
  const Bytes record = joined(RecordHeader{RecordKind::kRunDone, 0, 0});
  const auto lease = [](uint64_t offset, uint64_t bytes) {
    return joined(LeaseFrame{offset, bytes, 0, 1}, uint32_t{1});
  };
  EXPECT_EQ(drops(true, frame(FrameKind::kToController, 2, 5, record)), 1u);
  EXPECT_EQ(drops(true, frame(FrameKind::kToController, 1, 6, record)), 1u);
  EXPECT_EQ(drops(false, frame(FrameKind::kFromController, 2, 5, record)), 1u);
  EXPECT_EQ(drops(false, frame(FrameKind::kFromController, 1, 4, record)), 1u);
  EXPECT_EQ(drops(false, frame(FrameKind::kPeer, 1, 4, joined(FarHeader{2, 5}))), 1u);
  EXPECT_EQ(drops(true, frame(FrameKind::kPeer, 1, 5, joined(FarHeader{1, 5}))), 1u);
  EXPECT_EQ(drops(false, frame(FrameKind::kLease, 9, 1, lease(1 << 20, 64))), 1u);
  EXPECT_EQ(drops(false, frame(FrameKind::kData, 9, 0, joined(DataFrame{1 << 20, 0, 1}, uint64_t{1}))), 1u);
  EXPECT_EQ(drops(false, frame(FrameKind::kData, Home::kClient, 0, joined(DataFrame{1 << 20, 0, 1}, uint64_t{1}))), 1u);
  for (const uint64_t offset : {uint64_t{0}, uint64_t{64}, uint64_t{1 << 20} + 8, UINT64_MAX - 63, uint64_t{1} << 40}) {
    Bytes both = frame(FrameKind::kLease, Home::kClient, 1, lease(offset, 64));
    const Bytes data = frame(FrameKind::kData, Home::kClient, 0, joined(DataFrame{offset, 0, 1}, uint64_t{1}));
    both.insert(both.end(), data.begin(), data.end());
    EXPECT_EQ(drops(false, both), 1u) << offset;
  }
  for (const uint64_t bytes : {UINT64_MAX, uint64_t{4} << 20, UINT64_MAX - (1 << 20) - 63}) {
    Bytes both = frame(FrameKind::kLease, Home::kClient, 1, lease(1 << 20, bytes));
    const Bytes data = frame(FrameKind::kData, Home::kClient, 0, joined(DataFrame{1 << 20, 0, 1}, uint64_t{1}));
    both.insert(both.end(), data.begin(), data.end());
    EXPECT_EQ(drops(false, both), 1u) << bytes;
  }
  for (const DataFrame& data : {DataFrame{1 << 20, 64, 1}, DataFrame{1 << 20, 57, 1}, DataFrame{1 << 20, UINT64_MAX, 1},
                                DataFrame{1 << 20, 0, 2}}) {
    Bytes both = frame(FrameKind::kLease, Home::kClient, 1, lease(1 << 20, 64));
    const Bytes more = frame(FrameKind::kData, Home::kClient, 0, joined(data, uint64_t{1}));
    both.insert(both.end(), more.begin(), more.end());
    EXPECT_EQ(drops(false, both), 1u) << data.at;
  }
}

/// A machine that lies can write only to what was lent to it for a fetch, and return only its own leases.
TEST(Nonsense, HomeWritesOnlyWhatItLent) {
  Home home(1);
  home[0].add_host(1, 5);
  home[0].add_host(2, 5);
  home.hub.add_group(Home::kGroup, {1});
  home[0].twin_client(Home::kClient, home.arena_bytes());
  uint64_t own = 0, fetched = 0, lent = 0;
  for (uint64_t* block : {&own, &fetched, &lent}) {
    ASSERT_EQ(home.arena().allocate(64, block), Status::kOk);
    std::memset(home.arena().at(*block), 1, 64);
  }
  home.arena().lease_out(fetched, 6, 1);
  home.arena().lease_out(lent, 6, 2);
  put(home[0].hosts.at(1).orders, home.command(CommandKind::kFetch, 7, home.future().raw, fetched, 64, 1));
  put(home[0].hosts.at(1).orders, home.command(CommandKind::kPut, 8, 0, lent, 64, 2));
  home.transmit();
  Link& link = *home[0].at_home;
  const auto say = [&](const Bytes& bytes) {
    const uint64_t before = link.stats().dropped;
    EXPECT_EQ(refusal(link, bytes), "taken");
    return link.stats().dropped == before;
  };
  const auto write = [&](uint64_t offset, uint64_t at, uint64_t lease, size_t bytes) {
    Bytes payload = joined(DataFrame{offset, at, lease});
    payload.resize(sizeof(DataFrame) + bytes, std::byte{9});
    return say(frame(FrameKind::kData, Home::kClient, 0, payload));
  };
  const auto return_lease = [&](uint64_t offset, uint64_t lease, uint32_t host) {
    return say(
        frame(FrameKind::kLeaseBack, Home::kClient, static_cast<int32_t>(host), joined(LeaseBackFrame{offset, lease})));
  };
  EXPECT_FALSE(write(own, 0, 1, 8));
  EXPECT_FALSE(write(lent, 0, 2, 8));  // a put's
  EXPECT_FALSE(write(fetched, 0, 2, 8));
  EXPECT_FALSE(write(fetched, 60, 1, 8));
  EXPECT_FALSE(write(fetched, UINT64_MAX, 1, 8));
  EXPECT_FALSE(return_lease(own, 1, 1));
  EXPECT_FALSE(return_lease(lent, 1, 1));
  EXPECT_FALSE(return_lease(lent, 2, 2));  // to which this link has lent nothing
  for (const uint64_t block : {own, fetched, lent}) {
    EXPECT_EQ(home.arena().at(block)[0], std::byte{1});
    EXPECT_EQ(home.arena().was_references(block), block == own ? 1u : 3u);
  }
  EXPECT_TRUE(write(fetched, 56, 1, 8));
  EXPECT_EQ(home.arena().at(fetched)[63], std::byte{9});
  EXPECT_TRUE(return_lease(fetched, 1, 1));
  EXPECT_FALSE(return_lease(fetched, 1, 1));
  EXPECT_FALSE(write(fetched, 0, 1, 8));
  EXPECT_TRUE(return_lease(lent, 2, 1));
  EXPECT_EQ(home.arena().was_references(lent), 2u);
}

TEST(Nonsense, ACorruptRing) {
  for (const bool is_far : {false, true}) {
    Home home(1);
    home[0].add_host(1, 5);
    put(is_far ? home[0].hosts.at(1).to_far : home[0].hosts.at(1).outgoing, Bytes(4));
    EXPECT_THROW((void)home[0].here->collect(home[0].buffer), Error);
  }
  Home home(1);
  EXPECT_THROW((void)home[0].here->collect(std::span(home[0].buffer).first(1000)), Error);
}

}  // namespace
}  // namespace pathways::test::test_link_nonsense
