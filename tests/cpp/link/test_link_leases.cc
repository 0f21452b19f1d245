// Memory that a client leases to hosts of another machine: the bytes cross once, by value, and the leases end.
//
//   LINK-2   LinkLeases.LeasesOfLostHosts
//   LINK-3   LinkLeases.Puts, LinkLeases.Fetches, LinkLeases.ALeaseEndsBehindTheBytes, LinkLeases.RandomLeases
//   ARENA-5  LinkLeases.LeasesOfLostHosts
#include <map>
#include <utility>

#include "link/link_ends.h"

namespace pathways::test::test_link_leases {
namespace {

/// A client's blocks that are leased to hosts 0 and 1 of one machine, and to host 2 of another.
struct Leases : Home {
  Leases() : Home(2) {
    for (uint32_t host = 0; host < 3; ++host) (*this)[host / 2].add_host(host, 5);
    hub.add_group(kGroup, {0, 1, 2});
    for (size_t m = 0; m < 2; ++m) (*this)[m].twin_client(kClient, arena_bytes());
  }
  ArenaView there(size_t machine) { return ClientView((*this)[machine].clients.at(kClient)).arena(); }
  void order(uint32_t host, const Bytes& record) { put((*this)[host / 2].hosts.at(host).orders, record); }
  uint64_t block(size_t bytes, uint64_t borrowers, uint64_t stamp) {
    uint64_t offset = 0;
    EXPECT_EQ(arena().allocate(bytes, &offset), Status::kOk);
    if (borrowers != 0) arena().lease_out(offset, borrowers, stamp);
    return offset;
  }
  bool is_lent(uint64_t offset, unsigned host) { return ClientView(client).arena().find_leased(offset, 1, host); }
  /// Where the block of the host's next command lies on its machine.
  uint64_t place(uint32_t host) {
    const Bytes record = next((*this)[host / 2].hosts.at(host).inbox);
    return record.empty() ? 0 : read_record<CommandRecord>(record).lease_at;
  }
  void complete(uint32_t host, Handle token) {
    put((*this)[host / 2].hosts.at(host).outgoing,
        joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, Home::kClient}, token.raw, 0, 0}));
  }
};

TEST(LinkLeases, Puts) {
  Leases home;
  for (const size_t bytes : {size_t{1}, size_t{64}, size_t{300'000}, size_t{3'000'000}}) {
    const uint64_t stamp = bytes, offset = home.block(bytes, 7, stamp);
    const Bytes value = pattern(bytes, stamp);
    std::memcpy(home.arena().at(offset), value.data(), bytes);
    const Bytes record = home.command(CommandKind::kPut, stamp, 0, offset, bytes, stamp);
    const uint64_t before = home[0].at_home->stats().bytes_out;
    for (const uint32_t host : {0u, 1u, 2u}) home.order(host, record);
    home.transmit();
    EXPECT_LT(home[0].at_home->stats().bytes_out - before, bytes + bytes / 100 + 2000);  // once for both hosts
    std::map<uint32_t, uint64_t> places;
    for (const uint32_t host : {0u, 1u, 2u}) {
      EXPECT_FALSE(home.is_lent(offset, host));
      Bytes came = next(home[host / 2].hosts.at(host).inbox);
      ASSERT_EQ(came.size(), record.size());
      const uint64_t at = places[host] = read_record<CommandRecord>(came).lease_at;
      const std::byte* here = home.there(host / 2).find_leased(at, bytes, host);
      ASSERT_NE(here, nullptr) << host;
      EXPECT_EQ(std::memcmp(here, value.data(), bytes), 0);
      EXPECT_EQ(home.there(host / 2).find_leased(at, bytes + 64, host), nullptr);
      set_lease(came, offset, bytes);
      EXPECT_EQ(came, record);
    }
    EXPECT_EQ(places[0], places[1]);
    EXPECT_EQ(home.there(0).find_leased(places[0], bytes, 2), nullptr);
    EXPECT_EQ(home.arena().was_references(offset), 1u);
    home.arena().release(offset);
    EXPECT_EQ(home.arena().bytes_in_use(), 0u);
    for (const uint32_t host : {0u, 2u, 1u}) {  // a block is there until the last host of its machine returns it
      EXPECT_NE(home.there(host / 2).find_leased(places[host], bytes, host), nullptr);
      EXPECT_TRUE(home.there(host / 2).return_lease(places[host], host));
      EXPECT_FALSE(home.there(host / 2).return_lease(places[host], host));
      home.transmit();
      EXPECT_EQ(home.there(host / 2).find(places[host], 1) == nullptr, host != 0);
    }
  }
}

TEST(LinkLeases, RefusedPutsEndTheirLeases) {
  Leases home;
  const uint64_t offset = home.block(1'000'000, 3, 1);
  auto record = read_record<CommandRecord>(home.command(CommandKind::kPut, 1, 0, offset, 1'000'000, 1));
  record.is_refused = 1;
  home.order(0, joined(record));
  home.transmit();
  EXPECT_LT(home[0].at_home->stats().bytes_out, 2000u);
  EXPECT_FALSE(home.is_lent(offset, 0));
  EXPECT_TRUE(home.is_lent(offset, 1));
  const auto came = read_record<CommandRecord>(next(home[0].hosts.at(0).inbox));
  EXPECT_EQ(came.lease_bytes, 0u);
  EXPECT_EQ(came.is_refused, 1);
}

/// What the client has not leased there, or what finds no room, lies nowhere: its hosts refuse it.
TEST(LinkLeases, WhatLiesNowhere) {
  Home home(1);
  home[0].add_host(0, 5);
  home.hub.add_group(Home::kGroup, {0});
  home[0].twin_client(Home::kClient, 1 << 20);
  const auto place = [&](uint64_t handle, uint64_t offset, uint64_t bytes) {
    put(home[0].hosts.at(0).orders, home.command(CommandKind::kPut, handle, 0, offset, bytes, handle));
    home.transmit();
    const auto came = read_record<CommandRecord>(next(home[0].hosts.at(0).inbox));
    EXPECT_EQ(came.lease_bytes, bytes);
    return came.lease_at;
  };
  uint64_t big = 0, small = 0;
  ASSERT_EQ(home.arena().allocate(2 << 20, &big), Status::kOk);
  ASSERT_EQ(home.arena().allocate(1000, &small), Status::kOk);
  EXPECT_EQ(place(1, small, 1000), 0u);  // not leased
  home.arena().lease_out(big, 1, 1);
  home.arena().lease_out(small, 1, 2);
  EXPECT_EQ(place(2, small + 64, 64), 0u);
  EXPECT_EQ(place(3, UINT64_MAX - 63, 64), 0u);
  EXPECT_EQ(place(4, big, 2 << 20), 0u);
  EXPECT_EQ(home.arena().was_references(big), 1u);
  EXPECT_NE(place(5, small, 1000), 0u);
}

/// A block is for the hosts to which the client has leased it: the others refuse it, and nobody waits for them.
TEST(LinkLeases, OnlyForThoseThatHaveIt) {
  Leases home;
  home.hub.add_group(Home::kGroup, {0, 1});
  uint64_t stamp = 0;
  for (const uint32_t with : {0u, 1u}) {
    const uint64_t offset = home.block(64, uint64_t{1} << with, ++stamp);
    const Bytes record = home.command(CommandKind::kPut, stamp, 0, offset, 64, stamp);
    for (const uint32_t host : {0u, 1u}) home.order(host, record);
    home.transmit();
    const uint64_t at = home.place(with);
    EXPECT_NE(home.there(0).find_leased(at, 64, with), nullptr);
    EXPECT_EQ(home.place(1 - with), 0u);
    EXPECT_FALSE(home.is_lent(offset, with));
    EXPECT_TRUE(home.there(0).return_lease(at, with));
    home.transmit();
    EXPECT_EQ(home.there(0).find(at, 1), nullptr);
    home.arena().release(offset);
  }
  // The same command again, from a client that lies: each host has one of the two.
  const uint64_t offset = home.block(64, 3, ++stamp);
  const Bytes record = home.command(CommandKind::kPut, stamp, 0, offset, 64, stamp);
  for (const uint32_t host : {0u, 0u, 1u}) home.order(host, record);
  home.transmit();
  const uint64_t at = home.place(0);
  EXPECT_NE(at, 0u);
  EXPECT_EQ(home.place(0), 0u);
  EXPECT_EQ(home.place(1), at);
}

/// Hosts with high numbers have counted references, which no stamp names.
TEST(LinkLeases, HostsThatCannotBorrow) {
  Home home(1);
  home[0].add_host(0, 5);
  home[0].add_host(Arena::kBorrowers, 5);
  home.hub.add_group(Home::kGroup, {Arena::kBorrowers});
  home[0].twin_client(Home::kClient, home.arena_bytes());
  for (uint64_t handle = 1; handle < 4; ++handle) {
    uint64_t offset = 0;
    ASSERT_EQ(home.arena().allocate(100, &offset), Status::kOk);
    std::memset(home.arena().at(offset), static_cast<int>(handle), 100);
    home.arena().retain(offset);
    put(home[0].hosts.at(Arena::kBorrowers).orders, home.command(CommandKind::kPut, handle, 0, offset, 100, 0));
    home.transmit();
    EXPECT_EQ(home.arena().was_references(offset), 1u);
    home.arena().release(offset);
    const auto came = read_record<CommandRecord>(next(home[0].hosts.at(Arena::kBorrowers).inbox));
    const ArenaView there = ClientView(home[0].clients.at(Home::kClient)).arena();
    const std::byte* here = there.find(came.lease_at, 100);
    ASSERT_NE(here, nullptr);
    EXPECT_EQ(here[99], static_cast<std::byte>(handle));
    EXPECT_TRUE(there.release(came.lease_at));
    home.transmit();
    EXPECT_EQ(there.find(came.lease_at, 1), nullptr);
  }
}

TEST(LinkLeases, Fetches) {
  Leases home;
  for (const size_t bytes : {size_t{1}, size_t{300'000}, size_t{2'000'000}}) {
    const uint64_t stamp = bytes, offset = home.block(bytes, 3, stamp);
    const Handle token = home.future(2);
    for (const uint32_t host : {0u, 1u}) {
      home.order(host, home.command(CommandKind::kFetch, 77, token.raw, offset, bytes, stamp));
    }
    home.transmit();
    const Bytes value = pattern(bytes, stamp + 1);
    for (const uint32_t host : {0u, 1u}) {
      const uint64_t at = home.place(host);
      std::byte* here = home.there(0).find_leased(at, bytes, host);
      ASSERT_NE(here, nullptr);
      const size_t half = host == 0 ? 0 : bytes / 2;  // each its share
      std::memcpy(here + half, value.data() + half, host == 0 ? bytes / 2 : bytes - half);
      EXPECT_TRUE(home.there(0).return_lease(at, host));
      home.transmit();
      EXPECT_EQ(home.futures().poll(token), FutureState::kPending);
      EXPECT_TRUE(home.is_lent(offset, host));
      home.complete(host, token);
      home.transmit();
      EXPECT_FALSE(home.is_lent(offset, host));
      EXPECT_EQ(home.there(0).find(at, 1) == nullptr, host == 1);
    }
    EXPECT_EQ(home.futures().poll(token), FutureState::kReady);
    EXPECT_EQ(std::memcmp(home.arena().at(offset), value.data(), bytes), 0);
    EXPECT_EQ(home.arena().was_references(offset), 1u);
    home.arena().release(offset);
  }
}

TEST(LinkLeases, AFetchThatFailedBringsNothing) {
  Leases home;
  const uint64_t offset = home.block(64, 1, 1);
  std::memset(home.arena().at(offset), 1, 64);
  const Handle token = home.future();
  home.hub.add_group(Home::kGroup, {0});
  home.order(0, home.command(CommandKind::kFetch, 77, token.raw, offset, 64, 1));
  home.transmit();
  const uint64_t at = home.place(0);
  std::memset(home.there(0).find_leased(at, 64, 0), 2, 64);
  EXPECT_TRUE(home.there(0).return_lease(at, 0));
  home.transmit();
  EXPECT_TRUE(home.is_lent(offset, 0));  // not before the fetch is over
  const Bytes failed = joined(FailedRecord{{RecordKind::kFailed, 0, Home::kClient}, token.raw, 0, 0});
  put(home[0].hosts.at(0).outgoing, failed);
  home.transmit();
  EXPECT_EQ(next(home[0].hosts.at(0).reports), failed);
  EXPECT_EQ(home.arena().at(offset)[0], std::byte{1});
  EXPECT_FALSE(home.is_lent(offset, 0));
  EXPECT_EQ(home.there(0).find(at, 1), nullptr);
}

/// Else the memory could be another's when the bytes come.
TEST(LinkLeases, ALeaseEndsBehindTheBytes) {
  Leases home;
  const size_t bytes = 900'000;
  home.hub.add_group(Home::kGroup, {0});
  const uint64_t offset = home.block(bytes, 1, 1);
  const Handle token = home.future();
  home.order(0, home.command(CommandKind::kFetch, 77, token.raw, offset, bytes, 1));
  home.transmit();
  const uint64_t at = home.place(0);
  std::memset(home.there(0).find_leased(at, bytes, 0), 2, bytes);
  EXPECT_TRUE(home.there(0).return_lease(at, 0));
  home.complete(0, token);
  for (int i = 0; i < 5; ++i) {
    pass_time(10'000'000);
    home[0].collect();
  }
  while (home[0].in.left() != 0) {
    home[0].deliver(*home[0].at_home, home[0].in, 1000);
    if (!home.is_lent(offset, 0)) break;
  }
  EXPECT_EQ(home.arena().at(offset)[bytes - 1], std::byte{2});
  home[0].deliver_all();
  EXPECT_EQ(home.futures().poll(token), FutureState::kReady);
  EXPECT_FALSE(home.is_lent(offset, 0));
}

/// ARENA-5: nothing that a lost host's machine still says touches what its successor has been lent.
TEST(LinkLeases, LeasesOfLostHosts) {
  for (const CommandKind kind : {CommandKind::kPut, CommandKind::kFetch}) {
    Leases home;
    home.hub.add_group(Home::kGroup, {2});
    uint64_t offset = home.block(64, 4, 1);
    const Handle token = home.future();
    home.order(2, home.command(kind, 77, token.raw, offset, 64, 1));
    home.transmit();
    const uint64_t at = home.place(2);
    std::memset(home.there(1).find_leased(at, 64, 2), 2, 64);
    EXPECT_TRUE(home.there(1).return_lease(at, 2));
    home.complete(2, token);
    pass_time(10'000'000);
    for (int i = 0; i < 3; ++i) {
      home[1].collect();
      pass_time(10'000'000);
    }
    // All that is on its way when home knows that the host is lost. The block is leased anew, at the same place.
    home[1].remove_host(2);
    home.arena().reclaim(2, 1);
    home.arena().release(offset);
    EXPECT_EQ(home.arena().bytes_in_use(), 0u);
    const uint64_t again = home.block(64, 4, 2);
    ASSERT_EQ(again, offset);
    std::memset(home.arena().at(offset), 3, 64);
    home[1].add_host(2, 6);
    home[1].twin_client(Home::kClient, home.arena_bytes());
    home[1].deliver_all();
    EXPECT_EQ(home.futures().poll(token), FutureState::kPending);
    EXPECT_TRUE(home.is_lent(offset, 2));
    EXPECT_EQ(home.arena().at(offset)[0], std::byte{3});
    home.order(2, home.command(CommandKind::kPut, 78, 0, offset, 64, 2));
    home.transmit();
    EXPECT_FALSE(home.is_lent(offset, 2));
    const uint64_t there = home.place(2);
    const std::byte* here = home.there(1).find_leased(there, 64, 2);
    ASSERT_NE(here, nullptr);
    EXPECT_EQ(here[63], std::byte{3});
    EXPECT_TRUE(home.there(1).return_lease(there, 2));
  }
}

/// A host is lost while bytes that were lent to it are under way: its successor's lease, at the same place, stays.
TEST(LinkLeases, AHostIsLostWhileABlockIsSent) {
  Leases home;
  home.hub.add_group(Home::kGroup, {2});
  const uint64_t offset = home.block(3'000'000, 4, 1);
  home.order(2, home.command(CommandKind::kPut, 77, 0, offset, 3'000'000, 1));
  home[1].collect();
  EXPECT_LT(home[1].out.left(), 2'000'000u);
  home[1].remove_host(2);
  home.arena().reclaim(2, 1);
  home.arena().release(offset);
  ASSERT_EQ(home.block(3'000'000, 4, 2), offset);
  home[1].add_host(2, 6);
  home[1].twin_client(Home::kClient, home.arena_bytes());
  home.transmit();
  EXPECT_TRUE(home.is_lent(offset, 2));
  EXPECT_LT(home[1].at_home->stats().bytes_out, 2'000'000u);  // nobody needs the rest of the old one
}

/// Blocks of random sizes, put and fetched in random order while hosts return them at random times.
TEST(LinkLeases, RandomLeases) {
  const Watchdog watchdog("links with random leases");
  std::mt19937_64 random(seed());
  const auto below = [&](uint64_t n) { return random() % n; };
  Leases home;
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
      for (Bytes record = next(home[0].hosts.at(host).inbox); !record.empty();
           record = next(home[0].hosts.at(host).inbox)) {
        const auto command = read_record<CommandRecord>(record);
        came[{host, command.lease_stamp}] = command.lease_at;
      }
    }
    if (each.hosts.empty()) return;
    const uint32_t host = each.hosts[below(each.hosts.size())];
    if (!came.contains({host, each.stamp})) return;
    const uint64_t at = came[{host, each.stamp}];
    std::byte* here = home.there(0).find_leased(at, each.value.size(), host);
    ASSERT_NE(here, nullptr);
    if (each.token.valid()) {
      std::memcpy(here, each.value.data(), each.value.size());
    } else {
      ASSERT_EQ(std::memcmp(here, each.value.data(), each.value.size()), 0);
    }
    ASSERT_TRUE(home.there(0).return_lease(at, host));
    if (each.token.valid()) home.complete(host, each.token);
    std::erase(each.hosts, host);
  };
  home.hub.add_group(Home::kGroup, {0, 1});
  const auto finish = [&] {
    for (auto at = lent.begin(); at != lent.end();) {
      Lent& block = at->second;
      const bool is_back = block.offset != 0 && !home.is_lent(block.offset, 0) && !home.is_lent(block.offset, 1) &&
                           (!block.token.valid() || home.futures().poll(block.token) == FutureState::kReady);
      if (is_back && block.token.valid()) {
        EXPECT_EQ(std::memcmp(home.arena().at(block.offset), block.value.data(), block.value.size()), 0);
        (void)home.futures().release(block.token);
        ++fetches;
      } else if (is_back) {  // the client's memory may be another's, although the hosts still read the block
        std::memset(home.arena().at(block.offset), 0xee, block.value.size());
        ++puts;
      }
      if (is_back) home.arena().release(std::exchange(block.offset, 0));
      at = block.offset == 0 && block.hosts.empty() ? lent.erase(at) : std::next(at);
    }
  };
  for (int step = 0; step < 1500 * kStressScale; ++step) {
    switch (below(5)) {
      case 0: {
        if (lent.size() >= 8) break;
        const size_t bytes = 1 + below(below(6) == 0 ? 600'000 : 3000);
        uint64_t offset = 0;
        if (home.arena().allocate(bytes, &offset) != Status::kOk) break;
        home.arena().lease_out(offset, 3, ++stamp);
        Lent block{pattern(bytes, random()), {}, offset, stamp, {0, 1}};
        const bool is_fetch = below(2) == 0;
        if (is_fetch) {
          block.token = home.future(2);
        } else {
          std::memcpy(home.arena().at(offset), block.value.data(), bytes);
        }
        const Bytes record = home.command(is_fetch ? CommandKind::kFetch : CommandKind::kPut, stamp, block.token.raw,
                                          offset, bytes, stamp);
        for (const uint32_t host : {0u, 1u}) home.order(host, record);
        lent.emplace(stamp, std::move(block));
        break;
      }
      case 1:
        home[0].collect();
        pass_time(static_cast<int64_t>(below(5'000'000)));
        break;
      case 2:
        home[0].deliver(*home[0].here, home[0].out, below(100'000));
        break;
      case 3:
        home[0].deliver(*home[0].at_home, home[0].in, below(100'000));
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
    home.transmit();
    for (auto& each : lent) look(each.second);
    if (HasFatalFailure()) return;
    home.transmit();
    finish();
  }
  EXPECT_TRUE(lent.empty());
  EXPECT_EQ(home.arena().bytes_in_use(), 0u);
  home.arena().validate();
  EXPECT_GT(puts, 20u);
  EXPECT_GT(fetches, 20u);
}

TEST(LinkLeases, ClientsThatAreGone) {
  Leases home;
  const uint64_t offset = home.block(64, 3, 1);
  home.hub.add_group(Home::kGroup, {0, 1});
  const Bytes record = home.command(CommandKind::kPut, 1, 0, offset, 64, 1);
  const Bytes gone = joined(ClientGoneRecord{{RecordKind::kClientGone, 0, Home::kClient}});
  home.order(0, record);
  home.order(0, gone);
  home.order(1, record);
  home.transmit();
  home.hub.remove_client(Home::kClient);
  const uint64_t at = home.place(1);
  EXPECT_NE(home.there(0).find_leased(at, 64, 1), nullptr);
  EXPECT_TRUE(home.there(0).return_lease(at, 0));
  home.order(1, gone);
  home.transmit();
  EXPECT_TRUE(home.there(0).return_lease(at, 1));  // the host's own mapping stays
  home.transmit();
  EXPECT_EQ(next(home[0].hosts.at(1).inbox), gone);
}

}  // namespace
}  // namespace pathways::test::test_link_leases
