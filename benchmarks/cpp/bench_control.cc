// What the control path costs: a client's call, the controller, a host, the whole way, and the sequencer alone.
//
// Goals (docs: the table of goals): client cost of a call at 65,536 shards <= 1.1x that at 4; sequencer + message <= 2
// us per host per run. `python -m benchmarks.scale` measures the same over many sizes, each part timed alone; here the
// parts run on one thread with modelled devices that take no time, argument: number of hosts (4 shards each).
#include <benchmark/benchmark.h>

#include <numeric>

#include "sequencer/sequencer.h"
#include "simulate/simulation.h"

namespace pathways {
namespace {

SimulationOptions options_of(uint32_t hosts) {
  SimulationOptions options;
  options.hosts = hosts;
  options.devices = 4;
  options.pair_gangs = false;
  options.ring_bytes = 1u << 14;
  options.peer_ring_bytes = 0;
  return options;
}

ModelledSlice slice_of(uint32_t hosts) {
  ModelledSlice slice{std::vector<uint32_t>(hosts), 15};
  std::iota(slice.hosts.begin(), slice.hosts.end(), 0u);
  return slice;
}

/// A program without arguments: `calls` calls in a row.
ModelledProgram program_of(uint32_t hosts, uint32_t calls) {
  ModelledProgram program;
  const uint32_t slice = program.add_slice(slice_of(hosts));
  uint32_t value = program.add_call(slice, {});
  for (uint32_t i = 1; i < calls; ++i) value = program.add_call(slice, {value});
  program.add_result(value);
  return program;
}

void step_all(Simulation& sim, Client& client) {
  while (client.in_flight() != 0) sim.step();
}

/// One call, from submit to credit back, nothing else under way.
void BM_RunAlone(benchmark::State& state) {
  Simulation sim(options_of(static_cast<uint32_t>(state.range(0))));
  Client& client = sim.add_client();
  const auto& program = sim.add_program(program_of(sim.options().hosts, 1));
  for (auto _ : state) {
    uint64_t result = 0;
    if (client.submit(program.ref, {}, &result) != Status::kOk) std::abort();
    step_all(sim, client);
    client.release(Handle{result}, program.ref.group, 4);
  }
  state.counters["per_host"] =
      benchmark::Counter(static_cast<double>(state.iterations()) * static_cast<double>(sim.options().hosts),
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}
BENCHMARK(BM_RunAlone)->Arg(1)->Arg(2)->Arg(16)->Arg(256);

/// Many calls under way: what batching saves.
void BM_RunsTogether(benchmark::State& state) {
  constexpr uint32_t kTogether = 64;
  Simulation sim(options_of(static_cast<uint32_t>(state.range(0))));
  Client& client = sim.add_client();
  const auto& program = sim.add_program(program_of(sim.options().hosts, 1));
  uint64_t results[kTogether];
  for (auto _ : state) {
    for (uint64_t& result : results) {
      if (client.submit(program.ref, {}, &result) != Status::kOk) std::abort();
    }
    step_all(sim, client);
    for (const uint64_t result : results) client.release(Handle{result}, program.ref.group, 4);
  }
  state.SetItemsProcessed(state.iterations() * kTogether);
  state.counters["per_host"] =
      benchmark::Counter(static_cast<double>(state.iterations()) * kTogether * static_cast<double>(sim.options().hosts),
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}
BENCHMARK(BM_RunsTogether)->Arg(1)->Arg(2)->Arg(16)->Arg(256);

/// A chain in one program: what a launch costs the host, everything else spread over it.
void BM_Chained(benchmark::State& state) {
  Simulation sim(options_of(2));
  Client& client = sim.add_client();
  const auto& program = sim.add_program(program_of(2, static_cast<uint32_t>(state.range(0))));
  for (auto _ : state) {
    uint64_t result = 0;
    if (client.submit(program.ref, {}, &result) != Status::kOk) std::abort();
    step_all(sim, client);
    client.release(Handle{result}, program.ref.group, 4);
  }
  state.SetItemsProcessed(state.iterations() * state.range(0) * 2);  // launches
}
BENCHMARK(BM_Chained)->Arg(128);

/// The order alone: submit, grant, complete.
void BM_Sequencer(benchmark::State& state) {
  const auto hosts = static_cast<uint32_t>(state.range(0));
  Sequencer sequencer(hosts, 256);
  sequencer.add_group(0, slice_of(hosts).hosts);
  for (auto _ : state) {
    const EntryId id = sequencer.submit(0, 0, EntryKind::kRun, 0);
    sequencer.granted().clear();
    for (uint32_t h = 0; h < hosts; ++h) benchmark::DoNotOptimize(sequencer.complete(id, h));
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_Sequencer)->Arg(1)->Arg(16)->Arg(1024)->Arg(16384);

/// The order when the hosts are behind: every entry waits for room first.
void BM_SequencerBehind(benchmark::State& state) {
  const auto hosts = static_cast<uint32_t>(state.range(0));
  Sequencer sequencer(hosts, 1);
  sequencer.add_group(0, slice_of(hosts).hosts);
  EntryId running = sequencer.submit(0, 0, EntryKind::kRun, 0);
  sequencer.granted().clear();
  for (auto _ : state) {
    const EntryId next = sequencer.submit(0, 0, EntryKind::kRun, 0);
    for (uint32_t h = 0; h < hosts; ++h) benchmark::DoNotOptimize(sequencer.complete(running, h));
    sequencer.granted().clear();
    running = next;
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_SequencerBehind)->Arg(1)->Arg(16)->Arg(1024);

}  // namespace
}  // namespace pathways
