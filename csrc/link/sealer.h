/// Sealer: seals what one end of a carried link says, and opens what the other end has sealed (carrier.h, CARRY-1). The
/// cipher is a library's, so it is not here: csrc/bind/relays.cc has it.
///
/// Threading: `seal` by one thread, `open` by one thread. A sealer may take a lock that others hold while they wait for
/// a link's: that of csrc/bind takes Python's, also when it goes. So nobody calls a sealer under a link's lock, and its
/// last owner does not let it go there: then no two threads can wait for each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pathways {

class Sealer {
 public:
  static constexpr size_t kBytes = 16;  ///< by which a sealed message is longer

  virtual ~Sealer() = default;

  /// Seals all but the last kBytes of `message`, in place. `number`: no two messages that it seals have the same.
  /// Throws Error(kFailed).
  virtual void seal(uint64_t number, std::span<std::byte> message) = 0;
  /// Writes what was sealed to `out`, which is kBytes shorter. False: the other end has not sealed this message by this
  /// number, and nothing was written. Throws Error(kFailed).
  [[nodiscard]] virtual bool open(uint64_t number, std::span<const std::byte> message, std::span<std::byte> out) = 0;
};

}  // namespace pathways
