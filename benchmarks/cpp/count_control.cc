// Runs a part of the control path a given number of times, so that its instructions can be counted: by callgrind, which
// counts the same on a busy machine as on a quiet one. `python -m benchmarks.instructions` runs each case twice, with
// few and with many turns, and divides the difference; so the set-up does not count.
//
//   count_control dispatch POLICY TRACED TURNS        one client, a host of one device: a run and its release per turn
//   count_control gang POLICY TRACED TURNS            the same on two hosts
//   count_control transfer POLICY 0 TURNS             a call, whose value goes to a call on another host, per turn
//   count_control idle-passes BUFFERS WAITS TURNS     a pass without work per turn, beside BUFFERS live buffers
//   count_control beside-waiting BUFFERS WAITS TURNS  a run of another client per turn, beside them
//   count_control booked HOSTS DEVICES TURNS          a run per turn on all devices of all hosts, booked in the ledger
//
// POLICY: fifo or share. TRACED, WAITS: 0 or 1. With WAITS a client's put waits for memory that the buffers hold.
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "base/check.h"
#include "simulate/controller_cost.h"
#include "simulate/simulation.h"

namespace pathways {
namespace {

constexpr uint64_t kBufferBytes = 64;
constexpr uint32_t kTakeEvery = 4096;  // a trace's records are taken

void run_once(Simulation& sim, Client& client, const ProgramRef& program) {
  uint64_t result = 0;
  PW_CHECK(client.submit(program, {}, &result) == Status::kOk);
  while (client.in_flight() != 0) sim.step();
  PW_CHECK(client.poll(Handle{result}) == FutureState::kReady);
  client.release(Handle{result}, program.group, static_cast<uint32_t>(program.result_parts[0]));
}

ModelledProgram one_call(uint32_t hosts) {
  ModelledProgram program;
  ModelledSlice slice{std::vector<uint32_t>(hosts), 1};
  std::iota(slice.hosts.begin(), slice.hosts.end(), 0u);
  program.add_result(program.add_call(program.add_slice(slice), {}));
  return program;
}

ModelledProgram one_transfer() {
  ModelledProgram program;
  const uint32_t from = program.add_slice({{0}, 1}), to = program.add_slice({{1}, 1});
  const uint32_t sent = program.add_transfer(program.add_call(from, {}), to);
  program.add_result(program.add_call(to, {sent}));
  return program;
}

void dispatch(const ModelledProgram& played, uint32_t hosts, PolicyKind policy, bool is_traced, uint32_t turns) {
  SimulationOptions options;
  options.hosts = hosts;
  options.policy = policy;
  options.pair_gangs = false;
  Simulation sim(options);
  Client& client = sim.add_client();
  const auto& program = sim.add_program(played, true, 0);
  PW_CHECK(sim.run_until_idle());
  if (is_traced) {
    sim.controller().start_trace(2 * kTakeEvery);
    for (uint32_t h = 0; h < hosts; ++h) sim.host(h).executor().start_trace(4 * kTakeEvery);
  }
  uint64_t records = 0;
  for (uint32_t i = 1; i <= turns; ++i) {
    run_once(sim, client, program.ref);
    if (!is_traced || (i % kTakeEvery != 0 && i != turns)) continue;
    records += sim.controller().take_trace().records.size();
    for (uint32_t h = 0; h < hosts; ++h) records += sim.host(h).executor().take_trace().records.size();
  }
  PW_CHECK(records == (is_traced ? uint64_t{turns} * (1 + 2 * hosts) : 0));  // an order; a run and a call on each host
}

/// A put of so many bytes on the cluster's one device.
uint64_t put(Client& client, GroupId group, SpaceSetId spaces, uint64_t bytes) {
  Handle handle;
  const ModelledBackend::Put payload{1, 1};
  PW_CHECK(client.allocate(1, &handle) == Status::kOk);
  PW_CHECK(client.command(CommandKind::kPut, group, handle, Handle{}, std::as_bytes(std::span{&payload, 1}), spaces,
                          bytes) == Status::kOk);
  return handle.raw;
}

void beside_buffers(uint32_t buffers, bool waits, bool with_runs, uint32_t turns) {
  SimulationOptions options;
  options.policy = PolicyKind::kShare;
  options.pair_gangs = false;
  options.futures = 1u << 17;
  options.client_ring_bytes = 1u << 20;
  options.ring_bytes = 1u << 20;
  options.budgets = {kBufferBytes * (buffers + 16)};
  options.grace = std::chrono::hours(24);
  Simulation sim(options);
  Client& holder = sim.add_client();
  Client& waiter = sim.add_client();
  Client& worker = sim.add_client();
  const auto& program = sim.add_program(one_call(1), true, 2);
  const GroupId group = sim.add_group({0});
  const SpaceSetId spaces = sim.controller().add_space_set({0});
  for (uint32_t i = 0; i < buffers; ++i) {
    put(holder, group, spaces, kBufferBytes);
    if (i % 256 == 255) PW_CHECK(sim.run_until_idle());
  }
  PW_CHECK(sim.run_until_idle());
  if (waits) put(waiter, group, spaces, 32 * kBufferBytes);
  for (int i = 0; i < 100; ++i) sim.step();
  const ControllerStats stats = sim.controller().stats();
  PW_CHECK(stats.held == (waits ? 1 : 0) && stats.live_bytes.at(0) == kBufferBytes * buffers);
  for (uint32_t i = 0; i < turns; ++i) {
    if (with_runs) {
      run_once(sim, worker, program.ref);
    } else {
      PW_CHECK(sim.controller().step() == 0);
    }
  }
  PW_CHECK(sim.controller().stats().held == (waits ? 1 : 0));
}

int main_of(const std::vector<std::string>& args) {
  const auto number = [&](size_t at) { return static_cast<uint32_t>(std::strtoul(args.at(at).c_str(), nullptr, 10)); };
  const std::string& what = args.at(0);
  if (what == "dispatch" || what == "gang" || what == "transfer") {
    if (args.at(1) != "fifo" && args.at(1) != "share") throw std::out_of_range("POLICY");
    const PolicyKind policy = args[1] == "fifo" ? PolicyKind::kFifo : PolicyKind::kShare;
    const uint32_t hosts = what == "dispatch" ? 1 : 2;
    dispatch(what == "transfer" ? one_transfer() : one_call(hosts), hosts, policy, number(2) != 0, number(3));
  } else if (what == "idle-passes" || what == "beside-waiting") {
    beside_buffers(number(1), number(2) != 0, what == "beside-waiting", number(3));
  } else if (what == "booked") {
    (void)measure_controller({number(1), number(2), 1, PolicyKind::kFifo, 1, number(3)});
  } else {
    throw std::out_of_range("case");
  }
  return 0;
}

}  // namespace
}  // namespace pathways

int main(int argc, char** argv) {
  try {
    return pathways::main_of({argv + 1, argv + argc});
  } catch (const std::out_of_range&) {
    std::fprintf(stderr,
                 "expected: dispatch|gang|transfer fifo|share 0|1 TURNS, idle-passes|beside-waiting BUFFERS 0|1 TURNS, "
                 "or booked HOSTS DEVICES TURNS\n");
    return 2;
  }
}
