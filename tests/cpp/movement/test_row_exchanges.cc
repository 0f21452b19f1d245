// Exchanges of rows in the runs of two executors, with rows in memory and records that a test delivers when it likes.
//
//   EXCH-1  Rows: a run ends when its rows have come, whatever comes first
//   MEM-2   MemoryInOrder
//   ERR-1   Refused, FailedValue
//   ERR-2   LostHost: at each moment; the memory comes back
//   PEER-3  LostTogether: none of the hosts that die together is told of the end of another
//   PEER-1  LostPeer: both hosts end, at each moment
//   PEER-4  LostPeerWhoseRunIsLate: a host that gives up before the other's run has come is heard when it comes
#include "movement/row_exchanges.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bulk/row_copies.h"
#include "executor/bench_host.h"
#include "executor/executor.h"
#include "executor/stub_backend.h"

namespace pathways::test::test_row_exchanges {
namespace {

constexpr uint32_t kCapacity = 3;
using Numbers = std::vector<int32_t>;

struct Rows {
  Numbers numbers;
  int references = 1;
};

/// Rows of one int32. Each value has one shard.
class RowBackend : public test::StubBackend {
 public:
  Status read_shards(const NodeContext&, uint32_t, Value value, std::vector<std::span<const std::byte>>* shards,
                     Value* keep) override {
    shards->push_back(std::as_bytes(std::span<const int32_t>(of(value).numbers)));
    *keep = retain(value);
    return Status::kOk;
  }
  Status begin_exchange(const NodeContext& where, std::vector<uint64_t>* places) override {
    if (!has_memory) return Status::kNoMemory;
    begun.push_back(where.order);
    Numbers& room = rooms[where.order] = Numbers(2 * kCapacity, -7);
    places->push_back(reinterpret_cast<uint64_t>(room.data()));
    places->push_back(reinterpret_cast<uint64_t>(room.data() + kCapacity));
    return Status::kOk;
  }
  SendState write_rows(const NodeContext&, const RowWrite& write) override {
    const RowCopies copies(write);
    std::vector<const std::byte*> sources;
    for (const RowWrite::Shard& shard : write.shards) sources.push_back(shard.rows.data());
    sources.push_back(reinterpret_cast<const std::byte*>(copies.numbers.data()));
    std::vector<std::byte*> blocks;
    for (const Room& room : write.rooms) {
      blocks.push_back(reinterpret_cast<std::byte*>(room.rows));
      blocks.push_back(reinterpret_cast<std::byte*>(room.numbers));
    }
    std::vector<std::byte> all(copies.copy_plan.bytes());
    CopyWalk from(copies.copy_plan), to(copies.copy_plan);
    gather(from, sources, all);
    scatter(to, blocks, all);
    if (!is_slow) return SendState::kDone;
    slow.push_back({write.key, write.host});
    return SendState::kUnderWay;
  }
  void take_sent(std::vector<Sent>* out) override {
    if (is_slow) return;
    out->insert(out->end(), slow.begin(), slow.end());
    slow.clear();
  }
  Status finish_exchange(const NodeContext& where, const RowResults& results, std::span<Value> outputs) override {
    Numbers rows = rooms[where.order];
    rooms.erase(where.order);
    if (!results.kept.empty()) rows.resize(static_cast<size_t>(results.kept[0]));
    came[where.order] = rows;
    for (Value& output : outputs) output = make({});
    return Status::kOk;
  }
  void abandon_exchange(const NodeContext& where) override { rooms.erase(where.order); }
  Status put(uint32_t, std::span<const std::byte> payload, const Leased&, const Booked&, Value* output,
             uint64_t* devices) override {
    Numbers numbers(payload.size() / sizeof(int32_t));
    std::memcpy(numbers.data(), payload.data(), payload.size());
    *output = make(std::move(numbers));
    *devices = 1;
    return Status::kOk;
  }
  uint64_t devices_of_put(uint32_t, std::span<const std::byte>) override { return 1; }
  std::string_view last_error() const override { return "failed"; }
  Readiness readiness(Value value) override { return of(value).numbers == Numbers{-5} ? Readiness::kFailed : ready; }
  Value retain(Value value) override {
    ++of(value).references;
    return value;
  }
  void drop(Value value) override {
    if (--of(value).references == 0) {
      delete &of(value);
      --live;
    }
  }

  bool has_memory = true, is_slow = false;
  Readiness ready = Readiness::kReady;
  std::vector<Sent> slow;
  std::vector<uint64_t> begun;        ///< by order
  std::map<uint64_t, Numbers> rooms;  ///< memory that is taken
  std::map<uint64_t, Numbers> came;   ///< what came to the target
  int live = 0;

 private:
  static Rows& of(Value value) { return *static_cast<Rows*>(value); }
  Value make(Numbers numbers) {
    ++live;
    return new Rows{std::move(numbers)};
  }
};

/// Host 0 has the source shard, host 1 the target shard. Node 1 is coordinated by host 1, node 2 by host 0.
const ExchangeShape kOfTwo{{1, {{0, 0}}}, {1, {{0, 1}}}, kCapacity, Overflow::kDrop, {}, Routes::kChosen, 4};
/// Host 1 has a source shard, too, and host 2 the target shard. Node 3 is coordinated by host 0.
const ExchangeShape kOfThree{{2, {{0, 0}, {1, 1}}}, {1, {{0, 2}}}, kCapacity, Overflow::kDrop, {}, Routes::kChosen, 4};

PlanBuilder plan_of(uint32_t host, uint32_t node, const ExchangeShape& shape = kOfTwo) {
  PlanBuilder plan(host, 1, host == 0 ? 3 : 4);
  PlanBuilder::Node exchange;
  exchange.global_node = node;
  if (host == 0) {
    plan.set_arguments({0, 1});
    exchange.inputs = {0, 1};
    exchange.outputs = {2};
    exchange.input_devices = 1;
    plan.set_results({2});
  } else {
    plan.set_arguments({kNoValue, kNoValue});
    exchange.outputs = {0, 1, 2, 3};
    exchange.devices = 1;
    plan.set_results({0});
  }
  plan.add(exchange, shape);
  return plan;
}

struct RowHost {
  explicit RowHost(uint32_t number) : executor({.host = number, .quirks = test::kCpuHabits}, backend, link) {
    link.self = number;
    executor.add_client(0);
    for (const uint32_t node : {1u, 2u}) {
      executor.add_plan(node, Plan::parse(plan_of(number, node).finish()));
      executor.set_compiled(node);
    }
  }
  void put(uint64_t handle, const Numbers& numbers) {
    const auto bytes = std::as_bytes(std::span(numbers));
    CommandRecord record{{RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kPut), 0},
                         handle,
                         0,
                         0,
                         static_cast<uint32_t>(bytes.size())};
    executor.on_command(record, bytes);
  }
  void run(uint64_t order, uint32_t plan, std::vector<uint64_t> handles) {
    RunRecord record{};
    record.header = {RecordKind::kRun, 0, 0};
    record.tag = record.order = order;
    record.plan = plan;
    record.arguments = 2;
    record.results = 1;
    executor.on_run(record, handles.data());
  }
  RowBackend backend;
  test::RecordingLink link;
  Executor executor;
};

uint64_t handle(uint32_t n) { return Handle::make(n, 1).raw; }

struct Two {
  Two() {
    zero.put(handle(1), {10, 20, 30, 40});
    zero.put(handle(2), {0, 0, 0, 0});
    zero.put(handle(3), {-5});
  }
  void run(uint64_t order, uint32_t plan, uint32_t on, uint64_t values = handle(1)) {
    (on == 0 ? zero : one).run(order, plan, {values, handle(2), handle(100 + static_cast<uint32_t>(order))});
  }
  /// Delivers at most `records`, oldest first.
  void deliver(int records = 1000) {
    for (; records > 0; --records) {
      zero.executor.poll();
      one.executor.poll();
      RowHost& from = zero.link.outgoing.empty() ? one : zero;
      if (from.link.outgoing.empty()) return;
      const auto message = from.link.outgoing.front();
      from.link.outgoing.pop_front();
      if (message.host == 0 ? is_zero_there : is_one_there) message.deliver((message.host == 0 ? zero : one).executor);
    }
    zero.executor.poll();
    one.executor.poll();
  }
  void expect_over(RowHost& host) {
    EXPECT_TRUE(host.executor.is_idle());
    EXPECT_EQ(host.executor.stats().exchanges, 0u);
    host.executor.validate();
  }
  RowHost zero{0}, one{1};
  bool is_zero_there = true, is_one_there = true;
};

TEST(RowExchanges, Rows) {
  for (const uint32_t plan : {1u, 2u}) {
    for (const bool is_late : {false, true}) {  // whichever host reads the run first
      Two two;
      two.zero.backend.is_slow = is_late;
      two.run(1, plan, is_late ? 1 : 0);
      two.deliver();
      two.run(1, plan, is_late ? 0 : 1);
      two.deliver();
      EXPECT_EQ(two.zero.executor.sends_under_way(1), is_late ? 1u : 0u);
      two.zero.backend.is_slow = false;
      two.deliver();
      EXPECT_EQ(two.one.backend.came[1], (Numbers{10, 20, 30}));
      EXPECT_EQ(two.one.link.completions(handle(101)), 1u);
      EXPECT_EQ(two.zero.link.completions(handle(101)), 1u);
      EXPECT_EQ(two.zero.executor.stats().exchange_records + two.one.executor.stats().exchange_records, 3u);
      two.expect_over(two.zero);
      two.expect_over(two.one);
    }
  }
}

TEST(RowExchanges, MemoryInOrder) {
  Two two;
  two.one.backend.has_memory = false;
  for (const uint32_t order : {1u, 2u, 3u}) {
    two.run(order, 1 + order % 2, 0);
    two.run(order, 1 + order % 2, 1);
  }
  two.deliver();
  EXPECT_NE(two.one.executor.describe_runs(1)[0].find("no room to receive"), std::string::npos);
  EXPECT_TRUE(two.one.backend.came.empty());
  two.one.backend.has_memory = true;
  two.deliver();
  EXPECT_EQ(two.one.backend.begun, (std::vector<uint64_t>{1, 2, 3}));
  EXPECT_EQ(two.one.backend.came.size(), 3u);
  two.expect_over(two.one);
}

TEST(RowExchanges, FailedValue) {
  for (const uint32_t plan : {1u, 2u}) {
    Two two;
    two.run(1, plan, 0, handle(3));
    two.run(1, plan, 1, handle(3));
    two.deliver();
    EXPECT_EQ(two.zero.link.failure(handle(101)), "failed");
    EXPECT_EQ(two.one.link.failure(handle(101)), "failed");
    EXPECT_TRUE(two.one.backend.rooms.empty());
    two.expect_over(two.zero);
    two.expect_over(two.one);
  }
}

TEST(RowExchanges, Refused) {
  for (const uint32_t plan : {1u, 2u}) {
    for (const uint32_t refuser : {0u, 1u}) {
      for (const bool is_first : {false, true}) {
        Two two;
        RowHost& host = refuser == 0 ? two.zero : two.one;
        const auto refuse = [&] {
          RunRecord record{};
          record.header = {RecordKind::kRun, 0, 0};
          record.tag = record.order = 1;
          record.plan = plan;
          record.arguments = 1;  // it takes two
          const uint64_t argument = handle(1);
          host.executor.on_run(record, &argument);
        };
        if (is_first) refuse();
        two.deliver();
        two.run(1, plan, 1 - refuser);
        two.deliver();
        if (!is_first) refuse();
        two.deliver();
        RowHost& other = refuser == 0 ? two.one : two.zero;
        EXPECT_NE(other.link.failure(handle(101)).find("takes 2 arguments"), std::string::npos) << plan << refuser;
        two.expect_over(other);
        EXPECT_TRUE(other.backend.rooms.empty());
      }
    }
  }
}

TEST(RowExchanges, LostHost) {
  for (const uint32_t plan : {1u, 2u}) {
    for (const uint32_t dead : {0u, 1u}) {
      for (int records = 0; records < 4; ++records) {
        Two two;
        two.run(1, plan, 0);
        two.run(1, plan, 1);
        two.deliver(records);
        RowHost& other = dead == 0 ? two.one : two.zero;
        (dead == 0 ? two.is_zero_there : two.is_one_there) = false;
        (dead == 0 ? two.zero : two.one).link.outgoing.clear();
        other.executor.on_hosts_lost(std::vector<uint32_t>{dead}, "host is lost");
        two.deliver();
        two.expect_over(other);
        const std::string failure = other.link.failure(handle(101));
        EXPECT_TRUE(failure == "host is lost" || other.link.completions(handle(101)) == 1) << failure;
      }
    }
  }
}

TEST(RowExchanges, LostPeer) {
  for (const uint32_t plan : {1u, 2u}) {
    for (const uint32_t doubter : {0u, 1u}) {
      for (int records = -1; records < 4; ++records) {  // -1: before the run
        Two two;
        RowHost& host = doubter == 0 ? two.zero : two.one;
        const auto doubt = [&] { host.executor.close_peer(1 - doubter, "not believed"); };
        if (records < 0) doubt();
        two.run(1, plan, 0);
        two.run(1, plan, 1);
        two.deliver(std::max(records, 0));
        if (records >= 0) doubt();
        (doubter == 0 ? two.is_zero_there : two.is_one_there) = false;  // it reads nothing any more
        two.deliver();
        two.expect_over(host);
        (doubter == 0 ? two.is_zero_there : two.is_one_there) = true;
        two.expect_over(doubter == 0 ? two.one : two.zero);
      }
    }
  }
}

TEST(RowExchanges, LostTogether) {
  for (const uint32_t reported : {1u, 2u}) {  // the other one's end is the last thing that the decision waits for
    Two two;
    two.zero.executor.add_plan(3, Plan::parse(plan_of(0, 3, kOfThree).finish()));
    two.zero.executor.set_compiled(3);
    two.run(1, 3, 0);
    two.zero.executor.poll();
    HostReport report{reported};
    report.fault = {ExchangeFault::Kind::kSourceFailed, 0, 0, 0, "a fault of its own"};
    ASSERT_EQ(two.zero.executor.on_exchange_words(ExchangeWords::kReport, 1, 3, reported, encode(report)), Status::kOk);
    const std::vector<uint32_t> hosts{1, 2};
    two.zero.executor.on_hosts_lost(hosts, "a power cut");
    EXPECT_TRUE(two.zero.link.outgoing.empty()) << "host " << two.zero.link.outgoing.front().host << " is told";
    EXPECT_FALSE(two.zero.link.failure(handle(101)).empty());
    two.expect_over(two.zero);
  }
}

TEST(RowExchanges, LostPeerWhoseRunIsLate) {
  Two two;
  two.run(1, 1, 0);
  two.deliver();  // host 1 coordinates, and has this report before its run
  two.zero.executor.close_peer(1, "not believed");
  two.is_zero_there = false;
  two.deliver();  // host 0 will not write, whatever host 1 decides
  two.run(1, 1, 1);
  two.deliver();
  EXPECT_EQ(two.one.link.failure(handle(101)), "not believed");
  two.expect_over(two.zero);
  two.expect_over(two.one);
}

}  // namespace
}  // namespace pathways::test::test_row_exchanges
