// What the foundation costs: futures, ring hops within a process and between processes, doorbell, arena.
//
// Goals (docs: the table of goals): a future created, resolved and released <= 50 ns; a ring hop in process <= 100 ns.
// A hop is one way: half of a ping-pong's round trip. `hop_p50` is the median over batches of 50 round trips, which
// other load on the machine disturbs less than the mean. The two ends sit on two cores (where there are two), or a
// scheduler that puts both on one would measure time slices. They spin, or park at once (what a futex wake costs on the
// machine), or do what the core does ("adaptive": some of both). Spinning figures need two idle cores.
#include <benchmark/benchmark.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "futures/future_table.h"
#include "memory/arena.h"
#include "memory/segment.h"
#include "sync/byte_ring.h"
#include "sync/doorbell.h"

namespace pathways {
namespace {

constexpr auto kForever = std::chrono::nanoseconds::max();
constexpr SpinPolicy kSpin{UINT32_MAX, 0};

SpinPolicy policy_of(const benchmark::State& state) {
  switch (state.range(0)) {
    case 0:
      return kSpin;
    case 1:
      return SpinPolicy::adaptive();
    default:
      return SpinPolicy::sleep_at_once();
  }
}

/// Holds the calling thread on the n-th core that it may use, until destroyed.
class OnCore {
 public:
  explicit OnCore(int n) {
    ::sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &before_) || n-- != 0) continue;
      CPU_SET(cpu, &one);
      ::sched_setaffinity(0, sizeof one, &one);
    }
  }
  OnCore(const OnCore&) = delete;
  OnCore& operator=(const OnCore&) = delete;
  ~OnCore() { ::sched_setaffinity(0, sizeof before_, &before_); }

 private:
  cpu_set_t before_;
};

/// Runs `round_trip` as the benchmark's body, and reports half its time.
template <class RoundTrip>
void measure_hops(benchmark::State& state, RoundTrip round_trip) {
  constexpr int kBatch = 50;
  std::vector<std::int64_t> batches;
  std::int64_t start = monotonic_ns();
  int done = 0;
  for (auto _ : state) {
    round_trip();
    if (++done < kBatch) continue;
    const std::int64_t now = monotonic_ns();
    batches.push_back(now - start);
    start = now;
    done = 0;
  }
  if (batches.empty()) return;
  const auto middle = batches.begin() + static_cast<std::ptrdiff_t>(batches.size() / 2);
  std::nth_element(batches.begin(), middle, batches.end());
  state.counters["hop_p50_ns"] = static_cast<double>(*middle) / (2.0 * kBatch);
}

// ---- futures

void future_create_resolve_release(benchmark::State& state) {
  const Segment memory = Segment::heap(FutureTable::bytes_for(1 << 16));
  FutureTable* table = FutureTable::create(memory.data(), 1 << 16);
  for (auto _ : state) {
    Handle handle;
    benchmark::DoNotOptimize(table->allocate(1, &handle));
    benchmark::DoNotOptimize(table->complete(handle));
    benchmark::DoNotOptimize(table->release(handle));
  }
}
BENCHMARK(future_create_resolve_release);

void future_create_resolve_release_by_64(benchmark::State& state) {
  const Segment memory = Segment::heap(FutureTable::bytes_for(1 << 16));
  FutureTable* table = FutureTable::create(memory.data(), 1 << 16);
  const std::vector<std::uint32_t> parts(64, 1);
  std::vector<Handle> handles(64);
  for (auto _ : state) {
    benchmark::DoNotOptimize(table->allocate_many(parts, handles));
    for (const Handle handle : handles) benchmark::DoNotOptimize(table->complete(handle));
    for (const Handle handle : handles) benchmark::DoNotOptimize(table->release(handle));
  }
  state.counters["per_future"] =
      benchmark::Counter(64, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
BENCHMARK(future_create_resolve_release_by_64);

void future_poll(benchmark::State& state) {
  const Segment memory = Segment::heap(FutureTable::bytes_for(64));
  FutureTable* table = FutureTable::create(memory.data(), 64);
  Handle handle;
  static_cast<void>(table->allocate(1, &handle));
  for (auto _ : state) benchmark::DoNotOptimize(table->poll(handle));
}
BENCHMARK(future_poll);

void future_with_waiter(benchmark::State& state) {
  const Segment memory = Segment::heap(FutureTable::bytes_for(64));
  FutureTable* table = FutureTable::create(memory.data(), 64);
  Waiter waiter{[](Waiter*, FutureState) {}};
  for (auto _ : state) {
    Handle handle;
    static_cast<void>(table->allocate(1, &handle));
    table->add_waiter(handle, &waiter);
    static_cast<void>(table->complete(handle));
    static_cast<void>(table->release(handle));
  }
}
BENCHMARK(future_with_waiter);

// ---- byte ring

constexpr std::uint32_t kRingBytes = 1 << 16;

void byte_ring_one_thread(benchmark::State& state) {
  const Segment memory = Segment::heap(ByteRing::bytes_for(kRingBytes));
  ByteRing* ring = ByteRing::create(memory.data(), kRingBytes);
  auto producer = ring->claim_producer();
  auto consumer = ring->claim_consumer();
  for (auto _ : state) {
    benchmark::DoNotOptimize(producer.try_reserve(64).data());
    producer.publish();
    benchmark::DoNotOptimize(consumer.try_front().data());
    consumer.pop();
  }
}
BENCHMARK(byte_ring_one_thread);

/// One end of a ping-pong over two rings; `bell` is mine to wait at, `their_bell` to ring. 0 bytes from the first ends
/// it.
struct End {
  ByteRing::Producer out;
  ByteRing::Consumer in;
  DoorbellWord* bell;
  DoorbellWord* their_bell;

  void send(std::uint64_t value) {
    std::memcpy(out.try_reserve(64).data(), &value, sizeof value);
    out.publish();
    their_bell->ring();
  }
  std::uint64_t receive(SpinPolicy spin) {
    for (;;) {
      const std::uint32_t ticket = bell->ticket();
      const auto record = in.try_front();
      if (!record.empty()) {
        std::uint64_t value = 0;
        std::memcpy(&value, record.data(), sizeof value);
        in.pop();
        return value;
      }
      static_cast<void>(bell->wait(ticket, kForever, spin));
    }
  }
};

struct Pair {
  explicit Pair(const Segment& memory) {
    for (std::size_t i = 0; i < 2; ++i) {
      rings[i] = ByteRing::create(memory.data() + i * ByteRing::bytes_for(kRingBytes), kRingBytes);
      bells[i] = new (memory.data() + 2 * ByteRing::bytes_for(kRingBytes) + i * kCacheLine) DoorbellWord{};
    }
  }
  static std::size_t bytes() { return 2 * ByteRing::bytes_for(kRingBytes) + 2 * kCacheLine; }
  [[nodiscard]] End end(std::size_t i) const {
    return {rings[i]->claim_producer(), rings[1 - i]->claim_consumer(), bells[i], bells[1 - i]};
  }
  ByteRing* rings[2] = {};
  DoorbellWord* bells[2] = {};
};

void echo(End end, SpinPolicy spin) {
  const OnCore core(1);
  while (end.receive(spin) != 0) end.send(1);
}

void ping_pong(benchmark::State& state, End end, SpinPolicy spin) {
  const OnCore core(0);
  measure_hops(state, [&] {
    end.send(1);
    benchmark::DoNotOptimize(end.receive(spin));
  });
  end.send(0);
}

void byte_ring_hop_between_threads(benchmark::State& state) {
  const Segment memory = Segment::heap(Pair::bytes());
  const Pair pair(memory);
  const SpinPolicy spin = policy_of(state);
  std::thread other([&] { echo(pair.end(1), spin); });
  ping_pong(state, pair.end(0), spin);
  other.join();
}
BENCHMARK(byte_ring_hop_between_threads)->ArgNames({"spin0_adaptive1_park2"})->DenseRange(0, 2)->UseRealTime();

void byte_ring_hop_between_processes(benchmark::State& state) {
  const Segment memory = Segment::create("bench-rings", Pair::bytes());
  const Pair pair(memory);
  const SpinPolicy spin = policy_of(state);
  const pid_t child = ::fork();
  if (child == 0) {
    const Segment mine = Segment::attach(::dup(memory.fd()));
    echo(pair.end(1), spin);
    ::_exit(0);
  }
  ping_pong(state, pair.end(0), spin);
  ::waitpid(child, nullptr, 0);
}
BENCHMARK(byte_ring_hop_between_processes)->ArgNames({"spin0_adaptive1_park2"})->DenseRange(0, 2)->UseRealTime();

/// Two threads that look at the rings only: what one hop costs when both have a core and nobody may sleep.
void byte_ring_hop_without_doorbell(benchmark::State& state) {
  const Segment memory = Segment::heap(Pair::bytes());
  const Pair pair(memory);
  const auto send = [](End& end, std::uint64_t value) {
    std::memcpy(end.out.try_reserve(8).data(), &value, sizeof value);
    end.out.publish();
  };
  const auto receive = [](End& end) {
    auto record = end.in.try_front();
    for (; record.empty(); record = end.in.try_front()) cpu_relax();
    std::uint64_t value = 0;
    std::memcpy(&value, record.data(), sizeof value);
    end.in.pop();
    return value;
  };
  std::thread other([&] {
    const OnCore core(1);
    End end = pair.end(1);
    while (receive(end) != 0) send(end, 1);
  });
  const OnCore core(0);
  End end = pair.end(0);
  measure_hops(state, [&] {
    send(end, 1);
    benchmark::DoNotOptimize(receive(end));
  });
  send(end, 0);
  other.join();
}
BENCHMARK(byte_ring_hop_without_doorbell)->UseRealTime();

/// A stream: the consumer is another thread, a publish and a ring for every `range(0)` records.
void byte_ring_stream(benchmark::State& state) {
  const Segment memory = Segment::heap(Pair::bytes());
  const Pair pair(memory);
  const auto batch = static_cast<std::uint32_t>(state.range(0));
  DoorbellWord* bell = pair.bells[0];
  std::thread reader([&] {
    auto consumer = pair.rings[0]->claim_consumer();
    for (;;) {
      const std::uint32_t ticket = bell->ticket();
      auto record = consumer.try_front();
      if (record.empty()) {
        static_cast<void>(bell->wait(ticket, kForever, SpinPolicy::adaptive()));
        continue;
      }
      const bool over = record[0] != std::byte{0};
      consumer.pop();
      if (over) return;
    }
  });
  auto producer = pair.rings[0]->claim_producer();
  const auto put = [&](std::byte mark) {
    auto record = producer.try_reserve(64);
    while (record.empty()) {
      producer.publish();
      bell->ring();
      thread_yield();
      record = producer.try_reserve(64);
    }
    record[0] = mark;
  };
  std::uint32_t pending = 0;
  for (auto _ : state) {
    put(std::byte{0});
    if (++pending == batch) {
      producer.publish();
      bell->ring();
      pending = 0;
    }
  }
  put(std::byte{1});
  producer.publish();
  bell->ring();
  reader.join();
}
BENCHMARK(byte_ring_stream)->ArgNames({"batch"})->Arg(1)->Arg(16)->UseRealTime();

// ---- the rest

void doorbell_ring_with_nobody_waiting(benchmark::State& state) {
  DoorbellWord bell{};
  for (auto _ : state) bell.ring();
}
BENCHMARK(doorbell_ring_with_nobody_waiting);

void doorbell_ping_pong_parked(benchmark::State& state) {
  DoorbellWord bells[2] = {};
  Atomic<std::uint32_t> turn(0);
  const auto await = [&](std::uint32_t me) {
    for (;;) {
      const std::uint32_t ticket = bells[me].ticket();
      const std::uint32_t now = turn.load(std::memory_order_acquire);
      if (now == me || now == 2) return now;
      static_cast<void>(bells[me].wait(ticket, kForever, SpinPolicy::sleep_at_once()));
    }
  };
  std::thread other([&] {
    const OnCore core(1);
    while (await(1) != 2) {
      turn.store(0, std::memory_order_release);
      bells[0].ring();
    }
  });
  const OnCore core(0);
  measure_hops(state, [&] {
    turn.store(1, std::memory_order_release);
    bells[1].ring();
    benchmark::DoNotOptimize(await(0));
  });
  turn.store(2, std::memory_order_release);
  bells[1].ring();
  other.join();
}
BENCHMARK(doorbell_ping_pong_parked)->UseRealTime();

void arena_allocate_release(benchmark::State& state) {
  const Segment memory = Segment::heap(std::size_t{64} << 20);
  Arena* arena = Arena::create(memory.data(), memory.size());
  for (auto _ : state) {
    std::uint64_t offset = 0;
    benchmark::DoNotOptimize(arena->allocate(4096, &offset));
    arena->release(offset);
  }
}
BENCHMARK(arena_allocate_release);

}  // namespace
}  // namespace pathways
