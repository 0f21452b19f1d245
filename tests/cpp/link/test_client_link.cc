// The link of a client on another machine: what it leases, what it is told, and what makes no sense.
//
//   LINK-3   ClientLink.Puts, ClientLink.Fetches, ClientLink.WhatTheHeadKeepsCounts
//   LINK-4   ClientLink.NonsenseIsRefusedByName, ClientLink.AllClientsTogetherHaveABound
//   ARENA-5  ClientLink.ALostHostsLeases
//   FLOW-1   ClientLink.WhatNobodyReadsStaysInTheRing
//   TRUST-1  ClientLink.NobodyWritesWhatWasNotLent
#include <algorithm>
#include <array>
#include <deque>
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
    hub.add_client(kClient, far.view(), nullptr, far.at_head);
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
      send_over(*far.at_client, *far.at_head);
      send_over(*far.at_head, *far.at_client);
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
  void complete(Handle future) {
    hub.complete(joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, kClient}, future.raw, 0, 0}));
  }
  /// Where the block of the client's next command lies at the head.
  uint64_t place() {
    const Bytes record = next(from_client);
    return record.empty() ? 0 : read_record<CommandRecord>(record).lease_at;
  }
  void tell(const Bytes& record) { put(to_client, record); }
  Arena& arena() { return *far.block()->client_arena(); }
  ArenaView there() { return far.view().arena(); }

  std::mt19937_64 random{seed()};
  LinkHub hub;
  FarClient far{hub, {kClient, 64}, kSizes, head_clock, agent_clock};
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
    EXPECT_EQ(one.arena().was_references(offset), 1u);  // the leases ended with the bytes
    one.arena().release(offset);
    const uint64_t at = read_record<CommandRecord>(record).lease_at;
    const Bytes value = pattern(bytes, bytes);
    for (const unsigned host : {0u, 1u}) {
      const std::byte* here = one.there().find_leased(at, bytes, host);
      ASSERT_NE(here, nullptr);
      EXPECT_EQ(std::memcmp(here, value.data(), bytes), 0);
    }
    one.hub.return_lease(kClient, at, 1);
    one.transmit();
    EXPECT_GE(one.far.client.kept_elsewhere(), bytes);
    one.hub.return_lease(kClient, at, 0);
    one.transmit();
    EXPECT_EQ(one.there().find(at, 1), nullptr);
    EXPECT_EQ(one.far.client.kept_elsewhere(), 0u);
  }
  EXPECT_EQ(one.arena().bytes_in_use(), 0u);
  EXPECT_EQ(one.far.at_head->stats().dropped + one.far.at_client->stats().dropped, 0u);
}

/// Whenever the client sees the completion, it has the bytes.
TEST(ClientLink, Fetches) {
  OneClient one;
  const size_t bytes = 5'000'000;
  const uint64_t offset = one.block(bytes, 1);
  const Handle token = one.future(2);
  one.command(CommandKind::kFetch, one.future(1), token, offset, bytes);
  one.transmit();
  const uint64_t at = one.place();
  std::byte* here = one.there().find_leased(at, bytes, 0);
  ASSERT_NE(here, nullptr);
  const Bytes value = pattern(bytes, 77);
  std::memcpy(here, value.data(), bytes);
  one.complete(token);
  one.transmit();
  EXPECT_EQ(one.far.client.poll(token), FutureState::kPending);
  EXPECT_LT(one.far.at_head->stats().bytes_out, 10'000u);
  one.complete(token);
  const auto is_over = [&] { return one.far.client.poll(token) != FutureState::kPending; };
  while (!is_over()) {
    const size_t count = one.far.at_head->collect(one.buffer);
    for (size_t begin = 0; begin < count && !is_over(); begin += 1000) {
      one.far.at_client->deliver(std::span(one.buffer).subspan(begin, std::min<size_t>(1000, count - begin)));
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
    const uint64_t at = one.place();
    std::memcpy(one.there().find_leased(at, bytes, 0), value.data(), bytes);
    for (const uint32_t host : {0u, 1u}) {
      one.complete(token);
      one.hub.return_lease(kClient, at, host);
    }
    one.transmit();
    ASSERT_EQ(one.far.client.poll(token), FutureState::kReady);
    ASSERT_EQ(std::memcmp(one.arena().at(offset), value.data(), bytes), 0);
    EXPECT_EQ(one.arena().was_references(offset), 1u);
    one.arena().release(offset);
    one.far.client.forget(token);
    EXPECT_EQ(one.far.client.kept_elsewhere(), 0u);
  }
}

/// The bytes of a failed fetch do not cross, and its block comes back.
TEST(ClientLink, AFailedFetch) {
  OneClient one;
  const uint64_t offset = one.block(1'000'000, 5);
  const Handle token = one.future(2);
  one.command(CommandKind::kFetch, one.future(1), token, offset, 1'000'000);
  one.transmit();
  one.complete(token);
  const std::array<char, 8> why{'i', 't', ' ', 'd', 'i', 'e', 'd', '!'};
  one.tell(joined(FailedRecord{{RecordKind::kFailed, 0, kClient}, token.raw, 8, 0}, why));
  const uint64_t at = one.place();
  for (const uint32_t host : {0u, 1u}) one.hub.return_lease(kClient, at, host);
  one.transmit();
  one.far.client.poll_inbox();
  EXPECT_EQ(one.far.client.poll(token), FutureState::kFailed);
  EXPECT_EQ(one.far.client.kept_elsewhere(), 0u);
  EXPECT_EQ(one.far.client.error_of(token), "it died!");
  EXPECT_EQ(one.arena().was_references(offset), 1u);
  EXPECT_LT(one.far.at_head->stats().bytes_out, 10'000u);
}

/// The head takes back what a lost host had; a fetch of it brings nothing more, and its lease ends.
TEST(ClientLink, ALostHostsLeases) {
  for (const bool is_fetch : {false, true}) {
    OneClient one;
    const uint64_t offset = one.block(1000, 1);
    one.command(is_fetch ? CommandKind::kFetch : CommandKind::kPut, one.future(2), one.future(2), offset, 1000);
    one.transmit();
    EXPECT_EQ(one.arena().was_references(offset), is_fetch ? 3u : 1u);
    const auto command = read_record<CommandRecord>(next(one.from_client));
    one.hub.return_lease(kClient, command.lease_at, 1);
    one.tell(joined(ReclaimRecord{{RecordKind::kReclaim, 0, kClient}, 0, 0, command.lease_stamp - 1}));
    one.transmit();
    EXPECT_GE(one.far.client.kept_elsewhere(), 1000u);  // that was before this lease
    one.tell(joined(ReclaimRecord{{RecordKind::kReclaim, 0, kClient}, 0, 0, command.lease_stamp}));
    one.transmit();
    one.far.client.poll_inbox();
    EXPECT_EQ(one.far.client.kept_elsewhere(), 0u);
    EXPECT_EQ(one.arena().was_references(offset), 1u);
  }
}

/// The client asks for no more memory than its arena has, here and at the head together.
TEST(ClientLink, WhatTheHeadKeepsCounts) {
  OneClient one;
  uint64_t sent = 0;
  std::deque<uint64_t> places;
  for (int step = 0; step < 300; ++step) {
    const size_t bytes = 1 + one.random() % 1'000'000;
    if (one.arena().bytes_in_use() + one.far.client.kept_elsewhere() + bytes <= one.arena().capacity()) {
      const uint64_t offset = one.block(bytes, bytes);
      one.command(CommandKind::kPut, Handle{sent + 1}, {}, offset, bytes);
      one.transmit();
      one.arena().release(offset);
      ++sent;
    } else {
      EXPECT_FALSE(places.empty());
      for (const uint32_t host : {0u, 1u}) one.hub.return_lease(kClient, places.front(), host);
      places.pop_front();
    }
    one.transmit();
    for (uint64_t at = one.place(); at != 0; at = one.place()) places.push_back(at);
    EXPECT_EQ(one.arena().bytes_in_use(), 0u);
  }
  EXPECT_GT(sent, 100u);
  for (const uint64_t at : places) {
    for (const uint32_t host : {0u, 1u}) one.hub.return_lease(kClient, at, host);
  }
  one.transmit();
  EXPECT_EQ(one.far.client.kept_elsewhere(), 0u);
}

TEST(ClientLink, AllClientsTogetherHaveABound) {
  constexpr uint64_t kMost = 1'000'000;
  LinkHub hub(kMost);
  hub.add_group(kGroup, {0});
  const auto has_room = [&](FarClient& client, uint64_t number, uint64_t bytes) {
    const BlockFrame block{number, bytes, 0};
    client.at_head->deliver(frame(FrameKind::kBlock, kGroup, 0, joined(block, uint64_t{1})));
    const uint64_t before = client.at_head->stats().dropped;
    client.at_head->deliver(frame(FrameKind::kData, 0, 0, joined(DataFrame{number, 0}, uint64_t{1})));
    return client.at_head->stats().dropped == before;
  };
  std::deque<FarClient> clients;  // come one after the other, and each takes what it can
  uint64_t all = 0;
  for (uint32_t n = 1; n <= 12; ++n) {
    FarClient& client = clients.emplace_back(hub, Client::Options{kClient + n, 64}, kSizes, head_clock, agent_clock);
    EXPECT_EQ(has_room(client, 1, 2'000), n == 1) << "it has not joined, so it has no part";
    hub.add_client(kClient + n, client.view(), nullptr, client.at_head);
    uint64_t taken = 0;
    for (uint64_t number = 2, bytes = kMost; number <= 12; ++number, bytes /= 2) {
      if (has_room(client, number, bytes)) taken += bytes;
    }
    EXPECT_GT(taken, kMost / (n * (n + 1)) / 2) << "its part, whatever the others take";
    all += taken;
  }
  EXPECT_LT(all, 2 * kMost);
  EXPECT_FALSE(has_room(clients.back(), 13, kMost / 4));
  clients.front().at_head->close();
  EXPECT_TRUE(has_room(clients.back(), 14, kMost / 4));
  for (uint32_t n = 1; n <= 12; ++n) hub.remove_client(kClient + n);
}

TEST(ClientLink, TimesAreDurations) {
  OneClient one;
  const ErrorText late = make_error_text("late");
  uint64_t result = 0;
  ASSERT_EQ(one.far.client.submit({1, kGroup, {1}}, {}, &result, {}, agent_clock_ns + 7'000, &late), Status::kOk);
  one.send_over(*one.far.at_client, *one.far.at_head);
  const Bytes record = next(one.from_client);
  ASSERT_FALSE(record.empty());
  EXPECT_EQ(read_record<int64_t>(std::span(record).last(8)), head_clock_ns + 7'000);
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
      one.send_over(*one.far.at_client, *one.far.at_head);
      one.send_over(*one.far.at_head, *one.far.at_client);
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
TEST(ClientLink, WhatTheClientDoesNotReadStaysAtHead) {
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
      one.send_over(*one.far.at_head, *one.far.at_client);
      one.send_over(*one.far.at_client, *one.far.at_head);
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
    bool at_head;
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
      {true, frame(FrameKind::kBlock, kGroup, 0, Bytes(23)), "a block of 23 bytes"},
      {true, frame(FrameKind::kBlock, kGroup, 0, Bytes(31)), "the stamp of a lease of 7 bytes"},
      {true, frame(FrameKind::kData, 0, 0, Bytes(15)), "bytes of a block of 15 bytes"},
      {true, frame(FrameKind::kCredit, 0, 0, Bytes(7)), "a credit of 7 bytes"},
      {true, frame(FrameKind::kCredit, 0, 0, word), "a credit for nothing"},
      {false, frame(FrameKind::kFromController, 1, 5, word), "a frame of kind 1, which no client takes"},
      {false, frame(FrameKind::kBlock, 1, 5, word), "a frame of kind 4, which no client takes"},
      {false, frame(FrameKind::kToClient, 0, 0, Bytes(7)), "a record of 7 bytes"},
      {false, frame(FrameKind::kFutureDone, 0, 0, Bytes(23)), "a frame of kind 11"},
      {false, frame(FrameKind::kRetired, 0, 0, Bytes(7)), "a count of runs of 7 bytes"},
      {false, frame(FrameKind::kStatus, 3, 0, {}), "a status that there is not"},
      {false, frame(FrameKind::kBlockOver, 0, 0, Bytes(7)), "the number of a block of 7 bytes"},
      {false, frame(FrameKind::kKept, 0, 0, Bytes(15)), "what the head keeps of 15 bytes"},
      {false, frame(FrameKind::kKept, 0, 0, joined(uint64_t{1}, uint64_t{0})), "more blocks than were sent"},
      {false, frame(FrameKind::kCredit, 0, 0, word), "a credit for nothing"},
  };
  for (const Case& each : cases) {
    OneClient one;
    Link& link = each.at_head ? static_cast<Link&>(*one.far.at_head) : *one.far.at_client;
    const std::string why = refusal(link, each.bytes);
    EXPECT_NE(why.find(each.text), std::string::npos) << why << ", expected " << each.text;
    EXPECT_TRUE(next(one.from_client).empty());
  }
}

TEST(ClientLink, NobodyWritesWhatWasNotLent) {
  OneClient one;
  const auto block = [&](uint64_t number, uint64_t bytes, uint64_t token = 0, uint32_t group = kGroup) {
    return frame(FrameKind::kBlock, group, 0, joined(BlockFrame{number, bytes, token}, uint64_t{1}));
  };
  const auto data = [&](uint64_t number, uint64_t at) {
    return frame(FrameKind::kData, 0, 0, joined(DataFrame{number, at}, uint64_t{1}));
  };
  const auto is_dropped = [](Link& link, const Bytes& bytes) {
    const uint64_t before = link.stats().dropped;
    EXPECT_EQ(refusal(link, bytes), "taken");
    return link.stats().dropped != before;
  };
  Link& head = *one.far.at_head;
  EXPECT_TRUE(is_dropped(head, data(1, 0)));
  EXPECT_EQ(refusal(head, block(1, 64, 0, 99)), "taken");  // a group that there is not
  EXPECT_TRUE(is_dropped(head, data(1, 0)));
  for (const uint64_t bytes : {uint64_t{1} << 40, UINT64_MAX, UINT64_MAX - 63, UINT64_MAX - 127}) {
    EXPECT_EQ(refusal(head, block(bytes, bytes)), "taken");  // there is no room
    EXPECT_TRUE(is_dropped(head, data(bytes, 0))) << bytes;
  }
  EXPECT_FALSE(is_dropped(head, block(3, 64)));
  EXPECT_TRUE(is_dropped(head, block(3, 64)));  // there is one
  EXPECT_FALSE(is_dropped(head, data(3, 56)));
  EXPECT_TRUE(is_dropped(head, data(3, 57)));
  EXPECT_TRUE(is_dropped(head, data(3, UINT64_MAX)));
  EXPECT_TRUE(is_dropped(head, data(4, 0)));
  EXPECT_FALSE(is_dropped(head, block(5, 64, 9)));
  EXPECT_TRUE(is_dropped(head, data(5, 0)));  // hosts fill it
  EXPECT_TRUE(is_dropped(head, block(6, 64, 9)));
  uint64_t taken = 0;  // the other end names one before it sends the next
  for (uint64_t number = 100; number < 200; ++number) taken += is_dropped(head, block(number, 64)) ? 0u : 1u;
  EXPECT_LT(taken, 16u);
  // The head writes to nothing of the client's but to what it fetches into.
  const uint64_t put = one.block(64, 1), fetched = one.block(64, 1);
  one.command(CommandKind::kPut, one.future(2), {}, put, 64);
  one.command(CommandKind::kFetch, one.future(1), one.future(2), fetched, 64);
  (void)one.far.at_client->collect(one.buffer);
  EXPECT_EQ(one.arena().was_references(put), 1u);
  Link& client = *one.far.at_client;
  EXPECT_TRUE(is_dropped(client, data(1, 0)));
  EXPECT_FALSE(is_dropped(client, data(2, 0)));
  EXPECT_TRUE(is_dropped(client, data(2, 60)));
  EXPECT_TRUE(is_dropped(client, data(3, 0)));
  const auto over = [&](uint64_t number) { return frame(FrameKind::kBlockOver, 0, 0, joined(number)); };
  EXPECT_TRUE(is_dropped(client, over(1)));
  EXPECT_FALSE(is_dropped(client, over(2)));
  EXPECT_EQ(one.arena().was_references(fetched), 1u);
  EXPECT_TRUE(is_dropped(client, over(2)));
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
    Link& to = random() % 2 == 0 ? static_cast<Link&>(*one.far.at_head) : *one.far.at_client;
    try {
      to.deliver(bytes);
      (void)to.collect(one.buffer);
    } catch (const Error&) {
    }
  }
}

}  // namespace
}  // namespace pathways::test::test_client_link
