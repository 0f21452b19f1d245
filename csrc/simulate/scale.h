/// Measures the cost of the control path in one process and without JAX, from a few shards to thousands (COST-1..3).
///
/// A cluster of modelled hosts runs a chain of calls over all shards. Each part is timed alone, on one thread, so that
/// the times contain work and no waiting: the client's calls, the controller's passes (sequencer and messages, out and
/// back), the hosts' steps (executor, with a device that takes no time). All hosts share this machine's caches, so the
/// per-host times of big clusters include cache misses that a real host would not have.
#pragma once

#include <cstdint>

namespace pathways {

struct ScaleOptions {
  uint32_t hosts = 1;
  uint32_t shards = 4;   ///< in total: a multiple of `hosts`, at most 64 per host
  uint32_t calls = 2;    ///< calls chained in the program
  uint32_t batch = 32;   ///< runs that are under way together, 1 to 48
  uint32_t repeats = 0;  ///< timed batches; 0: as many as take about a second
};

struct ScaleReport {
  uint32_t hosts = 0;
  uint32_t shards = 0;
  uint32_t calls = 0;
  uint32_t batch = 0;
  uint32_t repeats = 0;
  // Medians over the repeats, in ns.
  double client_call_ns = 0;             ///< submit: one future, one record
  double client_call_in_cluster_ns = 0;  ///< the same, when the caches hold data of the hosts' work
  double client_release_ns = 0;          ///< release of a buffer, batched commands included
  double controller_out_ns = 0;          ///< per host and run: order, grant, record out
  double controller_in_ns = 0;           ///< per host and run: completion in
  double controller_ns = 0;              ///< their sum: sequencer + message
  double host_ns = 0;                    ///< per host and run: record in, prepare, launches, completion out
  double host_launch_ns = 0;             ///< the same per launch
  // Exact numbers.
  uint64_t bytes_per_buffer = 0;  ///< client: future and handle
  uint64_t plan_nodes = 0;
  uint64_t plan_bytes_per_host = 0;    ///< as sent
  uint64_t run_bytes_per_host = 0;     ///< a host's state of one run
  uint64_t run_bytes_controller = 0;   ///< the sequencer's entry of one run
  uint64_t messages_per_host_run = 0;  ///< out and back
  uint64_t resident_bytes = 0;         ///< of this process, at the end
};

/// Throws Error(kInvalid) for options out of range.
ScaleReport measure_scale(const ScaleOptions& options);

}  // namespace pathways
