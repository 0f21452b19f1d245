// The book of peers: who is lost, what was refused, what came before its run; the test is the waiters and the peers.
//
//   PEER-2   AnyLoss: each waiter hears of it for each run that is here, once, and for later ones of a closed peer
//   PEER-3   AnyLoss, Epochs, Campaign: a run means one life of each peer
//   PEER-4   Early.*, Campaign: what is said early is done once, when its run is here or refused, or not at all
//   TRUST-1  Early.OnePeerCannotTakeTheRoomOfAnother
//   END-1    Refused.WhoAsksIsAnswered
#include "movement/peer_book.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "support.h"

namespace pathways::test::test_peer_book {
namespace {

struct Waiter final : PeerWaiter {
  using Heard = std::tuple<uint32_t, uint32_t, std::string, LostPeer>;  ///< run, host, why, how
  void miss(uint32_t run, const Lost& lost) override { heard.emplace_back(run, lost.host, lost.text, lost.state); }
  std::vector<Heard> take() { return std::exchange(heard, {}); }
  std::vector<Heard> heard;
};

struct Books {
  Books() {
    for (Waiter& waiter : waiters) book.add(waiter);
  }
  ~Books() { book.validate(); }
  /// The run comes, in a slot that is its order.
  void come(uint32_t order) {
    book.run_comes(order);
    book.run_is_here(order, order);
  }
  void say(uint64_t order, uint32_t host, const std::string& what, Status status = Status::kOk) {
    ASSERT_EQ(book.keep(order, host, what.size(),
                        [=, this] {
                          done.push_back(what);
                          return status;
                        }),
              Status::kOk);
  }
  void lose(const std::vector<uint32_t>& hosts, LostPeer state, const std::vector<uint32_t>& runs = {}) {
    book.lose(hosts, "why", state, runs);
  }
  PeerBook book{9};
  Waiter waiters[3];
  std::vector<std::string> done;
};

// ---------------------------------------------------------------------------------------------------------- losses

struct AnyLoss : ::testing::TestWithParam<LostPeer>, Books {};

TEST_P(AnyLoss, IsHeardByAllOnceForEachRun) {
  come(4);
  come(7);
  lose({1, 2}, GetParam(), {4, 7});
  for (Waiter& waiter : waiters) {
    const auto heard = [&](uint32_t run, uint32_t host) { return Waiter::Heard(run, host, "why", GetParam()); };
    EXPECT_EQ(waiter.take(), (std::vector{heard(4, 1), heard(4, 2), heard(7, 1), heard(7, 2)}));
  }
  const bool is_dead = GetParam() == LostPeer::kDead;
  EXPECT_EQ(book.is_closed(1), !is_dead);
  EXPECT_EQ(book.is_dead(1, 7), is_dead);
  EXPECT_FALSE(book.is_dead(1, 8)) << "a later run means the successor";
  if (!is_dead) lose({1}, GetParam(), {4, 7});  // it is lost once
  come(8);
  for (Waiter& waiter : waiters) {
    const auto heard = waiter.take();
    if (is_dead) {
      EXPECT_TRUE(heard.empty());
    } else {
      EXPECT_EQ(heard,
                (std::vector<Waiter::Heard>{{8, 1, "why", LostPeer::kBefore}, {8, 2, "why", LostPeer::kBefore}}));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(PeerBook, AnyLoss, ::testing::Values(LostPeer::kAlive, LostPeer::kDead));

struct Epochs : ::testing::Test, Books {};

TEST_F(Epochs, AClosedPeerThatDiesHasASuccessor) {
  come(1);
  lose({1}, LostPeer::kAlive, {1});
  come(2);
  lose({1}, LostPeer::kDead, {1, 2});
  EXPECT_EQ(waiters[0].take(), (std::vector<Waiter::Heard>{{1, 1, "why", LostPeer::kAlive},
                                                           {2, 1, "why", LostPeer::kBefore},
                                                           {1, 1, "why", LostPeer::kDead},
                                                           {2, 1, "why", LostPeer::kDead}}));
  come(3);
  EXPECT_TRUE(waiters[0].heard.empty());
  EXPECT_FALSE(book.is_closed(1));
  EXPECT_TRUE(book.is_dead(1, 2));
  EXPECT_FALSE(book.is_dead(1, 3));
}

// ----------------------------------------------------------------------------------------------------------- early

struct Early : ::testing::Test, Books {};

TEST_F(Early, IsDoneWhenItsRunIsHere) {
  say(2, 1, "a");
  say(2, 2, "b");
  say(3, 1, "c");
  come(1);
  EXPECT_TRUE(done.empty());
  book.run_comes(2);
  EXPECT_TRUE(done.empty()) << "it is not prepared";
  book.run_is_here(2, 2);
  EXPECT_EQ(done, (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(waiters[0].heard.empty());
}

TEST_F(Early, WhatIsInvalidFailsThePeerInThisRun) {
  say(2, 1, "nonsense", Status::kInvalid);
  say(2, 2, "sense");
  say(3, 1, "sense");
  come(2);
  for (Waiter& waiter : waiters) {
    ASSERT_EQ(waiter.heard.size(), 1u);
    const auto& [run, host, text, state] = waiter.heard[0];
    EXPECT_EQ(std::tuple(run, host, state), std::tuple(2u, 1u, LostPeer::kAlive));
    EXPECT_NE(text.find("host 1 told host 9 of run 2 what is none of it"), std::string::npos) << text;
  }
  come(3);
  EXPECT_EQ(done, (std::vector<std::string>{"nonsense", "sense", "sense"}));
  EXPECT_EQ(waiters[0].heard.size(), 1u);
}

TEST_F(Early, WhatNamesNoRunIsDropped) {
  say(2, 1, "a");
  say(5, 1, "b");
  come(3);  // run 2 has no part here
  come(5);
  EXPECT_EQ(done, (std::vector<std::string>{"b"}));
}

TEST_F(Early, TheDeadSayNothing) {
  say(2, 1, "dead");
  say(2, 2, "alive");
  lose({1}, LostPeer::kDead);
  say(2, 1, "the successor");
  come(2);
  EXPECT_EQ(done, (std::vector<std::string>{"alive", "the successor"}));
}

TEST_F(Early, OnePeerCannotTakeTheRoomOfAnother) {
  const auto record = [] { return Status::kOk; };
  EXPECT_EQ(book.keep(2, 3, PeerBook::kMostKept, record), Status::kInvalid);
  while (book.keep(2, 1, PeerBook::kMostKept / 8, record) == Status::kOk) {
  }
  EXPECT_EQ(book.keep(2, 1, PeerBook::kMostKept / 8, record), Status::kInvalid);
  say(2, 2, "another");
  come(2);
  EXPECT_EQ(done, (std::vector<std::string>{"another"}));
  EXPECT_EQ(book.keep(3, 1, PeerBook::kMostKept / 8, record), Status::kOk) << "what is done takes no room";
}

// --------------------------------------------------------------------------------------------------------- refused

struct Refused : ::testing::Test, Books {};

TEST_F(Refused, WhoAsksIsAnswered) {
  say(2, 1, "asks early");
  book.run_comes(2);
  book.refuse(2, nullptr, "no such plan");
  EXPECT_EQ(done, (std::vector<std::string>{"asks early"}));
  EXPECT_EQ(book.why_refused(2), "no such plan");
  for (uint32_t order = 3; order < 3 + PeerBook::kRefusedKept; ++order) {
    book.run_comes(order);
    book.refuse(order, nullptr, "later");
  }
  EXPECT_TRUE(book.has_come(2));
  EXPECT_NE(book.why_refused(2).find("host 9 has refused run 2"), std::string::npos);
  EXPECT_EQ(book.why_refused(3), "later");
}

// -------------------------------------------------------------------------------------------------------- campaign

/// Peers speak, close, die and have successors at random, and runs come. What must follow is written down beside it.
struct Campaign : Books {
  struct Peer {
    uint64_t life = 0;
    bool is_closed = false;
    std::map<uint64_t, uint64_t> died;  ///< by life: the newest run then
  };
  struct Told {
    uint32_t host;
    uint64_t order, life;
    int done = 0;
    bool is_valid;
  };

  void play(std::mt19937_64& random) {
    const auto any = [&](uint64_t below) { return static_cast<uint32_t>(random() % below); };
    for (int step = 0; step < 200; ++step) {
      const uint32_t host = any(peers.size());
      switch (any(8)) {
        case 0:
        case 1:
        case 2:
          if (!peers[host].is_closed) speak(host, newest + 1 + any(4), any(8) != 0);
          break;
        case 3:
        case 4:
          begin(newest + 1 + (any(4) == 0 ? any(3) : 0), any(6) == 0);
          break;
        case 5:
          if (!here.empty()) here.erase(here.begin() + any(here.size()));  // a run is over
          break;
        case 6:
          disturb(host, any(3) == 0 ? LostPeer::kDead : LostPeer::kAlive);
          break;
        default:
          if (any(3) == 0) disturb(host, LostPeer::kDead);
      }
      check();
      if (::testing::Test::HasFailure()) return;
    }
  }

  void speak(uint32_t host, uint64_t order, bool is_valid) {
    const size_t index = told.size();
    told.push_back({host, order, peers[host].life, 0, is_valid});
    ASSERT_EQ(book.keep(order, host, 8,
                        [this, index] {
                          ++told[index].done;
                          return told[index].is_valid ? Status::kOk : Status::kInvalid;
                        }),
              Status::kOk);
  }

  void begin(uint32_t order, bool is_refused) {
    newest = order;
    begun.insert(order);
    book.run_comes(order);
    std::set<std::pair<uint32_t, LostPeer>> expected;
    if (is_refused) {
      book.refuse(order, nullptr, "refused");
    } else {
      here.push_back(order);
      for (uint32_t host = 0; host < peers.size(); ++host) {
        if (peers[host].is_closed) expected.emplace(host, LostPeer::kBefore);
      }
      for (const Told& each : told) {
        const bool counts = each.order == order && each.life == peers[each.host].life;
        if (counts && !each.is_valid) expected.emplace(each.host, LostPeer::kAlive);
      }
      book.run_is_here(order, order);
    }
    for (Waiter& waiter : waiters) {
      std::set<std::pair<uint32_t, LostPeer>> found;
      for (const auto& [run, host, text, state] : waiter.take()) {
        EXPECT_EQ(run, order);
        found.emplace(host, state);
      }
      EXPECT_EQ(found, expected) << "run " << order;
    }
  }

  void disturb(uint32_t host, LostPeer state) {
    Peer& peer = peers[host];
    const bool is_news = state == LostPeer::kDead || !peer.is_closed;
    peer.is_closed = state != LostPeer::kDead;
    if (state == LostPeer::kDead) peer.died[peer.life++] = newest;
    lose({host}, state, here);
    for (Waiter& waiter : waiters) {
      std::vector<uint32_t> runs;
      for (const auto& heard : waiter.take()) {
        EXPECT_EQ(std::get<1>(heard), host);
        EXPECT_EQ(std::get<3>(heard), state);
        runs.push_back(std::get<0>(heard));
      }
      EXPECT_EQ(runs, is_news ? here : std::vector<uint32_t>()) << "each waiter, each run, in the order";
    }
  }

  void check() {
    book.validate();
    for (const Told& each : told) {
      const Peer& peer = peers[each.host];
      const auto died = peer.died.find(each.life);
      const bool is_void = died != peer.died.end() && died->second < each.order;  // it died before the run came
      const bool has_come = begun.contains(each.order);
      EXPECT_EQ(each.done, has_come && !is_void ? 1 : 0) << "run " << each.order << " of host " << each.host;
    }
    for (uint32_t host = 0; host < peers.size(); ++host) {
      const uint64_t last = peers[host].died.empty() ? 0 : peers[host].died.rbegin()->second;
      for (const uint64_t order : {last, last + 1}) {
        EXPECT_EQ(book.is_dead(host, order), !peers[host].died.empty() && order <= last);
      }
      EXPECT_EQ(book.is_closed(host), peers[host].is_closed);
    }
  }

  std::vector<Peer> peers{3};
  std::vector<Told> told;
  std::vector<uint32_t> here;  ///< live runs, in their order
  std::set<uint64_t> begun;    ///< runs that have come
  uint32_t newest = 0;
};

TEST(PeerBook, Campaign) {
  const Watchdog watchdog("a book of peers");
  for (uint64_t trial = 0; trial < 100 * kStressScale && !::testing::Test::HasFailure(); ++trial) {
    SCOPED_TRACE("seed " + std::to_string(seed() + trial));
    std::mt19937_64 random(seed() + trial);
    Campaign().play(random);
  }
}

}  // namespace
}  // namespace pathways::test::test_peer_book
