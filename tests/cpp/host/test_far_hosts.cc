// A host whose peers and clients are on other machines. The test is the controller, the link and the other hosts.
//
//   PEER-1   Far.OtherEpochsAreDropped, Far.LostAndReplaced, Far.WhatWasSaidBeforeTheLossCounts;
//            Far.ASuccessorIsHeardBeforeTheLoss, Far.WhatASuccessorSaysEarlyIsBounded, Far.SendsDoNotHoldUpASuccessor;
//            Far.NonsenseClosesOneChannel, Far.ABrokenRingClosesAll
//   LINK-1   Far.CompletionsComeBeforeTheEndOfTheRun: on one ring
//   READ-1   Far.ValuesComeWithTheirCompletion: each host's share, and nothing else
#include "host/host.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <memory>

#include "executor/stub_backend.h"
#include "messages/peer_records.h"
#include "simulate/program.h"
#include "support.h"

namespace pathways::test::test_far_hosts {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::array<char, 8> kWhy{'i', 't', ' ', 'd', 'i', 'e', 'd', '!'};

template <typename... Parts>
Bytes joined(const Parts&... parts) {
  Bytes all;
  const auto add = [&](const auto& part) {
    const auto* from = reinterpret_cast<const std::byte*>(&part);
    all.insert(all.end(), from, from + sizeof part);
  };
  (add(parts), ...);
  return all;
}

using Opened = std::vector<std::pair<uint32_t, int32_t>>;

class PlainBackend final : public StubBackend {
 public:
  Status launch(const NodeContext&, std::span<const Value>, std::span<Value> outputs) override {
    for (Value& output : outputs) output = this;
    return Status::kOk;
  }
  Value placeholder(const NodeContext&, uint32_t) override { return this; }
  Status begin_receive(const NodeContext& context, std::vector<ReceiveBuffers>* receives) override {
    receives->push_back({context.plan + 1, {64}});
    return Status::kOk;
  }
  void send(const NodeContext&, Value, std::span<const ReceiveBuffers>, uint64_t,
            std::span<SendState> states) override {
    for (SendState& state : states) state = send_state;
    ++sends;
  }
  void peer_opens(uint32_t host, int32_t epoch) override { opened.emplace_back(host, epoch); }
  Status finish_receive(const NodeContext&, Value* output) override {
    *output = this;
    return Status::kOk;
  }
  Status read_back(Value, const ReadBackSlot& slot) override { return read(slot); }
  std::string_view last_error() const override { return "not here"; }

  std::function<Status(const ReadBackSlot&)> read = [](const ReadBackSlot&) { return Status::kOk; };
  uint32_t sends = 0;
  SendState send_state = SendState::kDone;
  Opened opened;  ///< by host and epoch
};

/// Host 0 of three. Plan 0 sends a value to host 1 and gets one back, plan 1 the same with host 2; plan 2 is a call.
struct OneFar {
  static constexpr uint32_t kHosts = 3;
  static constexpr HostBlock::Sizes kSizes{1u << 17, 4096, 0, 1u << 15};

  explicit OneFar(std::vector<int32_t> epochs = {3, 5, 7}) {
    std::vector<HostView> blocks(kHosts);
    blocks[0] = HostView(segment);
    host = std::make_unique<Host>(Host::Options{}, blocks, ControllerBlock::attach(controller), backend,
                                  std::move(epochs));
    for (uint32_t plan = 0; plan < 3; ++plan) {
      ModelledProgram program;
      const uint32_t here = program.add_slice({{0}, 1}), there = program.add_slice({{plan % 2 + 1}, 1});
      uint32_t value = program.add_call(here, {});
      if (plan < 2) value = program.add_transfer(program.add_call(there, {program.add_transfer(value, there)}), here);
      program.add_result(value);
      host->add_plan(plan, Plan::parse(program.plan_of(0, 1)));
      host->set_compiled(plan, std::nullopt);
    }
    host->attach_client(0, ClientView(client), 1u << 16);
    HostBlock* block = HostBlock::attach(segment);
    HostView view(segment);
    orders = block->ring_from_controller()->claim_producer();
    reports = block->ring_to_controller()->claim_consumer();
    from_link = view.from_link().producer();
    to_link = view.to_link().consumer();
  }

  static void put(ByteRing::Producer& ring, std::span<const std::byte> bytes) {
    const auto room = ring.try_reserve(static_cast<uint32_t>(bytes.size()));
    ASSERT_FALSE(room.empty());
    std::memcpy(room.data(), bytes.data(), bytes.size());
    ring.publish();
  }
  /// The next record, which is taken.
  static Bytes next(ByteRing::Consumer& ring) {
    Bytes scratch;
    const auto bytes = ring.try_take(scratch);
    const Bytes record(bytes.begin(), bytes.end());
    ring.pop();
    return record;
  }
  uint64_t run(uint32_t plan, bool is_wanted = false) {
    const uint64_t result = Handle::make(static_cast<uint32_t>(++order), 1).raw;
    const RunRecord record{
        {RecordKind::kRun, static_cast<uint16_t>(is_wanted ? kRunWanted : 0), 0}, order, order, plan, 0, 0, 1};
    put(orders, is_wanted ? joined(record, result, uint64_t{1}) : joined(record, result));
    step();
    return result;
  }
  void lose(uint32_t peer, uint64_t loss) {
    put(orders, joined(HostLostRecord{{RecordKind::kHostLost, 0, 0}, loss, 1, 8}, uint64_t{peer}, kWhy));
  }
  void step() {
    for (int i = 0; i < 8; ++i) host->step();
  }
  void say(PeerHeader from, uint64_t run, RecordKind kind) {
    if (kind == RecordKind::kReceiveReady) {
      put(from_link, joined(from, PeerRecord{kind, 0, 2, run, 0, 8}, uint64_t{128}));
    } else {
      put(from_link, joined(from, PeerRecord{kind, 0, 4, run, 0, 0}));
    }
    step();
  }
  /// What the peer says in a whole run.
  void answer(PeerHeader from, uint64_t run) {
    say(from, run, RecordKind::kReceiveReady);
    say(from, run, RecordKind::kReceiveDone);
  }
  /// The text of a failed result, or "ready"; takes all reports.
  std::string outcome(uint64_t handle) {
    std::string found = "pending";
    for (Bytes record = next(reports); !record.empty(); record = next(reports)) {
      const auto header = read_record<RecordHeader>(record);
      if (header.kind == RecordKind::kFutureDone && read_record<FutureDoneRecord>(record).handle == handle) {
        found = "ready";
      } else if (header.kind == RecordKind::kFailed && read_record<FailedRecord>(record).handle == handle) {
        const auto failed = read_record<FailedRecord>(record);
        found.assign(reinterpret_cast<const char*>(record.data()) + sizeof failed, failed.bytes);
      }
    }
    return found;
  }
  /// Everything that was said to other machines.
  std::vector<std::pair<PeerHeader, RecordKind>> said() {
    std::vector<std::pair<PeerHeader, RecordKind>> all;
    for (Bytes record = next(to_link); !record.empty(); record = next(to_link)) {
      all.emplace_back(read_record<PeerHeader>(record),
                       read_record<RecordHeader>(std::span(record).subspan(sizeof(PeerHeader))).kind);
    }
    return all;
  }

  Segment controller = ControllerBlock::make(false), segment = HostBlock::make(0, kHosts, kSizes, false);
  Segment client = ClientBlock::make({64, 4096, 0, false}, false);
  PlainBackend backend;
  std::unique_ptr<Host> host;
  ByteRing::Producer orders, from_link;
  ByteRing::Consumer reports, to_link;
  uint64_t order = 0;
};

TEST(Far, RecordsGoToOtherMachinesAndComeFromThere) {
  OneFar one;
  const uint64_t result = one.run(0);
  auto said = one.said();
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(said[0].second, RecordKind::kReceiveReady);
  EXPECT_EQ(said[0].first.host, 1u);
  EXPECT_EQ(said[0].first.epoch, 5);
  one.answer({1, 5}, 1);
  EXPECT_EQ(one.backend.sends, 1u);
  said = one.said();
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(said[0].second, RecordKind::kReceiveDone);
  EXPECT_EQ(one.outcome(result), "ready");
}

TEST(Far, CompletionsComeBeforeTheEndOfTheRun) {
  OneFar one;
  const uint64_t result = one.run(2);
  std::vector<RecordKind> kinds;
  for (Bytes record = OneFar::next(one.reports); !record.empty(); record = OneFar::next(one.reports)) {
    kinds.push_back(read_record<RecordHeader>(record).kind);
    if (kinds.back() == RecordKind::kFutureDone) {
      EXPECT_EQ(read_record<FutureDoneRecord>(record).handle, result);
      EXPECT_EQ(record.size(), sizeof(FutureDoneRecord));
    }
  }
  EXPECT_EQ(kinds, (std::vector{RecordKind::kFutureDone, RecordKind::kRunDone}));
}

TEST(Far, OtherEpochsAreDropped) {
  OneFar one({3, 5, kAbsent});
  const uint64_t result = one.run(0);
  for (const PeerHeader from : {PeerHeader{1, 4}, PeerHeader{1, 6}, PeerHeader{1, kAbsent}, PeerHeader{2, 0},
                                PeerHeader{2, kAbsent}, PeerHeader{2, -2}}) {
    one.answer(from, 1);
  }
  EXPECT_EQ(one.outcome(result), "pending");
  EXPECT_EQ(one.backend.sends, 0u);
  one.answer({1, 5}, 1);
  EXPECT_EQ(one.outcome(result), "ready");
}

TEST(Far, LostAndReplaced) {
  OneFar one;
  const uint64_t lost = one.run(0);
  one.host->open_peer(1, HostView(), 6, 1);
  one.step();
  EXPECT_EQ(one.backend.opened, (Opened{}));  // not before this host has heard of the loss
  one.answer({1, 5}, 1);
  EXPECT_EQ(one.outcome(lost), "ready");  // it is the lost one whose word counts
  const uint64_t second = one.run(0);
  one.lose(1, 1);
  one.step();
  EXPECT_EQ(one.outcome(second), "it died!");
  EXPECT_EQ(one.backend.opened, (Opened{{1, 6}}));
  (void)one.said();
  const uint64_t next = one.run(0);
  one.answer({1, 5}, 3);  // what is still on its way from the lost one
  EXPECT_EQ(one.outcome(next), "pending");
  const auto said = one.said();
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(said[0].first.epoch, 6);
  one.answer({1, 6}, 3);
  EXPECT_EQ(one.outcome(next), "ready");
}

TEST(Far, ASuccessorIsHeardBeforeTheLoss) {
  OneFar one;
  const uint64_t lost = one.run(0);
  one.host->open_peer(1, HostView(), 6, 1);
  one.host->open_peer(1, HostView(), 7, 2);
  one.say({1, 7}, 3, RecordKind::kReceiveReady);
  one.say({1, 6}, 2, RecordKind::kReceiveReady);
  one.say({1, 8}, 2, RecordKind::kReceiveReady);  // nobody expects it
  EXPECT_EQ(one.outcome(lost), "pending");
  one.lose(1, 1);
  one.step();
  EXPECT_EQ(one.outcome(lost), "it died!");
  (void)one.run(0);
  EXPECT_EQ(one.backend.sends, 1u);
  one.lose(1, 2);
  const uint64_t last = one.run(0);
  EXPECT_EQ(one.backend.sends, 2u);
  one.say({1, 7}, 3, RecordKind::kReceiveDone);
  EXPECT_EQ(one.outcome(last), "ready");
  EXPECT_EQ(one.backend.opened, (Opened{{1, 6}, {1, 7}}));
}

TEST(Far, WhatASuccessorSaysEarlyIsBounded) {
  OneFar one;
  one.host->open_peer(1, HostView(), 6, 1);
  one.host->open_peer(2, HostView(), 8, 2);
  const std::array<uint64_t, 1000> words{};
  const Bytes record = joined(PeerHeader{1, 6}, PeerRecord{RecordKind::kReceiveReady, 0, 2, 9, 0, sizeof words}, words);
  for (size_t bytes = 0; bytes < Peers::kMostKept; bytes += record.size()) {
    OneFar::put(one.from_link, record);
    one.host->step();
  }
  one.say({2, 8}, 2, RecordKind::kReceiveReady);
  one.lose(1, 1);
  EXPECT_NE(one.outcome(one.run(0)).find("it said more than 16777216 bytes"), std::string::npos);
  one.lose(2, 2);
  const uint64_t open = one.run(1);
  one.say({2, 8}, 2, RecordKind::kReceiveDone);
  EXPECT_EQ(one.outcome(open), "ready");
}

TEST(Far, SendsDoNotHoldUpASuccessor) {
  OneFar one;
  one.backend.send_state = SendState::kUnderWay;
  (void)one.run(0);
  one.say({1, 5}, 1, RecordKind::kReceiveReady);
  EXPECT_EQ(one.host->executor().sends_under_way(1), 1u);
  one.host->open_peer(1, HostView(), 6, 1);
  one.lose(1, 1);
  one.step();
  EXPECT_EQ(one.backend.opened, (Opened{{1, 6}}));
}

TEST(Far, NothingIsSaidToALostPeer) {
  OneFar one;
  one.lose(1, 1);
  one.step();
  const uint64_t result = one.run(0);
  EXPECT_TRUE(one.said().empty());
  one.answer({1, 5}, 1);
  EXPECT_EQ(one.outcome(result), "pending");  // the controller would not grant such a run
}

TEST(Far, WhatWasSaidBeforeTheLossCounts) {
  OneFar one;
  const uint64_t result = one.run(0);
  OneFar::put(one.from_link,
              joined(PeerHeader{1, 5}, PeerRecord{RecordKind::kReceiveReady, 0, 2, 1, 0, 8}, uint64_t{128}));
  OneFar::put(one.from_link, joined(PeerHeader{1, 5}, PeerRecord{RecordKind::kReceiveDone, 0, 4, 1, 0, 0}));
  one.lose(1, 1);
  one.step();
  EXPECT_EQ(one.outcome(result), "ready");
}

TEST(Far, NonsenseClosesOneChannel) {
  const PeerRecord done{RecordKind::kReceiveDone, 0, 4, 1, 0, 0};
  auto too_long = done;
  too_long.bytes = 80;
  for (const Bytes& nonsense :
       {joined(PeerHeader{1, 5}), joined(PeerHeader{1, 5}, uint32_t{3}), joined(PeerHeader{1, 5}, too_long),
        joined(PeerHeader{1, 5}, PeerRecord{RecordKind::kRun, 0, 0, 0, 0, 0})}) {
    OneFar one;
    const uint64_t closed = one.run(0), open = one.run(1);
    OneFar::put(one.from_link, nonsense);
    one.step();
    EXPECT_NE(one.outcome(closed).find("the channel from host 1 was closed"), std::string::npos) << nonsense.size();
    one.answer({1, 5}, 1);
    one.answer({2, 7}, 2);
    EXPECT_EQ(one.outcome(open), "ready");
    const uint64_t later = one.run(0);
    EXPECT_NE(one.outcome(later).find("the channel from host 1 was closed"), std::string::npos);
    one.lose(1, 1);
    one.host->open_peer(1, HostView(), 6, 1);
    one.step();
    const uint64_t with_successor = one.run(0);
    one.answer({1, 6}, one.order);
    EXPECT_EQ(one.outcome(with_successor), "ready");
  }
}

TEST(Far, ABrokenRingClosesAll) {
  for (const Bytes& nonsense : {joined(uint32_t{0}), joined(PeerHeader{0, 3}), joined(PeerHeader{9, 5}), Bytes()}) {
    OneFar one;
    const uint64_t first = one.run(0), second = one.run(1);
    if (nonsense.empty()) {  // the ring itself
      std::byte* ring = HostView(one.segment).from_link().at;
      std::memset(ring + sizeof(ByteRing), 0xff, 64);
      OneFar::put(one.from_link, joined(PeerHeader{1, 5}, uint64_t{0}));
      std::memset(ring + sizeof(ByteRing), 0xff, 64);
    } else {
      OneFar::put(one.from_link, nonsense);
    }
    one.step();
    std::vector<std::string> texts;
    for (Bytes record = OneFar::next(one.reports); !record.empty(); record = OneFar::next(one.reports)) {
      if (read_record<RecordHeader>(record).kind != RecordKind::kFailed) continue;
      const auto failed = read_record<FailedRecord>(record);
      EXPECT_TRUE(failed.handle == first || failed.handle == second);
      texts.emplace_back(reinterpret_cast<const char*>(record.data()) + sizeof failed, failed.bytes);
    }
    ASSERT_EQ(texts.size(), 2u);
    for (const std::string& text : texts) EXPECT_NE(text.find("was closed"), std::string::npos) << text;
    // This host hears nothing from over there any more. A successor does not change that, and no run waits for it.
    one.lose(1, 1);
    one.host->open_peer(1, HostView(), 6, 1);
    one.step();
    EXPECT_NE(one.outcome(one.run(0)).find("the channel from host 1 was closed"), std::string::npos);
  }
}

/// What a completion brings, put together as the client's machine does it: bytes that nobody wrote stay 0xee.
Bytes value_of(const Bytes& bytes, bool* is_large) {
  const auto record = read_record<FutureDoneRecord>(bytes);
  *is_large = record.is_large != 0;
  Bytes value(ReadBackArea::kLargeBytes, std::byte{0xee});
  auto rest = std::span(bytes).subspan(sizeof record);
  for (uint32_t i = 0; i < record.runs; ++i) {
    const auto run = read_record<ValueRun>(rest);
    std::memcpy(value.data() + run.offset, rest.data() + sizeof run, run.bytes);
    rest = rest.subspan(padded(sizeof run + size_t{run.bytes}));
  }
  EXPECT_TRUE(rest.empty());
  return value;
}

TEST(Far, ValuesComeWithTheirCompletion) {
  const Bytes whole = pattern(ReadBackArea::kLargeBytes, seed());
  struct Case {
    size_t bytes, first, stride, piece;  ///< this host's share: pieces of `piece` bytes, one every `stride` bytes
  };
  for (const Case& each : std::vector<Case>{{8, 0, 8, 8},
                                            {64, 0, 64, 64},
                                            {1, 0, 1, 1},
                                            {64, 16, 64, 16},
                                            {64, 1, 2, 1},
                                            {65, 0, 65, 65},
                                            {4096, 0, 4096, 4096},
                                            {4096, 1024, 4096, 1024},
                                            {4096, 0, 2, 1},
                                            {4096, 8, 64, 8},
                                            {4096, 4096, 1, 1}}) {
    OneFar one;
    Bytes expected(ReadBackArea::kLargeBytes, std::byte{0xee});
    const auto write = [&](std::byte* to) {
      for (size_t at = each.first; at < each.bytes; at += each.stride) {
        std::memcpy(to + at, whole.data() + at, std::min(each.piece, each.bytes - at));
      }
    };
    write(expected.data());
    one.backend.read = [&](const ReadBackSlot& slot) {
      write(slot.of(each.bytes));
      for (size_t at = each.first; at < each.bytes; at += each.stride) {
        slot.wrote(each.bytes, at, std::min(each.piece, each.bytes - at));
      }
      return Status::kOk;
    };
    const uint64_t result = one.run(2, true);
    const Bytes record = OneFar::next(one.reports);
    ASSERT_GE(record.size(), sizeof(FutureDoneRecord));
    ASSERT_EQ(read_record<RecordHeader>(record).kind, RecordKind::kFutureDone);
    EXPECT_EQ(read_record<FutureDoneRecord>(record).handle, result);
    bool is_large = false;
    EXPECT_EQ(value_of(record, &is_large), expected) << each.bytes << " bytes from " << each.first;
    if (each.first < each.bytes) {
      EXPECT_EQ(is_large, each.bytes > ReadBackArea::kSmallBytes);
    }
    // The next completion brings nothing of it.
    (void)one.outcome(0);
    (void)one.run(2);
    EXPECT_EQ(OneFar::next(one.reports).size(), sizeof(FutureDoneRecord));
  }
}

TEST(Far, AValueThatCannotBeReadFailsItsFuture) {
  OneFar one;
  one.backend.read = [](const ReadBackSlot&) { return Status::kFailed; };
  EXPECT_EQ(one.outcome(one.run(2, true)), "not here");
  one.backend.read = [](const ReadBackSlot& slot) {
    std::memset(slot.of(8), 1, 8);
    slot.wrote(8, 0, 8);
    return Status::kOk;
  };
  EXPECT_EQ(one.outcome(one.run(2, true)), "ready");
}

TEST(Far, ClientsThatAreGoneGetNothing) {
  OneFar one;
  OneFar::put(one.orders, joined(ClientGoneRecord{{RecordKind::kClientGone, 0, 0}}));
  one.step();
  EXPECT_EQ(one.outcome(one.run(2, true)), "pending");
}

TEST(Far, RefusedAtOnce) {
  PlainBackend backend;
  Segment controller = ControllerBlock::make(false);
  const auto make = [&](HostBlock::Sizes sizes, std::vector<int32_t> epochs) {
    Segment segment = HostBlock::make(0, 3, sizes, false);
    std::vector<HostView> blocks(3);
    blocks[0] = HostView(segment);
    const Host host(Host::Options{}, blocks, ControllerBlock::attach(controller), backend, std::move(epochs));
  };
  make(OneFar::kSizes, {3, 5, 7});
  make({1u << 17, 0, 0, 1u << 15}, {3, 5, 7});                          // no host is near: no rings to such
  EXPECT_THROW(make(OneFar::kSizes, {3, 5}), Error);                    // not all hosts
  EXPECT_THROW(make({1u << 17, 4096, 0, 0}, {3, 5, 7}), Error);         // no rings to a link
  EXPECT_THROW(make({1u << 16, 4096, 0, 1u << 15}, {3, 5, 7}), Error);  // the longest completion does not fit
  OneFar one;
  EXPECT_THROW(one.host->open_peer(0, HostView(), 5, 0), Error);
  EXPECT_THROW(one.host->open_peer(1, HostView(), kAbsent, 0), Error);
  EXPECT_THROW(one.host->open_peer(3, HostView(), 5, 0), Error);
}

}  // namespace
}  // namespace pathways::test::test_far_hosts
