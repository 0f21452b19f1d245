// A real controller, real executors, and a backend that counts the bytes that it keeps: what a client's records make of
// them. Shared by the tests of MEM-7.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cluster/counting_backend.h"
#include "controller/played.h"
#include "executor/bench_host.h"
#include "support.h"

namespace pathways::test {

inline constexpr uint32_t kHosts = 2, kDevicesEach = 2, kDevices = kHosts * kDevicesEach;
inline constexpr GroupId kAll = 0, kFirst = 1, kSecond = 2, kBoth = 3;
inline constexpr uint64_t kWorth = 100;  // bytes of most buffers, on each device

/// A host's rings, its executor, and its devices.
struct WorkingHost final : HostLink {
  WorkingHost(uint32_t number, ControllerBlock* controller)
      : rings(number, kHosts, controller), executor({.host = number, .devices = kDevicesEach}, backend, *this) {}
  ~WorkingHost() override { executor.clear(); }

  void complete(uint32_t, Handle) override {}
  void failed(uint32_t, Handle, std::string_view) override {}
  void run_done(uint32_t client, uint64_t tag, uint32_t gangs, uint32_t expected, DeviceTime,
                const TakenBranches&) override {
    rings.say(RunDoneRecord{{RecordKind::kRunDone, 0, client}, tag, gangs, expected, rings.host, 0, 0});
  }
  void command_done(uint32_t client, uint64_t bytes) override {
    rings.say(CommandsDoneRecord{{RecordKind::kCommandsDone, 0, client}, 1, bytes});
  }
  void hold_over(uint32_t client, uint64_t hold) override {
    rings.say(HoldOverRecord{{RecordKind::kHoldOver, 0, client}, hold});
  }
  void receive_ready(uint32_t, uint64_t, uint32_t, std::span<const uint64_t>) override {}
  void receive_done(uint32_t, uint64_t, uint32_t, Outcome, std::string_view) override {}
  void exchange_words(uint32_t, ExchangeWords, uint64_t, uint32_t, std::span<const uint64_t>) override {}
  void exchange_written(uint32_t, uint64_t, uint32_t, std::string_view) override {}
  void decided(uint32_t, uint64_t, uint32_t, const Decision&) override {}

  /// Does what the controller has sent. True when there was something.
  bool work() {
    bool done = false;
    for (auto bytes = rings.next(); !bytes.empty(); bytes = rings.next(), done = true) {
      const auto header = read_record<RecordHeader>(bytes);
      if (header.kind == RecordKind::kRun) {
        executor.on_run(read_record<RunRecord>(bytes),
                        reinterpret_cast<const uint64_t*>(bytes.data() + sizeof(RunRecord)));
      } else if (header.kind == RecordKind::kCommand) {
        const auto record = read_record<CommandRecord>(bytes);
        executor.on_command(record, std::span(bytes).subspan(sizeof record, record.bytes));
      } else if (header.kind == RecordKind::kHostLost) {
        const auto record = read_record<HostLostRecord>(bytes);
        std::vector<uint32_t> lost(record.hosts);
        std::memcpy(lost.data(), bytes.data() + sizeof record, lost.size() * sizeof(uint32_t));
        executor.on_hosts_lost(lost, "lost");
      } else if (header.kind == RecordKind::kClientGone) {
        executor.on_client_gone(header.client);
      }
    }
    rings.inbox.release();
    while (executor.poll() != 0) done = true;
    return done;
  }
  bool end_task() {
    if (backend.tasks.empty()) return false;
    const auto task = backend.tasks.front();
    backend.tasks.pop_front();
    end(task);
    return true;
  }
  /// Answers the tasks that read a buffer, and ends the others.
  bool answer_tasks() {
    bool done = false;
    for (auto task = backend.tasks.begin(); task != backend.tasks.end();) {
      if (!task->reads) {
        end(*task);
        task = backend.tasks.erase(task);
        done = true;
        continue;
      }
      if (!task->is_answered) executor.on_task_answered(task->number);
      done = done || !task->is_answered;
      task->is_answered = true;
      ++task;
    }
    return done;
  }
  void end(const CountingBackend::Task& task) {
    const Value made = task.makes ? backend.make(task.makes->devices, task.makes->bytes) : nullptr;
    executor.on_task_done(task.number, made, task.makes ? task.makes->devices : 0, {});
  }

  PlayedHost rings;
  CountingBackend backend;
  Executor executor;
};

/// What a plan of the culprit does. A value lies on the local device 0 of each host that holds it.
struct Shape {
  GroupId group = kFirst;
  uint64_t bytes = kWorth;              ///< of each value
  std::vector<GroupId> arguments = {};  ///< the hosts that hold each argument
  std::vector<uint32_t> donated = {};
  GroupId result = kFirst;
  bool is_passed_through = false;  ///< the result is the first argument
  bool gang = false;
};

inline const std::array<Shape, 8> kShapes = {
    Shape{},
    Shape{kBoth, kWorth, {}, {}, kBoth},
    Shape{kFirst, kWorth, {kFirst}, {0}, kFirst},
    Shape{kBoth, kWorth, {kBoth}, {0}, kBoth, false, true},
    Shape{kBoth, kWorth, {kBoth}, {}, kBoth, true},
    Shape{kFirst, kWorth / 10, {kFirst}, {}, kFirst},
    Shape{kBoth, kWorth, {kFirst, kBoth}, {1}, kBoth},
    Shape{kBoth, kWorth, {kFirst, kBoth}, {0}, kBoth},
};

inline bool has(GroupId group, uint32_t host) { return group == kAll || group == kBoth || group == host + 1; }

struct KeptMemory : ::testing::Test {
  KeptMemory() : controller_segment(ControllerBlock::make(false)), block(ControllerBlock::attach(controller_segment)) {
    std::vector<HostView> views;
    for (uint32_t h = 0; h < kHosts; ++h) {
      hosts.push_back(std::make_unique<WorkingHost>(h, block));
      views.push_back(hosts.back()->rings.block);
    }
    Controller::Options options{.window = 2, .budgets = std::vector<uint64_t>(kDevices, 1000)};
    options.devices = kDevices;
    options.knows_plans = true;
    options.policy = PolicyKind::kFifo;
    options.grace = std::chrono::milliseconds(1);
    options.clock = test_clock;
    controller = std::make_unique<Controller>(std::move(options), block, views);
    controller->add_group(kFirst, {0});
    controller->add_group(kSecond, {1});
    controller->add_group(kBoth, {0, 1});
    for (const auto& spaces : std::vector<std::vector<SpaceId>>{{0}, {2}, {0, 2}, {1}, {0, 1, 2, 3}}) {
      sets.push_back(controller->add_space_set(spaces));
    }
    join();  // the innocent client
    put(Handle::make(0, 1), kBoth, sets[2], kWorth / 2, {1, kWorth / 2});
    settle();
    join();
  }
  ~KeptMemory() override {
    ring.reset();
    controller.reset();
  }

  /// A new client, which the functions below speak for.
  void join() {
    client = next_client++;
    ring.reset();
    if (memories.size() > 1) memories.pop_back();  // its client is gone
    memories.push_back(std::make_unique<RawClient>());
    controller->add_client(client, memories.back()->block);
    for (auto& host : hosts) host->executor.add_client(client, 256);
    ring.emplace(memories.back()->block->ring_to_controller()->claim_producer());
    for (const Shape& shape : kShapes) add_plan(shape);
    controller->step();
  }
  /// The set of the devices on which the plans have their values.
  SpaceSetId set_of(GroupId group) const { return sets[group - 1]; }
  void add_plan(uint32_t id, const Shape& shape, uint32_t h) {
    CountingBackend& backend = hosts[h]->backend;
    backend.calls.resize(id + 1);
    if (!has(shape.group, h)) return;
    std::vector<uint32_t> inputs, taken;  // what lies here, which the host's part of a run names
    for (uint32_t i = 0; i < shape.arguments.size(); ++i) {
      if (!has(shape.arguments[i], h)) continue;
      const auto value = static_cast<uint32_t>(inputs.size());
      if (std::find(shape.donated.begin(), shape.donated.end(), i) != shape.donated.end()) taken.push_back(value);
      inputs.push_back(value);
    }
    auto values = static_cast<uint32_t>(inputs.size());
    PlanSizes sizes;
    std::vector<PlanBuilder::Node> nodes;
    uint32_t result = inputs.empty() ? kNoValue : inputs[0];
    if (!shape.is_passed_through) {
      result = values++;
      nodes.push_back(call(inputs, {result}, 1, shape.gang));
      nodes.back().global_node = 1;
      sizes.launches.push_back({0, taken});
      backend.calls[id] = {std::vector<uint64_t>(inputs.size(), kWorth), shape.bytes, 1, taken};
    }
    sizes.values.assign(values, kWorth);
    if (!shape.is_passed_through) sizes.values.back() = shape.bytes;
    PlanBuilder builder = plan_of(inputs, nodes, {result}, values, h, kDevicesEach);
    builder.set_donated(taken);
    hosts[h]->executor.add_plan(id, Plan::parse(builder.finish()), client);
    hosts[h]->executor.set_compiled(id, std::nullopt, sizes);
  }
  void add_plan(const Shape& shape) {
    const uint32_t id = next_plan++;
    for (uint32_t h = 0; h < kHosts; ++h) add_plan(id, shape, h);
    PlanMemory memory{client, "a plan", {}, {}, {}, shape.donated, shape.arguments};
    for (uint32_t h = 0; h < kHosts; ++h) {
      if (has(shape.group, h)) memory.needs.push_back({h * kDevicesEach, shape.bytes, 0});
    }
    memory.results.push_back({shape.result, set_of(shape.result), shape.bytes, shape.is_passed_through ? 0 : -1, -1});
    controller->register_plan(id, client, shape.group);
    controller->set_plan_memory(id, std::move(memory));
  }

  template <typename Record>
  void send(const Record& record, std::span<const std::byte> rest) {
    const size_t bytes = sizeof record + padded(rest.size());
    auto room = ring->try_reserve(static_cast<uint32_t>(bytes));
    if (room.empty()) return;  // it has as much under way as allowed
    std::memset(room.data(), 0, bytes);
    std::memcpy(room.data(), &record, sizeof record);
    if (!rest.empty()) std::memcpy(room.data() + sizeof record, rest.data(), rest.size());
    ring->publish();
    block->doorbell.ring();
  }
  void command(CommandKind kind, GroupId group, Handle handle, Handle token, std::span<const std::byte> rest,
               SpaceSetId set = kNoSpaceSet, uint64_t bytes = 0) {
    send(CommandRecord{{RecordKind::kCommand, static_cast<uint16_t>(kind), client},
                       handle.raw,
                       token.raw,
                       group,
                       static_cast<uint32_t>(rest.size()),
                       bytes,
                       set},
         rest);
  }
  using Payload = CountingBackend::Payload;
  void put(Handle handle, GroupId group, SpaceSetId set, uint64_t bytes, Payload what,
           CommandKind kind = CommandKind::kPut) {
    command(kind, group, handle, {}, std::as_bytes(std::span{&what, 1}), set, bytes);
  }
  /// A buffer where the plans have theirs.
  void put(Handle handle, GroupId group, uint64_t bytes = kWorth) {
    put(handle, group, set_of(group), bytes, {1, bytes});
  }
  void release(GroupId group, const std::vector<Handle>& handles) {
    command(CommandKind::kRelease, group, {}, {}, std::as_bytes(std::span(handles)));
  }
  void rename(GroupId group, Handle name, Handle fresh) {
    const Handle pair[] = {name, fresh};
    command(CommandKind::kRename, group, {}, {}, std::as_bytes(std::span(pair)));
  }
  /// `shape`: which of the plans of this client.
  void run(uint32_t shape, const std::vector<Handle>& arguments, Handle result) {
    std::vector<Handle> handles = arguments;
    handles.push_back(result);
    send(RunRecord{{RecordKind::kRun, 0, client},
                   ++tag,
                   0,
                   plan(shape),
                   kShapes[shape].group,
                   static_cast<uint32_t>(arguments.size()),
                   1},
         std::as_bytes(std::span(handles)));
  }
  uint32_t plan(uint32_t shape) const { return next_plan - static_cast<uint32_t>(kShapes.size()) + shape; }
  void cancel(uint64_t run) {
    auto cancels = memories.back()->block->ring_of_cancels()->claim_producer();
    const CancelRecord record{{RecordKind::kCancel, 0, client}, run};
    const auto room = cancels.try_reserve(sizeof record);
    if (room.empty()) return;
    std::memcpy(room.data(), &record, sizeof record);
    cancels.publish();
    block->doorbell.ring();
  }

  bool pass() {
    bool done = controller->step() != 0;
    for (auto& host : hosts) done = (host != nullptr && host->work()) || done;
    return done;
  }
  /// As pathways/controller/offloading.py does, while what tasks the hosts have go on.
  void suspend_and_resume(const std::function<void()>& meanwhile) {
    controller->suspend(client);
    while (!controller->is_quiet(client)) {
      if (!pass() && !end_tasks(1)) break;
    }
    controller->command_for(client, CommandKind::kOffload, {});
    settle_but_saves();
    controller->offload(client);
    meanwhile();
    if (controller->restore(client).empty()) {
      controller->command_for(client, CommandKind::kRestore, {});
      settle_but_saves();
    }
    controller->resume(client);
  }
  /// A host's process ends; another one takes its place.
  void lose(uint32_t h, const std::function<void()>& meanwhile) {
    const auto ended = std::move(hosts[h]);  // its rings stay until the controller has read them
    controller->lose_hosts({h}, "lost");
    meanwhile();
    hosts[h] = std::make_unique<WorkingHost>(h, block);
    hosts[h]->executor.set_predecessor_failure("lost", client);
    hosts[h]->executor.add_client(client, 256);
    for (uint32_t shape = 0; shape < kShapes.size(); ++shape) add_plan(plan(shape), kShapes[shape], h);
    controller->restore_host(h, hosts[h]->rings.block);
  }
  bool end_tasks(uint32_t most) {
    bool done = false;
    for (auto& host : hosts) {
      for (uint32_t i = 0; i < most && host != nullptr && host->end_task(); ++i) done = true;
    }
    return done;
  }
  /// Until nothing is under way but what waits for memory that the client holds itself.
  void settle() {
    for (bool done = true; done;) {
      done = pass();
      done = end_tasks(1) || done;
    }
  }
  /// Until nothing is under way but saves, for which hosts keep buffers.
  void settle_but_saves() {
    for (bool done = true; done;) {
      done = pass();
      for (auto& host : hosts) done = (host != nullptr && host->answer_tasks()) || done;
    }
  }
  /// A save of a buffer begins: its hosts keep the buffer until the test ends the task.
  void save(Handle handle, GroupId group, Handle token = Handle::make(30, 1)) {
    command(CommandKind::kTask, group, handle, token, {});
  }
  /// MEM-7. Nothing is under way, or only saves.
  void expect_counted() {
    const auto live = controller->stats().live_bytes;
    for (uint32_t device = 0; device < kDevices; ++device) {
      if (hosts[device / kDevicesEach] == nullptr) continue;
      const uint64_t kept = hosts[device / kDevicesEach]->backend.bytes_on(device % kDevicesEach);
      ASSERT_LE(kept, live[device]) << "device " << device << " keeps what the ledger has released";
    }
    for (auto& host : hosts) {
      if (host != nullptr) host->executor.validate();
    }
  }
  bool is_there() {
    const auto uses = controller->client_uses();
    return std::any_of(uses.begin(), uses.end(), [&](const ClientUse& use) { return use.client == client; });
  }
  /// The culprit goes, or is gone; then only the innocent client's buffer is left.
  void leave() {
    if (is_there()) controller->remove_client(client);
    settle_but_saves();
    expect_counted();
    settle();
    const auto live = controller->stats().live_bytes;
    for (uint32_t device = 0; device < kDevices; ++device) {
      const uint64_t expected = device % kDevicesEach == 0 ? innocent_bytes : 0;
      ASSERT_EQ(live[device], expected) << device;
      ASSERT_EQ(hosts[device / kDevicesEach]->backend.bytes_on(device % kDevicesEach), expected) << device;
    }
    ASSERT_EQ(controller->stats().clients, innocent_bytes == 0 ? 0u : 1u) << "the innocent client";
    ASSERT_EQ(block->cluster_status(), ClusterStatus::kUp) << block->failure();
  }
  /// The record before was the first that no correct client sends: its client is evicted, and nothing was kept.
  void expect_evicted() {
    settle();
    EXPECT_FALSE(is_there());
    expect_counted();
    leave();
  }
  void expect_kept_and_counted() {
    settle();
    EXPECT_TRUE(is_there());
    expect_counted();
    leave();
  }

  Segment controller_segment;
  ControllerBlock* block;
  std::vector<std::unique_ptr<WorkingHost>> hosts;
  std::vector<std::unique_ptr<RawClient>> memories;
  std::optional<ByteRing::Producer> ring;
  std::unique_ptr<Controller> controller;
  std::vector<SpaceSetId> sets;
  uint32_t client = 0, next_client = 0, next_plan = 0;
  uint64_t tag = 0;
  uint64_t innocent_bytes = kWorth / 2;  ///< of the innocent client's buffer; 0: there is no such client
};

}  // namespace pathways::test
