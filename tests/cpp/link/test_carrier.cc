// Links that a relay carries: sealed, in order, and apart from each other.
//
//   CARRY-1   Carrier.RecordsCross, Carrier.NothingIsInClear, Carrier.WhatARelayChanges,
//             Carrier.NobodySealsUnderALock
//   CARRY-2   Carrier.OneThatIsHeldHoldsUpNobody, Carrier.OneThatBreaksBreaksNobody, Carrier.WhoReadsNothing,
//             Carrier.WhenTheHeadReadsNothing
//   LINK-4    Carrier.WhatIsNotForAnEnd
#include <algorithm>
#include <map>
#include <random>
#include <thread>

#include "link/carried_ends.h"

namespace pathways::test::test_carrier {
namespace {

bool has(const Bytes& bytes, const Bytes& part) {  // clang 14 cannot compile std::ranges::search
  return std::search(bytes.begin(), bytes.end(), part.begin(), part.end()) != bytes.end();
}

TEST(Carrier, RecordsCross) {
  const Watchdog watchdog("carried links");
  std::mt19937_64 random(seed());
  Tree head(3);
  for (uint64_t round = 0; round < 50; ++round) {
    std::map<uint32_t, std::vector<uint64_t>> orders, reports;
    for (uint64_t i = random() % 20; i > 0; --i) {
      const auto m = static_cast<uint32_t>(random() % 3);
      orders[m].push_back(random()), head.order(m, orders[m].back());
      reports[m].push_back(random()), head.report(m, reports[m].back());
    }
    pass_time(100'000'000);
    head.exchange();
    for (uint32_t m = 0; m < 3; ++m) {
      for (const uint64_t tag : orders[m]) EXPECT_EQ(head.ordered(m), Tree::record(tag));
      for (const uint64_t tag : reports[m]) EXPECT_EQ(head.reported(m), Tree::record(tag));
    }
  }
  EXPECT_TRUE(head.carrier->take_broken().empty());
  EXPECT_EQ(head.relay->number_of("m2"), 2);
  EXPECT_EQ(head.relay->number_of("m3"), std::nullopt);
}

/// The same order reads differently each time, and is nowhere in what a relay gets.
TEST(Carrier, NothingIsInClear) {
  Tree head(1);
  head.exchange();
  head.order(0, 7);
  const Bytes first = head.all(*head.carrier);
  head.order(0, 7);
  const Bytes second = head.all(*head.carrier);
  ASSERT_EQ(first.size(), second.size());
  EXPECT_NE(first, second);
  EXPECT_FALSE(has(first, Tree::record(7)));
  head.ends[0]->deliver(first + second);
  EXPECT_EQ(head.ordered(0), Tree::record(7));
  EXPECT_EQ(head.ordered(0), Tree::record(7));
}

/// Any bit that a relay changes, and messages that it leaves out, repeats, mixes up or makes up.
TEST(Carrier, WhatARelayChanges) {
  const auto broken = [](const std::function<void(Tree&, Bytes, Bytes)>& lie) {
    Tree head(2);
    head.exchange();
    head.report(0, 1);
    Bytes first = head.all(*head.ends[0]);
    head.report(0, 2);
    lie(head, std::move(first), head.all(*head.ends[0]));
    const auto found = head.carrier->take_broken();
    EXPECT_EQ(found.size(), 1u);
    if (!found.empty()) {
      EXPECT_EQ(found[0].first, 0u);
      EXPECT_EQ(found[0].second, "what the relay brought for it is not what its other end has said");
    }
    head.report(1, 3);
    head.exchange();
    EXPECT_EQ(head.reported(1), Tree::record(3));
    head.report(0, 4);
    head.exchange();
    return head.reported(0);  // the last one that was taken before
  };
  const size_t message = sizeof(FrameHeader);
  Tree measured(1);
  measured.exchange();
  measured.report(0, 1);
  const size_t size = measured.all(*measured.ends[0]).size();
  for (size_t at = message; at < size; ++at) {
    EXPECT_EQ(broken([&](Tree& head, Bytes first, Bytes) {
                first[at] ^= std::byte{0x10};
                head.carrier->deliver(first);
              }),
              Bytes());
  }
  const auto left_out = broken([](Tree& head, Bytes, Bytes second) { head.carrier->deliver(second); });
  EXPECT_EQ(left_out, Bytes());
  const auto mixed = broken([](Tree& head, Bytes first, Bytes second) { head.carrier->deliver(second + first); });
  EXPECT_EQ(mixed, Bytes());
  const auto twice = broken([](Tree& head, Bytes first, Bytes) { head.carrier->deliver(first + first); });
  EXPECT_EQ(twice, Tree::record(1));
  const auto made_up = broken(
      [](Tree& head, Bytes, Bytes) { head.carrier->deliver(frame(FrameKind::kCarried, 0, 0, pattern(200, 1))); });
  EXPECT_EQ(made_up, Bytes());
  const auto too_short =
      broken([](Tree& head, Bytes, Bytes) { head.carrier->deliver(frame(FrameKind::kCarried, 0, 0, pattern(3, 1))); });
  EXPECT_EQ(too_short, Bytes());
  const auto back = broken([](Tree& head, Bytes, Bytes) {  // what the head itself has said
    head.order(0, 9);
    head.carrier->deliver(head.all(*head.carrier));
  });
  EXPECT_EQ(back, Bytes());
}

TEST(Carrier, OneThatIsHeldHoldsUpNobody) {
  Tree head(2);
  head.exchange();
  head.carrier->deliver(frame(FrameKind::kHold, 0, 1, {}));
  head.order(0, 1);
  head.order(1, 2);
  head.exchange();
  EXPECT_EQ(head.ordered(0), Bytes());
  EXPECT_EQ(head.ordered(1), Tree::record(2));
  head.carrier->deliver(frame(FrameKind::kHold, 0, 0, {}));
  head.exchange();
  EXPECT_EQ(head.ordered(0), Tree::record(1));
}

TEST(Carrier, OneThatBreaksBreaksNobody) {
  Tree head(3);
  head.exchange();
  head.relay->end(0);
  head.carrier->drop(1);
  head.exchange();
  const auto broken = head.carrier->take_broken();
  ASSERT_EQ(broken.size(), 1u);
  EXPECT_EQ(broken[0], std::pair(0u, std::string("its connection to the relay has ended")));
  EXPECT_EQ(head.relay->take_ended(), std::vector<uint32_t>{1});
  EXPECT_EQ(head.relay->number_of("m1"), std::nullopt);
  for (uint32_t m = 0; m < 3; ++m) head.order(m, m), head.report(m, m);
  head.exchange();
  EXPECT_EQ(head.ordered(2), Tree::record(2));
  EXPECT_EQ(head.reported(2), Tree::record(2));
  EXPECT_EQ(head.reported(0), Bytes());
  EXPECT_EQ(head.reported(1), Bytes());
}

/// A machine whose connection takes nothing: the head sends nothing more for it, and nothing is lost.
TEST(Carrier, WhoReadsNothing) {
  const Watchdog watchdog("a machine that reads nothing");
  Tree head(2);
  head.exchange();
  std::vector<uint64_t> sent;
  uint64_t most = 0;
  for (uint64_t tag = 0; tag < 100'000; ++tag) {
    const auto room = head[0].hosts.at(0).orders.try_reserve(static_cast<uint32_t>(Tree::record(tag).size()));
    if (room.empty()) break;  // the head has stopped, and the ring is full
    const Bytes bytes = Tree::record(tag);
    std::memcpy(room.data(), bytes.data(), bytes.size());
    head[0].hosts.at(0).orders.publish();
    sent.push_back(tag);
    head.order(1, tag);
    head.exchange(0);
    EXPECT_EQ(head.ordered(1), Tree::record(tag));
    most = std::max(most, head.branches[0]->queued_bytes());
  }
  EXPECT_LT(sent.size(), 100'000u);
  EXPECT_GT(most, RelayLink::kMostWaiting);
  EXPECT_LT(most, RelayLink::kMostWaiting + kMostFrame);
  for (const uint64_t tag : sent) {
    head.exchange();
    EXPECT_EQ(head.ordered(0), Tree::record(tag));
  }
  EXPECT_TRUE(head.carrier->take_broken().empty());
}

/// The same in the other direction: the trunk takes nothing, so the machine is held.
TEST(Carrier, WhenTheHeadReadsNothing) {
  const Watchdog watchdog("a trunk that takes nothing");
  Tree head(1);
  head.exchange();
  std::vector<uint64_t> sent;
  for (uint64_t tag = 0; tag < 200'000; ++tag) {
    const Bytes bytes = Tree::record(tag);
    const auto room = head[0].hosts.at(0).outgoing.try_reserve(static_cast<uint32_t>(bytes.size()));
    if (room.empty()) break;
    std::memcpy(room.data(), bytes.data(), bytes.size());
    head[0].hosts.at(0).outgoing.publish();
    sent.push_back(tag);
    (void)head.move(*head.ends[0], *head.branches[0]);
    (void)head.move(*head.branches[0], *head.ends[0]);
  }
  EXPECT_LT(sent.size(), 200'000u);
  EXPECT_LT(head.trunk->queued_bytes(), RelayLink::kMostWaiting + kMostFrame);
  for (const uint64_t tag : sent) {
    head.exchange();
    EXPECT_EQ(head.reported(0), Tree::record(tag));
  }
}

/// An answer waits for those of the machines that were sent something with this one, but not for long, nor for others.
TEST(Carrier, AnswersGoTogether) {
  Tree head(3);
  head.exchange();
  pass_time(RelayHub::kGathers.count());
  const auto sent = [&](std::initializer_list<uint32_t> to) {
    for (const uint32_t m : to) head.order(m, m);
    (void)head.move(*head.carrier, *head.trunk);
    for (const uint32_t m : to) (void)head.move(*head.branches[m], *head.ends[m]);
  };
  const auto answers = [&](uint32_t m) {
    head.report(m, m);
    (void)head.move(*head.ends[m], *head.branches[m]);
    (void)head.move(*head.trunk, *head.carrier);
    return head.trunk->queued_bytes() == 0;
  };
  sent({0, 1, 2});
  EXPECT_FALSE(answers(0));
  EXPECT_FALSE(answers(2));
  EXPECT_GT(head.trunk->again_in(), std::chrono::nanoseconds(0));
  EXPECT_LE(head.trunk->again_in(), RelayHub::kGathers);
  EXPECT_TRUE(answers(1));
  for (uint32_t m = 0; m < 3; ++m) EXPECT_EQ(head.reported(m), Tree::record(m));
  sent({1});
  EXPECT_TRUE(answers(1));
  sent({0, 1, 2});
  EXPECT_FALSE(answers(0));
  pass_time(RelayHub::kGathers.count());
  EXPECT_TRUE(answers(1));  // 2 was waited for
  EXPECT_TRUE(answers(1));
  sent({0, 1});
  head.relay->end(0);
  EXPECT_TRUE(answers(1));  // 0 will not answer
}

/// Who asks a carrier may hold a lock that its sealers take: see sealer.h.
TEST(Carrier, NobodySealsUnderALock) {
  const Watchdog watchdog("sealers whose carriers are asked meanwhile");
  struct Asking final : Sealer {
    Asking(std::shared_ptr<Carrier> of, int* calls) : of_(of), calls_(calls) {}
    ~Asking() override { ask(); }
    void seal(uint64_t, std::span<std::byte>) override { ask(); }
    bool open(uint64_t, std::span<const std::byte>, std::span<std::byte>) override { return ask(); }
    bool ask() {
      ++*calls_;
      if (const auto carrier = of_.lock()) std::thread([&] { (void)carrier->stats(); }).join();
      return true;
    }

    const std::weak_ptr<Carrier> of_;
    int* const calls_;
  };
  Head head(1);
  int calls = 0;
  const auto carrier = std::make_shared<Carrier>(head_clock);
  for (const auto& link : {head[0].at_head, head[0].here}) {
    carrier->add(7, link, std::make_shared<Asking>(carrier, &calls), "");
    carrier->start(7);
    Bytes said(kMostFrame);
    EXPECT_GT(carrier->collect(said), 0u);
    EXPECT_EQ(std::exchange(calls, 0), 1);
    carrier->deliver(frame(FrameKind::kCarried, 7, 0, Bytes(Sealer::kBytes)));
    EXPECT_EQ(std::exchange(calls, 0), 1);
    if (link == head[0].at_head) carrier->drop(7);
    EXPECT_EQ(std::exchange(calls, 0), link == head[0].at_head ? 1 : 0);
  }
  carrier->close();
}

TEST(Carrier, WhatIsNotForAnEnd) {
  Tree head(1);
  EXPECT_EQ(refusal(*head.carrier, frame(FrameKind::kToController, 0, 5, Tree::record(1))),
            "a link brought a frame of kind 2, which a relay does not send");
  EXPECT_EQ(refusal(*head.trunk, frame(FrameKind::kHold, 0, 1, {})),
            "a link brought a frame of kind 17, which a relay does not take");
  EXPECT_EQ(refusal(*head.trunk, frame(FrameKind::kExpect, 0, 0, pattern(65, 0))), "a link brought a name of 65 bytes");
  EXPECT_EQ(refusal(*head.branches[0], frame(FrameKind::kExpect, 0, 0, {})),
            "a link brought a frame of kind 18, which a relay does not take");
  EXPECT_EQ(refusal(*head.branches[0], frame(FrameKind::kCarried, 1, 0, {})),
            "a link brought a frame of another machine");
  EXPECT_EQ(refusal(*head[0].here, frame(FrameKind::kCarried, 0, 0, {})),
            "a link brought a frame of kind 16, which this end does not take");
}

}  // namespace
}  // namespace pathways::test::test_carrier
