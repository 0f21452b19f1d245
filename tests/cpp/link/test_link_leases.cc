// Memory that a client leases to hosts of another machine: the bytes cross once, by value, and the leases end.
//
//   LINK-2   LinkLeases.LeasesOfLostHosts
//   LINK-3   LinkLeases.Puts, LinkLeases.PartsOfPuts, LinkLeases.RandomLeases
//   ARENA-5  LinkLeases.LeasesOfLostHosts
#include <map>
#include <utility>

#include "link/leases.h"
#include "messages/leased_parts.h"

namespace pathways::test::test_link_leases {
namespace {

TEST(LinkLeases, Puts) {
  Leases head;
  for (const size_t bytes : {size_t{1}, size_t{64}, size_t{300'000}, size_t{3'000'000}}) {
    const uint64_t stamp = bytes, offset = head.block(bytes, 7, stamp);
    const Bytes value = pattern(bytes, stamp);
    std::memcpy(head.arena().at(offset), value.data(), bytes);
    const Bytes record = head.command(CommandKind::kPut, stamp, 0, offset, bytes, stamp);
    const uint64_t before = head[0].at_head->stats().bytes_out;
    for (const uint32_t host : {0u, 1u, 2u}) head.order(host, record);
    head.transmit();
    EXPECT_LT(head[0].at_head->stats().bytes_out - before, bytes + bytes / 100 + 2000);  // once for both hosts
    std::map<uint32_t, uint64_t> places;
    for (const uint32_t host : {0u, 1u, 2u}) {
      EXPECT_FALSE(head.is_lent(offset, host));
      Bytes came = next(head[host / 2].hosts.at(host).inbox);
      ASSERT_EQ(came.size(), record.size());
      const uint64_t at = places[host] = read_record<CommandRecord>(came).lease_at;
      const std::byte* here = head.there(host / 2).find_leased(at, bytes, host);
      ASSERT_NE(here, nullptr) << host;
      EXPECT_EQ(std::memcmp(here, value.data(), bytes), 0);
      EXPECT_EQ(head.there(host / 2).find_leased(at, bytes + 64, host), nullptr);
      set_lease(came, offset, bytes);
      EXPECT_EQ(came, record);
    }
    EXPECT_EQ(places[0], places[1]);
    EXPECT_EQ(head.there(0).find_leased(places[0], bytes, 2), nullptr);
    EXPECT_EQ(head.arena().was_references(offset), 1u);
    head.arena().release(offset);
    EXPECT_EQ(head.arena().bytes_in_use(), 0u);
    for (const uint32_t host : {0u, 2u, 1u}) {  // a block is there until the last host of its machine returns it
      EXPECT_NE(head.there(host / 2).find_leased(places[host], bytes, host), nullptr);
      EXPECT_TRUE(head.there(host / 2).return_lease(places[host], host));
      EXPECT_FALSE(head.there(host / 2).return_lease(places[host], host));
      head.transmit();
      EXPECT_EQ(head.there(host / 2).find(places[host], 1) == nullptr, host != 0);
    }
  }
}

/// To each machine goes what its hosts need, each byte once; where the client says nonsense, all of it.
TEST(LinkLeases, PartsOfPuts) {
  constexpr size_t kBytes = 300'000;
  const auto part = [](uint32_t host, uint64_t at, uint64_t bytes) { return LeasedPart{host, 0, at, bytes}; };
  const std::vector<LeasedPart> said{part(0, 0, 100'000), part(1, 50'000, 80'000), part(2, 200'000, 1000),
                                     part(2, 201'000, 1000), part(3, 0, kBytes)};
  struct Case {
    std::vector<LeasedPart> parts;
    uint32_t count;
    std::vector<BlockPiece> first, second;  ///< what goes to each machine
  };
  const std::vector<BlockPiece> all{{0, kBytes}};
  const auto outside = [&](LeasedPart wrong) {
    auto parts = said;
    parts.push_back(wrong);
    return Case{parts, 6, all, all};
  };
  const std::vector<Case> cases{{said, 5, {{0, 130'000}}, {{200'000, 2000}}},
                                {said, 0, all, all},
                                {said, 3, {{0, 130'000}}, {{200'000, 1000}}},
                                {{said[4]}, 1, {}, {}},
                                outside(part(0, kBytes, 1)),
                                outside(part(7, kBytes + 1, 0)),
                                outside(part(2, 1, UINT64_MAX))};
  uint64_t stamp = 0;
  for (const Case& each : cases) {
    SCOPED_TRACE(++stamp);
    Leases head;
    const size_t parts_bytes = each.parts.size() * sizeof(LeasedPart);
    const uint64_t offset = head.block(kBytes + parts_bytes, 7, stamp);
    const Bytes value = pattern(kBytes, stamp);
    std::memcpy(head.arena().at(offset), value.data(), kBytes);
    std::memcpy(head.arena().at(offset) + kBytes, each.parts.data(), parts_bytes);
    auto record = read_record<CommandRecord>(head.command(CommandKind::kPut, stamp, 0, offset, kBytes, stamp));
    record.lease_parts = each.count;
    for (const uint32_t host : {0u, 1u, 2u}) head.order(host, joined(record));
    head.transmit();
    for (const uint32_t host : {0u, 1u, 2u}) {
      EXPECT_FALSE(head.is_lent(offset, host));
      const std::byte* here = head.there(host / 2).find_leased(head.place(host), kBytes, host);
      ASSERT_NE(here, nullptr);
      Bytes want(kBytes);  // nothing else was written there
      for (const auto& [at, bytes] : host < 2 ? each.first : each.second) {
        std::memcpy(want.data() + at, value.data() + at, bytes);
      }
      EXPECT_EQ(std::memcmp(here, want.data(), kBytes), 0) << host;
    }
    const auto sent = head[1].at_head->stats().bytes_out;
    EXPECT_LT(sent, (each.second.empty() ? 0 : each.second[0].bytes) + kBytes / 100 + 2000);
  }
}

/// More than the block has, or than a block may say: it is not there, and nothing is made of that size.
TEST(LinkLeases, MorePartsThanThereAre) {
  for (const uint32_t count : {9u, kMostLeasedParts, kMostLeasedParts + 1, UINT32_MAX}) {
    Leases head;
    const uint64_t offset = head.block(64 + sizeof(LeasedPart), 7, 1);
    auto record = read_record<CommandRecord>(head.command(CommandKind::kPut, 1, 0, offset, 64, 1));
    record.lease_parts = count;
    head.order(0, joined(record));
    head.transmit();
    EXPECT_EQ(head.place(0), 0u) << count;
  }
  CommandRecord record{};
  record.lease_bytes = UINT64_MAX - 10;
  record.lease_parts = 1;
  EXPECT_EQ(leased_bytes(record), UINT64_MAX);
}

TEST(LinkLeases, RefusedPutsEndTheirLeases) {
  Leases head;
  const uint64_t offset = head.block(1'000'000, 3, 1);
  auto record = read_record<CommandRecord>(head.command(CommandKind::kPut, 1, 0, offset, 1'000'000, 1));
  record.is_refused = 1;
  head.order(0, joined(record));
  head.transmit();
  EXPECT_LT(head[0].at_head->stats().bytes_out, 2000u);
  EXPECT_FALSE(head.is_lent(offset, 0));
  EXPECT_TRUE(head.is_lent(offset, 1));
  const auto came = read_record<CommandRecord>(next(head[0].hosts.at(0).inbox));
  EXPECT_EQ(came.lease_bytes, 0u);
  EXPECT_EQ(came.is_refused, 1);
}

/// What the client has not leased there, or what finds no room, lies nowhere: its hosts refuse it.
TEST(LinkLeases, WhatLiesNowhere) {
  Head head(1);
  head[0].add_host(0, 5);
  head.hub.add_group(Head::kGroup, {0});
  head[0].twin_client(Head::kClient, 1 << 20);
  const auto place = [&](uint64_t handle, uint64_t offset, uint64_t bytes) {
    put(head[0].hosts.at(0).orders, head.command(CommandKind::kPut, handle, 0, offset, bytes, handle));
    head.transmit();
    const auto came = read_record<CommandRecord>(next(head[0].hosts.at(0).inbox));
    EXPECT_EQ(came.lease_bytes, bytes);
    return came.lease_at;
  };
  uint64_t big = 0, small = 0;
  ASSERT_EQ(head.arena().allocate(2 << 20, &big), Status::kOk);
  ASSERT_EQ(head.arena().allocate(1000, &small), Status::kOk);
  EXPECT_EQ(place(1, small, 1000), 0u);  // not leased
  head.arena().lease_out(big, 1, 1);
  head.arena().lease_out(small, 1, 2);
  EXPECT_EQ(place(2, small + 64, 64), 0u);
  EXPECT_EQ(place(3, UINT64_MAX - 63, 64), 0u);
  EXPECT_EQ(place(4, big, 2 << 20), 0u);
  EXPECT_EQ(head.arena().was_references(big), 1u);
  EXPECT_NE(place(5, small, 1000), 0u);
}

/// A block is for the hosts to which the client has leased it: the others refuse it, and nobody waits for them.
TEST(LinkLeases, OnlyForThoseThatHaveIt) {
  Leases head;
  head.hub.add_group(Head::kGroup, {0, 1});
  uint64_t stamp = 0;
  for (const uint32_t with : {0u, 1u}) {
    const uint64_t offset = head.block(64, uint64_t{1} << with, ++stamp);
    const Bytes record = head.command(CommandKind::kPut, stamp, 0, offset, 64, stamp);
    for (const uint32_t host : {0u, 1u}) head.order(host, record);
    head.transmit();
    const uint64_t at = head.place(with);
    EXPECT_NE(head.there(0).find_leased(at, 64, with), nullptr);
    EXPECT_EQ(head.place(1 - with), 0u);
    EXPECT_FALSE(head.is_lent(offset, with));
    EXPECT_TRUE(head.there(0).return_lease(at, with));
    head.transmit();
    EXPECT_EQ(head.there(0).find(at, 1), nullptr);
    head.arena().release(offset);
  }
  // The same command again, from a client that lies: each host has one of the two.
  const uint64_t offset = head.block(64, 3, ++stamp);
  const Bytes record = head.command(CommandKind::kPut, stamp, 0, offset, 64, stamp);
  for (const uint32_t host : {0u, 0u, 1u}) head.order(host, record);
  head.transmit();
  const uint64_t at = head.place(0);
  EXPECT_NE(at, 0u);
  EXPECT_EQ(head.place(0), 0u);
  EXPECT_EQ(head.place(1), at);
}

/// Hosts with high numbers have counted references, which no stamp names.
TEST(LinkLeases, HostsThatCannotBorrow) {
  Head head(1);
  head[0].add_host(0, 5);
  head[0].add_host(Arena::kBorrowers, 5);
  head.hub.add_group(Head::kGroup, {Arena::kBorrowers});
  head[0].twin_client(Head::kClient, head.arena_bytes());
  for (uint64_t handle = 1; handle < 4; ++handle) {
    uint64_t offset = 0;
    ASSERT_EQ(head.arena().allocate(100, &offset), Status::kOk);
    std::memset(head.arena().at(offset), static_cast<int>(handle), 100);
    head.arena().retain(offset);
    put(head[0].hosts.at(Arena::kBorrowers).orders, head.command(CommandKind::kPut, handle, 0, offset, 100, 0));
    head.transmit();
    EXPECT_EQ(head.arena().was_references(offset), 1u);
    head.arena().release(offset);
    const auto came = read_record<CommandRecord>(next(head[0].hosts.at(Arena::kBorrowers).inbox));
    const ArenaView there = ClientView(head[0].clients.at(Head::kClient)).arena();
    const std::byte* here = there.find(came.lease_at, 100);
    ASSERT_NE(here, nullptr);
    EXPECT_EQ(here[99], static_cast<std::byte>(handle));
    EXPECT_TRUE(there.release(came.lease_at));
    head.transmit();
    EXPECT_EQ(there.find(came.lease_at, 1), nullptr);
  }
}

/// ARENA-5: nothing that a lost host's machine still says touches what its successor has been lent.
TEST(LinkLeases, LeasesOfLostHosts) {
  for (const CommandKind kind : {CommandKind::kPut, CommandKind::kFetch}) {
    Leases head;
    head.hub.add_group(Head::kGroup, {2});
    uint64_t offset = head.block(64, 4, 1);
    const Handle token = head.future();
    head.order(2, head.command(kind, 77, token.raw, offset, 64, 1));
    head.transmit();
    const uint64_t at = head.place(2);
    std::memset(head.there(1).find_leased(at, 64, 2), 2, 64);
    EXPECT_TRUE(head.there(1).return_lease(at, 2));
    head.complete(2, token, 0, 64);
    pass_time(10'000'000);
    for (int i = 0; i < 3; ++i) {
      head[1].collect();
      pass_time(10'000'000);
    }
    // All that is on its way when the head knows that the host is lost. The block is leased anew, at the same place.
    head[1].remove_host(2);
    head.arena().reclaim(2, 1);
    head.arena().release(offset);
    EXPECT_EQ(head.arena().bytes_in_use(), 0u);
    const uint64_t again = head.block(64, 4, 2);
    ASSERT_EQ(again, offset);
    std::memset(head.arena().at(offset), 3, 64);
    head[1].add_host(2, 6);
    head[1].twin_client(Head::kClient, head.arena_bytes());
    head[1].deliver_all();
    EXPECT_EQ(head.futures().poll(token), FutureState::kPending);
    EXPECT_TRUE(head.is_lent(offset, 2));
    EXPECT_EQ(head.arena().at(offset)[0], std::byte{3});
    head.order(2, head.command(CommandKind::kPut, 78, 0, offset, 64, 2));
    head.transmit();
    EXPECT_FALSE(head.is_lent(offset, 2));
    const uint64_t there = head.place(2);
    const std::byte* here = head.there(1).find_leased(there, 64, 2);
    ASSERT_NE(here, nullptr);
    EXPECT_EQ(here[63], std::byte{3});
    EXPECT_TRUE(head.there(1).return_lease(there, 2));
  }
}

/// A host is lost while bytes that were lent to it are under way: its successor's lease, at the same place, stays.
TEST(LinkLeases, AHostIsLostWhileABlockIsSent) {
  Leases head;
  head.hub.add_group(Head::kGroup, {2});
  const uint64_t offset = head.block(3'000'000, 4, 1);
  head.order(2, head.command(CommandKind::kPut, 77, 0, offset, 3'000'000, 1));
  head[1].collect();
  EXPECT_LT(head[1].out.left(), 2'000'000u);
  head[1].remove_host(2);
  head.arena().reclaim(2, 1);
  head.arena().release(offset);
  ASSERT_EQ(head.block(3'000'000, 4, 2), offset);
  head[1].add_host(2, 6);
  head[1].twin_client(Head::kClient, head.arena_bytes());
  head.transmit();
  EXPECT_TRUE(head.is_lent(offset, 2));
  EXPECT_LT(head[1].at_head->stats().bytes_out, 2'000'000u);  // nobody needs the rest of the old one
}

/// Blocks of random sizes, put and fetched in random order while hosts return them at random times.
TEST(LinkLeases, RandomLeases) {
  const Watchdog watchdog("links with random leases");
  std::mt19937_64 random(seed());
  const auto below = [&](uint64_t n) { return random() % n; };
  Leases head;
  struct Lent {
    Bytes value;
    Handle token;     ///< of a fetch
    uint64_t offset;  ///< 0: the client has it back
    uint64_t stamp;
    std::vector<uint32_t> hosts;  ///< that have not returned it
  };
  std::map<uint64_t, Lent> lent;  // by stamp
  uint64_t stamp = 0, puts = 0, fetches = 0;
  std::map<std::pair<uint32_t, uint64_t>, uint64_t> came;  // by host and stamp of the commands: where their blocks lie
  const auto look = [&](Lent& each) {
    for (const uint32_t host : {0u, 1u}) {
      for (Bytes record = next(head[0].hosts.at(host).inbox); !record.empty();
           record = next(head[0].hosts.at(host).inbox)) {
        const auto command = read_record<CommandRecord>(record);
        came[{host, command.lease_stamp}] = command.lease_at;
      }
    }
    if (each.hosts.empty()) return;
    const uint32_t host = each.hosts[below(each.hosts.size())];
    if (!came.contains({host, each.stamp})) return;
    const uint64_t at = came[{host, each.stamp}];
    std::byte* here = head.there(0).find_leased(at, each.value.size(), host);
    ASSERT_NE(here, nullptr);
    const size_t half = each.value.size() / 2, from = host == 0 ? 0 : half,
                 count = host == 0 ? half : each.value.size() - half;
    if (each.token.valid()) {
      std::memcpy(here + from, each.value.data() + from, count);
    } else {
      ASSERT_EQ(std::memcmp(here, each.value.data(), each.value.size()), 0);
    }
    ASSERT_TRUE(head.there(0).return_lease(at, host));
    if (each.token.valid()) head.complete(host, each.token, from, count);
    std::erase(each.hosts, host);
  };
  head.hub.add_group(Head::kGroup, {0, 1});
  const auto finish = [&] {
    for (auto at = lent.begin(); at != lent.end();) {
      Lent& block = at->second;
      const bool is_back = block.offset != 0 && !head.is_lent(block.offset, 0) && !head.is_lent(block.offset, 1) &&
                           (!block.token.valid() || head.futures().poll(block.token) == FutureState::kReady);
      if (is_back && block.token.valid()) {
        EXPECT_EQ(std::memcmp(head.arena().at(block.offset), block.value.data(), block.value.size()), 0);
        (void)head.futures().release(block.token);
        ++fetches;
      } else if (is_back) {  // the client's memory may be another's, although the hosts still read the block
        std::memset(head.arena().at(block.offset), 0xee, block.value.size());
        ++puts;
      }
      if (is_back) head.arena().release(std::exchange(block.offset, 0));
      at = block.offset == 0 && block.hosts.empty() ? lent.erase(at) : std::next(at);
    }
  };
  for (int step = 0; step < 1500 * kStressScale; ++step) {
    switch (below(5)) {
      case 0: {
        if (lent.size() >= 8) break;
        const size_t bytes = 1 + below(below(6) == 0 ? 600'000 : 3000);
        uint64_t offset = 0;
        if (head.arena().allocate(bytes, &offset) != Status::kOk) break;
        head.arena().lease_out(offset, 3, ++stamp);
        Lent block{pattern(bytes, random()), {}, offset, stamp, {0, 1}};
        const bool is_fetch = below(2) == 0;
        if (is_fetch) {
          block.token = head.future(2);
        } else {
          std::memcpy(head.arena().at(offset), block.value.data(), bytes);
        }
        const Bytes record = head.command(is_fetch ? CommandKind::kFetch : CommandKind::kPut, stamp, block.token.raw,
                                          offset, bytes, stamp);
        for (const uint32_t host : {0u, 1u}) head.order(host, record);
        lent.emplace(stamp, std::move(block));
        break;
      }
      case 1:
        head[0].collect();
        pass_time(static_cast<int64_t>(below(5'000'000)));
        break;
      case 2:
        head[0].deliver(*head[0].here, head[0].out, below(100'000));
        break;
      case 3:
        head[0].deliver(*head[0].at_head, head[0].in, below(100'000));
        break;
      default:
        if (!lent.empty()) {
          auto at = lent.begin();
          std::advance(at, static_cast<std::ptrdiff_t>(below(lent.size())));
          look(at->second);
        }
        finish();
    }
    if (HasFatalFailure()) return;
  }
  for (int i = 0; i < 1000 && !lent.empty(); ++i) {
    head.transmit();
    for (auto& each : lent) look(each.second);
    if (HasFatalFailure()) return;
    head.transmit();
    finish();
  }
  EXPECT_TRUE(lent.empty());
  EXPECT_EQ(head.arena().bytes_in_use(), 0u);
  head.arena().validate();
  EXPECT_GT(puts, 20u);
  EXPECT_GT(fetches, 20u);
}

TEST(LinkLeases, ClientsThatAreGone) {
  Leases head;
  const uint64_t offset = head.block(64, 3, 1);
  head.hub.add_group(Head::kGroup, {0, 1});
  const Bytes record = head.command(CommandKind::kPut, 1, 0, offset, 64, 1);
  const Bytes gone = joined(ClientGoneRecord{{RecordKind::kClientGone, 0, Head::kClient}});
  head.order(0, record);
  head.order(0, gone);
  head.order(1, record);
  head.transmit();
  head.hub.remove_client(Head::kClient);
  const uint64_t at = head.place(1);
  EXPECT_NE(head.there(0).find_leased(at, 64, 1), nullptr);
  EXPECT_TRUE(head.there(0).return_lease(at, 0));
  head.order(1, gone);
  head.transmit();
  EXPECT_TRUE(head.there(0).return_lease(at, 1));  // the host's own mapping stays
  head.transmit();
  EXPECT_EQ(next(head[0].hosts.at(1).inbox), gone);
}

}  // namespace
}  // namespace pathways::test::test_link_leases
