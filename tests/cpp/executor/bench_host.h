// One or two executors on modelled devices, with a link that writes down what they say and delivers when it is told to.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "executor/executor.h"
#include "host/swapping_host_for_testing.h"
#include "simulate/modelled_device.h"

namespace pathways::test {

class RecordingLink final : public HostLink {
 public:
  void leave() override {
    if (on_leave) on_leave();
  }
  void complete(uint32_t client, Handle future) override { done.push_back({client, future.raw}); }
  void failed(uint32_t client, Handle future, std::string_view text) override {
    failures[{client, future.raw}] = std::string(text);
  }
  Status read_back(uint32_t, Handle future, const WriteValue& write) override {
    if (refused.count(future.raw) != 0) return Status::kOk;
    return write({reinterpret_cast<std::byte*>(&read[future.raw]), nullptr});
  }
  void run_done(uint32_t, uint64_t tag, uint32_t gangs, uint32_t expected, DeviceTime time,
                const TakenBranches& branches) override {
    runs[tag] = {gangs, expected};
    busy_ns[tag] = time.busy_ns;
    taken[tag] = branches;
  }
  void hold_over(uint32_t, uint64_t hold) override { holds_over.push_back(hold); }
  void receive_ready(uint32_t host, uint64_t order, uint32_t node, std::span<const uint64_t> offsets) override {
    outgoing.push_back({host, [=, o = std::vector<uint64_t>(offsets.begin(), offsets.end()),
                               from = self](Executor& to) { (void)to.on_receive_ready(order, node, from, o); }});
  }
  void receive_done(uint32_t host, uint64_t order, uint32_t node, Outcome outcome, std::string_view text) override {
    outgoing.push_back({host, [=, t = std::string(text), from = self](Executor& to) {
                          (void)to.on_receive_done(order, node, from, outcome, t);
                        }});
  }
  void exchange_words(uint32_t host, ExchangeWords kind, uint64_t order, uint32_t node,
                      std::span<const uint64_t> words) override {
    outgoing.push_back({host, [=, w = std::vector<uint64_t>(words.begin(), words.end()), from = self](Executor& to) {
                          (void)to.on_exchange_words(kind, order, node, from, w);
                        }});
  }
  void exchange_written(uint32_t host, uint64_t order, uint32_t node, std::string_view error) override {
    outgoing.push_back({host, [=, t = std::string(error), from = self](Executor& to) {
                          (void)to.on_exchange_written(order, node, from, t);
                        }});
  }
  void decided(uint32_t host, uint64_t order, uint32_t choice, const Decision& decision) override {
    ++decisions;
    outgoing.push_back({host, [=, d = decision, t = std::string(decision.text), from = self](Executor& to) {
                          (void)to.on_decision(order, choice, from, {d.outcome, d.taken, t});
                        }});
  }

  uint64_t completions(uint64_t handle, uint32_t client = 0) const {
    return static_cast<uint64_t>(std::count(done.begin(), done.end(), std::pair{client, handle}));
  }
  std::string failure(uint64_t handle, uint32_t client = 0) const {
    const auto found = failures.find({client, handle});
    return found == failures.end() ? std::string() : found->second;
  }

  struct Message {
    uint32_t host;
    std::function<void(Executor&)> deliver;
  };
  uint32_t self = 0;
  std::vector<std::pair<uint32_t, uint64_t>> done;
  std::map<uint64_t, uint64_t> read;  ///< by handle: what was written into its slot
  std::set<uint64_t> refused;         ///< handles that nobody will read
  std::map<std::pair<uint32_t, uint64_t>, std::string> failures;
  std::vector<uint64_t> holds_over;
  std::map<uint64_t, std::pair<uint32_t, uint32_t>> runs;  ///< by tag: gangs launched, expected
  std::map<uint64_t, TakenBranches> taken;                 ///< by tag
  std::map<uint64_t, int64_t> busy_ns;                     ///< by tag
  uint64_t decisions = 0;                                  ///< sent
  std::deque<Message> outgoing;
  std::function<void()> on_leave;
};

/// A host without rings.
struct BenchHost {
  explicit BenchHost(ModelClock& clock, uint32_t number = 0, uint32_t devices = 2, int64_t step_ns = 100,
                     uint32_t max_in_flight = 0, bool gangs_block = false)
      : backend({number, devices, step_ns, 0}, clock, nullptr),
        executor({.host = number, .devices = devices, .quirks = {max_in_flight, gangs_block, gangs_block}}, backend,
                 link) {
    link.self = number;
    executor.add_client(0);
  }

  void add_plan(uint32_t id, const PlanBuilder& builder, bool compiled = true, uint32_t client = Executor::kNobody) {
    Plan plan = Plan::parse(builder.finish());
    backend.learn(id, plan, {});
    executor.add_plan(id, std::move(plan), client);
    if (compiled) executor.set_compiled(id);
  }
  void run(uint64_t order, uint32_t plan, std::vector<uint64_t> arguments, const std::vector<uint64_t>& results,
           uint32_t client = 0, std::vector<uint64_t> wanted = {}) {
    RunRecord record{};
    record.header = {RecordKind::kRun, static_cast<uint16_t>(wanted.empty() ? 0 : kRunWanted), client};
    record.tag = record.order = order;
    record.plan = plan;
    record.arguments = static_cast<uint32_t>(arguments.size());
    record.results = static_cast<uint32_t>(results.size());
    arguments.insert(arguments.end(), results.begin(), results.end());
    arguments.insert(arguments.end(), wanted.begin(), wanted.end());
    take(record, std::as_bytes(std::span(arguments)));
  }
  void client_gone(uint32_t client) { take(RecordHeader{RecordKind::kClientGone, 0, client}, {}); }
  void command(CommandKind kind, uint64_t handle, uint64_t token, std::span<const std::byte> payload,
               uint32_t client = 0) {
    CommandRecord record{{RecordKind::kCommand, static_cast<uint16_t>(kind), client},
                         handle,
                         token,
                         0,
                         static_cast<uint32_t>(payload.size())};
    record.hold = hold;
    executor.on_command(record, payload);
  }
  void put(uint64_t handle, uint64_t hash, uint64_t devices = 1, uint32_t client = 0) {
    const ModelledBackend::Put payload{hash, devices};
    command(CommandKind::kPut, handle, 0, std::as_bytes(std::span{&payload, 1}), client);
  }
  void release(uint64_t handle, uint32_t client = 0) {
    command(CommandKind::kRelease, 0, 0, std::as_bytes(std::span{&handle, 1}), client);
  }
  void fetch(uint64_t handle, uint64_t token, uint64_t* out, uint32_t client = 0) {
    const ModelledBackend::Fetch payload{out};
    command(CommandKind::kFetch, handle, token, std::as_bytes(std::span{&payload, 1}), client);
  }
  /// From now on every second run comes before the one that it follows.
  void swap_runs() {
    swap.emplace(1, [this](std::span<const std::byte> bytes) { deliver(bytes); });
  }
  void poll() {
    do {
      if (swap) swap->poll(true);
    } while (executor.poll() != 0);
  }
  /// Nothing is left: each value was dropped exactly once (a second drop aborts).
  void expect_empty() {
    const ExecutorStats stats = executor.stats();
    EXPECT_EQ(backend.live_values(), 0u);
    EXPECT_EQ(backend.open_receives(), 0u);
    EXPECT_EQ(backend.order_violations(), 0u);
    EXPECT_EQ(stats.objects, 0u);
    EXPECT_EQ(stats.live_runs, 0u);
    EXPECT_EQ(stats.waiting, 0u);
    EXPECT_EQ(stats.exchanges, 0u);
    EXPECT_TRUE(executor.is_idle());
    executor.validate();
  }

  RecordingLink link;
  ModelledBackend backend;
  Executor executor;
  std::optional<RunSwap> swap;
  uint64_t hold = 0;  ///< of the tasks that come

 private:
  template <typename Record>
  void take(const Record& record, std::span<const std::byte> words) {
    const auto head = std::as_bytes(std::span{&record, 1});
    std::vector<std::byte> bytes(head.begin(), head.end());
    bytes.insert(bytes.end(), words.begin(), words.end());
    swap ? swap->take(bytes) : deliver(bytes);
  }
  void deliver(std::span<const std::byte> bytes) {
    const auto header = read_record<RecordHeader>(bytes);
    if (header.kind == RecordKind::kRun) {
      const auto* words = reinterpret_cast<const uint64_t*>(bytes.data() + sizeof(RunRecord));
      executor.on_run(read_record<RunRecord>(bytes), words);
    } else {
      executor.on_client_gone(header.client);
    }
  }
};

/// One host, and what most tests of it do.
struct Bench : ::testing::Test {
  ModelClock clock{ModelClock::Kind::kVirtual};
  BenchHost host{clock};

  void pass(int64_t ns = 1000000) {
    clock.advance(ns);
    host.poll();
  }
  /// Releases what the test still has; then nothing is left.
  void drop(std::vector<uint64_t> handles) {
    for (const uint64_t h : handles) host.release(h);
    pass();
    host.expect_empty();
  }
};

inline PlanBuilder::Node call(std::vector<uint32_t> inputs, std::vector<uint32_t> outputs, uint64_t devices = 1,
                              bool gang = false) {
  static uint32_t number = 0;
  PlanBuilder::Node n;
  n.kind = NodeKind::kCall;
  n.gang = gang;
  n.global_node = ++number % 1000;
  n.inputs = std::move(inputs);
  n.outputs = std::move(outputs);
  n.devices = devices;
  return n;
}

inline PlanBuilder::Node transfer(uint32_t number, std::vector<uint32_t> inputs, std::vector<uint32_t> outputs,
                                  std::vector<uint32_t> sources, std::vector<uint32_t> destinations) {
  PlanBuilder::Node n;
  n.kind = NodeKind::kTransfer;
  n.global_node = number;
  n.devices = outputs.empty() ? 0 : 1;
  n.input_devices = inputs.empty() ? 0 : 1;
  n.inputs = std::move(inputs);
  n.outputs = std::move(outputs);
  n.sources = std::move(sources);
  n.destinations = std::move(destinations);
  return n;
}

/// Arguments, then nodes, then results.
inline PlanBuilder plan_of(std::vector<uint32_t> arguments, std::vector<PlanBuilder::Node> nodes,
                           std::vector<uint32_t> results, uint32_t values, uint32_t host = 0, uint32_t devices = 2) {
  PlanBuilder builder(host, devices, values);
  builder.set_arguments(std::move(arguments));
  builder.set_results(std::move(results));
  for (PlanBuilder::Node& node : nodes) builder.add(std::move(node));
  return builder;
}

inline uint64_t handle(uint32_t index, uint32_t generation = 1) { return Handle::make(index, generation).raw; }

}  // namespace pathways::test
