// What makes no sense breaks a link, by name, or counts as for nobody; nothing of it is applied.
//
//   LINK-4   Nonsense.IsRefusedByName, Nonsense.NothingOfACompletionIsApplied, Nonsense.ACorruptRing,
//            Nonsense.WhatIsRelayedIsCheckedBefore
//   LINK-2   Nonsense.WhatIsForNobodyIsDropped, Nonsense.TheHeadWritesOnlyWhatItLent,
//            Nonsense.AHostCompletesItsOwnPartOfAFutureOnce
#include "link/link_ends.h"

namespace pathways::test::test_link_nonsense {
namespace {

TEST(Nonsense, IsRefusedByName) {
  const RecordHeader done{RecordKind::kRunDone, 0, 0};
  const auto completion = [](uint32_t runs, uint32_t is_large, ValueRun run, size_t bytes) {
    Bytes record = joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, Head::kClient}, 1, runs, is_large}, run);
    record.resize(sizeof(FutureDoneRecord) + bytes);
    return record;
  };
  const auto to_head = [](const Bytes& record) { return frame(FrameKind::kToController, 1, 5, record); };
  FrameHeader odd{8, FrameKind::kPing, 1, 0, 0};
  struct Case {
    bool at_head;
    Bytes bytes;
    std::string text;
  };
  const std::vector<Case> cases{
      {true, joined(FrameHeader{kMostFrame, FrameKind::kPing, 0, 0, 0}), "a frame of 1048576 bytes"},
      {false, joined(FrameHeader{UINT32_MAX, FrameKind::kPing, 0, 0, 0}), "a frame of 4294967295 bytes"},
      {true, joined(odd, uint64_t{0}), "a frame with a wrong header"},
      {true, frame(static_cast<FrameKind>(0), 1, 5, joined(done)), "a frame of kind 0"},
      {true, frame(static_cast<FrameKind>(16), 1, 5, joined(done)), "a frame of kind 16"},
      {true, frame(FrameKind::kFromController, 1, 5, joined(done)), "a frame of kind 1, which this end does not take"},
      {true, frame(FrameKind::kBlock, 1, 5, joined(done)), "a frame of kind 4"},
      {false, frame(FrameKind::kToController, 1, 5, joined(done)), "a frame of kind 2"},
      {true, frame(FrameKind::kBlockOver, 1, 5, joined(done)), "a frame of kind 6"},
      {true, to_head({}), "a record of 0 bytes"},
      {true, to_head(Bytes(7)), "a record of 7 bytes"},
      {true, to_head(Bytes(Machine::kSizes.ring_bytes / 2)), "a record of 32768 bytes"},
      {false, frame(FrameKind::kFromController, 1, 5, Bytes(7)), "a record of 7 bytes"},
      {true, frame(FrameKind::kPeer, 1, 5, Bytes(7)), "a record of a host to another of 7 bytes"},
      {false, frame(FrameKind::kBlock, Head::kClient, 1, Bytes(23)), "a block of 23 bytes"},
      {false, frame(FrameKind::kBlock, Head::kClient, 0, Bytes(24)), "a block for 0 hosts"},
      {false, frame(FrameKind::kBlock, Head::kClient, 2, Bytes(32)), "a block for 2 hosts in 8 bytes"},
      {false, frame(FrameKind::kBlock, Head::kClient, 1025, Bytes(24 + 8200)), "a block for 1025 hosts"},
      {false, frame(FrameKind::kBlock, Head::kClient, -1, Bytes(32)), "a block for 4294967295 hosts"},
      {true, frame(FrameKind::kData, Head::kClient, 0, Bytes(15)), "bytes of a block of 15 bytes"},
      {false, frame(FrameKind::kData, Head::kClient, 0, Bytes(15)), "bytes of a block of 15 bytes"},
      {true, frame(FrameKind::kPing, 0, 0, Bytes(7)), "a ping of 7 bytes"},
      {true, frame(FrameKind::kPong, 0, 0, Bytes(15)), "a pong of 15 bytes"},
      {true, to_head(joined(RecordHeader{RecordKind::kFutureDone, 0, Head::kClient}, uint64_t{1})),
       "a completion of 16 bytes that is none"},
      {true, to_head(completion(1, 0, {0, 8}, 8)), "a completion of 32 bytes that is none"},
      {true, to_head(completion(1, 0, {57, 8}, 16)), "a completion of 40 bytes that is none"},
      {true, to_head(completion(1, 0, {8, UINT32_MAX}, 16)), "a completion of 40 bytes that is none"},
      {true, to_head(completion(1, 1, {4096, 8}, 16)), "a completion of 40 bytes that is none"},
      {true, to_head(completion(UINT32_MAX, 0, {0, 8}, 16)), "a completion of 40 bytes that is none"},
      {true, to_head(completion(0, 0, {0, 8}, 16)), "a completion of 40 bytes that is none"},
  };
  for (const Case& each : cases) {
    Head head(1);
    head[0].add_host(1, 5);
    head[0].twin_client(Head::kClient, head.arena_bytes());
    const std::string why = refusal(each.at_head ? *head[0].at_head : *head[0].here, each.bytes);
    EXPECT_NE(why.find(each.text), std::string::npos) << why << ", expected " << each.text;
    EXPECT_TRUE(next(head[0].hosts.at(1).reports).empty());
    EXPECT_TRUE(next(head[0].hosts.at(1).inbox).empty());
  }
}

TEST(Nonsense, NothingOfACompletionIsApplied) {
  Head head(1);
  head[0].add_host(1, 5);
  const Handle future = head.future();
  ReadBackArea& area = *ClientBlock::attach(head.client)->read_back_area();
  ASSERT_TRUE(area.try_open(future, 16));
  std::memset(area.slot(future, 16), 1, 16);
  Bytes record = joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, Head::kClient}, future.raw, 2, 0}, ValueRun{0, 8},
                        uint64_t{0}, ValueRun{64, 8}, uint64_t{0});
  EXPECT_NE(refusal(*head[0].at_head, frame(FrameKind::kToController, 1, 5, record)), "taken");
  EXPECT_EQ(head.futures().poll(future), FutureState::kPending);
  EXPECT_EQ(area.slot(future, 16)[0], std::byte{1});
}

TEST(Nonsense, WhatIsForNobodyIsDropped) {
  const auto drops = [](bool at_head, const Bytes& bytes) {
    Head head(1);
    head[0].add_host(1, 5);
    head[0].twin_client(Head::kClient, head.arena_bytes());
    Link& link = at_head ? *head[0].at_head : *head[0].here;
    EXPECT_EQ(refusal(link, bytes), "taken");
    EXPECT_TRUE(next(head[0].hosts.at(1).reports).empty());
    EXPECT_TRUE(next(head[0].hosts.at(1).inbox).empty());
    EXPECT_TRUE(next(head[0].hosts.at(1).from_far).empty());
    return link.stats().dropped;
  };
  const Bytes record = joined(RecordHeader{RecordKind::kRunDone, 0, 0});
  const auto block = [](uint64_t number, uint64_t bytes) {
    return joined(BlockFrame{number, bytes, 0}, BlockHost{1, 5});
  };
  const auto data = [](uint64_t number, uint64_t at) { return joined(DataFrame{number, at}, uint64_t{1}); };
  EXPECT_EQ(drops(true, frame(FrameKind::kToController, 2, 5, record)), 1u);
  EXPECT_EQ(drops(true, frame(FrameKind::kToController, 1, 6, record)), 1u);
  EXPECT_EQ(drops(false, frame(FrameKind::kFromController, 2, 5, record)), 1u);
  EXPECT_EQ(drops(false, frame(FrameKind::kFromController, 1, 4, record)), 1u);
  EXPECT_EQ(drops(false, frame(FrameKind::kPeer, 1, 4, joined(PeerHeader{2, 5}))), 1u);
  EXPECT_EQ(drops(true, frame(FrameKind::kPeer, 1, 5, joined(PeerHeader{1, 5}))), 1u);
  EXPECT_EQ(drops(false, frame(FrameKind::kBlock, 9, 1, block(1, 64))), 1u);
  for (const BlockHost host : {BlockHost{1, 4}, BlockHost{2, 5}}) {  // hosts that are not there, or not any more
    EXPECT_EQ(drops(false, frame(FrameKind::kBlock, Head::kClient, 1, joined(BlockFrame{1, 64, 0}, host))), 1u);
  }
  EXPECT_EQ(drops(false, frame(FrameKind::kData, 9, 0, data(1, 0))), 1u);
  EXPECT_EQ(drops(false, frame(FrameKind::kData, Head::kClient, 0, data(1, 0))), 1u);
  const auto drops_of = [&](uint64_t bytes, const Bytes& payload) {
    Bytes both = frame(FrameKind::kBlock, Head::kClient, 1, block(1, bytes));
    const Bytes data_frame = frame(FrameKind::kData, Head::kClient, 0, payload);
    both.insert(both.end(), data_frame.begin(), data_frame.end());
    return drops(false, both);
  };
  for (const uint64_t bytes : {UINT64_MAX, uint64_t{8} << 20, UINT64_MAX - 63, UINT64_MAX - 127}) {
    EXPECT_EQ(drops_of(bytes, data(1, 0)), 1u) << bytes;  // there is no room
  }
  for (const uint64_t at : {uint64_t{64}, uint64_t{57}, UINT64_MAX}) EXPECT_EQ(drops_of(64, data(1, at)), 1u) << at;
  EXPECT_EQ(drops_of(64, data(2, 0)), 1u);
  EXPECT_EQ(drops_of(64, data(1, 56)), 0u);
}

/// A machine that lies can write only to what was lent to it for a fetch, and end only its own hosts' leases.
TEST(Nonsense, TheHeadWritesOnlyWhatItLent) {
  Head head(1);
  head[0].add_host(1, 5);
  head[0].add_host(2, 5);
  head.hub.add_group(Head::kGroup, {1});
  head[0].twin_client(Head::kClient, head.arena_bytes());
  uint64_t own = 0, fetched = 0, lent = 0;
  for (uint64_t* block : {&own, &fetched, &lent}) {
    ASSERT_EQ(head.arena().allocate(64, block), Status::kOk);
    std::memset(head.arena().at(*block), 1, 64);
  }
  head.arena().lease_out(fetched, 2, 1);
  head.arena().lease_out(lent, 2, 2);
  const Handle token = head.future();
  put(head[0].hosts.at(1).orders, head.command(CommandKind::kFetch, 7, token.raw, fetched, 64, 1));
  put(head[0].hosts.at(1).orders, head.command(CommandKind::kPut, 8, 0, lent, 64, 2));
  head.transmit();
  EXPECT_EQ(head.arena().was_references(lent), 1u);
  Link& link = *head[0].at_head;
  const auto say = [&](const Bytes& bytes) {
    const uint64_t before = link.stats().dropped;
    EXPECT_EQ(refusal(link, bytes), "taken");
    return link.stats().dropped == before;
  };
  const auto write = [&](uint64_t number, uint64_t at, size_t bytes, uint32_t client = Head::kClient) {
    Bytes payload = joined(DataFrame{number, at});
    payload.resize(sizeof(DataFrame) + bytes, std::byte{9});
    return say(frame(FrameKind::kData, client, 0, payload));
  };
  const auto complete = [&](uint32_t host) {
    return say(frame(FrameKind::kToController, host, 5,
                     joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, Head::kClient}, token.raw, 0, 0})));
  };
  EXPECT_FALSE(write(0, 0, 8));
  EXPECT_FALSE(write(2, 0, 8));  // a put's
  EXPECT_FALSE(write(3, 0, 8));
  EXPECT_FALSE(write(1, 60, 8));
  EXPECT_FALSE(write(1, UINT64_MAX, 8));
  EXPECT_FALSE(write(1, 0, 8, Head::kClient + 1));
  for (const uint64_t block : {own, fetched, lent}) EXPECT_EQ(head.arena().at(block)[0], std::byte{1});
  EXPECT_FALSE(complete(2));  // which has no part in it
  EXPECT_EQ(head.arena().was_references(fetched), 2u);
  EXPECT_TRUE(write(1, 56, 8));
  EXPECT_EQ(head.arena().at(fetched)[63], std::byte{9});
  EXPECT_TRUE(complete(1));
  EXPECT_EQ(head.arena().was_references(fetched), 1u);
  EXPECT_FALSE(write(1, 0, 8));
}

TEST(Nonsense, AHostCompletesItsOwnPartOfAFutureOnce) {
  Head head(2);
  head[0].add_host(0, 5);
  head[0].add_host(1, 5);
  head[1].add_host(2, 5);
  const auto complete = [&](uint32_t host, Handle future, uint32_t client = Head::kClient) {
    Link& link = *head[host / 2].at_head;
    const uint64_t before = link.stats().dropped;
    const FutureDoneRecord done{{RecordKind::kFutureDone, 0, client}, future.raw, 0, 0};
    EXPECT_EQ(refusal(link, frame(FrameKind::kToController, host, 5, joined(done))), "taken");
    return link.stats().dropped == before;
  };
  const auto send = [&](uint32_t host, const Bytes& record) {
    put(head[host / 2].hosts.at(host).orders, record);
    head.transmit();
    EXPECT_FALSE(next(head[host / 2].hosts.at(host).inbox).empty());
  };
  const auto command = [&](CommandKind kind, Handle handle, Handle token) {
    return head.command(kind, handle.raw, token.raw, 0, 0, 0);
  };
  const Handle argument = head.future(), result = head.future(2), buffer = head.future(), token = head.future(),
               saved = head.future(), restored = head.future();
  const Handle hidden = Handle::make(Handle::kHidden | 1, 1);
  const RunRecord run{{RecordKind::kRun, kRunWanted, Head::kClient}, 1, 2, 3, Head::kGroup, 1, 2};
  send(0, joined(run, argument.raw, result.raw, hidden.raw, uint64_t{1}));
  send(1, joined(run, argument.raw, result.raw, hidden.raw, uint64_t{1}));
  send(0, command(CommandKind::kPut, buffer, {}));
  send(0, command(CommandKind::kFetch, result, token));
  send(0, command(CommandKind::kTask, result, saved));
  send(0, command(CommandKind::kTask, restored, {}));
  const Handle all[] = {argument, result, buffer, token, saved, restored, hidden};
  for (const Handle each : all) {
    EXPECT_FALSE(complete(2, each)) << "a host of another machine";
    EXPECT_FALSE(complete(0, each, Head::kClient + 1)) << "another client";
    EXPECT_FALSE(complete(0, Handle::make(each.index(), each.generation() + 1))) << "another buffer";
    EXPECT_EQ(complete(1, each), each == result) << "of host 0 alone but for the result";
  }
  EXPECT_EQ(head.futures().poll(result), FutureState::kPending);
  for (const Handle each : all) EXPECT_EQ(complete(0, each), each != argument && each != hidden);
  for (const Handle each : all) EXPECT_FALSE(complete(0, each)) << "a second time";
  for (const Handle each : {result, buffer, token, saved, restored}) {
    EXPECT_EQ(head.futures().poll(each), FutureState::kReady);
  }
  EXPECT_EQ(head.futures().poll(argument), FutureState::kPending);
  // Who is lost, or whose client is gone, has no part any more; nor has a successor.
  const Handle late = head.future(), later = head.future();
  send(0, command(CommandKind::kFetch, result, late));
  send(1, command(CommandKind::kFetch, result, later));
  head[0].remove_host(0);
  head[0].add_host(0, 6);
  EXPECT_EQ(refusal(*head[0].at_head,
                    frame(FrameKind::kToController, 0, 6,
                          joined(FutureDoneRecord{{RecordKind::kFutureDone, 0, Head::kClient}, late.raw, 0, 0}))),
            "taken");
  EXPECT_EQ(head.futures().poll(late), FutureState::kPending);
  send(1, joined(ClientGoneRecord{{RecordKind::kClientGone, 0, Head::kClient}}));
  EXPECT_FALSE(complete(1, later));
}

TEST(Nonsense, WhatIsRelayedIsCheckedBefore) {
  const auto record = [](RecordKind kind, uint32_t bytes, size_t behind) {
    Bytes all = joined(PeerHeader{0, 5}, PeerRecord{kind, 0, 0, 1, 0, bytes});
    all.resize(all.size() + behind);
    return all;
  };
  const auto ready = RecordKind::kReceiveReady;
  const uint32_t long_bytes = kLinkRingBytes / 2;
  const std::pair<Bytes, std::string> cases[] = {
      {joined(PeerHeader{0, 5}), "more of its records wait"},
      {joined(PeerHeader{0, 5}, uint64_t{0}), "a record is shorter than its header"},
      {record(RecordKind::kRun, 0, 0), "a record is of kind 1, which hosts do not send"},
      {record(ready, 8, 0), "a receive-ready record has 24 bytes, expected 32"},
      {record(ready, UINT32_MAX, 8), "a receive-ready record has 32 bytes"},
      {record(ready, long_bytes, long_bytes), "a record of 524320 bytes to a host"},
  };
  for (const auto& [bytes, text] : cases) {
    Head head(2);
    head[0].add_host(0, 5);
    head[1].add_host(1, 5);
    const std::string why = refusal(*head[0].at_head, frame(FrameKind::kPeer, 1, 5, bytes));
    EXPECT_NE(why.find(text), std::string::npos) << why << ", expected " << text;
    put(head[1].hosts.at(1).outgoing, joined(RecordHeader{RecordKind::kRunDone, 0, 0}));
    head[1].transmit();
    EXPECT_TRUE(next(head[1].hosts.at(1).from_far).empty());
    EXPECT_FALSE(next(head[1].hosts.at(1).reports).empty()) << "the other machine's link goes on";
  }
}

TEST(Nonsense, ACorruptRing) {
  for (const bool is_far : {false, true}) {
    Head head(1);
    head[0].add_host(1, 5);
    put(is_far ? head[0].hosts.at(1).to_far : head[0].hosts.at(1).outgoing, Bytes(4));
    EXPECT_THROW((void)head[0].here->collect(head[0].buffer), Error);
  }
  Head head(1);
  EXPECT_THROW((void)head[0].here->collect(std::span(head[0].buffer).first(1000)), Error);
}

}  // namespace
}  // namespace pathways::test::test_link_nonsense
