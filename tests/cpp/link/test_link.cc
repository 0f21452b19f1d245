// The two ends of a link: what rings, futures and leases have crosses whole, in order, and to nobody else.
//
//   LINK-1   Link.RecordsCrossWhereverTheBytesAreCut, Link.RandomRecords, Link.AFullRingIsTriedAgain
//   LINK-2   Link.OtherIncarnationsAreDropped, Link.HostsOfOtherMachines
//   LINK-4   Link.WhatIsNotRead; see test_link_nonsense.cc
//   READ-1   Link.ValuesOfFutures
#include <deque>
#include <set>

#include "link/link_ends.h"

namespace pathways::test::test_link {
namespace {

Bytes plain(uint64_t tag) { return joined(RunDoneRecord{{RecordKind::kRunDone, 0, 0}, tag, 1, 1, 0}); }

TEST(Link, RecordsCrossWhereverTheBytesAreCut) {
  const auto all = [](Machine& machine) {
    for (uint64_t i = 0; i < 3; ++i) {
      put(machine.hosts.at(1).orders, plain(i));
      put(machine.hosts.at(1).outgoing, pattern(8 + 3 * i, i));  // a record need not be of whole words
    }
    machine.collect();
  };
  Head counted(1);
  counted[0].add_host(1, 5);
  all(counted[0]);
  for (size_t cut = 0; cut <= counted[0].out.left(); ++cut) {
    Head head(1);
    head[0].add_host(1, 5);
    all(head[0]);
    head[0].deliver(*head[0].here, head[0].out, cut);
    head[0].deliver(*head[0].at_head, head[0].in, cut);
    head[0].deliver_all();
    for (uint64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(next(head[0].hosts.at(1).inbox), plain(i)) << cut;
      EXPECT_EQ(next(head[0].hosts.at(1).reports), pattern(8 + 3 * i, i)) << cut;
    }
  }
  Head head(1);  // byte by byte
  head[0].add_host(1, 5);
  all(head[0]);
  while (head[0].out.left() != 0) head[0].deliver(*head[0].here, head[0].out, 1);
  while (head[0].in.left() != 0) head[0].deliver(*head[0].at_head, head[0].in, 1);
  for (uint64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(next(head[0].hosts.at(1).inbox), plain(i));
    EXPECT_EQ(next(head[0].hosts.at(1).reports), pattern(8 + 3 * i, i));
  }
}

/// Random records of every kind of ring, and random cuts; what arrives is compared with what was sent.
TEST(Link, RandomRecords) {
  const Watchdog watchdog("links with random records");
  std::mt19937_64 random(seed());
  const auto below = [&](uint64_t n) { return random() % n; };
  Head head(2);
  for (uint32_t host = 0; host < 4; ++host) head[host / 2].add_host(host, static_cast<int32_t>(host) + 10);
  std::map<uint32_t, std::deque<Bytes>> orders, reports;
  std::map<std::pair<uint32_t, uint32_t>, std::deque<Bytes>> peers;  // to, from: the order of each pair
  uint64_t sent = 0, came = 0;
  const auto send = [&](ByteRing::Producer& ring, const Bytes& record) {
    const auto room = ring.try_reserve(static_cast<uint32_t>(record.size()));
    if (room.empty()) return false;
    std::memcpy(room.data(), record.data(), record.size());
    ring.publish();
    ++sent;
    return true;
  };
  const auto look = [&](uint32_t host) {
    Machine::End& end = head[host / 2].hosts.at(host);
    for (Bytes record = next(end.inbox); !record.empty(); record = next(end.inbox), ++came) {
      ASSERT_EQ(record, orders[host].front());
      orders[host].pop_front();
    }
    for (Bytes record = next(end.reports); !record.empty(); record = next(end.reports), ++came) {
      ASSERT_EQ(record, reports[host].front());
      reports[host].pop_front();
    }
    for (Bytes record = next(end.from_far); !record.empty(); record = next(end.from_far), ++came) {
      const auto from = read_record<PeerHeader>(record);
      ASSERT_EQ(from.epoch, static_cast<int32_t>(from.host) + 10);
      auto& expected = peers[{host, from.host}];
      ASSERT_FALSE(expected.empty());
      ASSERT_EQ(Bytes(record.begin() + sizeof from, record.end()), expected.front());
      expected.pop_front();
    }
  };
  for (int step = 0; step < 4000 * kStressScale; ++step) {
    const auto host = static_cast<uint32_t>(below(4));
    Machine& machine = head[host / 2];
    Machine::End& end = machine.hosts.at(host);
    Bytes record = pattern(8 + below(below(20) == 0 ? 12000 : 200), random());
    const RecordHeader header{RecordKind::kRunDone, 0, 0};
    std::memcpy(record.data(), &header, sizeof header);
    switch (below(7)) {
      case 0:
        if (send(end.orders, record)) orders[host].push_back(record);
        break;
      case 1:
        if (send(end.outgoing, record)) reports[host].push_back(record);
        break;
      case 2: {
        const auto to = static_cast<uint32_t>((host / 2 * 2 + 2 + below(2)) % 4);
        record = peer_record(random(), static_cast<uint32_t>(record.size()));
        const Bytes far = joined(PeerHeader{to, static_cast<int32_t>(to) + 10}) + record;
        if (send(end.to_far, far)) peers[{to, host}].push_back(record);
        break;
      }
      case 3:
        machine.collect();
        pass_time(static_cast<int64_t>(below(2'000'000)));
        break;
      case 4:
        machine.deliver(*machine.here, machine.out, below(3) == 0 ? 1 + below(40) : machine.out.left());
        break;
      case 5:
        machine.deliver(*machine.at_head, machine.in, below(3) == 0 ? 1 + below(40) : machine.in.left());
        break;
      default:
        look(host);
    }
    if (HasFatalFailure()) return;
  }
  for (int i = 0; i < 1000 && came != sent; ++i) {
    head.transmit();
    for (uint32_t host = 0; host < 4; ++host) look(host);
  }
  EXPECT_EQ(came, sent);
  EXPECT_GT(came, 1000u);
  for (size_t m = 0; m < 2; ++m) EXPECT_EQ(head[m].at_head->stats().dropped + head[m].here->stats().dropped, 0u);
}

TEST(Link, AFullRingIsTriedAgain) {
  Head head(1);
  head[0].add_host(1, 5);
  Machine::End& host = head[0].hosts.at(1);
  uint64_t sent = 0, came = 0;
  for (; sent < 10000; ++sent) {
    put(host.orders, plain(sent));
    head[0].collect();
    head[0].deliver_all();
  }
  while (came < sent) {
    const Bytes record = next(host.inbox);
    if (record.empty()) {
      (void)head[0].here->collect(head[0].buffer);  // nobody rings when there is room again
      continue;
    }
    ASSERT_EQ(record, plain(came));
    ++came;
  }
}

TEST(Link, OtherIncarnationsAreDropped) {
  Head head(1);
  head[0].add_host(1, 5);
  put(head[0].hosts.at(1).orders, plain(1));
  put(head[0].hosts.at(1).outgoing, plain(2));
  head[0].collect();
  head[0].remove_host(1);
  head[0].add_host(1, 6);
  put(head[0].hosts.at(1).orders, plain(3));
  head[0].transmit();
  EXPECT_EQ(next(head[0].hosts.at(1).inbox), plain(3));
  EXPECT_TRUE(next(head[0].hosts.at(1).inbox).empty());
  EXPECT_TRUE(next(head[0].hosts.at(1).reports).empty());
  EXPECT_EQ(head[0].here->stats().dropped, 1u);
  EXPECT_EQ(head[0].at_head->stats().dropped, 1u);
}

TEST(Link, HostsOfOtherMachines) {
  Head head(2);
  head[0].add_host(0, 1);
  head[1].add_host(1, 2);
  const auto say = [&](PeerHeader to, uint64_t what) {
    put(head[0].hosts.at(0).to_far, joined(to) + peer_record(what));
  };
  const auto heard = [&]() -> Bytes { return next(head[1].hosts.at(1).from_far); };
  const auto expected = [&](uint64_t what) { return joined(PeerHeader{0, 1}) + peer_record(what); };
  say({1, 2}, 7);
  head.transmit();
  EXPECT_EQ(heard(), expected(7));
  for (const PeerHeader& nobody : {PeerHeader{1, 1}, PeerHeader{1, 3}, PeerHeader{0, 1}, PeerHeader{2, 2}})
    say(nobody, 8);
  head.transmit();
  EXPECT_TRUE(heard().empty());
  EXPECT_EQ(head[0].at_head->stats().dropped, 4u);
  // A machine speaks for its own hosts only.
  for (const PeerHeader& forged : {PeerHeader{1, 2}, PeerHeader{0, 2}, PeerHeader{3, 1}}) {
    head[0].at_head->deliver(frame(FrameKind::kPeer, 1, 2, joined(forged) + peer_record(9)));
  }
  head.transmit();
  EXPECT_TRUE(heard().empty());
  // What a lost machine has said reaches nobody under the name of its successor.
  say({1, 2}, 10);
  head[0].collect();
  head[0].remove_host(0);
  head[0].add_host(0, 4);
  head.transmit();
  EXPECT_TRUE(heard().empty());
}

TEST(Link, NothingComesOutOfAClosedLink) {
  Head head(2);
  head[0].add_host(0, 1);
  head[1].add_host(1, 2);
  put(head[0].hosts.at(0).outgoing, plain(1));
  put(head[0].hosts.at(0).to_far, joined(PeerHeader{1, 2}) + peer_record(1));
  head[0].collect();
  head[0].at_head->close();
  head[0].deliver_all();
  EXPECT_TRUE(next(head[0].hosts.at(0).reports).empty());
  EXPECT_EQ(head[0].at_head->collect(head[0].buffer), 0u);
  EXPECT_THROW(head[0].at_head->add_host(2, 1, HostView(), nullptr), Error);
  head[0].at_head->remove_host(0);
  put(head[1].hosts.at(1).to_far, joined(PeerHeader{0, 1}) + peer_record(1));
  head[1].transmit();
  EXPECT_EQ(head[1].at_head->stats().dropped, 1u);
  EXPECT_TRUE(next(head[1].hosts.at(1).from_far).empty());
}

TEST(Link, DeadlinesAreWhatIsLeft) {
  Head head(1);
  head[0].add_host(1, 5);
  const int64_t left = 1'234'567'890, on_its_way = 1000;
  RunRecord run{{RecordKind::kRun, kRunWanted | kRunHasDeadline, 0}, 1, 2, 3, 4, 1, 1};
  put(head[0].hosts.at(1).orders, joined(run, uint64_t{11}, uint64_t{12}, uint64_t{1}, head_clock() + left));
  run.header.detail = kRunWanted;
  put(head[0].hosts.at(1).orders, joined(run, uint64_t{11}, uint64_t{12}, uint64_t{1}));
  put(head[0].hosts.at(1).orders, joined(RecordHeader{RecordKind::kRun, kRunHasDeadline, 0}));  // nonsense, left alone
  head[0].collect();
  pass_time(on_its_way);
  head[0].deliver_all();
  const Bytes record = next(head[0].hosts.at(1).inbox);
  ASSERT_EQ(record.size(), sizeof run + 32);
  EXPECT_EQ(read_record<int64_t>(std::span(record).subspan(sizeof run + 24)), agent_clock() + left);
  EXPECT_EQ(next(head[0].hosts.at(1).inbox), joined(run, uint64_t{11}, uint64_t{12}, uint64_t{1}));
  EXPECT_EQ(next(head[0].hosts.at(1).inbox).size(), 8u);
}

TEST(Link, ValuesOfFutures) {
  Head head(2);
  head[0].add_host(0, 1);
  head[1].add_host(1, 1);
  const auto complete = [&](size_t machine, Handle future, uint32_t is_large, uint32_t offset, const Bytes& bytes) {
    head.ask(machine, static_cast<uint32_t>(machine), future);
    Bytes record = joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, Head::kClient}, future.raw, 1, is_large},
                          ValueRun{offset, static_cast<uint32_t>(bytes.size())});
    record.insert(record.end(), bytes.begin(), bytes.end());
    record.resize(padded(record.size()));
    put(head[machine].hosts.at(static_cast<uint32_t>(machine)).outgoing, record);
    put(head[machine].hosts.at(static_cast<uint32_t>(machine)).outgoing, plain(machine));
    head[machine].transmit();
  };
  ReadBackArea& area = *ClientBlock::attach(head.client)->read_back_area();
  for (const size_t bytes : {size_t{8}, size_t{64}, size_t{65}, size_t{4096}}) {
    const Bytes value = pattern(bytes, seed());
    const Handle future = head.future(2);
    ASSERT_TRUE(area.try_open(future, bytes));
    const size_t half = bytes / 2;
    complete(0, future, bytes > 64, 0, Bytes(value.begin(), value.begin() + static_cast<std::ptrdiff_t>(half)));
    EXPECT_EQ(head.futures().poll(future), FutureState::kPending);
    complete(1, future, bytes > 64, static_cast<uint32_t>(half),
             Bytes(value.begin() + static_cast<std::ptrdiff_t>(half), value.end()));
    ASSERT_EQ(head.futures().poll(future), FutureState::kReady);
    EXPECT_EQ(std::memcmp(area.slot(future, bytes), value.data(), bytes), 0);
    // The controller hears of the ends of runs alone.
    EXPECT_EQ(next(head[0].hosts.at(0).reports), plain(0));
    EXPECT_TRUE(next(head[0].hosts.at(0).reports).empty());
    EXPECT_EQ(next(head[1].hosts.at(1).reports), plain(1));
    (void)head.futures().release(future);
    complete(0, future, 0, 0, value.size() > 64 ? Bytes(8) : value);  // too late: nothing happens
    EXPECT_EQ(next(head[0].hosts.at(0).reports), plain(0));
  }
  const Handle future = head.future();
  head.hub.remove_client(Head::kClient);
  complete(0, future, 0, 0, Bytes(8));
  EXPECT_EQ(head.futures().poll(future), FutureState::kPending);
}

TEST(Link, WhatIsNotRead) {
  Head head(2);
  head[0].add_host(0, 1);
  head[1].add_host(1, 1);
  // Host 0 says more to host 1 than that machine takes: its own link breaks, and it alone.
  const Bytes record = joined(PeerHeader{1, 1}) + peer_record(0, 12'000);
  const auto talk = [&] {
    for (uint64_t said = 0; said < Link::kMostRelayed + (1u << 20); said += record.size()) {
      put(head[0].hosts.at(0).to_far, record);
      head[0].collect();
      head[0].deliver_all();
    }
  };
  EXPECT_THROW(talk(), Error);
  put(head[1].hosts.at(1).outgoing, plain(1));
  head[1].transmit();
  EXPECT_EQ(next(head[1].hosts.at(1).reports), plain(1));
}

TEST(Link, WhoSaysMoreThanAHostReadsIsSilenced) {
  Head head(2);
  head[1].add_host(1, 1);
  Link& link = *head[1].here;
  const auto say = [&](PeerHeader from, uint64_t what, uint32_t bytes = 0) {
    link.deliver(frame(FrameKind::kPeer, 1, 1, joined(from) + peer_record(what, bytes)));
  };
  const auto last_heard = [&] {
    Bytes last;
    for (int quiet = 0; quiet < 3; ++quiet) {
      (void)link.collect(head[1].buffer);
      for (Bytes record = next(head[1].hosts.at(1).from_far); !record.empty();
           record = next(head[1].hosts.at(1).from_far)) {
        last = std::move(record);
        quiet = 0;
      }
    }
    return last;
  };
  for (uint64_t said = 0; said < Link::kMostKept + (1u << 20); said += 12'000) say({0, 1}, said, 12'000);
  const Link::Stats full = link.stats();
  EXPECT_GT(full.kept, Link::kMostKept);
  EXPECT_LE(full.kept, full.most_kept);
  EXPECT_EQ(last_heard(), joined(PeerHeader{0, 1})) << "the host closes the channel";
  say({0, 1}, 7);
  EXPECT_TRUE(last_heard().empty());
  for (const PeerHeader other : {PeerHeader{2, 1}, PeerHeader{0, 2}}) {
    say(other, 8);
    EXPECT_EQ(last_heard(), joined(other) + peer_record(8));
  }
}

TEST(Link, RoundTripsAreMeasured) {
  Head head(1);
  head[0].collect();
  pass_time(3'000'000);
  head[0].deliver_all();
  head[0].collect();
  pass_time(2'000'000);
  head[0].deliver_all();
  EXPECT_EQ(head[0].at_head->stats().round_trip_ns, 5'000'000);
  pass_time(7);
  EXPECT_EQ(head[0].at_head->stats().heard_ns, 7);
  const int64_t ahead = agent_clock() - head_clock();
  EXPECT_EQ(head[0].at_head->stats().clock_ahead_ns, ahead + 500'000);  // it came 3 ms after the ping, of 5
  // A shorter trip says more, a longer one does not.
  for (const int64_t there : {1'000'000, 40'000'000}) {
    pass_time(1'000'000'000);
    head[0].collect();
    pass_time(there);
    head[0].deliver_all();
    head[0].collect();
    head[0].deliver_all();
    EXPECT_EQ(head[0].at_head->stats().round_trip_ns, there);
    EXPECT_EQ(head[0].at_head->stats().clock_ahead_ns, ahead + 500'000);
  }
}

TEST(Link, BothEndsAsk) {
  Head head(1);
  head[0].transmit();
  for (int second = 0; second < 5; ++second) {  // neither end hears of the other: all may be behind a block
    pass_time(1'000'000'000);
    EXPECT_NE(head[0].here->collect(head[0].buffer), 0U);
    EXPECT_NE(head[0].at_head->collect(head[0].buffer), 0U);
  }
}

}  // namespace
}  // namespace pathways::test::test_link
