#include "simulate/scale.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/status.h"
#include "simulate/simulation.h"

namespace pathways {
namespace {

constexpr uint32_t kMostBatch = 48;  // so that a batch fits into a ring of 4 KiB
constexpr uint32_t kClientBatch = 64, kClientRounds = 4000;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

uint64_t resident_bytes() {
  uint64_t pages = 0, resident = 0;
  if (std::FILE* file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%lu %lu", &pages, &resident) != 2) resident = 0;
    std::fclose(file);
  }
  return resident * 4096;
}

int64_t time_of(auto&& work) {
  const int64_t start = monotonic_ns();
  work();
  return monotonic_ns() - start;
}

/// Measures the client alone. This function plays the rest of the cluster: it completes each submitted run at once, and
/// takes the records from the client's ring.
void measure_client(const ProgramRef& program, ScaleReport* report) {
  Segment controller_segment = ControllerBlock::make(false);
  Segment segment = ClientBlock::make({1024, 1u << 16, 0}, false);
  ClientBlock* block = ClientBlock::attach(segment);
  ByteRing::Consumer cluster = block->ring_to_controller()->claim_consumer();
  Client client({0, 1024}, block, ControllerBlock::attach(controller_segment));
  std::vector<double> call, release;
  const uint64_t argument = Handle::make(0, 1).raw;
  uint64_t results[kClientBatch];
  for (uint32_t round = 0; round < kClientRounds; ++round) {
    const int64_t call_ns = time_of([&] {
      for (uint64_t& result : results) PW_CHECK(client.submit(program, {&argument, 1}, &result) == Status::kOk);
    });
    for (const uint64_t result : results) {
      PW_CHECK(client.futures().complete(Handle{result}, program.result_parts[0]) == Completion::kReady);
    }
    block->retired.store(client.submitted(), std::memory_order_relaxed);
    const int64_t release_ns = time_of([&] {
      for (const uint64_t result : results) client.release(Handle{result}, program.group, 4);
      client.flush();
    });
    while (!cluster.try_front().empty()) cluster.pop();
    if (round < kClientRounds / 4) continue;
    call.push_back(static_cast<double>(call_ns) / kClientBatch);
    release.push_back(static_cast<double>(release_ns) / kClientBatch);
  }
  report->client_call_ns = median(call);
  report->client_release_ns = median(release);
}

}  // namespace

ScaleReport measure_scale(const ScaleOptions& options) {
  const uint32_t hosts = options.hosts, per_host = hosts == 0 ? 0 : options.shards / hosts;
  if (hosts == 0 || options.shards % hosts != 0 || per_host == 0 || per_host > kMaxLocalDevices) {
    throw Error(Status::kInvalid, "shards: expected 1 to 64 for each of " + std::to_string(hosts) + " hosts, got " +
                                      std::to_string(options.shards) + " in all");
  }
  if (options.calls == 0 || options.batch == 0 || options.batch > kMostBatch) {
    throw Error(Status::kInvalid, "expected at least one call and a batch of 1 to " + std::to_string(kMostBatch));
  }
  SimulationOptions setup;
  setup.hosts = hosts;
  setup.devices = per_host;
  setup.pair_gangs = false;
  setup.ring_bytes = 4096;
  setup.peer_ring_bytes = 0;
  setup.futures = 1024;
  Simulation sim(setup);
  Client& client = sim.add_client();
  ModelledSlice slice{{}, per_host == 64 ? ~uint64_t{0} : (uint64_t{1} << per_host) - 1};
  for (uint32_t h = 0; h < hosts; ++h) slice.hosts.push_back(h);
  const Simulation::Program& program = sim.add_program(make_chain(slice, options.calls));
  const GroupId group = sim.add_group(slice.hosts);

  Handle argument;
  PW_CHECK(client.allocate(hosts, &argument) == Status::kOk);
  const ModelledBackend::Put put{1, slice.devices};
  PW_CHECK(client.command(CommandKind::kPut, group, argument, Handle{}, std::as_bytes(std::span{&put, 1})) ==
           Status::kOk);
  PW_CHECK(sim.run_until_idle());

  const auto passes = [](auto&& step) {
    while (step() != 0) {
    }
  };
  std::vector<uint64_t> results(options.batch);
  std::vector<double> call, out, in, host;
  const auto batch = [&](bool counts) {
    const int64_t call_ns = time_of([&] {
      for (uint64_t& result : results) {
        PW_CHECK(client.submit(program.ref, {&argument.raw, 1}, &result) == Status::kOk);
      }
    });
    const int64_t out_ns = time_of([&] { passes([&] { return sim.controller().step(); }); });
    const int64_t host_ns = time_of([&] {
      for (uint32_t h = 0; h < hosts; ++h) passes([&] { return sim.host(h).step(); });
    });
    const int64_t in_ns = time_of([&] { passes([&] { return sim.controller().step(); }); });
    PW_CHECK(client.in_flight() == 0);
    for (const uint64_t result : results) {
      PW_CHECK(client.poll(Handle{result}) == FutureState::kReady);
      client.release(Handle{result}, group, 4);
    }
    client.flush();
    PW_CHECK(sim.run_until_idle());
    if (!counts) return;
    const double runs = options.batch, host_runs = runs * hosts;
    call.push_back(static_cast<double>(call_ns) / runs);
    out.push_back(static_cast<double>(out_ns) / host_runs);
    host.push_back(static_cast<double>(host_ns) / host_runs);
    in.push_back(static_cast<double>(in_ns) / host_runs);
  };
  ScaleReport report;
  report.repeats = options.repeats != 0 ? options.repeats : std::clamp(30000u / hosts, 7u, 1000u);
  for (uint32_t i = 0; i < std::clamp(2000u / hosts, 1u, 20u); ++i) batch(false);
  for (uint32_t i = 0; i < report.repeats; ++i) batch(true);
  measure_client(program.ref, &report);

  report.hosts = hosts;
  report.shards = options.shards;
  report.calls = options.calls;
  report.batch = options.batch;
  report.client_call_in_cluster_ns = median(call);
  report.controller_out_ns = median(out);
  report.controller_in_ns = median(in);
  report.controller_ns = report.controller_out_ns + report.controller_in_ns;
  report.host_ns = median(host);
  report.host_launch_ns = report.host_ns / options.calls;
  const Plan plan = Plan::parse(program.program.plan_of(hosts - 1, per_host));
  report.bytes_per_buffer =
      (FutureTable::bytes_for(1u << 20) - FutureTable::bytes_for(1)) / ((1u << 20) - 1) + sizeof(Handle);
  report.plan_nodes = plan.nodes().size();
  report.plan_bytes_per_host = plan.bytes();
  report.run_bytes_per_host = Executor::run_bytes(plan);
  report.run_bytes_controller = sizeof(Entry);
  report.messages_per_host_run = 2;
  report.resident_bytes = resident_bytes();
  return report;
}

}  // namespace pathways
