// The model test of branches: random programs with branches over several hosts, each on a thread of its own. Gangs on
// one device wait in their launch for their other hosts, so a decision that does not go out in time ends in a hang.
//
//   GANG-1, GANG-2, ORD-1, ORD-2, PLAN-5, ERR-1   Model.RandomProgramsGiveWhatOneHostWould
//
// PATHWAYS_BRANCH_PROGRAMS: how many programs are played, of kRuns runs each. The seed of a failing program is printed.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>

#include "executor/bench_host.h"
#include "support.h"

namespace pathways::test::test_branch_model {
namespace {

constexpr uint32_t kHosts = 4, kRuns = 20, kArguments = 4;

/// Hosts 0 and 1 are one island, hosts 2 and 3 another.
struct ModelSlice {
  std::vector<uint32_t> hosts;
  uint64_t devices;
  bool has(uint32_t host) const { return std::count(hosts.begin(), hosts.end(), host) != 0; }
};

struct Step {
  NodeKind kind = NodeKind::kCall;
  uint32_t slice = 0;
  std::vector<uint32_t> inputs;
  uint32_t output = 0;
  uint32_t choice = 0;
  uint32_t predicate = kNoPredicate;
};

/// A program with branches, and what it gives when one host runs it.
struct ModelProgram {
  std::vector<ModelSlice> slices;
  std::vector<uint32_t> value_slice, value_scope;
  std::vector<Step> steps;
  struct Choice {
    uint32_t value, scope, first_node;
  };
  std::vector<Choice> choices;
  std::vector<PredicateRecord> predicates;
  std::vector<uint32_t> results;
  uint32_t cases = 2, devices = 1;
  std::mt19937_64 random;

  explicit ModelProgram(uint64_t seed) : random(seed) {
    cases = 2 + below(2);
    devices = 1 + below(2);
    const auto mask = [&] { return devices == 1 ? 1u : 1u + below(3); };
    for (uint32_t h = 0; h < kHosts; ++h) slices.push_back({{h}, mask()});
    slices.push_back({{0, 1}, mask()});
    slices.push_back({{2, 3}, mask()});
    for (uint32_t i = 0; i < kArguments; ++i) (void)add_value(below(6), kNoPredicate);
    std::vector<uint32_t> visible = {0, 1, 2, 3};
    block(visible, kNoPredicate, 3 + below(4), 0);
    while (results.size() < 3) results.push_back(visible[below(static_cast<uint32_t>(visible.size()))]);
    results.push_back(visible.back());
  }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>(random() % n); }
  uint32_t add_value(uint32_t slice, uint32_t scope) {
    value_slice.push_back(slice);
    value_scope.push_back(scope);
    return static_cast<uint32_t>(value_slice.size() - 1);
  }
  uint32_t add(NodeKind kind, uint32_t slice, std::vector<uint32_t> inputs, uint32_t predicate, uint32_t choice = 0) {
    const uint32_t output = add_value(slice, predicate);
    steps.push_back({kind, slice, std::move(inputs), output, choice, predicate});
    return output;
  }
  uint32_t moved(uint32_t value, uint32_t slice, uint32_t scope) {
    return value_slice[value] == slice ? value : add(NodeKind::kTransfer, slice, {value}, scope);
  }
  /// Adds steps to the scope `scope`; what they make is appended to `visible`.
  void block(std::vector<uint32_t>& visible, uint32_t scope, uint32_t count, uint32_t depth) {
    for (uint32_t i = 0; i < count; ++i) {
      const auto any = [&] { return visible[below(static_cast<uint32_t>(visible.size()))]; };
      const uint32_t what = below(10);
      if (what < 5 || (depth == 3 && what >= 7)) {
        const uint32_t slice = below(6);
        std::vector<uint32_t> inputs = {moved(any(), slice, scope)};
        if (below(2) == 0) inputs.push_back(moved(any(), slice, scope));
        visible.push_back(add(NodeKind::kCall, slice, inputs, scope));
      } else if (what < 7) {
        visible.push_back(moved(any(), below(6), scope));
      } else {
        branch(visible, scope, depth);
      }
    }
  }
  void branch(std::vector<uint32_t>& visible, uint32_t scope, uint32_t depth) {
    const uint32_t which = visible[below(static_cast<uint32_t>(visible.size()))], home = below(6);
    const auto choice = static_cast<uint32_t>(choices.size());
    uint32_t first_node = 0;
    for (uint32_t i = 0; i < steps.size(); ++i) {
      if (steps[i].output == which) first_node = i + 2;
    }
    choices.push_back({which, value_scope[which], first_node});
    std::vector<uint32_t> inputs;
    for (uint32_t c = 0; c < cases; ++c) {
      predicates.push_back({choice, c, scope, kNoBit});
      const auto predicate = static_cast<uint32_t>(predicates.size() - 1);
      std::vector<uint32_t> inside = visible;
      block(inside, predicate, below(4), depth + 1);
      inputs.push_back(moved(inside.back(), home, predicate));
    }
    visible.push_back(add(NodeKind::kSelect, home, inputs, scope, choice));
  }

  PlanBuilder plan_of(uint32_t host, std::vector<uint32_t>* communicators) const {
    std::vector<uint32_t> local(value_slice.size(), kNoValue);
    uint32_t count = 0;
    for (uint32_t v = 0; v < local.size(); ++v) {
      if (slices[value_slice[v]].has(host)) local[v] = count++;
    }
    PlanBuilder builder(host, devices, count);
    std::vector<uint32_t> arguments, bound;
    for (uint32_t i = 0; i < kArguments; ++i) arguments.push_back(local[i]);
    for (const uint32_t v : results) bound.push_back(local[v]);
    builder.set_arguments(arguments);
    builder.set_results(bound);
    communicators->assign(1, Fabric::kNoCommunicator);
    for (uint32_t i = 0; i < steps.size(); ++i) {
      const Step& s = steps[i];
      PlanBuilder::Node n;
      n.kind = s.kind;
      n.global_node = i + 1;
      n.predicate = s.predicate;
      n.devices = slices[s.slice].devices;
      n.gang = s.kind == NodeKind::kCall && slices[s.slice].hosts.size() > 1;
      n.computation = s.choice;
      const bool is_here = slices[s.slice].has(host);
      if (s.kind == NodeKind::kTransfer) {
        const auto &from = slices[value_slice[s.inputs[0]]].hosts, &to = slices[s.slice].hosts;
        for (uint32_t d = 0; d < to.size(); ++d) {
          const uint32_t source = from[d % from.size()];
          if (to[d] == host) n.sources = {source};
          if (source == host) n.destinations.push_back(to[d]);
        }
        if (!n.destinations.empty()) n.inputs = {local[s.inputs[0]]};
        if (!n.destinations.empty()) n.input_devices = slices[value_slice[s.inputs[0]]].devices;
        if (is_here) n.outputs = {local[s.output]};
        if (n.inputs.empty() && n.outputs.empty()) continue;
        if (!is_here) n.devices = 0;
        n.spread = from.size() + to.size() > 2 || from[0] != to[0];
      } else {
        if (!is_here) continue;
        for (const uint32_t v : s.inputs) n.inputs.push_back(local[v]);
        n.outputs = {local[s.output]};
      }
      communicators->push_back(n.gang ? s.slice - 4 : Fabric::kNoCommunicator);
      builder.add(n);
    }
    for (uint32_t i = 0; i < choices.size(); ++i) {
      const Choice& c = choices[i];
      const uint32_t owner = slices[value_slice[c.value]].hosts[0];
      // The owner tells its island and one host of the other island, which tells the rest.
      const uint32_t neighbour = owner ^ 1, relay = owner < 2 ? 2 : 0;
      const uint32_t source = host == owner ? owner : host == (relay ^ 1) ? relay : owner;
      std::vector<uint32_t> told;
      if (host == owner) told = {neighbour, relay};
      if (host == relay) told = {relay ^ 1};
      builder.add(PlanBuilder::Choice{i, owner, source, host == owner ? local[c.value] : kNoValue, cases, c.scope,
                                      c.first_node, told});
    }
    for (const PredicateRecord& p : predicates) builder.add(p);
    return builder;
  }

  /// The checksums of the results; nullopt: it fails.
  std::vector<std::optional<uint64_t>> expected(const std::vector<std::optional<uint64_t>>& arguments) const {
    std::vector<std::optional<uint64_t>> values(value_slice.size());
    std::copy(arguments.begin(), arguments.end(), values.begin());
    const auto taken = [&](uint32_t choice) -> std::optional<uint32_t> {
      const auto hash = values[choices[choice].value];
      if (!hash || (*hash < 256 && *hash >= cases)) return std::nullopt;
      return static_cast<uint32_t>(*hash < 256 ? *hash : (*hash >> 8) % cases);
    };
    const auto holds = [&](uint32_t predicate) {
      for (uint32_t p = predicate; p != kNoPredicate; p = predicates[p].parent) {
        if (taken(predicates[p].choice) != predicates[p].which) return false;
      }
      return true;
    };
    for (uint32_t i = 0; i < steps.size(); ++i) {
      const Step& s = steps[i];
      if (!holds(s.predicate)) continue;
      if (s.kind == NodeKind::kSelect) {
        if (const auto which = taken(s.choice)) values[s.output] = values[s.inputs[*which]];
      }
      if (s.kind == NodeKind::kSelect) continue;
      std::vector<uint64_t> inputs;
      for (const uint32_t v : s.inputs) {
        if (values[v]) inputs.push_back(*values[v]);
      }
      if (inputs.size() == s.inputs.size()) values[s.output] = modelled_hash(0, i + 1, 0, inputs);
    }
    std::vector<std::optional<uint64_t>> out;
    for (const uint32_t v : results) out.push_back(values[v]);
    return out;
  }
};

/// What the hosts of one program share.
struct Post {
  std::mutex mutex;
  std::deque<RecordingLink::Message> boxes[kHosts];
  std::atomic<uint32_t> idle{0};
};

struct ModelHost {
  ModelHost(const ModelProgram& program, uint32_t number, const ModelClock& clock, Fabric& fabric, Post& shared)
      : number(number),
        post(shared),
        backend({number, program.devices, 0, 0, true}, clock, &fabric),
        executor({.host = number, .devices = program.devices, .quirks = {4, true, true}}, backend, link) {
    link.self = number;
    link.on_leave = [this] { send(); };
    executor.add_client(0);
    backend.set_cases(program.cases);
    backend.set_scalar_ns(number % 2 == 0 ? 0 : 1000);
    std::vector<uint32_t> communicators;
    Plan plan = Plan::parse(program.plan_of(number, &communicators).finish());
    backend.learn(0, plan, communicators);
    executor.add_plan(0, std::move(plan));
    executor.set_compiled(0);
  }
  void send() {
    const std::lock_guard lock(post.mutex);
    for (auto& message : link.outgoing) post.boxes[message.host].push_back(std::move(message));
    link.outgoing.clear();
  }
  bool receive() {
    std::deque<RecordingLink::Message> taken;
    {
      const std::lock_guard lock(post.mutex);
      taken.swap(post.boxes[number]);
    }
    for (auto& message : taken) message.deliver(executor);
    return !taken.empty();
  }
  const uint32_t number;
  Post& post;
  RecordingLink link;
  ModelledBackend backend;
  Executor executor;
};

uint64_t argument(uint32_t run, uint32_t i) { return handle(run * kArguments + i + 1); }
uint64_t result(uint32_t run, uint32_t i) { return handle(1000 + run * 8 + i); }

/// One host's thread: puts and runs come in the order, at random times.
void play(const ModelProgram& program, ModelHost& host,
          const std::vector<std::vector<std::optional<uint64_t>>>& arguments, uint64_t seed) {
  std::mt19937_64 random(seed);
  uint32_t next = 0;
  bool was_idle = false;
  while (host.post.idle.load() != kHosts) {
    bool is_busy = host.receive();
    if (next < kRuns && random() % 3 != 0) {
      std::vector<uint64_t> words;
      for (uint32_t i = 0; i < kArguments; ++i) {
        const ModelSlice& slice = program.slices[program.value_slice[i]];
        words.push_back(argument(next, i));
        if (!slice.has(host.number) || !arguments[next][i]) continue;
        const ModelledBackend::Put payload{*arguments[next][i], slice.devices};
        const CommandRecord put{
            {RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kPut), 0}, words.back(), 0, 0, sizeof payload};
        host.executor.on_command(put, std::as_bytes(std::span{&payload, 1}));
      }
      RunRecord record{};
      record.header = {RecordKind::kRun, kRunWanted, 0};
      record.tag = record.order = next + 1;
      record.arguments = kArguments;
      record.results = static_cast<uint32_t>(program.results.size());
      for (uint32_t i = 0; i < record.results; ++i) words.push_back(result(next, i));
      words.push_back((uint64_t{1} << record.results) - 1);
      host.executor.on_run(record, words.data());
      ++next;
      is_busy = true;
    }
    is_busy = host.executor.poll() != 0 || is_busy;
    host.send();
    if (!was_idle && next == kRuns && host.executor.stats().live_runs == 0) {
      was_idle = true;
      host.post.idle.fetch_add(1);
    }
    if (!is_busy) std::this_thread::yield();
  }
}

void check(const ModelProgram& program, std::vector<std::unique_ptr<ModelHost>>& hosts,
           const std::vector<std::vector<std::optional<uint64_t>>>& arguments, uint64_t* failed) {
  for (uint32_t run = 0; run < kRuns; ++run) {
    const auto expected = program.expected(arguments[run]);
    for (uint32_t i = 0; i < expected.size(); ++i) {
      for (const uint32_t h : program.slices[program.value_slice[program.results[i]]].hosts) {
        const RecordingLink& link = hosts[h]->link;
        const uint64_t buffer = result(run, i);
        if (expected[i]) {
          ASSERT_EQ(link.failure(buffer), "") << "run " << run << ", result " << i << ", host " << h;
          ASSERT_EQ(link.completions(buffer), 1u) << "run " << run << ", result " << i << ", host " << h;
          ASSERT_EQ(link.read.at(buffer), *expected[i]) << "run " << run << ", result " << i << ", host " << h;
        } else {
          ASSERT_NE(link.failure(buffer), "") << "run " << run << ", result " << i << ", host " << h;
          ASSERT_EQ(link.completions(buffer), 0u);
          ++*failed;
        }
      }
    }
  }
  for (auto& host : hosts) {
    for (uint32_t run = 0; run < kRuns; ++run) {
      const auto [gangs, wanted] = host->link.runs.at(run + 1);
      ASSERT_EQ(gangs, wanted);
    }
    std::vector<uint64_t> handles;
    for (uint32_t run = 0; run < kRuns; ++run) {
      for (uint32_t i = 0; i < kArguments; ++i) handles.push_back(argument(run, i));
      for (uint32_t i = 0; i < program.results.size(); ++i) handles.push_back(result(run, i));
    }
    const CommandRecord release{{RecordKind::kCommand, static_cast<uint16_t>(CommandKind::kRelease), 0},
                                0,
                                0,
                                0,
                                static_cast<uint32_t>(handles.size() * sizeof(uint64_t))};
    host->executor.on_command(release, std::as_bytes(std::span(handles)));
    while (host->executor.poll() != 0) {
    }
    ASSERT_EQ(host->backend.live_values(), 0u);
    ASSERT_EQ(host->backend.open_receives(), 0u);
    ASSERT_EQ(host->backend.order_violations(), 0u);
    ASSERT_TRUE(host->executor.is_idle());
    host->executor.validate();
  }
}

TEST(Model, RandomProgramsGiveWhatOneHostWould) {
  const char* asked = std::getenv("PATHWAYS_BRANCH_PROGRAMS");
  const uint64_t programs = asked != nullptr ? std::strtoull(asked, nullptr, 0) : 60;
  const Watchdog watchdog("a program with branches", std::chrono::seconds(asked != nullptr ? 3000 : 240));
  uint64_t failed = 0, branches = 0, launches = 0;
  std::mt19937_64 seeds(seed());
  for (uint64_t n = 0; n < programs; ++n) {
    const uint64_t program_seed = seeds();
    SCOPED_TRACE("program " + std::to_string(n));
    const ModelProgram program(program_seed);
    std::mt19937_64 random(program_seed + 1);
    std::vector<std::vector<std::optional<uint64_t>>> arguments(kRuns);
    for (auto& each : arguments) {
      for (uint32_t i = 0; i < kArguments; ++i) {
        const uint64_t kind = random() % 40;  // 0: there is no such buffer; 1: no number of a case
        if (kind == 0) {
          each.push_back(std::nullopt);
        } else {
          each.push_back(kind == 1 ? 200 : random() | 256);
        }
      }
    }
    const ModelClock clock(ModelClock::Kind::kReal);
    Fabric fabric;
    fabric.add_communicator({0, 1});
    fabric.add_communicator({2, 3});
    Post post;
    std::vector<std::unique_ptr<ModelHost>> hosts;
    for (uint32_t h = 0; h < kHosts; ++h) {
      hosts.push_back(std::make_unique<ModelHost>(program, h, clock, fabric, post));
    }
    {
      std::vector<std::jthread> threads;
      for (uint32_t h = 0; h < kHosts; ++h) {
        threads.emplace_back([&, h] { play(program, *hosts[h], arguments, program_seed + h); });
      }
    }
    check(program, hosts, arguments, &failed);
    EXPECT_EQ(fabric.crossed(), 0u);
    EXPECT_EQ(fabric.incomplete(), 0u);
    branches += program.choices.size();
    for (const auto& host : hosts) launches += host->executor.stats().launches;
    if (::testing::Test::HasFailure()) return;
  }
  std::printf("%llu runs, %llu branches in %llu programs, %llu launches, %llu results failed as they should\n",
              static_cast<unsigned long long>(programs * kRuns), static_cast<unsigned long long>(branches),
              static_cast<unsigned long long>(programs), static_cast<unsigned long long>(launches),
              static_cast<unsigned long long>(failed));
  EXPECT_GT(branches, programs);
  EXPECT_GT(failed, 0u);
}

}  // namespace
}  // namespace pathways::test::test_branch_model
