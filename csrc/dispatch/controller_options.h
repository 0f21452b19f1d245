/// What a controller is made with, and what it counts. `Controller::Options` is the public name of the options.
///
/// Threading: the options do not change. The statistics belong to the controller's stepping thread: each class counts
/// what it does, and Controller::stats() copies the counts on that thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "policy/share_policy.h"
#include "sync/atomic.h"

namespace pathways {

struct ReadyBell;

inline constexpr size_t kMostReleases = 64;  ///< handles in one command of the controller that releases them

struct ControllerOptions {
  uint32_t window = 256;              ///< most runs that are granted to one host and not done there
  std::vector<uint64_t> budgets{};    ///< bytes per memory space: devices by number, then hosts' memory for transfers
  std::vector<std::string> spaces{};  ///< their names, for errors; what has none is called by its number
  uint32_t devices = UINT32_MAX;      ///< so many of the memory spaces are devices, which clients' quotas count
  uint32_t host_ring_bytes = 0;       ///< of the rings of hosts that come later; 0: all hosts are there at first
  std::chrono::nanoseconds grace = std::chrono::milliseconds(250);  ///< see MEM-3 in admission_queue.h
  /// Every plan is registered with `register_plan`, and its memory with `set_plan_memory`, before its first run; a
  /// client that runs any other plan is evicted (MEM-6). False where a test takes the part of client and hosts.
  bool knows_plans = false;
  PolicyKind policy = PolicyKind::kFifo;
  /// Work that only other clients' live buffers keep out asks for room (SUSP-2) before it is refused (MEM-3).
  bool asks_for_room = false;
  /// Where to say which host was written to, when another thread reads the rings to all hosts; nullptr: each host reads
  /// its own, and has a doorbell.
  ReadyBell* readers = nullptr;
  /// Who started the hosts asks for those that have faults, and ends them (FAULT-1). False: a fault of a host, which is
  /// in this process or played by a test, is thrown.
  bool ends_hosts_with_faults = false;
  Clock clock = monotonic_ns;  ///< of deadlines, graces, shares and traces

  /// The name of a memory space, for errors.
  std::string name_of_space(uint32_t space) const {
    if (space < spaces.size()) return spaces[space];
    if (devices >= budgets.size()) return "memory space " + std::to_string(space);
    const auto hosts = static_cast<uint32_t>(budgets.size()) - devices;
    if (space >= devices) return "host " + std::to_string(space - devices) + "'s memory for transfers";
    return "device " + std::to_string(space) + " of host " + std::to_string(space / (devices / hosts));
  }
};

/// A client that waits for memory which live buffers hold (SUSP-2).
struct RoomRequest {
  uint32_t client = 0;
  bool has_room = false;          ///< a suspended client: its buffers would fit now
  std::vector<uint32_t> holders;  ///< who holds buffers on the memory space in question, itself perhaps among them
};

/// What one client has and does: `Controller::client_uses`.
struct ClientUse {
  uint32_t client = 0;
  uint64_t device_ns = 0;   ///< device time of its runs so far, summed over hosts (dispatch/device_times.h)
  uint64_t in_flight = 0;   ///< runs admitted and not over
  uint64_t held = 0;        ///< records that wait for memory, or behind one that does
  bool has_unread = false;  ///< there are records in its ring, or it has as much under way as allowed (FLOW-1)
  uint64_t memory = 0;      ///< the most that it holds on any one device
  bool is_waiting = false;  ///< its next run waits for its turn (SHARE-2)
  uint64_t tasks = 0;       ///< saves and restores of arrays, for which hosts keep memory (ledger/task_holds.h)
};

struct ControllerStats {
  uint64_t runs = 0;  ///< submitted
  uint64_t granted = 0;
  uint64_t retired = 0;
  uint64_t dropped = 0;  ///< runs that were cancelled, or too late, before they were granted
  uint64_t late = 0;     ///< runs that were not over when their deadline passed
  uint64_t commands = 0;
  uint64_t records_out = 0;
  uint64_t passes = 0;
  uint64_t clients = 0;
  uint64_t looks = 0;  ///< times that the rings of a client were looked at
  uint64_t waiting = 0;
  std::vector<uint64_t> gangs;  ///< launches per host, of retired runs
  uint64_t held = 0;            ///< records that wait for memory, or behind one that does
  uint64_t unread = 0;          ///< clients that are not read further, because they have too much under way
  uint64_t refused = 0;         ///< runs and puts that failed because there was no memory for them
  uint64_t charged = 0;         ///< runs that entered under the policy, with several clients, and are over
  std::vector<uint64_t> live_bytes, high_water;  ///< per memory space; see sequencer/admission.h
};

}  // namespace pathways
