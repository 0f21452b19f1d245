/// The bounds on the work that one client may have under way. At a bound, the controller reads no further record of
/// that client.
///
/// FLOW-1: a client's work costs the controller and the hosts bounded memory, whatever the client's library does. The
/// controller does not read a client that is at a bound until earlier work of the client is done. So the client's ring
/// fills up, and its calls wait for room (ASY-1). The other clients notice nothing. The client waits for work that
/// hosts have been granted or will be granted, so the wait ends without any action of the client. There is one
/// exception: only the client can end a wait for memory that its own arrays fill. The bounds for that wait are so wide
/// that no correct client meets them, because the releases that make room may come behind the waiting records.
///
/// A host reports done commands in batches: a quarter of the bound at a time. So a client's commands cost few messages,
/// and at any time at least three quarters of the bound are free for commands that are really under way.
///
/// Threading: constants, and a count for one thread.
#pragma once

#include <cstdint>

namespace pathways {

inline constexpr uint64_t kMostRuns = 1u << 14;                       ///< runs in the order and not over
inline constexpr uint64_t kMostCommands = 4096;                       ///< commands sent to one host and not done there
inline constexpr uint64_t kMostCommandBytes = uint64_t{4} << 20;      ///< bytes of the records of these commands
inline constexpr uint64_t kMostWaiting = 4096;                        ///< records in the order that no host was granted
inline constexpr uint64_t kMostWaitingBytes = uint64_t{4} << 20;      ///< and their bytes
inline constexpr uint64_t kMostHeld = 1u << 18;                       ///< held records: see held_records.h
inline constexpr uint64_t kMostHeldBytes = uint64_t{128} << 20;       ///< and their bytes
inline constexpr uint64_t kMostHolds = 1u << 16;                      ///< see task_holds.h; more evicts the client
inline constexpr uint64_t kMostUndeliveredBytes = uint64_t{1} << 20;  ///< bytes sent to the client that it has not read
inline constexpr uint64_t kMostDefinedBytes = uint64_t{64} << 20;     ///< bytes of descriptions; more evicts the client
inline constexpr uint64_t kCommandsDelivered = kMostCommands / 4;     ///< a host reports when it has done so many
inline constexpr uint64_t kCommandBytesDelivered = kMostCommandBytes / 4;

/// A number of records, and their bytes.
struct Load {
  uint64_t count = 0;
  uint64_t bytes = 0;
  void add(uint64_t more, uint64_t more_bytes) {
    count += more;
    bytes += more_bytes;
  }
  void remove(uint64_t less, uint64_t less_bytes) {
    count -= less < count ? less : count;
    bytes -= less_bytes < bytes ? less_bytes : bytes;
  }
  bool is_above(uint64_t most, uint64_t most_bytes) const { return count >= most || bytes >= most_bytes; }
};

}  // namespace pathways
