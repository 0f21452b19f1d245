// A client of a simulated cluster that does what clients do, at random, and knows what must come of it.
//
// It keeps buffers with the checksum that each must have, puts new ones, runs programs on them, reads them back and
// compares, cancels runs in flight, and releases. A buffer that depends on a cancelled run is `tainted`: it may fail,
// but it may never be wrong. Nothing here waits: the caller decides who runs next.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "simulate/simulation.h"

namespace pathways::test {

/// What all clients of a cluster use: slices, a group for each, and programs over them.
struct Stage {
  std::vector<ModelledSlice> slices;
  std::vector<GroupId> groups;
  std::vector<const Simulation::Program*> programs;
};

inline Stage make_stage(Simulation& sim, std::vector<ModelledSlice> slices, uint32_t programs, uint32_t calls,
                        uint64_t seed) {
  Stage stage;
  stage.slices = slices;
  for (const ModelledSlice& slice : slices) stage.groups.push_back(sim.add_group(slice.hosts));
  std::mt19937_64 random(seed);
  for (uint32_t p = 0; p < programs; ++p) {
    std::vector<uint32_t> arguments;
    for (uint64_t i = 1 + random() % 3; i > 0; --i)
      arguments.push_back(static_cast<uint32_t>(random() % slices.size()));
    const auto size = static_cast<uint32_t>(1 + random() % calls);
    const auto client = sim.options().own_handles ? std::optional<uint32_t>(0) : std::nullopt;
    stage.programs.push_back(&sim.add_program(make_random_program(slices, size, arguments, random()), true, client));
  }
  return stage;
}

class Workload {
 public:
  struct Rates {
    uint32_t put = 15, run = 45, fetch = 20, release = 15, cancel = 5;
  };

  Workload(Simulation& sim, const Stage& stage, uint32_t id, uint64_t seed, Rates rates)
      : sim_(sim), stage_(stage), client_(sim.client(id)), random_(seed), rates_(rates) {}
  Workload(Simulation& sim, const Stage& stage, uint32_t id, uint64_t seed) : Workload(sim, stage, id, seed, Rates{}) {}

  /// One action. kFull: the caller lets somebody else run and tries again.
  Status act() {
    check_fetches();
    const uint32_t total = rates_.put + rates_.run + rates_.fetch + rates_.release + rates_.cancel;
    uint32_t draw = below(total);
    if (buffers_.size() > kMostBuffers || draw < rates_.release) return release();
    draw -= rates_.release;
    if (draw < rates_.run) return run();
    draw -= rates_.run;
    if (draw < rates_.fetch) return fetch();
    draw -= rates_.fetch;
    if (draw < rates_.cancel) return cancel();
    return put(below(stage_.slices.size()));
  }

  /// Gives everything back. True when it is done; else call it again later.
  bool finish() {
    check_fetches();
    if (!fetches_.empty()) return false;
    while (!buffers_.empty()) drop(buffers_.size() - 1);
    client_.flush();
    return client_.futures().in_use() == 0;
  }

  /// With threads: sleeps until the oldest read is there, without a time limit (a lost wake-up hangs).
  void wait_oldest() {
    if (fetches_.empty()) return;
    const Handle token = fetches_.front()->token;
    while (client_.wait(token, std::chrono::nanoseconds::max(), SpinPolicy::adaptive()) == FutureState::kPending) {
      client_.poll_inbox();
      if (client_.cluster_status() != ClusterStatus::kUp) return;
    }
  }
  /// With threads: sleeps until credits are back, or looks again after a moment when something else is short.
  void wait_room() {
    client_.flush();
    client_.wait_room(std::chrono::nanoseconds::max(), SpinPolicy::adaptive());
  }

  uint64_t compared() const { return compared_; }
  uint64_t wrong() const { return wrong_; }
  uint64_t failed() const { return failed_; }
  uint64_t runs() const { return runs_; }
  Client& client() { return client_; }
  /// Wrong values and unexpected failures are counted and not reported, for tests that break things on purpose.
  void expect_faults() { expect_faults_ = true; }

 private:
  static constexpr size_t kMostBuffers = 60;
  struct Buffer {
    Handle handle;
    uint64_t hash;
    uint32_t slice;
    bool tainted;
    uint64_t tag;  ///< of the run that makes it; 0: a put
  };
  struct Read {
    Handle token;
    uint64_t hash;
    uint32_t slice;
    bool tainted;
    std::vector<uint64_t> out;
  };

  uint32_t below(size_t n) { return static_cast<uint32_t>(random_() % n); }
  uint32_t parts_of(uint32_t slice) const { return static_cast<uint32_t>(stage_.slices[slice].hosts.size()); }

  Status put(uint32_t slice) {
    Handle handle;
    if (client_.allocate(parts_of(slice), &handle) != Status::kOk) return Status::kFull;
    const ModelledBackend::Put payload{random_() | 1, stage_.slices[slice].devices};
    const Status status = client_.command(CommandKind::kPut, stage_.groups[slice], handle, Handle{},
                                          std::as_bytes(std::span{&payload, 1}));
    if (status != Status::kOk) {
      client_.forget(handle);
      return status;
    }
    buffers_.push_back({handle, payload.hash, slice, false, 0});
    return status;
  }

  Status run() {
    const Simulation::Program& program = *stage_.programs[below(stage_.programs.size())];
    std::vector<uint64_t> arguments, hashes;
    bool tainted = false;
    for (const uint32_t value : program.program.arguments()) {
      const uint32_t slice = program.program.slice_of(value);
      std::vector<size_t> fitting;
      for (size_t i = 0; i < buffers_.size(); ++i) {
        if (buffers_[i].slice == slice) fitting.push_back(i);
      }
      if (fitting.empty()) return put(slice);
      const Buffer& chosen = buffers_[fitting[below(fitting.size())]];
      arguments.push_back(chosen.handle.raw);
      hashes.push_back(chosen.hash);
      tainted |= chosen.tainted;
    }
    std::vector<uint64_t> results(program.ref.result_parts.size());
    const Status status = client_.submit(program.ref, arguments, results.data());
    if (status != Status::kOk) return status;
    ++runs_;
    const auto wanted = program.program.evaluate(program.ref.plan, hashes);
    for (size_t i = 0; i < results.size(); ++i) {
      buffers_.push_back({Handle{results[i]}, wanted[i], program.program.slice_of(program.program.results()[i]),
                          tainted, client_.last_tag()});
    }
    return status;
  }

  Status fetch() {
    if (buffers_.empty()) return put(0);
    const Buffer& buffer = buffers_[below(buffers_.size())];
    Handle token;
    if (client_.allocate(parts_of(buffer.slice), &token) != Status::kOk) return Status::kFull;
    reads_.push_back(
        {token, buffer.hash, buffer.slice, buffer.tainted, std::vector<uint64_t>(sim_.options().hosts, 0)});
    const ModelledBackend::Fetch payload{reads_.back().out.data()};
    const Status status = client_.command(CommandKind::kFetch, stage_.groups[buffer.slice], buffer.handle, token,
                                          std::as_bytes(std::span{&payload, 1}));
    if (status != Status::kOk) {
      client_.forget(token);
      reads_.pop_back();
      return status;
    }
    fetches_.push_back(&reads_.back());
    return status;
  }

  void check_fetches() {
    client_.poll_inbox();
    std::erase_if(fetches_, [&](Read* read) {
      const FutureState state = client_.poll(read->token);
      if (state == FutureState::kPending) return false;
      if (state == FutureState::kReady) {
        for (const uint32_t h : stage_.slices[read->slice].hosts) {
          ++compared_;
          if (read->out[h] == read->hash) continue;
          ++wrong_;
          if (!expect_faults_) ADD_FAILURE() << "a wrong value on host " << h;
        }
      } else {
        ++failed_;
        if (!read->tainted && !expect_faults_) {
          ADD_FAILURE() << "a fetch failed: " << client_.error_of(read->token);
        }
      }
      client_.forget(read->token);
      return true;
    });
  }

  Status release() {
    if (!buffers_.empty()) drop(below(buffers_.size()));
    return Status::kOk;
  }

  void drop(size_t index) {
    client_.release(buffers_[index].handle, stage_.groups[buffers_[index].slice], random_() % 8 == 0 ? 1u << 20 : 8);
    buffers_[index] = buffers_.back();
    buffers_.pop_back();
  }

  Status cancel() {
    const uint64_t in_flight = client_.in_flight();
    if (in_flight == 0) return Status::kOk;
    const uint64_t tag = client_.last_tag() - below(std::min<uint64_t>(in_flight, 8));
    std::vector<uint64_t> results;
    for (Buffer& buffer : buffers_) {
      if (buffer.tag == tag) results.push_back(buffer.handle.raw);
    }
    const Status status = client_.cancel(tag, results, "cancelled by the test");
    // Whoever depends on it is younger; what reads it already may fail, too.
    if (status == Status::kOk) taint();
    return status;
  }

  void taint() {
    for (Buffer& buffer : buffers_) buffer.tainted |= buffer.tag != 0;
    for (Read* read : fetches_) read->tainted = true;
  }

  Simulation& sim_;
  const Stage& stage_;
  Client& client_;
  std::mt19937_64 random_;
  const Rates rates_;
  bool expect_faults_ = false;
  std::vector<Buffer> buffers_;
  std::deque<Read> reads_;  ///< kept: a host may write until it has heard that the client is gone
  std::vector<Read*> fetches_;
  uint64_t compared_ = 0, wrong_ = 0, failed_ = 0, runs_ = 0;
};

/// Nothing is left of anybody's work.
inline void expect_clean(Simulation& sim) {
  EXPECT_TRUE(sim.controller().is_idle());
  EXPECT_EQ(sim.live_values(), 0u);
  EXPECT_EQ(sim.live_objects(), 0u);
  EXPECT_EQ(sim.open_receives(), 0u);
  for (uint32_t h = 0; h < sim.options().hosts; ++h) {
    const ExecutorStats stats = sim.host(h).executor().stats();
    EXPECT_EQ(stats.live_runs, 0u);
    EXPECT_EQ(stats.waiting, 0u);
    EXPECT_EQ(stats.exchanges, 0u);
    EXPECT_EQ(stats.gangs, sim.backend(h).gangs());
    EXPECT_EQ(sim.controller().stats().gangs[h], sim.backend(h).gangs());
  }
}

/// ORD-1 and GANG-1 as the devices saw them.
inline void expect_ordered(Simulation& sim) {
  EXPECT_EQ(sim.order_violations(), 0u);
  EXPECT_EQ(sim.fabric().crossed(), 0u);
  EXPECT_EQ(sim.fabric().incomplete(), 0u);
  EXPECT_EQ(sim.controller_block()->cluster_status(), ClusterStatus::kUp) << sim.controller_block()->failure();
}

}  // namespace pathways::test
