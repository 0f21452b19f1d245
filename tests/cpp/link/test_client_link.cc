// The link of a client on another machine: what it leases, what it is told, and what makes no sense.
//
//   LINK-3   ClientLink.Puts, ClientLink.Fetches
//   LINK-4   ClientLink.NonsenseIsRefusedByName
//   ARENA-5  ClientLink.ALostHostsLeases
//   ARENA-6  ClientLink.Puts
//   FLOW-1   ClientLink.WhatNobodyReadsStaysInTheRing
//   TRUST-1  ClientLink.NobodyWritesWhatWasNotLent
#include <algorithm>
#include <array>
#include <random>
#include <string>

#include "link/far_client.h"
#include "link/link_ends.h"

namespace pathways::test::test_client_link {
namespace {

constexpr uint32_t kClient = 3, kGroup = 7;
constexpr ClientBlock::Sizes kSizes{64, 1u << 16, size_t{8} << 20};

/// The test is the controller and the hosts: it uses the twin as they do.
struct OneClient {
  OneClient() {
    hub.add_client(kClient, far.view(), nullptr, far.at_home);
    hub.add_group(kGroup, {0, 1});
  }
  ~OneClient() { hub.remove_client(kClient); }

  void send_over(Link& from, Link& to) {
    size_t count = from.collect(buffer);
    for (size_t at = 0; at < count;) {  // in pieces, cut anywhere
      const size_t piece = std::min(count - at, 1 + random() % 100'000);
      to.deliver(std::span(buffer).subspan(at, piece));
      at += piece;
    }
  }
  void transmit() {
    for (int i = 0; i < 20; ++i) {
      send_over(*far.at_client, *far.at_home);
      send_over(*far.at_home, *far.at_client);
      pass_time(10'000'000);
    }
  }
  uint64_t block(size_t bytes, uint64_t stamp) {
    uint64_t offset = 0;
    EXPECT_EQ(arena().allocate(bytes, &offset), Status::kOk);
    const Bytes value = pattern(bytes, stamp);
    std::memcpy(arena().at(offset), value.data(), bytes);
    return offset;
  }
  /// The client leases a block to hosts 0 and 1.
  void command(CommandKind kind, Handle handle, Handle token, uint64_t offset, uint64_t bytes) {
    const Lease lease{offset, 3, 0, bytes};
    ASSERT_EQ(far.client.command(kind, kGroup, handle, token, {}, kNoSpaceSet, 0, lease), Status::kOk);
  }
  Handle future(uint32_t parts) {
    Handle made;
    EXPECT_EQ(far.client.allocate(parts, &made), Status::kOk);
    return made;
  }
  bool complete(Handle future) {
    return hub.complete(joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, kClient}, future.raw, 0, 0}));
  }
  void tell(const Bytes& record) { put(to_client, record); }
  Arena& arena() { return *far.block()->client_arena(); }
  ArenaView there() { return far.view().arena(); }

  std::mt19937_64 random{seed()};
  LinkHub hub;
  FarClient far{hub, {kClient, 64}, kSizes, home_clock, agent_clock};
  ByteRing::Consumer from_client = far.view().from_client(), cancels = far.view().cancels();
  ByteRing::Producer to_client = far.view().to_client();
  Bytes buffer = Bytes(size_t{1} << 20);
};

TEST(ClientLink, Puts) {
  OneClient one;
  for (const size_t bytes : {size_t{1}, size_t{64}, size_t{300'000}, size_t{3'000'000}}) {
    const uint64_t offset = one.block(bytes, bytes);
    one.command(CommandKind::kPut, one.future(2), {}, offset, bytes);
    one.transmit();
    const Bytes record = next(one.from_client);
    ASSERT_EQ(record.size(), sizeof(CommandRecord));
    EXPECT_EQ(read_record<CommandRecord>(record).lease_at, offset);
    const Bytes value = pattern(bytes, bytes);
    for (const unsigned host : {0u, 1u}) {
      const std::byte* here = one.there().find_leased(offset, bytes, host);
      ASSERT_NE(here, nullptr);
      EXPECT_EQ(std::memcmp(here, value.data(), bytes), 0);
    }
    one.hub.return_lease(kClient, offset, 1);
    one.transmit();
    EXPECT_EQ(one.arena().was_references(offset), 3u);  // all come back together
    one.hub.return_lease(kClient, offset, 0);
    one.transmit();
    EXPECT_EQ(one.arena().was_references(offset), 1u);
    EXPECT_EQ(one.there().find(offset, 1), nullptr);
    one.arena().release(offset);
  }
  EXPECT_EQ(one.arena().bytes_in_use(), 0u);
  EXPECT_EQ(one.far.at_home->stats().dropped + one.far.at_client->stats().dropped, 0u);
}

/// Whenever the client sees the completion, it has the bytes.
TEST(ClientLink, Fetches) {
  OneClient one;
  const size_t bytes = 5'000'000;
  const uint64_t offset = one.block(bytes, 1);
  const Handle token = one.future(2);
  one.command(CommandKind::kFetch, one.future(1), token, offset, bytes);
  one.transmit();
  std::byte* here = one.there().find_leased(offset, bytes, 0);
  ASSERT_NE(here, nullptr);
  const Bytes value = pattern(bytes, 77);
  std::memcpy(here, value.data(), bytes);
  EXPECT_TRUE(one.complete(token));
  one.transmit();
  EXPECT_EQ(one.far.client.poll(token), FutureState::kPending);
  EXPECT_LT(one.far.at_home->stats().bytes_out, 10'000u);
  EXPECT_TRUE(one.complete(token));
  const auto is_over = [&] { return one.far.client.poll(token) != FutureState::kPending; };
  while (!is_over()) {
    const size_t count = one.far.at_home->collect(one.buffer);
    for (size_t at = 0; at < count && !is_over(); at += 1000) {
      one.far.at_client->deliver(std::span(one.buffer).subspan(at, std::min<size_t>(1000, count - at)));
    }
  }
  EXPECT_EQ(one.far.client.poll(token), FutureState::kReady);
  EXPECT_EQ(std::memcmp(one.arena().at(offset), value.data(), bytes), 0);
}

TEST(ClientLink, FetchesComeBackWhole) {
  OneClient one;
  for (int i = 0; i < 50; ++i) {
    const size_t bytes = 1 + one.random() % 2'000'000;
    const uint64_t offset = one.block(bytes, 1);
    const Handle token = one.future(2);
    one.command(CommandKind::kFetch, one.future(1), token, offset, bytes);
    one.transmit();
    const Bytes value = pattern(bytes, static_cast<uint64_t>(i));
    std::memcpy(one.there().find_leased(offset, bytes, 0), value.data(), bytes);
    for (const uint32_t host : {0u, 1u}) {
      EXPECT_TRUE(one.complete(token));
      one.hub.return_lease(kClient, offset, host);
    }
    one.transmit();
    ASSERT_EQ(one.far.client.poll(token), FutureState::kReady);
    ASSERT_EQ(std::memcmp(one.arena().at(offset), value.data(), bytes), 0);
    EXPECT_EQ(one.arena().was_references(offset), 1u);
    one.arena().release(offset);
    one.far.client.forget(token);
    while (!next(one.from_client).empty()) {
    }
  }
}

/// The bytes of a failed fetch do not cross, and its block comes back.
TEST(ClientLink, AFailedFetch) {
  OneClient one;
  const uint64_t offset = one.block(1'000'000, 5);
  const Handle token = one.future(2);
  one.command(CommandKind::kFetch, one.future(1), token, offset, 1'000'000);
  one.transmit();
  EXPECT_TRUE(one.complete(token));
  const std::array<char, 8> why{'i', 't', ' ', 'd', 'i', 'e', 'd', '!'};
  one.tell(joined(FailedRecord{{RecordKind::kFailed, 0, kClient}, token.raw, 8, 0}, why));
  for (const uint32_t host : {0u, 1u}) one.hub.return_lease(kClient, offset, host);
  one.transmit();
  one.far.client.poll_inbox();
  EXPECT_EQ(one.far.client.poll(token), FutureState::kFailed);
  EXPECT_EQ(one.far.client.error_of(token), "it died!");
  EXPECT_EQ(one.arena().was_references(offset), 1u);
  EXPECT_LT(one.far.at_home->stats().bytes_out, 10'000u);
}

/// The client takes back what it leased to a lost host; what it leases to the successor at the same place is its own.
TEST(ClientLink, ALostHostsLeases) {
  OneClient one;
  uint64_t offset = one.block(1000, 1);
  one.command(CommandKind::kPut, one.future(2), {}, offset, 1000);
  one.transmit();
  const uint64_t stamp = read_record<CommandRecord>(next(one.from_client)).lease_stamp;
  one.hub.return_lease(kClient, offset, 1);
  one.tell(joined(ReclaimRecord{{RecordKind::kReclaim, 0, kClient}, 0, 0, stamp}));
  one.transmit();
  one.far.client.poll_inbox();
  EXPECT_EQ(one.arena().was_references(offset), 1u);
  one.arena().release(offset);
  const uint64_t before = offset;
  offset = one.block(1000, 2);
  ASSERT_EQ(offset, before);
  one.command(CommandKind::kPut, one.future(2), {}, offset, 1000);
  one.transmit();
  const Bytes value = pattern(1000, 2);
  for (const unsigned host : {0u, 1u}) {
    const std::byte* here = one.there().find_leased(offset, 1000, host);
    ASSERT_NE(here, nullptr) << host;
    EXPECT_EQ(std::memcmp(here, value.data(), 1000), 0);
    one.hub.return_lease(kClient, offset, host);
  }
  one.transmit();
  EXPECT_EQ(one.arena().was_references(offset), 1u);
}

TEST(ClientLink, TimesAreDurations) {
  OneClient one;
  const ErrorText late = make_error_text("late");
  uint64_t result = 0;
  ASSERT_EQ(one.far.client.submit({1, kGroup, {1}}, {}, &result, {}, agent_clock_ns + 7'000, &late), Status::kOk);
  one.send_over(*one.far.at_client, *one.far.at_home);
  const Bytes record = next(one.from_client);
  ASSERT_FALSE(record.empty());
  EXPECT_EQ(read_record<int64_t>(std::span(record).last(8)), home_clock_ns + 7'000);
}

TEST(ClientLink, CancelsOvertake) {
  OneClient one;
  uint64_t result = 0;
  ASSERT_EQ(one.far.client.submit({1, kGroup, {1}}, {}, &result), Status::kOk);
  const uint64_t tag = one.far.client.last_tag();
  ASSERT_EQ(one.far.client.cancel(tag, std::span(&result, 1), "cancelled"), Status::kOk);
  one.transmit();
  EXPECT_EQ(read_record<CancelRecord>(next(one.cancels)).tag, tag);
  EXPECT_FALSE(next(one.from_client).empty());
}

TEST(ClientLink, CountsOfRunsWakeWhoWaitsForRoom) {
  OneClient one;
  one.far.client.set_window(4);
  uint64_t result = 0;
  for (int i = 0; i < 4; ++i) ASSERT_EQ(one.far.client.submit({1, kGroup, {1}}, {}, &result), Status::kOk);
  EXPECT_EQ(one.far.client.submit({1, kGroup, {1}}, {}, &result), Status::kFull);
  one.transmit();
  one.far.view().tell_retired(3);
  one.transmit();
  EXPECT_EQ(one.far.client.in_flight(), 1u);
  EXPECT_EQ(one.far.client.submit({1, kGroup, {1}}, {}, &result), Status::kOk);
  // The next run that is over rings the link.
  const uint32_t ticket = one.far.view().futures().doorbell().ticket();
  one.far.view().tell_retired(4);
  EXPECT_NE(one.far.view().futures().doorbell().ticket(), ticket);
}

TEST(ClientLink, TheEndOfTheCluster) {
  OneClient one;
  one.far.cluster()->is_traced.store(1, std::memory_order_relaxed);
  one.transmit();
  EXPECT_EQ(StatusBlock::attach(one.far.client_status)->is_traced.load(std::memory_order_relaxed), 1u);
  EXPECT_EQ(one.far.client.cluster_status(), ClusterStatus::kUp);
  one.far.cluster()->set_status(ClusterStatus::kFailed, "HostLostError: all of them");
  one.transmit();
  EXPECT_EQ(one.far.client.cluster_status(), ClusterStatus::kFailed);
  EXPECT_EQ(one.far.client.cluster_failure(), "HostLostError: all of them");
  one.far.at_client->fail("a later reason");
  EXPECT_EQ(one.far.client.cluster_failure(), "HostLostError: all of them");
}

TEST(ClientLink, ABrokenLink) {
  OneClient one;
  one.far.at_client->fail("ControllerLostError: a cable");
  EXPECT_EQ(one.far.client.cluster_status(), ClusterStatus::kFailed);
  EXPECT_EQ(one.far.client.cluster_failure(), "ControllerLostError: a cable");
}

/// FLOW-1: records that the controller does not read fill the client's ring, and not the link.
TEST(ClientLink, WhatNobodyReadsStaysInTheRing) {
  OneClient one;
  const Bytes payload(1000);
  uint64_t sent = 0, read = 0;
  const auto fill = [&] {
    for (int i = 0; i < 100; ++i) {
      while (one.far.client.command(CommandKind::kBackend, kGroup, {}, Handle{sent + 1}, payload) == Status::kOk)
        ++sent;
      one.send_over(*one.far.at_client, *one.far.at_home);
      one.send_over(*one.far.at_home, *one.far.at_client);
    }
  };
  fill();
  const uint64_t most = (RecordCredit::kWindow + 2 * kSizes.ring_bytes) / payload.size() + 10;
  EXPECT_LT(sent, most);
  EXPECT_GT(sent, most / 2);
  while (read < 5 * most) {
    fill();
    for (Bytes record = next(one.from_client); !record.empty(); record = next(one.from_client)) {
      ASSERT_EQ(read_record<CommandRecord>(record).token, ++read);
    }
  }
  EXPECT_GT(sent, 5 * most);
}

/// The same for what the controller tells a client that does not look.
TEST(ClientLink, WhatTheClientDoesNotReadStaysAtHome) {
  OneClient one;
  uint64_t told = 0;
  const auto tell = [&] {
    for (int i = 0; i < 100; ++i) {
      while (true) {
        const auto room = one.to_client.try_reserve(512);
        if (room.empty()) break;
        const FailedRecord record{{RecordKind::kFailed, 0, kClient}, Handle::make(1, 1).raw, 480, 0};
        std::memcpy(room.data(), &record, sizeof record);
        ++told;
      }
      one.to_client.publish();
      one.send_over(*one.far.at_home, *one.far.at_client);
      one.send_over(*one.far.at_client, *one.far.at_home);
    }
  };
  tell();
  const uint64_t before = told;
  EXPECT_LT(told, (RecordCredit::kWindow + 4 * kSizes.ring_bytes) / 512);
  for (int i = 0; i < 10; ++i) {
    one.far.client.poll_inbox();
    tell();
  }
  EXPECT_GT(told, before + 500);
}

// --------------------------------------------------------------------------------------------------------- nonsense

TEST(ClientLink, NonsenseIsRefusedByName) {
  struct Case {
    bool at_home;
    Bytes bytes;
    std::string text;
  };
  const Bytes word = joined(uint64_t{1});
  const std::vector<Case> cases{
      {true, frame(FrameKind::kToController, 1, 5, word), "a frame of kind 2, which no client may send"},
      {true, frame(FrameKind::kPeer, 1, 5, word), "a frame of kind 3, which no client may send"},
      {true, frame(FrameKind::kStatus, 1, 0, {}), "a frame of kind 13, which no client may send"},
      {true, frame(FrameKind::kFutureDone, 0, 0, word), "a frame of kind 11, which no client may send"},
      {true, frame(FrameKind::kFromClient, 2, 0, word), "a frame of kind 9, which no client may send"},
      {true, frame(FrameKind::kFromClient, 0, 0, Bytes(7)), "a record of 7 bytes"},
      {true, frame(FrameKind::kFromClient, 0, 0, Bytes(kSizes.ring_bytes)), "a record of 65536 bytes"},
      {true, frame(FrameKind::kLease, kGroup, 0, Bytes(31)), "a lease of 31 bytes"},
      {true, frame(FrameKind::kLease, kGroup, 0, Bytes(39)), "the stamp of a lease of 7 bytes"},
      {true, frame(FrameKind::kData, 0, 0, Bytes(23)), "bytes of a block of 23 bytes"},
      {true, frame(FrameKind::kCredit, 0, 0, Bytes(7)), "a credit of 7 bytes"},
      {true, frame(FrameKind::kCredit, 0, 0, word), "a credit for nothing"},
      {false, frame(FrameKind::kFromController, 1, 5, word), "a frame of kind 1, which no client takes"},
      {false, frame(FrameKind::kLease, 1, 5, word), "a frame of kind 4, which no client takes"},
      {false, frame(FrameKind::kToClient, 0, 0, Bytes(7)), "a record of 7 bytes"},
      {false, frame(FrameKind::kFutureDone, 0, 0, Bytes(23)), "a frame of kind 11"},
      {false, frame(FrameKind::kRetired, 0, 0, Bytes(7)), "a count of runs of 7 bytes"},
      {false, frame(FrameKind::kStatus, 3, 0, {}), "a status that there is not"},
      {false, frame(FrameKind::kLeaseBack, 0, 0, Bytes(15)), "a lease back of 15 bytes"},
      {false, frame(FrameKind::kLeaseBack, 0, 0, Bytes(18)), "a lease back with half a host"},
      {false, frame(FrameKind::kCredit, 0, 0, word), "a credit for nothing"},
  };
  for (const Case& each : cases) {
    OneClient one;
    Link& link = each.at_home ? static_cast<Link&>(*one.far.at_home) : *one.far.at_client;
    const std::string why = refusal(link, each.bytes);
    EXPECT_NE(why.find(each.text), std::string::npos) << why << ", expected " << each.text;
    EXPECT_TRUE(next(one.from_client).empty());
  }
}

TEST(ClientLink, NobodyWritesWhatWasNotLent) {
  OneClient one;
  const auto lease = [&](uint64_t offset, uint64_t bytes, uint64_t number, uint32_t group = kGroup) {
    return frame(FrameKind::kLease, group, 0, joined(LeaseFrame{offset, bytes, 0, number}, uint64_t{1}));
  };
  const auto data = [&](uint64_t offset, uint64_t at, uint64_t number) {
    return frame(FrameKind::kData, 0, 0, joined(DataFrame{offset, at, number}, uint64_t{1}));
  };
  const auto is_dropped = [](Link& link, const Bytes& bytes) {
    const uint64_t before = link.stats().dropped;
    EXPECT_EQ(refusal(link, bytes), "taken");
    return link.stats().dropped != before;
  };
  Link& home = *one.far.at_home;
  EXPECT_TRUE(is_dropped(home, data(1 << 20, 0, 1)));
  (void)refusal(home, lease(1 << 20, 64, 1, 99));  // a group that there is not
  EXPECT_TRUE(is_dropped(home, data(1 << 20, 0, 1)));
  for (const uint64_t offset : {uint64_t{0}, uint64_t{64}, uint64_t{1 << 20} + 8, UINT64_MAX - 63, uint64_t{1} << 40}) {
    EXPECT_EQ(refusal(home, lease(offset, 64, 2)), "taken");
    EXPECT_TRUE(is_dropped(home, data(offset, 0, 2))) << offset;
  }
  EXPECT_EQ(refusal(home, lease(1 << 20, 64, 3)), "taken");
  EXPECT_FALSE(is_dropped(home, data(1 << 20, 56, 3)));
  EXPECT_TRUE(is_dropped(home, data(1 << 20, 57, 3)));
  EXPECT_TRUE(is_dropped(home, data(1 << 20, UINT64_MAX, 3)));
  EXPECT_TRUE(is_dropped(home, data(1 << 20, 0, 4)));
  // Home writes to nothing of the client's but to what it fetches into.
  const uint64_t put = one.block(64, 1), fetched = one.block(64, 1);
  one.command(CommandKind::kPut, one.future(2), {}, put, 64);
  one.command(CommandKind::kFetch, one.future(1), one.future(2), fetched, 64);
  (void)one.far.at_client->collect(one.buffer);
  Link& client = *one.far.at_client;
  EXPECT_TRUE(is_dropped(client, data(put, 0, 1)));
  EXPECT_FALSE(is_dropped(client, data(fetched, 0, 2)));
  EXPECT_TRUE(is_dropped(client, data(fetched, 60, 2)));
  EXPECT_TRUE(is_dropped(client, data(fetched, 0, 1)));
  const auto back = [&](uint64_t offset, uint64_t number) {
    return frame(FrameKind::kLeaseBack, 0, 0, joined(LeaseBackFrame{offset, number}, uint32_t{0}));
  };
  EXPECT_TRUE(is_dropped(client, back(put, 2)));
  EXPECT_FALSE(is_dropped(client, back(put, 1)));
  EXPECT_TRUE(is_dropped(client, back(put, 1)));
}

/// Random bytes and mutated frames break the link or count for nothing; they write nothing outside of the blocks.
TEST(ClientLink, Mutations) {
  std::mt19937_64 random{seed()};
  for (int round = 0; round < 300 * kStressScale; ++round) {
    OneClient one;
    const uint64_t offset = one.block(5000, 1);
    one.command(random() % 2 == 0 ? CommandKind::kPut : CommandKind::kFetch, one.future(2), one.future(2), offset,
                5000);
    Bytes bytes(one.far.at_client->collect(one.buffer));
    std::copy_n(one.buffer.begin(), bytes.size(), bytes.begin());
    for (uint64_t changes = 1 + random() % 8; changes != 0; --changes) {
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    }
    Link& to = random() % 2 == 0 ? static_cast<Link&>(*one.far.at_home) : *one.far.at_client;
    try {
      to.deliver(bytes);
      (void)to.collect(one.buffer);
    } catch (const Error&) {
    }
  }
}

}  // namespace
}  // namespace pathways::test::test_client_link
