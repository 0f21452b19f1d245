// Memory that a client leases to hosts of another machine: the bytes cross once, and the leases come back.
//
//   LINK-2   LinkLeases.LeasesOfLostHosts
//   LINK-3   LinkLeases.Puts, LinkLeases.Fetches, LinkLeases.ALeaseComesBackBehindTheBytes
//   ARENA-5  LinkLeases.LeasesOfLostHosts
//   ARENA-6  LinkLeases.Puts, LinkLeases.RandomLeases
#include <set>

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
    for (const uint32_t host : {0u, 1u, 2u}) {
      EXPECT_EQ(next(home[host / 2].hosts.at(host).inbox), record);
      const std::byte* here = home.there(host / 2).find_leased(offset, bytes, host);
      ASSERT_NE(here, nullptr) << host;
      EXPECT_EQ(std::memcmp(here, value.data(), bytes), 0);
      EXPECT_EQ(home.there(host / 2).find_leased(offset, bytes + 64, host), nullptr);
    }
    EXPECT_EQ(home.there(0).find_leased(offset, bytes, 2), nullptr);
    for (const uint32_t host : {0u, 2u, 1u}) {
      EXPECT_TRUE(home.is_lent(offset, host));
      EXPECT_TRUE(home.there(host / 2).return_lease(offset, host));
      EXPECT_FALSE(home.there(host / 2).return_lease(offset, host));
      home.transmit();
      // A machine's leases come back together, and after that nothing of them is there any more.
      EXPECT_EQ(home.is_lent(offset, 0), host != 1);
      EXPECT_EQ(home.is_lent(offset, 1), host != 1);
      EXPECT_EQ(home.is_lent(offset, 2), host == 0);
    }
    EXPECT_EQ(home.arena().was_references(offset), 1u);
    home.arena().release(offset);
    EXPECT_EQ(home.arena().bytes_in_use(), 0u);
  }
}

TEST(LinkLeases, RefusedPutsLeaseWithoutBytes) {
  Leases home;
  const uint64_t offset = home.block(1'000'000, 1, 1);
  auto record = read_record<CommandRecord>(home.command(CommandKind::kPut, 1, 0, offset, 1'000'000, 1));
  record.is_refused = 1;
  home.order(0, joined(record));
  home.transmit();
  EXPECT_LT(home[0].at_home->stats().bytes_out, 2000u);
  EXPECT_TRUE(home.there(0).return_lease(offset, 0));
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
    const ArenaView there = ClientView(home[0].clients.at(Home::kClient)).arena();
    const std::byte* here = there.find(offset, 100);
    ASSERT_NE(here, nullptr);
    EXPECT_EQ(here[99], static_cast<std::byte>(handle));
    EXPECT_TRUE(there.release(offset));
    home.transmit();
    EXPECT_EQ(home.arena().was_references(offset), 1u);
    home.arena().release(offset);
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
      std::byte* here = home.there(0).find_leased(offset, bytes, host);
      ASSERT_NE(here, nullptr);
      const size_t half = host == 0 ? 0 : bytes / 2;  // each its share
      std::memcpy(here + half, value.data() + half, host == 0 ? bytes / 2 : bytes - half);
      EXPECT_TRUE(home.there(0).return_lease(offset, host));
      EXPECT_EQ(home.futures().poll(token), FutureState::kPending);
      put(home[0].hosts.at(host).outgoing,
          joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, Home::kClient}, token.raw, 0, 0}));
      home.transmit();
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
  std::memset(home.there(0).find_leased(offset, 64, 0), 2, 64);
  EXPECT_TRUE(home.there(0).return_lease(offset, 0));
  home.transmit();
  EXPECT_TRUE(home.is_lent(offset, 0));  // not before the fetch is over
  const Bytes failed = joined(FailedRecord{{RecordKind::kFailed, 0, Home::kClient}, token.raw, 0, 0});
  put(home[0].hosts.at(0).outgoing, failed);
  home.transmit();
  EXPECT_EQ(next(home[0].hosts.at(0).reports), failed);
  EXPECT_EQ(home.arena().at(offset)[0], std::byte{1});
  EXPECT_FALSE(home.is_lent(offset, 0));
}

/// Else the memory could be another's when the bytes come.
TEST(LinkLeases, ALeaseComesBackBehindTheBytes) {
  Leases home;
  const size_t bytes = 900'000;
  home.hub.add_group(Home::kGroup, {0});
  const uint64_t offset = home.block(bytes, 1, 1);
  const Handle token = home.future();
  home.order(0, home.command(CommandKind::kFetch, 77, token.raw, offset, bytes, 1));
  home.transmit();
  std::memset(home.there(0).find_leased(offset, bytes, 0), 2, bytes);
  EXPECT_TRUE(home.there(0).return_lease(offset, 0));
  put(home[0].hosts.at(0).outgoing,
      joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, Home::kClient}, token.raw, 0, 0}));
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
  home.transmit();
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
    std::memset(home.there(1).find_leased(offset, 64, 2), 2, 64);
    EXPECT_TRUE(home.there(1).return_lease(offset, 2));
    put(home[1].hosts.at(2).outgoing,
        joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, Home::kClient}, token.raw, 0, 0}));
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
    home.order(2, home.command(CommandKind::kPut, 78, 0, offset, 64, 2));
    home.transmit();
    EXPECT_EQ(home.futures().poll(token), FutureState::kPending);
    EXPECT_TRUE(home.is_lent(offset, 2));
    EXPECT_EQ(home.arena().at(offset)[0], std::byte{3});
    const std::byte* here = home.there(1).find_leased(offset, 64, 2);
    ASSERT_NE(here, nullptr);
    EXPECT_EQ(here[63], std::byte{3});
    EXPECT_TRUE(home.there(1).return_lease(offset, 2));
    home.transmit();
    EXPECT_FALSE(home.is_lent(offset, 2));
  }
}

/// Blocks of random sizes, put and fetched in random order while hosts return them at random times.
TEST(LinkLeases, RandomLeases) {
  const Watchdog watchdog("links with random leases");
  std::mt19937_64 random(seed());
  const auto below = [&](uint64_t n) { return random() % n; };
  Leases home;
  struct Lent {
    Bytes value;
    Handle token;  ///< of a fetch
    uint64_t stamp;
    std::vector<uint32_t> hosts;  ///< that have not returned it
  };
  std::map<uint64_t, Lent> lent;  // by offset
  uint64_t stamp = 0, puts = 0, fetches = 0;
  std::set<std::pair<uint32_t, uint64_t>> came;  // host and stamp of the commands that have arrived
  const auto look = [&](uint64_t offset, Lent& each) {
    for (const uint32_t host : {0u, 1u}) {
      for (Bytes record = next(home[0].hosts.at(host).inbox); !record.empty();
           record = next(home[0].hosts.at(host).inbox)) {
        came.emplace(host, read_record<CommandRecord>(record).lease_stamp);
      }
    }
    if (each.hosts.empty()) return;
    const uint32_t host = each.hosts[below(each.hosts.size())];
    if (!came.contains({host, each.stamp})) return;
    std::byte* here = home.there(0).find_leased(offset, each.value.size(), host);
    ASSERT_NE(here, nullptr);
    if (each.token.valid()) {
      std::memcpy(here, each.value.data(), each.value.size());
    } else {
      ASSERT_EQ(std::memcmp(here, each.value.data(), each.value.size()), 0);
    }
    ASSERT_TRUE(home.there(0).return_lease(offset, host));
    if (each.token.valid()) {
      put(home[0].hosts.at(host).outgoing,
          joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, Home::kClient}, each.token.raw, 0, 0}));
    }
    std::erase(each.hosts, host);
  };
  home.hub.add_group(Home::kGroup, {0, 1});
  const auto finish = [&] {
    std::erase_if(lent, [&](auto& each) {
      auto& [offset, block] = each;
      if (!block.hosts.empty() || home.is_lent(offset, 0) || home.is_lent(offset, 1)) return false;
      if (block.token.valid()) {
        if (home.futures().poll(block.token) != FutureState::kReady) return false;
        EXPECT_EQ(std::memcmp(home.arena().at(offset), block.value.data(), block.value.size()), 0);
        (void)home.futures().release(block.token);
        ++fetches;
      } else {
        ++puts;
      }
      home.arena().release(offset);
      return true;
    });
  };
  for (int step = 0; step < 1500 * kStressScale; ++step) {
    switch (below(5)) {
      case 0: {
        if (lent.size() >= 8) break;
        const size_t bytes = 1 + below(below(6) == 0 ? 600'000 : 3000);
        uint64_t offset = 0;
        if (home.arena().allocate(bytes, &offset) != Status::kOk) break;
        home.arena().lease_out(offset, 3, ++stamp);
        Lent block{pattern(bytes, random()), {}, stamp, {0, 1}};
        const bool is_fetch = below(2) == 0;
        if (is_fetch) {
          block.token = home.future(2);
        } else {
          std::memcpy(home.arena().at(offset), block.value.data(), bytes);
        }
        const Bytes record = home.command(is_fetch ? CommandKind::kFetch : CommandKind::kPut, stamp, block.token.raw,
                                          offset, bytes, stamp);
        for (const uint32_t host : {0u, 1u}) home.order(host, record);
        lent.emplace(offset, std::move(block));
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
          look(at->first, at->second);
        }
        finish();
    }
    if (HasFatalFailure()) return;
  }
  for (int i = 0; i < 1000 && !lent.empty(); ++i) {
    home.transmit();
    for (auto& [offset, block] : lent) look(offset, block);
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
  EXPECT_NE(home.there(0).find_leased(offset, 64, 1), nullptr);
  EXPECT_TRUE(home.there(0).return_lease(offset, 0));
  home.order(1, gone);
  home.transmit();
  EXPECT_TRUE(home.there(0).return_lease(offset, 1));  // the host's own mapping stays
  home.transmit();
  EXPECT_EQ(next(home[0].hosts.at(1).inbox), record);
  EXPECT_EQ(next(home[0].hosts.at(1).inbox), gone);
}

}  // namespace
}  // namespace pathways::test::test_link_leases
