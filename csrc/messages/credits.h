/// What one client may have under way before the controller reads no further record of the client's.
///
/// FLOW-1: what a client sent costs controller and hosts bounded memory, whatever its library does. A client that goes
/// past a bound is not read until its earlier work is done: its ring fills up, and its calls wait for room (ASY-1). The
/// others notice nothing. All that is waited for here is done by hosts, from work that they have or will be granted; so
/// it ends without a word of the client's. What only the client can end, a memory that its own arrays fill, has bounds
/// so wide that no sound client meets them, for the releases that make room may come behind.
///
/// A host says which commands it is done with for many at once, a quarter of what may be under way there; so a client
/// that is within its bounds costs nobody a message, and one that waits is read on with at least three quarters free.
///
/// Threading: constants, and a count for one thread.
#pragma once

#include <cstdint>

namespace pathways {

inline constexpr uint64_t kMostRuns = 1u << 14;                       ///< in the order and not over
inline constexpr uint64_t kMostCommands = 4096;                       ///< given to one host and not done there
inline constexpr uint64_t kMostCommandBytes = uint64_t{4} << 20;      ///< of their records
inline constexpr uint64_t kMostWaiting = 4096;                        ///< records in the order that no host was granted
inline constexpr uint64_t kMostWaitingBytes = uint64_t{4} << 20;      ///< and their bytes
inline constexpr uint64_t kMostHeld = 1u << 18;                       ///< records that wait for memory, or behind such
inline constexpr uint64_t kMostHeldBytes = uint64_t{128} << 20;       ///< and their bytes
inline constexpr uint64_t kMostUndeliveredBytes = uint64_t{1} << 20;  ///< that it was told and does not read
inline constexpr uint64_t kMostDefinedBytes = uint64_t{64} << 20;     ///< of descriptions; more puts it out
inline constexpr uint64_t kCommandsDelivered = kMostCommands / 4;     ///< a host says so when it is done with as many
inline constexpr uint64_t kCommandBytesDelivered = kMostCommandBytes / 4;

/// Records, and their bytes.
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
